"""nn.ConvTranspose1d, swapped on request: results, surgery, verification, timing, files."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize
from typer.testing import CliRunner

import tconv_swap
from tconv_swap import ConvTranspose1d, op, plan_swap, swap_layers, unswap_layers
from tconv_swap.cli import app
from tconv_swap.files.loading import load_model
from tconv_swap.input_search import infer_inputs

pytestmark = pytest.mark.filterwarnings("error::tconv_swap.surgery.SwapWarning")

GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": 16, "stride": 8, "padding": 4},
    {"kernel_size": 3, "stride": 2, "output_padding": 1, "groups": 2, "bias": False},
    {"kernel_size": 5, "stride": 3, "dilation": 2, "padding": 1},
    {"kernel_size": 1},
]


class Vocoder(nn.Module):
    """The upsampling of HiFi-GAN: weight-normed transposed convolutions and dilated residual blocks."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.pre = parametrizations.weight_norm(nn.Conv1d(8, channels, 7, padding=3))
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for kernel, stride in ((8, 4), (4, 2)):
            up = nn.ConvTranspose1d(channels, channels // 2, kernel, stride, (kernel - stride) // 2)
            channels //= 2
            self.ups.append(parametrizations.weight_norm(up))
            self.blocks.append(parametrizations.weight_norm(nn.Conv1d(channels, channels, 3, 1, 3, 3)))
        self.post = parametrizations.weight_norm(nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        for up, block in zip(self.ups, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = x + block(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x)))


def ours(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ConvTranspose1d)]


@pytest.mark.parametrize("arguments", GEOMETRIES, ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 7), (4, 7), (2, 4, 1), (0, 4, 7)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_same_output_gradients_and_layout(
    arguments: dict[str, Any], shape: tuple[int, ...], transposed: bool
) -> None:
    theirs = nn.ConvTranspose1d(4, 6, **arguments).double()
    swapped = swap_layers(copy.deepcopy(theirs), include_1d=True)
    assert type(swapped) is ConvTranspose1d
    x = torch.randn(shape, dtype=torch.float64)
    if transposed:  # a signal as an image of height 1 would lie in channels_last
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, actual = theirs(inputs[0]), swapped(inputs[1])
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for mine, other in zip(swapped.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_supported_inputs_run_on_our_operator_and_others_on_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = op.conv_transpose2d
    monkeypatch.setattr(op, "conv_transpose2d", lambda *args: calls.append(args) or real(*args))
    layer = nn.ConvTranspose1d(4, 6, 4, 2, 1)
    swapped = swap_layers(copy.deepcopy(layer), include_1d=True)
    for size in ([13], [2, 6, 14], None):
        x = torch.randn(2, 4, 7)
        if size == [13]:
            with pytest.raises(ValueError, match="output size"):
                swapped(x, [12])
        torch.testing.assert_close(swapped(x, size and [14]), layer(x, size and [14]))
    assert len(calls) == 3
    assert calls[0][0].shape == (2, 4, 1, 7)
    for bad in (torch.randn(4), torch.randn(1, 5, 7), torch.randn(1, 1, 4, 7)):
        with pytest.raises(RuntimeError):
            swapped(bad)
    z = torch.randn(2, 4, 7, dtype=torch.complex64)
    torch.testing.assert_close(swapped.to(torch.complex64)(z), layer.to(torch.complex64)(z))


class Named(nn.ConvTranspose1d):
    def label(self) -> str:
        return "named"


@pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_swap_copy_pickle_and_unswap(round_trip: Callable[[Any], Any]) -> None:
    model = nn.ModuleDict({"a": nn.ConvTranspose1d(4, 2, 4, 2), "b": Named(4, 2, 3), "c": nn.Conv1d(1, 1, 1)})
    model["d"], model["two"] = model["a"], nn.ConvTranspose2d(4, 2, 2)
    state = copy.deepcopy(model.state_dict())
    assert [layer.names[0] for layer in plan_swap(model).swapped] == ["two"]
    plan = plan_swap(model, include_1d=True)
    assert [layer.names for layer in plan.swapped] == [("a", "d"), ("b",), ("two",)]
    swap_layers(model, include_1d=True, exclude="two")
    assert ours(model) == ["a", "b"]
    assert model["d"] is model["a"]
    again = round_trip(model)
    assert ours(again) == ["a", "b"]
    assert again["b"].label() == "named"
    x = torch.randn(1, 4, 5)
    assert torch.equal(again["b"](x), model["b"](x))
    torch.testing.assert_close(dict(again.state_dict()), dict(state))
    unswap_layers(again)
    assert [type(again[k]) for k in "abc"] == [nn.ConvTranspose1d, Named, nn.Conv1d]
    assert ours(model) == ["a", "b"]


def test_a_parametrized_1d_layer_stays_parametrized() -> None:
    model = Vocoder()
    twin = copy.deepcopy(model)
    swap_layers(model, include_1d=True)
    assert ours(model) == ["ups.0", "ups.1"]
    x = torch.randn(1, 8, 9)
    torch.testing.assert_close(model(x), twin(x))
    parametrize.remove_parametrizations(model.ups[0], "weight")
    assert type(model.ups[0]) is ConvTranspose1d
    unswap_layers(model)
    assert type(model.ups[0]) is nn.ConvTranspose1d
    assert ours(model) == []


def test_traced_compiled_and_exported() -> None:
    model = nn.Sequential(nn.ConvTranspose1d(4, 6, 4, 2, 1), nn.ReLU())
    x = torch.randn(2, 4, 7)
    expected = model(x)
    swap_layers(model, include_1d=True)
    traced = fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "output",
    ]
    for other in (
        traced,
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        torch.export.export(model, (x,)).module(),
        torch.jit.trace(model, x),
    ):
        torch.testing.assert_close(other(x), expected)


def test_verified_and_timed() -> None:
    torch.manual_seed(0)
    model = Vocoder()
    found = infer_inputs(model)
    assert found.inputs.args[0].dim() == 3
    swapped = swap_layers(model, inplace=False, include_1d=True)
    report = tconv_swap.verify(model, swapped, torch.randn(2, 8, 12))
    assert report.passed, report.failures
    assert {c.name for c in report.checks if c.kind == "layer_grad_bias"} == {"ups.0", "ups.1"}
    timing = tconv_swap.benchmark(model, swapped, torch.randn(2, 8, 12), warmup=1, iters=3)
    assert [c.name for c in timing.layers if c.stage == "backward"] == ["ups.0", "ups.1"]
    assert timing.layers[0].input_shape == (2, 16, 12)


def test_a_wrong_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.ConvTranspose1d(4, 3, 4, 2), nn.InstanceNorm1d(3))
    swapped = swap_layers(model, inplace=False, include_1d=True)
    monkeypatch.setattr(op, "conv_transpose2d", lambda x, *rest: F.conv_transpose2d(x * 1.01, *rest))
    report = tconv_swap.verify(model, swapped, torch.randn(2, 4, 9))
    assert {c.kind for c in report.checks if not c.passed} >= {"layer_output", "layer_grad_weight"}


def test_unbatched_and_unreached_layers_are_compared() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.unused = nn.ConvTranspose1d(4, 3, 4, 2), nn.ConvTranspose1d(2, 2, 9, 4, 30)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[21])

    model = Net()
    report = tconv_swap.verify(model, swap_layers(model, inplace=False, include_1d=True), torch.randn(4, 9))
    assert report.passed, report.failures
    assert {c.name for c in report.checks if c.kind == "layer_output"} == {"up", "unused"}


def test_the_command_line(tmp_path: Path) -> None:
    source, target = tmp_path / "vocoder.pt", tmp_path / "fast.pt"
    model = nn.Sequential(
        nn.ConvTranspose1d(8, 4, 8, 4, 2), nn.LeakyReLU(0.1), nn.ConvTranspose1d(4, 2, 4, 2)
    )
    torch.save(model, source)
    run = CliRunner().invoke
    assert run(app, [str(source)]).exit_code == 4
    options = ["--include-1d", "--out", str(target), "--no-benchmark", "--json", "-"]
    result = run(app, [str(source), *options])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [layer["kind"] for layer in data["plan"]["layers"]] == ["ConvTranspose1d"] * 2
    again = load_model(target).model
    assert ours(again) == ["0", "2"]
    x = torch.randn(1, 8, 5)
    torch.testing.assert_close(again(x), model(x))
    buffer = io.BytesIO()
    torch.save(unswap_layers(again), buffer)
    # A swapped file is 1-D still, without the option.
    assert run(app, [str(target), "--no-benchmark"]).exit_code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Vocoder(64).cuda().to(dtype)
    swapped = swap_layers(model, inplace=False, include_1d=True)
    report = tconv_swap.verify(model, swapped, torch.randn(2, 8, 33, device="cuda", dtype=dtype))
    assert report.passed, report.failures
