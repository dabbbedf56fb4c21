"""Calls of several shapes in turn: each goes its own way, and csrc/node.cpp is told each way once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pretended_gpu
import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import ARGUMENTS, GPU
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tconv_swap import op
from tconv_swap.cuda import measured, node, plan, route
from tconv_swap.measurement.modes import MODES

BATCHES = (2, 3)
ALL = [True, True, True]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu.pretended_gpu(monkeypatch) as pretended:
        yield pretended


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The routes of which csrc/node.cpp was told the steps of gradients, each time."""
    numbers: list[int] = []
    add_gradients = node.add_gradients

    def add(number: int, *more: object) -> None:
        numbers.append(number)
        add_gradients(number, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(node, "add_gradients", add)
    return numbers


def tensors(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """grad_output, input, weight."""
    torch.manual_seed(batch)
    return torch.randn(batch, 8, 10, 12), torch.randn(batch, 16, 5, 6), torch.randn(16, 8, 4, 4)


def in_a_graph(gpu: GPU, batch: int, backend: str = "auto", dtype: torch.dtype = torch.float32) -> None:
    gpu.gradients(*(one.to(dtype) for one in tensors(batch)), ALL, backend)


def eagerly(gpu: GPU, batch: int) -> None:
    """PyTorch's forward pass, our gradients."""
    grad_output, x, w = tensors(batch)
    w.requires_grad_()
    known = route.find(("eager", batch))
    if known is None:
        route.remember(("eager", batch), x, w, None, None, ARGUMENTS, "auto")
        known = route.find(("eager", batch))
    assert known is not None
    assert known.handle is None
    y = known.differentiable(x, w, None)
    assert y is not None
    (found,), (wanted,) = (
        torch.autograd.grad(one, w, grad_output) for one in (y, F.conv_transpose2d(x, w, None, 2, 1))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("call", [in_a_graph, eagerly])
def test_two_batches_in_turn(
    gpu: GPU, told: list[int], monkeypatch: pytest.MonkeyPatch, call: Callable[[GPU, int], None]
) -> None:
    monkeypatch.setattr(measured, "why_forward_is_native", lambda *_, **__: "for this test")
    for _ in range(3):
        for batch in BATCHES:
            call(gpu, batch)
    gpu.asked.clear()
    gpu.launched.clear()
    told.clear()
    for _ in range(5):
        for batch in BATCHES:
            call(gpu, batch)
    assert gpu.asked == []
    assert told == []
    assert len(gpu.launched) >= 10


def test_two_dtypes_in_turn(gpu: GPU) -> None:
    dtypes = torch.float16, torch.bfloat16
    for _ in range(3):
        for dtype in dtypes:
            in_a_graph(gpu, 2, dtype=dtype)
    gpu.asked.clear()
    for dtype in dtypes:
        in_a_graph(gpu, 2, dtype=dtype)
    assert gpu.asked == []


def test_what_was_measured_of_one_batch_is_not_the_others(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(problem: plan.Problem, *_: object, **__: object) -> str | None:
        return "for this test" if problem.geometry.batch == BATCHES[1] else None

    for stage in ("grad_input", "grad_weight"):
        monkeypatch.setattr(measured, f"why_{stage}_is_native", why)
    launches: dict[int, set[bool]] = {}
    for _ in range(3):
        for batch in BATCHES:
            for _ in range(3):
                gpu.launched.clear()
                in_a_graph(gpu, batch)
                launches.setdefault(batch, set()).add(len(gpu.launched) > 0)
    assert launches == {BATCHES[0]: {True}, BATCHES[1]: {False}}


def test_a_gradient_that_no_plan_may_read_is_told_once(
    gpu: GPU, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins between two pieces that kernels copy."""
    monkeypatch.setattr(pretended_gpu, "_layout", layout_and_beginning)
    grad_output, x, w = tensors(2)
    between = torch.cat((grad_output.new_zeros(1), grad_output.flatten()))[1:].view(grad_output.shape)
    for _ in range(6):
        gpu.gradients(between, x, w, ALL)
    assert len(told) <= 2
    told.clear()
    for _ in range(3):
        gpu.gradients(grad_output, x, w, ALL)
    assert len(told) <= 1


def layout_and_beginning(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), 0 if tensor.is_meta else tensor.data_ptr() % 16


def test_a_call_that_is_refused_is_not_remembered(gpu: GPU) -> None:
    grad_output, x, w = tensors(2)
    before = len(route._numbered)
    for wrong in ((grad_output[0], x[0], w), (grad_output[:, :, 1:], x, w)):
        for _ in range(3):
            with pytest.raises(RuntimeError):
                gpu.gradients(*wrong, ALL)
    assert not route._routes
    assert len(route._numbered) == before


def test_each_gpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on two of them would find the other's way, which does not fit, and ask for its own every time."""
    keys = []

    def again(key: object, input: Tensor, *_: object) -> Tensor:
        keys.append(key)
        return input

    monkeypatch.setattr(op, "again", again)
    monkeypatch.setattr(op, "is_eager", lambda: True)
    monkeypatch.setattr(op, "are_plain", lambda *_: True)
    monkeypatch.setattr(op, "Tensor", FakeTensor)
    for device in ("cuda:0", "cuda:1"):
        with FakeTensorMode():
            x, w = torch.empty(2, 4, 5, 6, device=device), torch.empty(4, 3, 2, 2, device=device)
            op.conv_transpose2d(x, w)
    assert len(set(keys)) == 2
