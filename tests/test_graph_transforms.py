"""Calls the two ops of a graph outside of a compiled graph, as a decomposed program does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from tconv_swap.geometry import as_list
from tconv_swap.runtime import host

OPS = torch.ops.tconv_swap
ARGUMENTS: tuple[Any, ...] = ((2, 2), (1, 1), (0, 0), 1, (1, 1))
GEOMETRY = as_list(ARGUMENTS)
#: The keys with which a tensor on CUDA reaches a kernel of csrc/call.cpp.
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.CUDA
)


@pytest.fixture(autouse=True)
def _host_part_is_loaded() -> None:
    assert host.is_available()


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 5, 6), (4, 3, 4, 4), (3,)
    x, w, b = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return x, w, b


def output(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return OPS.conv_transpose2d_output(x, w, b, GEOMETRY, "kernel")  # type: ignore[no-any-return]


def input_gradient(grad_output: Tensor, x: Tensor, w: Tensor) -> Tensor:
    mask = [True, False, False]
    return OPS.conv_transpose2d_gradients(grad_output, x, w, GEOMETRY, mask, "kernel")[0]  # type: ignore[no-any-return]


# --- sizes that are symbols ---------------------------------------------------------------------------------


def of_symbols(small: Tensor, large: Tensor, which: str) -> Any:
    """On CUDA; the output has the size of another tensor."""
    (h, w), (height, width) = small.shape, large.shape
    x = torch.empty(2, 4, h, w, device="cuda")
    weight = torch.empty(4, 3, 4, 4, device="cuda")
    geometry = [2, 2, 1, 1, height - 2 * h, width - 2 * w, 1, 1, 1]
    if which == "output":
        return OPS.conv_transpose2d_output(x, weight, None, geometry, "auto")
    grad_output = torch.empty(2, 3, height, width, device="cuda")
    return OPS.conv_transpose2d_gradients(grad_output, x, weight, geometry, [True] * 3, "auto")


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("which", ["output", "gradients"])
def test_a_symbolic_geometry(which: str, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        traced = make_fx(lambda a, b: of_symbols(a, b, which), tracing_mode="symbolic")(
            torch.empty(5, 6), torch.empty(11, 12)
        )
    (call,) = (one for one in traced.graph.nodes if "tconv_swap" in str(one.target))
    (geometry,) = (one for one in call.args if isinstance(one, list) and len(one) == 9)
    assert [isinstance(number, int) for number in geometry] == [True] * 4 + [False] * 2 + [True] * 3


# --- autocast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_an_autocast_casts_as_it_would_a_convolution(given: torch.dtype, trained: bool) -> None:
    x, w, b = operands(torch.float32)
    w.requires_grad_(trained)
    with torch.autocast("cpu", torch.bfloat16):
        y = output(x.to(given), w, b)
        expected = torch.nn.functional.conv_transpose2d(x.to(given), w, b, 2, 1)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert y.requires_grad == trained
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert output(*operands(torch.float64)).dtype == torch.float64


# --- derivatives --------------------------------------------------------------------------------------------


@pytest.fixture(params=["output", "input_gradient"])
def linear(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Tensor]]:
    """Returns a linear map by one of the two ops, and a point at which to differentiate it."""
    x, w, _ = operands()
    if request.param == "output":
        yield lambda one: output(one, w), x
    else:
        yield lambda one: input_gradient(one, x, w), output(x, w)


def test_forward_mode(linear: tuple[Any, Tensor]) -> None:
    compute, x = linear
    tangent = torch.randn_like(x)
    expected = compute(tangent)
    torch.testing.assert_close(torch.func.jvp(compute, (x,), (tangent,))[1], expected)
    with forward_ad.dual_level():
        dual = compute(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected)


def test_forward_mode_through_the_cpp_node() -> None:
    x, w, _ = operands()
    tangent = torch.randn_like(x)
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(x, tangent)
        y = OPS.conv_transpose2d_output.default.redispatch(ON_CUDA, dual, w, None, GEOMETRY, "kernel")
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, output(tangent, w))
        cotangent = forward_ad.make_dual(output(x, w), output(tangent, w))
        mask = [True, False, False]
        (g,) = OPS.conv_transpose2d_gradients.default.redispatch(
            ON_CUDA, cotangent, x, w, GEOMETRY, mask, "kernel"
        )
        found = forward_ad.unpack_dual(g).tangent
        torch.testing.assert_close(found, input_gradient(output(tangent, w), x, w))


def test_functional_gradients_and_batches(linear: tuple[Any, Tensor]) -> None:
    compute, x = linear
    expected = x.clone().requires_grad_()
    compute(expected).square().sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda one: compute(one).square().sum())(x), expected.grad)
    several = torch.stack([x, 2 * x, -x])
    torch.testing.assert_close(torch.vmap(compute)(several), torch.stack([compute(one) for one in several]))
