"""Compares the layer with ``nn.ConvTranspose2d``: construction, results, errors, and calls that PyTorch computes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import mkldnn

import tconv_swap
from tconv_swap import op
from tconv_swap.layer import ConvTranspose2d, original_class, swapped_class

GEOMETRIES: list[dict[str, Any]] = [
    {"out_channels": 6, "kernel_size": 4, "stride": 2, "padding": 1},
    {"out_channels": 6, "kernel_size": (3, 5), "stride": (2, 3), "padding": (1, 2), "bias": False},
    {"out_channels": 6, "kernel_size": 3, "stride": 2, "output_padding": 1, "groups": 2},
    {"out_channels": 4, "kernel_size": 3, "dilation": (2, 1), "groups": 4},
    {"out_channels": 1, "kernel_size": 1},
]
GEOMETRIES = [{"in_channels": 4, **arguments} for arguments in GEOMETRIES]


def pair(dtype: torch.dtype = torch.float64, **arguments: Any) -> tuple[nn.ConvTranspose2d, ConvTranspose2d]:
    """Returns PyTorch's layer and ours with the same parameters."""
    theirs = nn.ConvTranspose2d(**arguments, dtype=dtype)
    ours = ConvTranspose2d(**arguments, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the arguments of every call of our operator, which still computes."""
    made: list[tuple[Any, ...]] = []
    real = op.conv_transpose2d

    def spy(*args: Any) -> Tensor:
        made.append(args)
        return real(*args)

    monkeypatch.setattr(op, "conv_transpose2d", spy)
    return made


# --- construction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", GEOMETRIES)
def test_the_same_seed_gives_pytorchs_initial_values(arguments: dict[str, Any]) -> None:
    torch.manual_seed(3)
    theirs = nn.ConvTranspose2d(**arguments)
    after_theirs = torch.rand(1)
    torch.manual_seed(3)
    ours = ConvTranspose2d(**arguments)
    assert torch.equal(torch.rand(1), after_theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_same_constructor_and_forward_signature() -> None:
    assert inspect.signature(ConvTranspose2d) == inspect.signature(nn.ConvTranspose2d)
    assert list(inspect.signature(ConvTranspose2d.forward).parameters) == ["self", "input", "output_size"]
    assert ConvTranspose2d(2, 3, 2, device="meta", dtype=torch.bfloat16).weight.is_meta
    with pytest.raises(ValueError, match='Only "zeros" padding mode'):
        ConvTranspose2d(2, 3, 2, padding_mode="circular")


@pytest.mark.parametrize("arguments", GEOMETRIES)
def test_same_repr(arguments: dict[str, Any]) -> None:
    theirs, ours = pair(**arguments)
    assert repr(ours) == repr(theirs)


# --- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", GEOMETRIES)
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (4, 5, 6), (0, 4, 5, 6)])
def test_same_output_and_gradients(
    arguments: dict[str, Any], shape: tuple[int, ...], calls: list[tuple[Any, ...]]
) -> None:
    theirs, ours = pair(**arguments)
    x = torch.randn(shape, dtype=torch.float64)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = theirs(x_theirs), ours(x_ours)
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad)
    for (name, p_ours), p_theirs in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p_ours.grad, p_theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_supported_dtype_runs_on_our_operator(dtype: torch.dtype, calls: list[tuple[Any, ...]]) -> None:
    theirs, ours = pair(dtype=dtype, **GEOMETRIES[0])
    x = torch.randn(1, 4, 3, 3, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    assert len(calls) == 1


@pytest.mark.parametrize("output_size", [(9, 12), (10, 13), (2, 6, 10, 11), torch.Size([2, 6, 9, 13])])
def test_output_size(output_size: Any, calls: list[tuple[Any, ...]]) -> None:
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": (2, 3), "padding": (1, 2)}
    theirs, ours = pair(**arguments)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    actual = ours(x, output_size=output_size)
    assert tuple(actual.shape[-2:]) == tuple(output_size[-2:])
    torch.testing.assert_close(actual, theirs(x, output_size=output_size))
    torch.testing.assert_close(ours(x[0], output_size[-2:]), theirs(x[0], output_size[-2:]))
    assert len(calls) == 2


def test_output_size_counts_the_dilation() -> None:
    theirs, ours = pair(in_channels=2, out_channels=3, kernel_size=3, stride=2, dilation=2)
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x, [12, 11]), theirs(x, [12, 11]))


def test_input_may_be_given_by_name() -> None:
    theirs, ours = pair(**GEOMETRIES[0])
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(input=x, output_size=None), theirs(x))


def test_meta_tensors() -> None:
    layer = ConvTranspose2d(4, 6, 4, 2, 1, device="meta")
    y = layer(torch.empty(2, 4, 5, 6, device="meta"))
    assert y.is_meta
    assert y.shape == (2, 6, 10, 12)


def test_autocast_as_pytorch() -> None:
    theirs, ours = pair(dtype=torch.float32, **GEOMETRIES[0])
    x = torch.randn(1, 4, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = theirs(x), ours(x)
    assert actual.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


# --- errors, and what goes to PyTorch's operator -----------------------------------------------------------


def wrong_padding_mode(layer: nn.ConvTranspose2d) -> None:
    layer.padding_mode = "reflect"


def wrong_padding(layer: nn.ConvTranspose2d) -> None:
    layer.padding = 1


@pytest.mark.parametrize(
    ("error", "shape", "output_size", "spoil"),
    [
        pytest.param(ValueError, (1, 4, 3, 3), (5, 5), None, id="output_size too small"),
        pytest.param(ValueError, (1, 4, 3, 3), (6, 8), None, id="output_size too large"),
        pytest.param(ValueError, (1, 4, 3, 3), (6, 6, 6), None, id="output_size of three"),
        pytest.param(RuntimeError, (1, 5, 3, 3), None, None, id="channels"),
        pytest.param(RuntimeError, (3, 3), None, None, id="dimensions"),
        pytest.param(ValueError, (1, 4, 3, 3), None, wrong_padding_mode, id="padding_mode"),
        pytest.param(AssertionError, (1, 4, 3, 3), None, wrong_padding, id="padding not a tuple"),
    ],
)
def test_same_errors(
    error: type[Exception],
    shape: tuple[int, ...],
    output_size: Any,
    spoil: Callable[[nn.ConvTranspose2d], None] | None,
) -> None:
    layers = pair(**GEOMETRIES[0])
    messages = []
    for layer in layers:
        if spoil:
            spoil(layer)
        with pytest.raises(error) as raised:
            layer(torch.zeros(shape, dtype=torch.float64), output_size)
        assert type(raised.value) is error
        messages.append(str(raised.value))
    if error is not RuntimeError:  # these words are the module's, the others the operator's
        assert messages[0] == messages[1]


def test_complex_goes_to_pytorchs_operator(calls: list[tuple[Any, ...]]) -> None:
    theirs, ours = pair(dtype=torch.complex64, **GEOMETRIES[2])
    x = torch.randn(2, 4, 3, 3, dtype=torch.complex64)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, (7, 8)), theirs(x, (7, 8)))
    assert not calls


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_moving_between_dtypes_after_construction(calls: list[tuple[Any, ...]]) -> None:
    layer = ConvTranspose2d(4, 6, 4, 2, 1)
    for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.complex64):
        layer.to(dtype)
        x = torch.randn(1, 4, 3, 3, dtype=dtype)
        reference = nn.ConvTranspose2d(4, 6, 4, 2, 1, dtype=dtype)
        reference.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x), reference(x))
    assert [args[0].dtype for args in calls] == [torch.float64, torch.bfloat16, torch.float32]


def test_integer_inputs_raise_pytorchs_error(calls: list[tuple[Any, ...]]) -> None:
    theirs, ours = pair(dtype=torch.float32, **GEOMETRIES[0])
    for layer in (theirs, ours):
        with pytest.raises(RuntimeError, match=r"type|not implemented"):
            layer(torch.zeros(1, 4, 3, 3, dtype=torch.int64))
    assert not calls


def test_other_devices_go_to_pytorchs_operator(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setattr("tconv_swap.op.SUPPORTED_DEVICES", ("cuda",))
    theirs, ours = pair(**GEOMETRIES[0])
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    assert not calls


# --- saving, copying, compiling, tracing -------------------------------------------------------------------


def test_state_dict_both_ways() -> None:
    theirs, ours = nn.ConvTranspose2d(4, 6, 3), ConvTranspose2d(4, 6, 3)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    assert torch.equal(ours.weight, theirs.weight)
    fresh = nn.ConvTranspose2d(4, 6, 3)
    fresh.load_state_dict(ours.state_dict())
    assert torch.equal(fresh.weight, ours.weight)


@pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_survives_copy_and_pickle(round_trip: Callable[[Any], Any]) -> None:
    layer = ConvTranspose2d(4, 6, 3, 2).eval()
    again = round_trip(layer)
    assert type(again) is ConvTranspose2d
    assert not again.training
    x = torch.randn(1, 4, 3, 3)
    assert torch.equal(again(x), layer(x))


def test_loads_with_weights_only() -> None:
    buffer = io.BytesIO()
    torch.save(ConvTranspose2d(4, 6, 3), buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([ConvTranspose2d, set]):
        assert type(torch.load(buffer, weights_only=True)) is ConvTranspose2d


def test_compiles_without_a_graph_break() -> None:
    theirs, ours = pair(dtype=torch.float32, **GEOMETRIES[0])
    x = torch.randn(2, 4, 3, 3)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs(x))
    torch.testing.assert_close(compiled(x, output_size=(7, 6)), theirs(x, output_size=(7, 6)))


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(ConvTranspose2d(4, 6, 3, stride=2, padding=1), nn.ReLU())
        self.last = ConvTranspose2d(6, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.up(x), output_size=(10, 10))
        return y


def test_symbolic_tracing_records_a_leaf() -> None:
    model = Upsampler()
    traced = fx.symbolic_trace(model)
    called = {node.target: node.kwargs for node in traced.graph.nodes if node.op == "call_module"}
    assert called == {"up.0": {}, "up.1": {}, "last": {"output_size": (10, 10)}}
    assert type(traced.last) is ConvTranspose2d
    x = torch.randn(1, 4, 3, 3)
    torch.testing.assert_close(traced(x), model(x))


def test_symbolic_tracing_of_the_layer_itself_is_refused_as_pytorchs() -> None:
    for layer in pair(**GEOMETRIES[0]):
        with pytest.raises(fx.proxy.TraceError, match="control flow"):
            fx.symbolic_trace(layer)


# --- the classes -------------------------------------------------------------------------------------------


class Doubling(nn.ConvTranspose2d):
    """A subclass without its own forward."""

    def double(self) -> None:
        with torch.no_grad():
            self.weight.mul_(2)


class OwnForward(nn.ConvTranspose2d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(input, output_size) * 2


class Derived(ConvTranspose2d):
    """A user's class on top of ours."""


def test_swapped_and_original_class_are_inverse() -> None:
    assert swapped_class(nn.ConvTranspose2d) is ConvTranspose2d
    assert original_class(ConvTranspose2d) is nn.ConvTranspose2d
    swapped = swapped_class(Doubling)
    assert issubclass(swapped, Doubling)
    assert issubclass(swapped, ConvTranspose2d)
    assert swapped.forward is ConvTranspose2d.forward
    assert swapped.double is Doubling.double
    assert (swapped.__module__, swapped.__name__) == ("tconv_swap.layer", "Doubling")
    assert swapped_class(Doubling) is swapped
    assert original_class(swapped) is Doubling
    assert original_class(Derived) is Derived


@pytest.mark.parametrize("cls", [nn.ConvTranspose3d, nn.Linear, ConvTranspose2d, Derived])
def test_classes_without_a_swapped_class_are_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match=cls.__name__):
        swapped_class(cls)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", GEOMETRIES)
def test_moves_to_the_gpu_and_back(arguments: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
    theirs, ours = pair(dtype=torch.float64, **arguments)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    expected = theirs(x)
    torch.testing.assert_close(ours.cuda()(x.cuda()).cpu(), expected)
    torch.testing.assert_close(ours.cpu()(x), expected)
    assert len(calls) == 2


def test_a_copy_of_a_compiled_layer_computes_with_its_own_weight() -> None:
    """`layer.compile()` stores a bound function on the layer, which no copy may keep."""
    ours = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(6, 3, 4, 2, 1)))
    ours[0].compile(backend="eager")
    image = torch.randn(2, 6, 7, 5)
    for round_trip in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin = round_trip(ours)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            assert twin(image).abs().max() == 0
    assert ours(image).abs().max() > 0


def test_layouts_that_are_not_strided_go_to_pytorchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        op, "is_plain", lambda *_: False
    )  # which would leave them to PyTorch's operator anyhow
    theirs = nn.Sequential(nn.ConvTranspose2d(16, 3, 4, 2, 1)).eval()
    ours = tconv_swap.swap_layers(theirs, inplace=False)
    image = torch.randn(4, 16, 32, 32)  # not one that is PyTorch's operator anyhow
    with torch.no_grad():
        opaque = mkldnn.to_mkldnn(copy.deepcopy(ours))(image.to_mkldnn())
        torch.testing.assert_close(opaque.to_dense(), theirs(image))
    for wrong in (image.to_sparse(), None):
        errors = []
        for model in (theirs, ours):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                model(wrong)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]
    weight = theirs[0].weight.detach()
    with pytest.raises(RuntimeError) as caught:
        F.conv_transpose2d(image.to_sparse(), weight)
    with pytest.raises(RuntimeError) as ours_caught:
        op.conv_transpose2d(image.to_sparse(), weight)
    assert str(ours_caught.value) == str(caught.value)
