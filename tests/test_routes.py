"""Calls made again: the way of an earlier call is gone only by tensors and switches like its own. On a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap import conv_transpose2d
from tconv_swap.cuda import call, measured, route

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    route.forget()
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, 4 bytes past an aligned address."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, every other one of its memory."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


LAYOUTS = [torch.Tensor.contiguous, misaligned, strided, channels_last]


def check(x: Tensor, w: Tensor, b: Tensor | None, backend: str, gradients: bool) -> None:
    """Against PyTorch's operator, gradients of a sum (an expanded number) and of noise."""
    leaves = [t.detach().requires_grad_(gradients) for t in (x, w, b) if t is not None]
    bias = leaves[2] if b is not None else None
    y = conv_transpose2d(leaves[0], leaves[1], bias, 2, 1, backend=backend)
    expected = F.conv_transpose2d(leaves[0], leaves[1], bias, 2, 1)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if not gradients:
        return
    for grad in (torch.ones((), device="cuda").expand_as(y), torch.randn_like(y)):
        found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        wanted = torch.autograd.grad(expected, leaves, grad, retain_graph=True)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["auto", "kernel"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_tensors_that_lie_otherwise_go_another_way(operand: int, gradients: bool, backend: str) -> None:
    operands = [randn(2, 16, 9, 10), randn(16, 8, 4, 4), randn(8)]
    for layout in (*LAYOUTS, *LAYOUTS[::-1]):
        for _ in range(2):
            changed = [*operands]
            changed[operand] = layout(operands[operand])
            check(*changed, backend, gradients)


@pytest.mark.parametrize("backend", ["auto", "kernel", "native"])
def test_like_calls_are_told_apart(backend: str) -> None:
    x, w, b = randn(2, 16, 9, 10), randn(16, 8, 4, 4), randn(8)
    for _ in range(3):
        check(x, w, b, backend, True)
        check(x, w, None, backend, True)
        check(x[:1], w, b, backend, False)
        check(x, w[:, :4], b[:4], backend, False)
        half = conv_transpose2d(x.half(), w.half(), b.half(), 2, 1, backend=backend)
        assert half.dtype == torch.float16
        for stride, padding in ((1, 0), (2, 0), ((2, 1), 1), ([2, 1], [1, 0])):
            ours = conv_transpose2d(x, w, b, stride, padding, backend=backend)
            torch.testing.assert_close(
                ours, F.conv_transpose2d(x, w, b, stride, padding), rtol=1e-4, atol=1e-4
            )
        with pytest.raises(RuntimeError):
            conv_transpose2d(x, w, b[:3], 2, 1, backend=backend)
        with pytest.raises(RuntimeError):
            conv_transpose2d(x, w.cpu(), b, 2, 1, backend=backend)


def test_the_switch_is_obeyed_at_every_call() -> None:
    x, w = randn(4, 64, 12, 12), randn(64, 64, 4, 4)
    truth = F.conv_transpose2d(x.double(), w.double(), None, 2, 1)

    def error(backend: str) -> float:
        y = conv_transpose2d(x, w, None, 2, 1, backend=backend)
        return float((y.double() - truth).norm() / truth.norm())

    for _ in range(3):
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert error("kernel") < 1e-6
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        assert error("kernel") > 1e-5


def test_a_call_made_again_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = randn(2, 16, 9, 10), randn(16, 8, 4, 4).requires_grad_(), randn(8)

    def step() -> None:
        conv_transpose2d(x, w, b, 2, 1, backend="kernel").sum().backward()

    for _ in range(2):
        step()
    refuse: Callable[..., None] = lambda *_: pytest.fail("the way of the earlier call was not taken")  # noqa: E731
    monkeypatch.setattr(call, "forward_calls", refuse)
    monkeypatch.setattr(call, "backward_and_calls", refuse)
    step()


def test_gradients_of_several_steps_are_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "why_grad_weight_is_native", lambda *_, **__: "for this test")
    x, w, b = randn(8, 64, 12, 10), randn(64, 32, 4, 4), randn(32)
    for _ in range(2):
        check(x, w, b, "auto", True)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    _, calls = call.backward_and_calls(
        randn(8, 32, 24, 20), x, w, ((2, 2), (1, 1), (0, 0), 1, (1, 1)), (True, True, True), "auto"
    )
    assert [one.handle is None for one in calls] == [False, True]
    refuse: Callable[..., None] = lambda *_: pytest.fail("the way of the earlier call was not taken")  # noqa: E731
    monkeypatch.setattr(call, "backward_and_calls", refuse)
    conv_transpose2d(*leaves, 2, 1).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_new_shapes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "MOST_ROUTES", 3)
    w = randn(4, 3, 2, 2)
    for size in range(1, 9):
        conv_transpose2d(randn(1, 4, size, size), w, backend="kernel")
    assert len(route._routes) <= 3
