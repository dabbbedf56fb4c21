"""Switches of PyTorch that its convolutions do not obey, and that no formulation of ours on the CPU may obey either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tconv_swap.cpu import plan as plan_cpu
from tconv_swap.geometry import check_geometry
from tconv_swap.op import conv_transpose2d


@pytest.fixture
def _matmul_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("_matmul_precision")
@pytest.mark.parametrize("name", ["outer", "products", "kernel = stride"])
def test_a_switch_for_matrix_products_leaves_convolutions_exact(name: str) -> None:
    """torch.set_float32_matmul_precision, which Lightning asks for, and PyTorch's convolutions do not obey."""
    shapes = {
        "outer": ((32, 100, 1, 1), (100, 512, 4, 4), (1, 0)),
        "products": ((8, 64, 32, 32), (64, 3, 4, 4), (2, 1)),
        "kernel = stride": ((4, 64, 32, 32), (64, 32, 2, 2), (2, 0)),
    }
    x_shape, w_shape, (stride, padding) = shapes[name]
    torch.manual_seed(0)
    x, w = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        a, b = x.to(dtype), w.to(dtype)
        y = conv_transpose2d(a, b, None, stride, padding)
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    exact = results(torch.float64)
    chosen = []
    for precision in ("highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        for found, truth in zip(results(torch.float32), exact, strict=True):
            # A gradient of the weight sums 32,768 products: 1e-6 off in float32, and 2e-3 of bfloat16's.
            assert float((found - truth).detach().norm() / truth.detach().norm()) < 1e-5
        geometry = check_geometry(x_shape, w_shape, None, (stride,) * 2, (padding,) * 2, (0, 0), 1, (1, 1))
        chosen.append(plan_cpu.choose(geometry, torch.float32, torch.contiguous_format))
    assert chosen[0] == chosen[2] != "plain" == chosen[1]


@pytest.mark.parametrize("shapes", [((32, 100, 1, 1), (100, 512, 4, 4)), ((2, 4, 5, 6), (4, 3, 3, 3))])
def test_a_backward_pass_inside_an_autocast_casts_nothing(shapes: tuple[Any, Any]) -> None:
    """As PyTorch's: what was computed in float32 has gradients of float32, and gradients of those."""
    torch.manual_seed(0)
    x, w = (torch.randn(shape, requires_grad=True) for shape in shapes)

    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        y = function(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            first = torch.autograd.grad(y.square().mean(), (x, w), create_graph=True)
            return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]

    for ours, theirs in zip(gradients(conv_transpose2d), gradients(F.conv_transpose2d), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
