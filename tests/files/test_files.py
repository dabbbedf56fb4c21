"""Files of every kind, on the command line: code of the user's, weights without a network, exported programs."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from file_cases import one_line, run
from forked import run_python
from torch import nn

import tconv_swap
from tconv_swap.files import weights
from tconv_swap.files.loading import LoadError, UntrustedError, load_model, load_weights
from tconv_swap.files.usercode import import_file, parse_factory

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
    result = run(path, "--module", source, "--out", out, "--no-backward")
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


def test_the_snippet_loads_the_written_file(network: nn.Module, source: Path) -> None:
    path, out = source.with_name("model.pt"), source.with_name("fast.pt")
    torch.save(network, path)
    result = run(path, "--module", source, "--out", out, "--json", "-")
    snippet = json.loads(result.stdout)["facts"]["load_snippet"]
    code = f"{snippet}\nprint(sum(isinstance(m, tconv_swap.ConvTranspose2d) for m in model.modules()))"
    loaded = run_python("-c", code, env={})
    assert loaded.stdout.strip() == "2", loaded.stderr


@pytest.mark.parametrize("name", ["build", "os.system", "Path", "nn.Linear", "missing"])
def test_module_allows_its_own_classes_and_nothing_else(network: nn.Module, source: Path, name: str) -> None:
    path = source.with_name("model.pt")
    torch.save(network, path)
    rename(path, b"users_net\nNet", b"users_net\n" + name.encode())
    with pytest.raises(UntrustedError) as caught:
        load_model(path, module=source)
    assert [found.option for found in caught.value.names] == [f"users_net:{name}"]


def test_a_missing_module_file_is_reported(network: nn.Module, source: Path) -> None:
    path = source.with_name("model.pt")
    torch.save(network, path)
    text = one_line(run(path, "--module", source.with_name("users_nte.py")), 3)
    assert text.endswith("users_nte.py: no such file")
    torch.save(nn.Sequential(nn.ConvTranspose2d(4, 3, 2)), path)
    assert "no such file" in one_line(run(path, "--module", "users_nte.py"), 3)


def test_a_module_that_lacks_the_class(network: nn.Module, source: Path) -> None:
    path = source.with_name("model.pt")
    torch.save(network, path)
    sys.modules.pop("users_net")
    source.write_text("class Other: pass")
    text = one_line(run(path, "--module", source), 3)
    assert text.endswith(f"{source} defines no class Block, Net, Up")
    sys.modules.pop("users_net")
    source.write_text(SOURCE)
    other = source.with_name("other_net.py")
    other.write_text(SOURCE)
    text = one_line(run(path, "--module", other), 3)
    assert "other_net.py does not help: it defines classes of the module 'other_net'" in text
    assert "--trust users_net:Net" in text
    assert not other.with_suffix(".executed").exists()


def test_trusting_a_name_of_another_module(network: nn.Module, source: Path) -> None:
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
        ("json.py", "", "another module has the name 'json'"),
        ("torch.py", "", "another module has the name 'torch'"),
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


def test_a_pipe_is_not_a_module(tmp_path: Path) -> None:
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
def test_weights_are_loaded_into_a_network(
    network: nn.Module, source: Path, name: str, out_format: str
) -> None:
    suffix = Path(name).suffix if out_format == "state_dict" else ".pt"
    path, out = source.with_name(name), source.with_name(f"fast{suffix}")
    save_weights(network, path, name.split(".")[1])
    before = path.read_bytes()
    refused = run(path)
    assert "--model module:factory" in one_line(refused, 3)
    assert not source.with_suffix(".executed").exists()
    result = run(
        path, "--model", f"{source}:build", "--out", out, "--out-format", out_format, "--no-backward"
    )
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
        (lambda s: s.update({"more.weight": torch.ones(1)}), "also has more.weight"),
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
def test_factories_that_build_no_network(
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
    assert "holds a whole network: leave out --model" in text
    assert not source.with_suffix(".executed").exists()


def test_factories_are_parsed() -> None:
    assert parse_factory("a.b:c.d") == ("a.b", "c.d")
    assert parse_factory("/x y/net.py:build") == ("/x y/net.py", "build")


@pytest.mark.parametrize("size", [0, 7, 8, 9, 40, -1])
def test_damaged_safetensors(network: nn.Module, source: Path, size: int) -> None:
    path = source.with_name("weights.safetensors")
    save_weights(network, path, "")
    path.write_bytes(path.read_bytes()[:size])
    assert one_line(run(path, "--model", f"{source}:build"), 3)
