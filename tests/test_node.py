"""csrc/node.cpp's autograd node, where there is no GPU; tests/test_routes.py has it on one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import CHANNELS_LAST, GPU, pretended_gpu
from torch import Tensor

from tconv_swap.cuda import route
from tconv_swap.measurement.modes import MODES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


def operands(*needs: bool) -> list[Tensor]:
    torch.manual_seed(0)
    made = torch.randn(2, 16, 5, 6), torch.randn(16, 8, 4, 4), torch.randn(8)
    return [one.requires_grad_(wanted) for one, wanted in zip(made, needs, strict=True)]


def check(gpu: GPU, leaves: list[Tensor], create_graph: bool = False) -> None:
    needing = [one for one in leaves if one.requires_grad]
    y, expected = gpu.differentiable(*leaves), F.conv_transpose2d(*leaves, 2, 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(y).requires_grad_(create_graph)
    found, wanted = (
        torch.autograd.grad(output, needing, grad, create_graph=create_graph) for output in (y, expected)
    )
    if create_graph:
        found, wanted = (
            torch.autograd.grad(sum(one.square().sum() for one in first), [*needing[:2], grad])
            for first in (found, wanted)
        )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=3) if any(one)], ids=str)
def test_it_asks_for_the_gradients_that_are_wanted(gpu: GPU, needs: tuple[bool, bool, bool]) -> None:
    """The first backward pass is Python's, the next are its own."""
    for _ in range(3):
        check(gpu, operands(*needs))
    assert gpu.asked == ["gradients"]
    assert len(gpu.launched) >= 6


def test_gradients_of_gradients_are_the_ops(gpu: GPU) -> None:
    for _ in range(2):
        check(gpu, operands(True, True, True), create_graph=True)
    assert gpu.asked == []


def test_tensors_that_lie_otherwise_are_left_to_python(gpu: GPU) -> None:
    x, w, b = operands(True, True, True)
    check(gpu, [x, w, b])
    known = route.find((x.shape, w.shape, x.dtype, False))
    assert known is not None
    assert known.differentiable(x.to(memory_format=CHANNELS_LAST), w, b) is None
    assert known.differentiable(x, w, None) is None
    assert known.differentiable(x, w, b) is not None
