"""A call of an eager layer or a compiled graph: Python plans each kind of call once, and kinds are not confused. On a
pretended GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import (
    ARGUMENTS,
    CHANNELS_LAST,
    GEOMETRY,
    GPU,
    H200,
    NCHW,
    grad_output,
    operands,
    pretended_gpu,
)
from sampling import sampled
from torch import Tensor

from tconv_swap.cuda import call, choice
from tconv_swap.kernels import measured, plan
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import host, launch

MASKS = [list(mask) for mask in product([False, True], repeat=3) if any(mask)]
ALL = [True, True, True]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


def misaligned(tensor: Tensor) -> Tensor:
    """Returns a copy that begins one element past an aligned address."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def expected_gradients(grad: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> list[Tensor]:
    stride, padding, output_padding, groups, dilation = ARGUMENTS
    found = torch.ops.aten.convolution_backward(
        *(grad.float(), x.float(), w.float(), [8]),
        *(stride, padding, dilation, True, output_padding, groups, [True] * 3),
    )
    return [gradient for gradient, wanted in zip(found, mask, strict=True) if wanted]


def check_output(gpu: GPU, x: Tensor, w: Tensor, b: Tensor | None, backend: str = "kernel") -> None:
    y = gpu.output(x, w, b, backend)
    expected = F.conv_transpose2d(x.float(), w.float(), None if b is None else b.float(), 2, 1)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def check_gradients(
    gpu: GPU, grad: Tensor, x: Tensor, w: Tensor, mask: list[bool], backend: str = "kernel"
) -> None:
    found = gpu.gradients(grad, x, w, mask, backend)
    form = CHANNELS_LAST if x.is_contiguous(memory_format=CHANNELS_LAST) else NCHW
    for ours, theirs in zip(found, expected_gradients(grad, x, w, mask), strict=True):
        assert ours.dim() == 1 or ours.is_contiguous(memory_format=form)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-1)


def train(gpu: GPU, leaves: list[Tensor], backend: str = "kernel") -> None:
    """Runs a forward and a backward pass without checking them."""
    gpu.differentiable(*leaves, backend).sum().backward()  # type: ignore[arg-type, misc]


# Who computes


@pytest.mark.parametrize(
    ("name", "source", "casts"),
    [
        ("conv_transpose2d_output", "call.cpp", True),
        ("conv_transpose2d_gradients", "call.cpp", False),
        ("norm_activation", "blocks.cpp", False),
        ("block_output", "blocks.cpp", True),
        ("block_training", "blocks.cpp", True),
    ],
)
def test_no_kernel_of_pythons_is_on_the_way(name: str, source: str, casts: bool) -> None:
    assert host.is_available()
    lines = torch._C._dispatch_dump_table(f"tconv_swap::{name}").splitlines()
    for key in ("AutogradCUDA", "CUDA", *(["AutocastCUDA"] if casts else [])):
        (line,) = (line for line in lines if line.startswith(f"{key}:"))
        assert source in line


@pytest.mark.parametrize(
    ("dtype", "form", "backend"),
    sampled(
        product((torch.float32, torch.float16, torch.bfloat16), (NCHW, CHANNELS_LAST), ("auto", "kernel")), 5
    ),
    ids=str,
)
def test_python_is_asked_once(gpu: GPU, form: torch.memory_format, dtype: torch.dtype, backend: str) -> None:
    x, w, b = operands(form, dtype)
    for bias in (b, None):
        gpu.planned.clear()
        for _ in range(3):
            check_output(gpu, x, w, bias, backend)
        assert gpu.planned == ["output"]
    gpu.planned.clear()
    grad = grad_output(dtype).to(memory_format=form)
    for _ in range(3):
        check_gradients(gpu, grad, x, w, ALL, backend)
    assert gpu.planned == ["gradients"]
    assert len(gpu.launched) >= 6


def test_every_mask_of_gradients(gpu: GPU) -> None:
    x, w, _ = operands()
    for _ in range(2):
        for mask in MASKS:
            check_gradients(gpu, grad_output(), x, w, mask)
    assert len(gpu.planned) == len(MASKS)


def test_a_gradient_of_a_sum(gpu: GPU) -> None:
    """The gradient is one expanded number, which a kernel cannot read as it lies in memory."""
    x, w, _ = operands()
    for grad in (torch.ones(()).expand(2, 8, 10, 12), grad_output().to(memory_format=CHANNELS_LAST)):
        gpu.planned.clear()
        for _ in range(3):
            check_gradients(gpu, grad, x, w, ALL)
        assert gpu.planned == ["gradients"]


def test_gradients_in_several_steps_and_formats(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operator computes one of them, in a format of its own choice."""
    monkeypatch.setattr(measured, "why_grad_weight_is_native", lambda *_, **__: "for this test")
    x, w, _ = operands()
    for form, weights in product((NCHW, CHANNELS_LAST), repeat=2):
        tensors = x.to(memory_format=form), w.to(memory_format=weights)
        grad = grad_output().to(memory_format=form)
        gpu.planned.clear()
        gpu.launched.clear()
        last = CHANNELS_LAST in (form, weights)
        for _ in range(3):
            found = gpu.gradients(grad, *tensors, ALL, "auto")
            for ours, theirs in zip(found, expected_gradients(grad, *tensors, ALL), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
                assert ours.dim() == 1 or ours.is_contiguous(memory_format=CHANNELS_LAST if last else NCHW)
        assert gpu.launched
        assert gpu.planned == ["gradients"]


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("ours", [(True, False, False), (False, True, True)])
def test_gradients_of_two_steps_come_back_in_order(
    gpu: GPU, mask: tuple[bool, ...], ours: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tuple(a and b for a, b in zip(mask, ours, strict=True))
    native = tuple(a and not b for a, b in zip(mask, ours, strict=True))

    def mixed(problem: plan.Problem, *_: object) -> tuple[choice.Step, ...]:
        return choice.Step(own, plan.plan_backward(problem, own, H200), ""), choice.Step(native, None, "")

    monkeypatch.setattr(choice, "choose_backward", mixed)
    x, w, _ = operands()
    grad = grad_output()
    found = gpu.gradients(grad, x, w, list(mask))
    for one, theirs in zip(found, expected_gradients(grad, x, w, list(mask)), strict=True):
        torch.testing.assert_close(one, theirs, rtol=1e-3, atol=1e-3)
    assert len(gpu.launched) == 1


def test_pytorchs_operator_is_called_from_there_too(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where formats are mixed, PyTorch's operator chooses the format of its result; a compiled graph gets the
    promised one."""
    for stage in ("forward", "grad_weight"):
        monkeypatch.setattr(measured, f"why_{stage}_is_native", lambda *_, **__: "for this test")
    x, w, b = operands()
    for form, weights in product((NCHW, CHANNELS_LAST), repeat=2):
        tensors = x.to(memory_format=form), w.to(memory_format=weights)
        promised = CHANNELS_LAST if CHANNELS_LAST in (form, weights) else NCHW
        gpu.planned.clear()
        grad = grad_output().to(memory_format=form)
        for _ in range(3):
            check_output(gpu, *tensors, b, "auto")
            assert gpu.output(*tensors, b, "auto").is_contiguous(memory_format=promised)
            (found,) = gpu.gradients(grad, *tensors, [False, True, False], "auto")
            (wanted,) = expected_gradients(grad, *tensors, [False, True, False])
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            assert found.is_contiguous(memory_format=promised)
        assert gpu.planned == ["output", "gradients"]
    assert gpu.launched == []


# What tells calls apart

CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "batch": lambda x, w, b: (x[:1], w, b),
    "height": lambda x, w, b: (x[:, :, :3].contiguous(), w, b),
    "channels_last": lambda x, w, b: (x.to(memory_format=CHANNELS_LAST), w, b),
    "a slice": lambda x, w, b: (x[:, :, :, 1:], w, b),
    "the weight's format": lambda x, w, b: (x, w.to(memory_format=CHANNELS_LAST), b),
    "dtype": lambda x, w, b: (x.half(), w.half(), b.half()),
    "no bias": lambda x, w, b: (x, w, None),
    "backend": lambda x, w, b: (x, w, b, "auto"),
    "an input that begins elsewhere": lambda x, w, b: (misaligned(x), w, b),
    "a weight that begins elsewhere": lambda x, w, b: (x, misaligned(w), b),
    "a bias that begins elsewhere": lambda x, w, b: (x, w, misaligned(b)),
    "a bias with a stride": lambda x, w, b: (x, w, torch.stack((b, b), 1)[:, 0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_not_answered_by_the_first_and_both_are_known(gpu: GPU, change: str) -> None:
    first = operands()
    other = CHANGES[change](*first)
    check_output(gpu, *first)
    check_output(gpu, *other)
    assert gpu.planned == ["output"] * 2
    for _ in range(3):
        check_output(gpu, *other)
        check_output(gpu, *first)
    assert gpu.planned == ["output"] * 2


def test_each_number_of_the_geometry_tells_calls_apart(gpu: GPU) -> None:
    x, w, _ = operands()
    op = torch.ops.tconv_swap.conv_transpose2d_output.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    geometries = [[2, 2, 1, 1, 0, 0, 1, 1, 1]]
    for place in range(9):
        geometries.append([number + (index == place) for index, number in enumerate(geometries[0])])
    for geometry in geometries:
        shape = F.conv_transpose2d(
            x, w, None, geometry[:2], geometry[2:4], geometry[4:6], geometry[6], geometry[7:]
        ).shape
        assert op.redispatch(keys, x, w, None, geometry, "native").shape == shape
    assert len(gpu.planned) == len(geometries)


def test_layouts_dtypes_and_sizes_live_side_by_side(gpu: GPU) -> None:
    """Training steps of all kinds in turn: after the first round Python plans nothing."""
    steps = [
        [one.requires_grad_() for one in operands(form, dtype, batch)]
        for form, dtype, batch in product((NCHW, CHANNELS_LAST), (torch.float32, torch.float16), (2, 3))
    ]
    for step in steps:
        train(gpu, step)
    gpu.planned.clear()
    gpu.launched.clear()
    for _ in range(3):
        for step in steps:
            train(gpu, step)
    assert gpu.planned == []
    assert len(gpu.launched) >= 2 * 3 * len(steps)


def test_what_was_measured_of_one_batch_is_not_the_others(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(problem: plan.Problem, *_: object, **__: object) -> str | None:
        return "for this test" if problem.geometry.batch == 3 else None

    for stage in ("grad_input", "grad_weight"):
        monkeypatch.setattr(measured, f"why_{stage}_is_native", why)
    launches: dict[int, set[bool]] = {}
    for batch in (2, 3, 2, 3):
        gpu.launched.clear()
        gpu.gradients(grad_output(batch=batch), *operands(batch=batch)[:2], ALL, "auto")
        launches.setdefault(batch, set()).add(len(gpu.launched) > 0)
    assert launches == {2: {True}, 3: {False}}


def test_the_switch_is_obeyed_and_thrown_to_and_fro_finds_its_old_answer(gpu: GPU) -> None:
    x, w, b = operands()
    plans: dict[str, set[int]] = {"ieee": set(), "tf32": set()}
    for _ in range(3):
        for precision, handles in plans.items():
            torch.backends.cudnn.conv.fp32_precision = precision
            gpu.launched.clear()
            check_output(gpu, x, w, b)
            check_gradients(gpu, grad_output(), x, w, ALL)
            handles.update(gpu.launched)
    assert plans["ieee"]
    assert plans["ieee"].isdisjoint(plans["tf32"])
    assert gpu.planned == ["output", "gradients"] * 2


def test_half_precision_knows_no_switch(gpu: GPU) -> None:
    x, w, b = operands(dtype=torch.float16)
    check_output(gpu, x, w, b)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    check_output(gpu, x, w, b)
    assert gpu.planned == ["output"]


# What is kept


def test_what_does_not_fit_is_refused_and_not_kept(gpu: GPU) -> None:
    x, w, b = operands()
    check_output(gpu, x, w, b)
    known = launch.count_plans()
    for _ in range(2):
        for wrong in ((x, w, b[:3]), (x, w[:3], b), (x[0], w, b), (x, w.half(), b)):
            with pytest.raises(RuntimeError):
                gpu.output(*wrong)
        with pytest.raises(RuntimeError, match="grad_output"):
            gpu.gradients(torch.randn(2, 8, 10, 11), x, w, ALL)
        with pytest.raises(ValueError, match="backend"):
            gpu.output(x, w, b, "elsewhere")
    assert launch.count_plans() == known


def test_forgotten_calls_are_chosen_anew(gpu: GPU) -> None:
    x, w, b = operands()
    for _ in range(2):
        check_output(gpu, x, w, b)
        call.forget()
        assert launch.count_plans() == 0
    check_output(gpu, x, w, b)
    assert gpu.planned == ["output"] * 3


def test_what_is_forgotten_during_a_call_is_not_answered_by_it(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that another thread planned before ``tune`` emptied the cache must not be kept."""
    x, w, b = operands()
    plan_call = call.plan_call
    monkeypatch.setattr(call, "plan_call", lambda *given: (plan_call(*given), call.forget())[0])
    check_output(gpu, x, w, b)
    monkeypatch.setattr(call, "plan_call", plan_call)
    check_output(gpu, x, w, b)
    assert gpu.planned == ["output"] * 2


def test_ever_new_sizes_leave_a_bounded_number_behind(gpu: GPU) -> None:
    """Call plans that are used stay in the cache; the oldest ones are dropped."""
    w, often = torch.randn(1, 1, 1, 1), torch.randn(1, 1, 5000, 1)
    op = torch.ops.tconv_swap.conv_transpose2d_output.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for size in range(1, 4200):
        op.redispatch(keys, torch.randn(1, 1, size, 1), w, None, [1, 1, 0, 0, 0, 0, 1, 1, 1], "native")
        op.redispatch(keys, often, w, None, [1, 1, 0, 0, 0, 0, 1, 1, 1], "native")
    assert launch.count_plans() <= 4096
    assert len(gpu.planned) == 4200


def test_threads_share_what_is_known(gpu: GPU) -> None:
    """Each thread plans each of its calls at most once; results are right while others insert and forget."""
    wrong: list[BaseException] = []

    def work(batch: int) -> None:
        try:
            for _ in range(30):
                check_output(gpu, *operands(batch=batch))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(batch,)) for batch in (1, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        call.forget()
    for thread in threads:
        thread.join()
    assert wrong == []


# Without the host part


def test_without_the_host_part_pytorchs_operator_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tconv_swap import graph

    monkeypatch.setattr(host, "is_available", lambda: False)

    def refused() -> None:
        raise host.BuildError("no compiler")

    monkeypatch.setattr(host, "library", refused)
    x, w, b = operands()

    class OnCuda(Tensor):
        is_cuda = True

    on_cuda = x.as_subclass(OnCuda)
    found = graph.compute_output(on_cuda, w, b, GEOMETRY, "auto")
    torch.testing.assert_close(found.as_subclass(Tensor), F.conv_transpose2d(x, w, b, 2, 1))
    gradients = graph.compute_gradients(grad_output(), on_cuda, w, GEOMETRY, ALL, "auto")
    assert [one.shape for one in gradients] == [x.shape, w.shape, b.shape]
    with pytest.raises(host.BuildError, match="no compiler"):
        graph.compute_output(on_cuda, w, b, GEOMETRY, "kernel")
