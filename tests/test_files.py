"""Files of every kind, on the command line: code of the user's, weights without a network, exported programs."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tconv_swap
from tconv_swap import workflow
from tconv_swap.cli import app
from tconv_swap.files import exported, weights
from tconv_swap.files.loading import LoadError, UntrustedError, load_model, load_weights
from tconv_swap.files.usercode import import_file, parse_factory

REPOSITORY = Path(__file__).parents[1]
SOURCE = """
from pathlib import Path
import os
import torch
from torch import nn

Path(__file__).with_suffix(".executed").touch()

class Up(nn.ConvTranspose2d):
    pass

class Block(nn.Sequential):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Block(Up(4, 6, 4, 2, 1), nn.ReLU())
        self.out = nn.ConvTranspose2d(6, 3, 2, 2)

    def forward(self, x):
        return self.out(self.up(x))

def build():
    return Net()

def tied():
    net = nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3))
    net[1].weight = net[0].weight
    return net

def not_a_network():
    return 3

def broken():
    raise SystemExit("no\\nnetwork")
"""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A file with a user's classes, which leaves a trace when it is executed."""
    path = tmp_path / "users_net.py"
    path.write_text(SOURCE)
    before = [*sys.path]
    yield path
    sys.path[:] = before
    sys.modules.pop("users_net", None)


@pytest.fixture
def network(source: Path) -> nn.Module:
    """Of the user's class, as it would be in another process: the file counts as not executed."""
    torch.manual_seed(0)
    net = import_file(source).build()
    forget(source)
    return net


def forget(source: Path) -> None:
    """Call after the network has been saved: then nothing of it is imported any more."""
    source.with_suffix(".executed").unlink(missing_ok=True)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments), "--no-benchmark", "--input-shape", "2,4,5,6"])


def one_line(result: Any, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    text = result.stderr.strip()
    assert "Traceback" not in text
    return " ".join(text.split())


# --- classes in a file of the user's ------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["users_net", "__main__", "package.users_net", "legacy"])
def test_module_lets_the_classes_of_a_file_be_used(network: nn.Module, source: Path, written: str) -> None:
    path, out = source.with_name("model.pt"), source.with_name("fast.pt")
    torch.save(network, path, _use_new_zipfile_serialization=written != "legacy")
    if written != "legacy":  # the script that defined the classes saved them, or a package did
        rename(path, b"users_net", written.encode())
    sys.modules.pop("users_net")

    refused = run(path)
    assert "would execute code" in one_line(refused, 3)
    assert not source.with_suffix(".executed").exists()
    result = run(path, "--module", source, "--out", out)
    assert result.exit_code == 0, result.output
    assert source.with_suffix(".executed").exists()
    again = load_model(out, module=source).model
    assert sum(isinstance(m, tconv_swap.ConvTranspose2d) for m in again.modules()) == 2
    x = torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(again(x), network(x))


def rename(path: Path, old: bytes, new: bytes) -> None:
    """Another module's name in a pickle of protocol 2, whose globals are lines of text."""
    content = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            content[name] = (
                data.replace(b"c" + old + b"\n", b"c" + new + b"\n") if "data.pkl" in name else data
            )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def test_the_snippet_loads_what_was_written(network: nn.Module, source: Path) -> None:
    path, out = source.with_name("model.pt"), source.with_name("fast.pt")
    torch.save(network, path)
    result = run(path, "--module", source, "--out", out, "--json", "-")
    snippet = json.loads(result.stdout)["facts"]["load_snippet"]
    code = f"{snippet}\nprint(sum(isinstance(m, tconv_swap.ConvTranspose2d) for m in model.modules()))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    assert loaded.stdout.strip() == "2", loaded.stderr


@pytest.mark.parametrize("name", ["build", "os.system", "Path", "nn.Linear", "missing"])
def test_module_allows_its_own_classes_and_nothing_else(network: nn.Module, source: Path, name: str) -> None:
    path = source.with_name("model.pt")
    torch.save(network, path)
    rename(path, b"users_net\nNet", b"users_net\n" + name.encode())
    with pytest.raises(UntrustedError) as caught:
        load_model(path, module=source)
    assert [found.option for found in caught.value.names] == [f"users_net:{name}"]


def test_trusting_a_name_that_leads_elsewhere(network: nn.Module, source: Path) -> None:
    path = source.with_name("model.pt")
    torch.save(network, path)
    rename(path, b"users_net\nNet", b"users_net\nos.system")
    trust = [f"users_net:{name}" for name in ("os.system", "Up", "Block")]
    with pytest.raises(UntrustedError, match=r"posix\.system it can do anything|nt\.system"):
        load_model(path, trust=trust)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("users_net.txt", "", "is not the name of a Python file"),
        ("my-net.py", "", "is not the name of a Python file"),
        ("json.py", "", "another module is called 'json'"),
        ("torch.py", "", "another module is called 'torch'"),
        ("users_net.py", "raise SystemExit(0)", r"cannot be imported \(SystemExit: 0\)"),
        ("users_net.py", "def f(:", r"cannot be imported \(SyntaxError"),
        ("users_net.py", None, "FileNotFoundError"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=reason) as caught:
        import_file(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert "users_net" not in sys.modules


def test_a_pipe_is_no_module(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "users_net.py")
    with pytest.raises(LoadError, match="is not a regular file"):
        import_file(tmp_path / "users_net.py")


# --- weights without a network ------------------------------------------------------------------------------


def save_weights(network: nn.Module, path: Path, kind: str) -> None:
    state = network.state_dict()
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, path)
    elif kind == "lightning":
        content = {"epoch": 3, "global_step": 7, "pytorch-lightning_version": "2.4.0", "optimizer_states": []}
        torch.save({**content, "state_dict": {f"model.{k}": v for k, v in state.items()}}, path)
    elif kind == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(state, path)


KINDS = ["weights.pt", "weights.legacy", "weights.lightning.ckpt", "weights.safetensors"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("out_format", ["module", "state_dict"])
def test_weights_get_a_network(network: nn.Module, source: Path, name: str, out_format: str) -> None:
    path, out = source.with_name(name), source.with_name(f"fast{Path(name).suffix}")
    save_weights(network, path, name.split(".")[1])
    before = path.read_bytes()
    refused = run(path)
    assert "--model module:factory" in one_line(refused, 3)
    assert not source.with_suffix(".executed").exists()
    result = run(path, "--model", f"{source}:build", "--out", out, "--out-format", out_format)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "are in the network that" in text
    assert path.read_bytes() == before
    if out_format == "state_dict":
        assert "a swap changes no weight" in text
        assert weights.same_weights(load_weights(out), read(path))
        return
    again = load_model(out, unsafe_pickle=True).model
    x = torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(again(x), network(x))


def read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return weights.read_safetensors(path)
    content = torch.load(path)
    return content.get("state_dict", content)


def test_a_network_can_be_written_as_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.BatchNorm2d(3))
    torch.save(model, tmp_path / "model.pt")
    for name in ("weights.pt", "weights.safetensors"):
        result = run(tmp_path / "model.pt", "--out", tmp_path / name, "--out-format", "state_dict")
        assert result.exit_code == 0, result.output
        assert weights.same_weights(load_weights(tmp_path / name), model.state_dict())


def test_tied_weights_may_be_in_the_file_once(source: Path) -> None:
    net = import_file(source).tied()
    state = {k: v for k, v in net.state_dict().items() if k != "1.weight"}
    torch.save(state, source.with_name("weights.pt"))
    loaded: Any = load_model(source.with_name("weights.pt"), factory=f"{source}:tied").model
    assert loaded[1].weight is loaded[0].weight
    assert torch.equal(loaded[0].weight, net[0].weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop("out.bias"), "it lacks out.bias"),
        (lambda s: s.update({"more.weight": torch.ones(1)}), "has, and the network has not, more.weight"),
        (
            lambda s: s.update({"out.bias": torch.ones(5)}),
            r"out.bias is \[5\] there and \[3\] in the network",
        ),
        (lambda s: [s.update({f"a{i}": torch.ones(1)}) for i in range(9)], "a0, a1, a2 and 6 more"),
        (lambda s: s.clear(), "no state_dict, but a dict with no keys"),
        (lambda s: s.update({"epoch": 3}), "no state_dict, but a dict with 'up.0.weight'"),
    ],
)
def test_weights_that_do_not_fit(network: nn.Module, source: Path, change: Any, reason: str) -> None:
    state = network.state_dict()
    change(state)
    path = source.with_name("weights.pt")
    torch.save(dict(state), path)
    with pytest.raises(LoadError, match=reason):
        load_model(path, factory=f"{source}:build")


def test_other_dtypes_are_said_to_be_converted(network: nn.Module, source: Path) -> None:
    path = source.with_name("weights.pt")
    torch.save(network.half().state_dict(), path)
    loaded = load_model(path, factory=f"{source}:build")
    assert loaded.notes[-1] == "the file's weights are float16, the network's float32: they were converted"


@pytest.mark.parametrize(
    ("factory", "code", "reason"),
    [
        ("users_net.py:not_a_network", 3, "returns a int, not a network"),
        ("users_net.py:broken", 3, "raises SystemExit: no"),
        ("users_net.py:nowhere", 3, "has no nowhere"),
        ("users_nat.py:build", 3, "cannot be imported (FileNotFoundError"),
        ("no.such.module:build", 3, "cannot import no.such.module (ModuleNotFoundError"),
        ("torchvision.models:resnet18", 3, "does not fit the network"),
        ("users_net.py", 2, "is not of the form module:factory"),
        ("users net:build", 2, "is not of the form"),
        (":build", 2, "is not of the form"),
    ],
)
def test_factories_that_are_none(
    network: nn.Module, source: Path, monkeypatch: pytest.MonkeyPatch, factory: str, code: int, reason: str
) -> None:
    torch.save(network.state_dict(), source.with_name("weights.pt"))
    monkeypatch.chdir(source.parent)
    result = run("weights.pt", "--model", factory)
    assert result.exit_code == code
    assert reason in " ".join(result.stderr.replace("│", "").split())


def test_model_with_a_file_that_is_a_network(network: nn.Module, source: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), source.with_name("model.pt"))
    sys.modules.pop("users_net")
    text = one_line(run(source.with_name("model.pt"), "--model", f"{source}:build"), 3)
    assert "holds a whole network: leave --model away" in text
    assert not source.with_suffix(".executed").exists()


def test_factories_are_taken_apart() -> None:
    assert parse_factory("a.b:c.d") == ("a.b", "c.d")
    assert parse_factory("/x y/net.py:build") == ("/x y/net.py", "build")


@pytest.mark.parametrize("size", [0, 7, 8, 9, 40, -1])
def test_damaged_safetensors(network: nn.Module, source: Path, size: int) -> None:
    path = source.with_name("weights.safetensors")
    save_weights(network, path, "")
    path.write_bytes(path.read_bytes()[:size])
    assert one_line(run(path, "--model", f"{source}:build"), 3)


# --- exported programs --------------------------------------------------------------------------------------


def exported_network() -> tuple[nn.Module, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.ConvTranspose2d(6, 3, 2, 2)})
    model = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 4, 2, 1),
        nn.BatchNorm2d(6),
        nn.Sequential(block["up"], nn.ReLU()),
        nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(3, 3, 2, 2)),
        nn.ConvTranspose2d(3, 2, 3, bias=False),
    ).eval()
    axes = {0: torch.export.Dim("n", min=1)}
    return model, torch.export.export(model, (torch.randn(2, 4, 5, 6),), dynamic_shapes=(axes,))


def convolutions(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "conv" in str(node.target)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_program_is_swapped_verified_and_saved(tmp_path: Path, decomposed: bool) -> None:
    model, program = exported_network()
    if decomposed:
        program = program.run_decompositions()
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(program, path)
    assert "whose loader can execute what the file says" in one_line(run(path), 3)

    arguments = [str(path), "--unsafe-pickle", "--no-benchmark", "--json", "-"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [layer["names"] for layer in data["plan"]["layers"]] == [["0"], ["2.0"], ["4"]]
    assert data["facts"]["inputs_origin"] == "those the program was exported with"
    assert "3 is left: the graph computes its weight" in data["facts"]["warnings"]
    names = {check["name"] for check in data["verification"]["checks"] if check["kind"] == "layer_output"}
    assert names == {"0", "2.0", "4"}
    loaded = torch.export.load(out)
    assert [("tconv_swap" in target) for target in convolutions(loaded)] == [True, True, False, True]
    x = torch.randn(3, 4, 5, 6)
    torch.testing.assert_close(loaded.module()(x), model(x))

    # The result is a program again: found to be swapped, partly swapped, unswapped.
    again = CliRunner().invoke(app, [str(out), "--unsafe-pickle", "--no-benchmark", "--exclude", "4"])
    assert again.exit_code == 0, again.output
    assert "--out-format" in one_line(run(path, "--unsafe-pickle", "--out-format", "state_dict"), 2)
    back = exported.unswap_program(loaded)
    assert exported.count_swapped(back) == 0
    torch.testing.assert_close(back.module()(x), model(x))


def test_swap_program_swaps_every_form_and_leaves_its_argument() -> None:
    model, program = exported_network()
    swapped = tconv_swap.swap_program(program)
    assert exported.count_swapped(program) == 0
    assert exported.count_swapped(swapped) == 4  # the weight-normed one too, whose weight the graph computes
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(swapped.module()(x), model(x))


def test_what_is_no_batched_2d_layer_is_listed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave, self.one = nn.ConvTranspose1d(4, 4, 2), nn.ConvTranspose2d(4, 4, 2)
            self.kernel = nn.Parameter(torch.randn(4, 4, 2, 2))

        def forward(self, x: torch.Tensor) -> Any:
            return (
                self.wave(x[:, :, 0]),
                self.one(x[0]),
                nn.functional.conv_transpose2d(x, self.kernel),
                self.one(x),
                nn.functional.conv_transpose2d(x, self.one.weight, stride=2),
            )

    model, x = Net(), torch.randn(2, 4, 3, 3)
    network, left = exported.lifted(torch.export.export(model, (x,)))
    assert [layer.names for layer in tconv_swap.plan_swap(network).layers] == [("one",)]
    assert len(left) == 4
    text = "\n".join(left)
    assert "conv_transpose1d" in text
    assert "its weight and bias are not those of one layer" in text
    assert "its weight is used with other arguments too" in text
    torch.testing.assert_close(network(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(exported_network()[1], path)
    whole = path.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        assert one_line(run(path, "--unsafe-pickle"), 3)


# --- what takes more than there is --------------------------------------------------------------------------


def test_a_tensor_that_is_huge_only_when_copied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2))
    model.register_buffer("bomb", torch.zeros(1).expand(1 << 45))
    torch.save(model, tmp_path / "model.pt")
    assert "its tensors would need 131072 GiB" in one_line(run(tmp_path / "model.pt"), 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_file_that_unpacks_to_more_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tconv_swap.memory.free_bytes", lambda device: 1 << 26)
    monkeypatch.setattr("tconv_swap.memory.LEAST_BYTES", 0)
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data + bytes(1 << 28 if "data.pkl" in name else 0))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    assert one_line(run(tmp_path / "bomb.pt"), 3)
    torch.save(torch.nn.Linear(1 << 14, 1 << 12), tmp_path / "big.pt")
    gc.collect()  # what is let go only while the file is loaded would make room for it
    assert "needs more memory than is free" in one_line(run(tmp_path / "big.pt"), 3)


HEADS = [b"PK\x03\x04", b"\x80\x02", b"\x80\x02X\xff\xff\xff\x0f", (2).to_bytes(8, "little") + b"{}"]


@pytest.mark.parametrize("head", HEADS)
def test_a_file_larger_than_any_memory(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.pt"
    with path.open("wb") as stream:
        stream.write(head)
        stream.truncate(1 << 42)  # of which the disk holds a few bytes
    assert one_line(run(path), 3)
    assert one_line(run(path, "--model", "torch.nn:Identity"), 3)


def test_names_in_an_archive_that_lead_out_of_it(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        for name in (
            "../escaped",
            "plain/../../escaped",
            "/tmp/escaped-tconv-swap",
            "plain/data/../../escaped",
        ):
            archive.writestr(name, b"escaped")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(tmp_path / "model.pt").exit_code in (0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (tmp_path.parent / "escaped").exists()
    assert not Path("/tmp/escaped-tconv-swap").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_devices(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), tmp_path / "model.pt")
    for device in ("/dev/zero", "/dev/full", "/dev/null"):
        assert "is not a regular file" in one_line(run(device), 3)
        assert "is not a regular file" in one_line(run(tmp_path / "model.pt", "--out", device), 2)
        assert "is not the name of a Python file" in one_line(
            run(tmp_path / "model.pt", "--module", device), 2
        )


def test_the_two_networks_share_their_parameters_and_nothing_that_a_run_changes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 3, 2, 2), nn.BatchNorm2d(3))
    original, swapped = workflow._pair(model, workflow.Request(tmp_path), torch.device("cpu"))
    assert all(a is b for a, b in zip(original.parameters(), swapped.parameters(), strict=True))
    assert not any(a is b for a, b in zip(original.buffers(), swapped.buffers(), strict=True))
    assert not any(a is b for a, b in zip(original.modules(), swapped.modules(), strict=True))
    assert not any(a is b for a, b in zip(original.parameters(), model.parameters(), strict=True))
    assert [type(network[0]) for network in (model, original, swapped)] == [
        *[nn.ConvTranspose2d] * 2,
        tconv_swap.ConvTranspose2d,
    ]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The system itself refuses to write more than 4 KiB: exit code 5, and nothing is left behind."""
    source, out = tmp_path / "model.pt", tmp_path / "fast.pt"
    torch.save(nn.Sequential(nn.ConvTranspose2d(16, 16, 4)), source)
    result = subprocess.run(
        [sys.executable, "-m", "tconv_swap", str(source), "--out", str(out), "--no-benchmark"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 5, result.stderr
    assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt"]
