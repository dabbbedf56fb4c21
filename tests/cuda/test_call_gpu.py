"""Repeated calls on a GPU: a call plan is used for tensors and switches like those it was made for, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tconv_swap
from tconv_swap import conv_transpose2d
from tconv_swap.cuda import call
from tconv_swap.kernels import measured
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import launch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    with MODES["fp32"].switched_on():
        call.forget()
        yield
        call.forget()


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def misaligned(tensor: Tensor) -> Tensor:
    """Returns a copy that begins 4 bytes past an aligned address."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """Returns a copy that uses every other element of its memory."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def negated(tensor: Tensor) -> Tensor:
    """Returns an equal tensor whose memory holds the negative numbers, as views of complex tensors may."""
    return torch._neg_view(-tensor)


LAYOUTS = [torch.Tensor.contiguous, misaligned, strided, channels_last, negated]


def check(x: Tensor, w: Tensor, b: Tensor | None, backend: str, gradients: bool) -> None:
    """Compares with PyTorch's operator: the gradients of a sum (an expanded number) and of noise."""
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
    monkeypatch.setattr(call, "plan_call", lambda *_: pytest.fail("Python plans"))
    step()


def test_gradients_of_several_steps_are_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "why_grad_weight_is_native", lambda *_, **__: "for this test")
    x, w, b = randn(8, 64, 12, 10), randn(64, 32, 4, 4), randn(32)
    for _ in range(2):
        check(x, w, b, "auto", True)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    monkeypatch.setattr(call, "plan_call", lambda *_: pytest.fail("Python plans"))
    conv_transpose2d(*leaves, 2, 1).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


BACKENDS = ["auto", "kernel"]


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(randn(*shape).requires_grad_() for shape in ((2, 16, 9, 10), (16, 8, 4, 4), (8,)))  # type: ignore[return-value]


def made_again(x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
    """Returns the output of a call after the same call was made and differentiated."""
    for _ in range(3):
        y = conv_transpose2d(x, w, b, 2, 1, backend=backend)
        y.sum().backward(retain_graph=True)
    return y


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_needs_a_gradient_gets_one(backend: str) -> None:
    for needed in range(1, 8):
        x, w, b = leaves()
        wanted = [t.requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((x, w, b))]
        made_again(x, w, b, backend)
        assert [t.grad is not None for t in wanted] == [t.requires_grad for t in wanted]
    x, w, b = leaves()
    y, expected = made_again(x, w, b, backend), F.conv_transpose2d(x, w, b, 2, 1)
    for asked in ([w], [b, x], [x], [w, b]):
        found = torch.autograd.grad(y.square().sum(), asked, retain_graph=True)
        truth = torch.autograd.grad(expected.square().sum(), asked, retain_graph=True)
        for ours, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_gradients_and_of_batches(backend: str) -> None:
    operands = leaves()
    y, expected = made_again(*operands, backend), F.conv_transpose2d(*operands, 2, 1)

    def second(output: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.square().sum(), operands[:2], create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].sum(), operands[:2])

    batch = randn(3, *y.shape)

    def batched(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, operands, batch, retain_graph=True, is_grads_batched=True)

    for derivative in (batched, second):
        for ours, theirs in zip(derivative(y), derivative(expected), strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocasts_are_told_apart(backend: str) -> None:
    operands = leaves()
    for _ in range(3):
        for dtype in (torch.float16, torch.bfloat16, None):
            with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
                y = conv_transpose2d(*operands, 2, 1, backend=backend)
                expected = F.conv_transpose2d(*operands, 2, 1)
                with torch.no_grad():
                    assert torch.equal(conv_transpose2d(*operands, 2, 1, backend=backend), y)
            assert y.dtype == expected.dtype == (dtype or torch.float32)
            found, truth = (
                torch.autograd.grad(output.float().square().sum(), operands) for output in (y, expected)
            )
            tolerance = {torch.float16: 3e-3, torch.bfloat16: 2e-2, None: 1e-5}[dtype]
            for ours, theirs in zip((y, *found), (expected, *truth), strict=True):
                assert ours.dtype == theirs.dtype
                error = (ours - theirs).detach().float().norm() / theirs.detach().float().norm()
                assert float(error) < tolerance


def test_what_was_saved_is_watched() -> None:
    x, w, b = leaves()
    y = made_again(x, w, b, "kernel")
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()
    y = made_again(x, w, b, "kernel")
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.cuda()):
        y = conv_transpose2d(x, w, b, 2, 1, backend="kernel")
    assert packed == [x.shape, w.shape]
    expected = F.conv_transpose2d(x, w, b, 2, 1)
    found, truth = (torch.autograd.grad(output.sum(), x)[0] for output in (y, expected))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_gradients_are_not_copied_on_their_way_to_the_parameters() -> None:
    _, w, b = leaves()
    x = randn(2, 16, 9, 10)
    made_again(x, w, b, "kernel")
    w.grad = b.grad = None
    seen: list[int] = []
    for parameter in (w, b):
        parameter.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    conv_transpose2d(x, w, b, 2, 1, backend="kernel").sum().backward()
    assert w.grad is not None
    assert b.grad is not None
    assert sorted(seen) == sorted([w.grad.data_ptr(), b.grad.data_ptr()])


def test_dispatch_modes_see_the_gradients() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    operands = leaves()
    y = made_again(*operands, "kernel")
    with Seen():
        y.sum().backward()
    assert "tconv_swap.conv_transpose2d_gradients.default" in names


def test_a_switch_thrown_between_the_passes_holds_for_that_backward_pass_only() -> None:
    x, w = randn(4, 64, 12, 12), randn(64, 64, 4, 4).requires_grad_()
    truth = torch.autograd.grad(F.conv_transpose2d(x.double(), w.double(), None, 2, 1).square().sum(), w)[0]

    def error(backward: str) -> float:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        loss = conv_transpose2d(x, w, None, 2, 1, backend="kernel").square().sum()
        torch.backends.cudnn.conv.fp32_precision = backward
        return float((torch.autograd.grad(loss, w)[0] - truth).norm() / truth.norm())

    for precision in ("ieee", "ieee", "tf32", "ieee", "tf32", "tf32", "ieee"):
        assert (error(precision) > 1e-5) == (precision == "tf32")


def test_both_layouts_go_without_python_whichever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        [one.detach().half().contiguous(memory_format=form).requires_grad_() for one in leaves()[:2]]
        for form in (torch.contiguous_format, torch.channels_last)
    ]
    for x, w in steps:
        conv_transpose2d(x, w, None, 2, 1, backend="kernel").sum().backward()
    monkeypatch.setattr(call, "plan_call", lambda *_: pytest.fail("Python plans"))
    for x, w in steps[::-1]:
        conv_transpose2d(x, w, None, 2, 1, backend="kernel").sum().backward()


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_compiled_graph_goes_without_python(
    form: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles, trains and serves a network; then calls it on another stream after its weights changed."""
    torch.compiler.reset()
    layer = tconv_swap.ConvTranspose2d(16, 8, 4, 2, 1).to("cuda", dtype, memory_format=form)
    layer.tconv_backend = "kernel"
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager", fullgraph=True)

    def step() -> None:
        x = torch.randn(2, 16, 5, 6, device="cuda", dtype=dtype).to(memory_format=form).requires_grad_()
        y = compiled(x)
        wanted = F.conv_transpose2d(x, layer.weight, layer.bias, 2, 1)
        grad = torch.randn_like(y)
        leaves = (x, layer.weight, layer.bias)
        with torch.no_grad():
            assert torch.equal(compiled(x), y)
        tolerance = dict(rtol=1e-2, atol=1e-1)
        torch.testing.assert_close(y, wanted, **tolerance)
        for ours, theirs in zip(
            torch.autograd.grad(y, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **tolerance)

    for _ in range(2):
        step()
    monkeypatch.setattr(call, "plan_call", lambda *_: pytest.fail("Python plans"))
    with torch.no_grad():
        layer.weight.mul_(2)
    step()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.compiler.reset()


def test_ever_new_sizes_keep_their_memory() -> None:
    """Programs are bounded like call plans: those of sizes that are no longer used are dropped."""
    w = randn(4, 3, 2, 2)
    for size in range(1, 9):
        for _ in range(2):
            conv_transpose2d(randn(1, 4, size, size), w, backend="kernel")
    assert launch.count_plans() == 8
    call.forget()
    assert launch.count_plans() == 0
