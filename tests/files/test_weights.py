"""Weights in a network that a factory builds: their dtypes, and what is written of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import run, swap
from torch import Tensor

from tconv_swap.files import weights
from tconv_swap.files.loading import load_model, load_weights

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("scale", torch.ones(3, 1, 1), persistent=False)

    def forward(self, x):
        return self.norm(self.up(x)) * self.scale

class Mixed(Net):
    def __init__(self):
        super().__init__()
        self.up.half()

    def forward(self, x):
        return self.norm(self.up(x.half()).float())

class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x):
        return self.up(x)[:, self.order]

class Turned(Net):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.tensor(1j))

    def forward(self, x):
        return super().forward(x) * (self.turn * self.turn.conj()).real

def lazy():
    return nn.Sequential(nn.LazyConvTranspose2d(3, 4))
"""


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of factories in the working directory, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    Path("nets.py").write_text(SOURCE)


def state(factory: str, change: Any = lambda tensor: tensor) -> dict[str, Tensor]:
    """The weights of what a factory of the file builds, changed one by one, as in `weights.pt`."""
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    torch.manual_seed(0)
    return save({name: change(tensor) for name, tensor in names[factory]().state_dict().items()})


def save(content: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.save(content, "weights.pt")
    return content


def floats_to(dtype: torch.dtype) -> Any:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def written(factory: str, *arguments: object) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `--out-format state_dict` writes, and the JSON."""
    made = ("--model", f"nets.py:{factory}", "--out-format", "state_dict", "--out", "out.pt", "--json", "-")
    result = swap("weights.pt", *made, "--input-shape", "2,4,5,6", *arguments)
    assert result.exit_code == 0, result.output
    return load_weights(Path("out.pt")), json.loads(result.stdout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_network_gets_the_files_dtype(dtype: torch.dtype) -> None:
    content = state("Net", floats_to(dtype))
    out, found = written("Net")
    assert weights.same_weights(out, content)
    notes = found["facts"]["warnings"]
    name = str(dtype).removeprefix("torch.")
    assert name in found["facts"]["inputs"]
    assert f"the network has the dtypes of the weights, {name}: it is built in float32" in notes
    assert not any("converted" in note for note in notes)
    model: Any = load_model("weights.pt", factory="nets.py:Net").model
    assert {t.dtype for t in (model.up.weight, model.norm.running_var, model.scale)} == {dtype}
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_dtype_changes_the_computation_and_not_the_output() -> None:
    content = state("Net", floats_to(torch.float16))
    out, found = written("Net", "--dtype", "float64")
    assert weights.same_weights(out, content)
    assert "float64" in found["facts"]["inputs"]


def test_a_network_of_the_files_dtype_is_written() -> None:
    state("Net", floats_to(torch.float16))
    result = swap("weights.pt", "--model", "nets.py:Net", "--input-shape", "2,4,5,6", "--out", "fast.pt")
    assert result.exit_code == 0, result.output
    model = torch.load("fast.pt", weights_only=False)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_mixed_dtypes_in_the_file() -> None:
    content = state("Net")
    content = save({n: t.double() if n.startswith("norm.running") else t for n, t in content.items()})
    model: Any = load_model("weights.pt", factory="nets.py:Net").model
    assert weights.same_weights(model.state_dict(), content)
    assert model.up.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_network_that_mixes_dtypes_keeps_them(dtype: torch.dtype) -> None:
    content = state("Mixed", floats_to(dtype))
    out, found = written("Mixed")
    assert weights.same_weights(out, content)
    notes = " ".join(found["facts"]["warnings"])
    assert "weights of the file were converted (float" in notes
    model: Any = load_model("weights.pt", factory="nets.py:Mixed").model
    assert (model.up.weight.dtype, model.norm.weight.dtype) == (torch.float16, torch.float32)


def test_matching_mixed_dtypes_are_not_converted() -> None:
    content = state("Mixed")
    out, found = written("Mixed")
    assert weights.same_weights(out, content)
    assert "converted" not in " ".join(found["facts"]["warnings"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_integers_are_not_converted(dtype: torch.dtype) -> None:
    content = state("Picks", lambda tensor: tensor if tensor.is_floating_point() else tensor.to(dtype))
    out, found = written("Picks")
    assert weights.same_weights(out, content)
    assert f"({str(dtype).removeprefix('torch.')} to int64)" in " ".join(found["facts"]["warnings"])


def test_a_storage_dtype_is_converted_for_the_network_only() -> None:
    content = state("Net", floats_to(torch.float8_e4m3fn))
    out, found = written("Net")
    assert weights.same_weights(out, content)
    assert "(float8_e4m3fn to float32)" in " ".join(found["facts"]["warnings"])


def test_complex_numbers_keep_their_imaginary_part() -> None:
    content = state("Turned", floats_to(torch.float64))
    model: Any = load_model("weights.pt", factory="nets.py:Turned").model
    assert weights.same_weights(model.state_dict(), content)


def test_lazy_layers_get_the_files_dtype() -> None:
    content = save({"0.weight": torch.randn(4, 3, 4, 4).half(), "0.bias": torch.randn(3).half()})
    model: Any = load_model("weights.pt", factory="nets.py:lazy").model
    assert weights.same_weights(model.state_dict(), content)


def test_weights_are_not_in_memory_twice() -> None:
    state("Net", lambda tensor: tensor.double() if tensor.dim() == 4 else tensor)
    loaded = load_model("weights.pt", factory="nets.py:Net")
    assert loaded.weights is not None
    own = loaded.model.state_dict()
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in loaded.weights.items())


# --- which of the weights in a file -------------------------------------------------------------------------


def test_a_note_says_which_weights_were_taken() -> None:
    content = {"params": state("Net"), "params_ema": state("Net", lambda t: t + 1), "epoch": 3}
    torch.save(content, "weights.pt")
    out, found = written("Net")
    assert weights.same_weights(out, content["params_ema"])
    notes = found["facts"]["warnings"]
    assert (
        "the weights are those under 'params_ema' in the file; there are some under 'params' too (--key)"
        in notes
    )
    assert "out.pt holds these weights only, without 'params', 'epoch' of weights.pt" in notes
    out, found = written("Net", "--key", "params")
    assert weights.same_weights(out, content["params"])
    assert "those under 'params' in the file; there are some under 'params_ema'" in str(
        found["facts"]["warnings"]
    )
    assert (
        "those under 'params_ema' in the file"
        in run("explain", "weights.pt", "--model", "nets.py:Net").stdout
    )


def test_a_file_of_weights_only_has_no_such_notes() -> None:
    state("Net")
    notes = " ".join(written("Net")[1]["facts"]["warnings"])
    assert "dtypes" not in notes
    assert "those under" not in notes
    assert "holds these weights only" not in notes


def test_weights_under_an_unusual_key() -> None:
    content = {"generator": state("Net"), "discriminator": {"weight": torch.ones(1)}, "step": 7}
    torch.save(content, "weights.pt")
    refused = swap("weights.pt", "--model", "nets.py:Net", "-q")
    assert refused.exit_code == 3
    assert "'step': --key NAME takes the weights under 'generator', 'discriminator'" in refused.stderr
    assert "nets" not in sys.modules
    assert weights.same_weights(written("Net", "--key", "generator")[0], content["generator"])


@pytest.mark.parametrize(
    ("content", "key", "reason"),
    [
        (
            {"params": {"a": torch.ones(1)}},
            "ema",
            "holds no state_dict under 'ema', but a dict with 'params': --key",
        ),
        ({"params": {"a": torch.ones(1)}, "step": 3}, "step", "holds no state_dict under 'step'"),
        ({"params": {"a": torch.ones(1)}}, "", "no state_dict under ''"),
        ({"a": torch.ones(1)}, "a", "is a state_dict as a whole: leave out --key"),
        ([torch.ones(1)], "a", "holds no state_dict, but a list"),
    ],
)
def test_keys_that_lead_to_no_weights(content: Any, key: str, reason: str) -> None:
    torch.save(content, "weights.pt")
    refused = swap("weights.pt", "--model", "nets.py:Net", "--key", key, "-q")
    assert refused.exit_code == 3
    assert reason in refused.stderr


@pytest.mark.parametrize("command", ["swap", "explain", "tune"])
def test_a_key_without_a_network_to_build(command: str) -> None:
    state("Net")
    refused = run(command, "weights.pt", "--key", "params")
    assert refused.exit_code == 2
    assert "needs --model" in refused.stderr
