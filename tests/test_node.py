"""csrc/node.cpp's autograd node, where there is no GPU; tests/test_routes.py has it on one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import ARGUMENTS, CHANNELS_LAST, GPU, pretended_gpu
from torch import Tensor

from tconv_swap import eager
from tconv_swap.cuda import node, route
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


HALF = torch.float16


def served(monkeypatch: pytest.MonkeyPatch, *tensors: Tensor, gradients: bool = False) -> Tensor:
    """A call under an autocast that was made before; casts of Python's are a failure."""
    key = (*(one.dtype for one in tensors), *(one.shape for one in tensors))
    route.remember(key, *(one.detach().to(HALF) for one in tensors), HALF, ARGUMENTS, "kernel")
    with monkeypatch.context() as context, torch.set_grad_enabled(gradients):
        context.setattr(eager, "cast", lambda *_: pytest.fail("Python was asked to cast"))
        found = eager.again(key, *tensors, HALF)
    assert found is not None
    return found


@pytest.mark.parametrize("given", [(torch.float32,) * 3, (HALF, torch.float32, torch.float32), (HALF,) * 3])
def test_it_casts_what_an_autocast_would(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, given: tuple[torch.dtype, ...]
) -> None:
    """Served as well as trained; a node is hung behind the output where a derivative is wanted alone."""
    tensors = [one.to(dtype) for one, dtype in zip(operands(False, False, False), given, strict=True)]
    x, w, b = (one.to(HALF).float() for one in tensors)
    expected = F.conv_transpose2d(x, w, b, 2, 1)
    for _ in range(2):
        found = served(monkeypatch, *tensors)
        assert (found.dtype, found.requires_grad) == (HALF, False)
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-2)
    weight = tensors[1].requires_grad_()
    assert served(monkeypatch, *tensors).grad_fn is None
    trained = served(monkeypatch, *tensors, gradients=True)
    (gradient,) = torch.autograd.grad(trained.float().sum(), weight)
    assert gradient.dtype == weight.dtype
    with torch.inference_mode():
        assert served(monkeypatch, *tensors).is_inference()


def test_float64_is_not_cast(gpu: GPU) -> None:
    x, w, b = operands(False, False, False)
    key = "float64"
    route.remember(key, x.half(), w.half(), b.half(), HALF, ARGUMENTS, "kernel")
    known = route.find(key)
    assert known is not None
    assert known.differentiable(x.double(), w, b) is None


def test_nobody_waits_for_a_compiler_to_have_something_cast(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "is_built", lambda: False)
    x, w, b = operands(True, True, True)
    for dtype in (HALF, None):
        tensors = [one.detach() if dtype is None else one.detach().half() for one in (x, w, b)]
        route.remember(dtype, *tensors, dtype, ARGUMENTS, "kernel")
        known = route.find(dtype)
        assert known is not None
        with torch.no_grad():
            found = eager.again(dtype, x, w, b, dtype)
        assert found is not None
        assert found.dtype == (dtype or torch.float32)
        assert known.number is None
