"""What a compiled graph calls, made again: csrc/node.cpp answers, and only where everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import ARGUMENTS, CHANNELS_LAST, GEOMETRY, GPU, NCHW, pretended_gpu
from torch import Tensor

import tconv_swap
from tconv_swap import graph
from tconv_swap.cuda import call, graph_calls, measured, node, route
from tconv_swap.measurement.modes import MODES

MASKS = [list(mask) for mask in product([False, True], repeat=3) if any(mask)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


def operands(form: torch.memory_format = NCHW, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 16, 5, 6), torch.randn(16, 8, 4, 4), torch.randn(8)
    return [one.to(dtype) for one in (x.to(memory_format=form), w.to(memory_format=form), b)]


def expected_gradients(grad_output: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> list[Tensor]:
    stride, padding, output_padding, groups, dilation = ARGUMENTS
    found = torch.ops.aten.convolution_backward(
        *(grad_output.float(), x.float(), w.float(), [8]),
        *(stride, padding, dilation, True, output_padding, groups, [True] * 3),
    )
    return [gradient for gradient, wanted in zip(found, mask, strict=True) if wanted]


def check_output(gpu: GPU, x: Tensor, w: Tensor, b: Tensor | None, backend: str = "kernel") -> None:
    y = gpu.output(x, w, b, backend)
    expected = F.conv_transpose2d(x.float(), w.float(), None if b is None else b.float(), 2, 1)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


def check_gradients(
    gpu: GPU, grad_output: Tensor, x: Tensor, w: Tensor, mask: list[bool], backend: str = "kernel"
) -> None:
    found = gpu.gradients(grad_output, x, w, mask, backend)
    form = CHANNELS_LAST if x.is_contiguous(memory_format=CHANNELS_LAST) else NCHW
    for ours, theirs in zip(found, expected_gradients(grad_output, x, w, mask), strict=True):
        assert ours.dim() == 1 or ours.is_contiguous(memory_format=form)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("name", ["conv_transpose2d_output", "conv_transpose2d_gradients"])
def test_no_kernel_of_pythons_is_on_the_way(name: str) -> None:
    assert node._library() is not None
    lines = torch._C._dispatch_dump_table(f"tconv_swap::{name}").splitlines()
    for key in ("AutogradCUDA", "CUDA"):
        (line,) = (line for line in lines if line.startswith(f"{key}:"))
        assert "node.cpp" in line


@pytest.mark.parametrize("backend", ["auto", "kernel"])
@pytest.mark.parametrize("form", [NCHW, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_python_is_asked_twice(gpu: GPU, form: torch.memory_format, dtype: torch.dtype, backend: str) -> None:
    x, w, b = operands(form, dtype)
    for bias in (b, None):
        gpu.asked.clear()
        for _ in range(4):
            check_output(gpu, x, w, bias, backend)
        assert gpu.asked == ["output"] * 2
    assert len(gpu.launched) == 8


@pytest.mark.parametrize("form", [NCHW, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_python_is_asked_twice_for_gradients(gpu: GPU, form: torch.memory_format, dtype: torch.dtype) -> None:
    x, w, _ = operands(form, dtype)
    grad_output = torch.randn(2, 8, 10, 12).to(dtype).to(memory_format=form)
    for _ in range(4):
        check_gradients(gpu, grad_output, x, w, [True, True, True])
    assert gpu.asked == ["gradients"] * 2
    assert gpu.launched


def test_every_mask_of_gradients(gpu: GPU) -> None:
    x, w, _ = operands()
    grad_output = torch.randn(2, 8, 10, 12)
    for _ in range(2):
        for mask in MASKS:
            check_gradients(gpu, grad_output, x, w, mask)
    gpu.asked.clear()
    for mask in MASKS:
        check_gradients(gpu, grad_output, x, w, mask)
    assert gpu.asked == []


def test_a_gradient_of_a_sum(gpu: GPU) -> None:
    """One number, expanded, which a kernel cannot read as it lies; and a gradient that lies in another format."""
    x, w, _ = operands()
    for grad_output in (
        torch.ones(()).expand(2, 8, 10, 12),
        torch.randn(2, 8, 10, 12).to(memory_format=CHANNELS_LAST),
    ):
        gpu.asked.clear()
        for _ in range(4):
            check_gradients(gpu, grad_output, x, w, [True, True, True])
        assert len(gpu.asked) <= 2


def test_gradients_in_several_steps_and_formats(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by PyTorch's operator, whose gradients lie as it likes."""
    monkeypatch.setattr(measured, "why_grad_weight_is_native", lambda *_, **__: "for this test")
    x, w, _ = operands()
    for form, weights in product((NCHW, CHANNELS_LAST), repeat=2):
        tensors = x.to(memory_format=form), w.to(memory_format=weights)
        grad_output = torch.randn(2, 8, 10, 12).to(memory_format=form)
        gpu.asked.clear()
        gpu.launched.clear()
        for _ in range(4):
            found = gpu.gradients(grad_output, *tensors, [True, True, True], "auto")
            wanted = expected_gradients(grad_output, *tensors, [True, True, True])
            last = CHANNELS_LAST in (form, weights)
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
                assert ours.dim() == 1 or ours.is_contiguous(memory_format=CHANNELS_LAST if last else NCHW)
        assert gpu.launched
        if form == weights:
            assert gpu.asked == ["gradients"] * 2


def test_pytorchs_operator_is_asked_from_there_too(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives out lies as it likes where formats are mixed, and then as the graph was promised."""
    for stage in ("forward", "grad_weight"):
        monkeypatch.setattr(measured, f"why_{stage}_is_native", lambda *_, **__: "for this test")
    x, w, b = operands()
    for form, weights in product((NCHW, CHANNELS_LAST), repeat=2):
        tensors = x.to(memory_format=form), w.to(memory_format=weights)
        promised = CHANNELS_LAST if CHANNELS_LAST in (form, weights) else NCHW
        gpu.asked.clear()
        for _ in range(4):
            check_output(gpu, *tensors, b, "auto")
            assert gpu.output(*tensors, b, "auto").is_contiguous(memory_format=promised)
        assert gpu.asked == ["output"] * 2
        grad_output = torch.randn(2, 8, 10, 12).to(memory_format=form)
        for _ in range(4):
            (found,) = gpu.gradients(grad_output, *tensors, [False, True, False], "auto")
            (wanted,) = expected_gradients(grad_output, *tensors, [False, True, False])
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            assert found.is_contiguous(memory_format=promised)
        assert gpu.asked == ["output", "output", "gradients", "gradients"]
    assert gpu.launched == []


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, ...]]] = {
    "batch": lambda x, w, b: (x[:1], w, b),
    "height": lambda x, w, b: (x[:, :, :3].contiguous(), w, b),
    "channels_last": lambda x, w, b: (x.to(memory_format=CHANNELS_LAST), w, b),
    "a slice": lambda x, w, b: (x[:, :, :, 1:], w, b),
    "the weight's format": lambda x, w, b: (x, w.to(memory_format=CHANNELS_LAST), b),
    "dtype": lambda x, w, b: (x.half(), w.half(), b.half()),
    "no bias": lambda x, w, b: (x, w, None),
    "backend": lambda x, w, b: (x, w, b, "auto"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_not_answered_by_the_first(gpu: GPU, change: str) -> None:
    first = operands()
    other = CHANGES[change](*first)
    for _ in range(4):
        check_output(gpu, *first)
    gpu.asked.clear()
    check_output(gpu, *other)
    assert gpu.asked == ["output"]
    for _ in range(3):
        check_output(gpu, *other)
        check_output(gpu, *first)
    # Tensors that lie as no plan wants them are copied, by Python, every time.
    assert gpu.asked == ["output"] * (4 if change in ("a slice", "the weight's format") else 2)


def test_the_geometry_tells_calls_apart() -> None:
    x, w, _ = operands()
    keys = {
        graph_calls.key_of(op, x, w, has_bias, geometry, backend)
        for op in (0, 1)
        for has_bias in (False, True)
        for geometry in ([2, 2, 1, 1, 0, 0, 1, 1, 1], [2, 2, 1, 1, 0, 0, 1, 1, 2])
        for backend in ("auto", "kernel")
    }
    assert len(keys) == 16


def test_the_switch_is_obeyed(gpu: GPU) -> None:
    """What was chosen under one precision is not what the other wants: each has a plan of its own."""
    x, w, b = operands()
    grad_output = torch.randn(2, 8, 10, 12)
    plans: dict[str, set[int]] = {"ieee": set(), "tf32": set()}
    for _ in range(3):
        for precision, handles in plans.items():
            torch.backends.cudnn.conv.fp32_precision = precision
            for _ in range(3):
                gpu.launched.clear()
                check_output(gpu, x, w, b)
                check_gradients(gpu, grad_output, x, w, [True, True, True])
                handles.update(gpu.launched)
    assert plans["ieee"]
    assert plans["ieee"].isdisjoint(plans["tf32"])


def test_switches_thrown_to_and_fro_leave_nothing_behind(gpu: GPU) -> None:
    x, w, b = operands()
    grad_output = torch.randn(2, 8, 10, 12)
    counts = []
    for _ in range(4):
        for precision in ("ieee", "tf32"):
            torch.backends.cudnn.conv.fp32_precision = precision
            for _ in range(3):
                check_output(gpu, x, w, b)
                check_gradients(gpu, grad_output, x, w, [True, True, True])
        counts.append(len(route._numbered))
    assert counts[1:] == counts[:1] * 3


def test_half_precision_knows_no_switch(gpu: GPU) -> None:
    x, w, b = operands(dtype=torch.float16)
    for _ in range(2):
        check_output(gpu, x, w, b)
    gpu.asked.clear()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    check_output(gpu, x, w, b)
    assert gpu.asked == []


def test_what_is_forgotten_during_a_call_is_not_answered_by_it(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: what `tune` has found must not wait for the next time that everything is forgotten."""
    x, w, b = operands()
    check_output(gpu, x, w, b)
    told = route.Route.told
    monkeypatch.setattr(route.Route, "told", lambda self: (route.forget(), told(self))[1])
    check_output(gpu, x, w, b)
    monkeypatch.setattr(route.Route, "told", told)
    gpu.asked.clear()
    check_output(gpu, x, w, b)
    assert gpu.asked == ["output"]


def test_the_whole_op_is_called_with_all_of_the_geometry() -> None:
    """Each number another, so that none can stand in the place of another."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    x, w = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(4, 3, 3, 2, requires_grad=True)
    arguments: tuple[Any, ...] = ((3, 4), (2, 1), (1, 2), 2, (2, 5))
    expected = F.conv_transpose2d(x, w, None, *arguments)
    output = torch.ops.tconv_swap.conv_transpose2d_output.default
    with torch.enable_grad():
        y = output.redispatch(keys, x, w, None, graph.as_list(arguments), "auto")
    torch.testing.assert_close(y, expected)
    (found,), (wanted,) = (torch.autograd.grad(one.square().sum(), w) for one in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["forgotten", "too many"])
def test_forgotten_calls_are_chosen_anew(gpu: GPU, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    x, w, b = operands()
    for _ in range(3):
        check_output(gpu, x, w, b)
    gpu.asked.clear()
    if how == "forgotten":
        route.forget()
    else:
        monkeypatch.setattr(route, "MOST_ROUTES", 1)
        check_output(gpu, x, w, None)
    check_output(gpu, x, w, b)
    assert gpu.asked == ["output"] * (1 if how == "forgotten" else 2)


def test_without_node_cpp_python_is_asked_every_time(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_library", lambda: None)
    x, w, b = operands()
    for _ in range(4):
        check_output(gpu, x, w, b)
        check_gradients(gpu, torch.randn(2, 8, 10, 12), x, w, [True, False, True])
    assert gpu.asked == ["output", "gradients"] * 4


def test_what_does_not_fit_is_refused(gpu: GPU) -> None:
    x, w, b = operands()
    for _ in range(3):
        check_output(gpu, x, w, b)
    for wrong in ((x, w, b[:3]), (x, w[:3], b), (x[0], w, b), (x, w.half(), b)):
        with pytest.raises(RuntimeError):
            gpu.output(*wrong)
    with pytest.raises(RuntimeError, match="grad_output"):
        gpu.gradients(torch.randn(2, 8, 10, 11), x, w, [True, True, True])


def test_where_a_derivative_is_wanted_the_whole_op_is_called(gpu: GPU) -> None:
    """A graph differentiates around its calls; whoever calls its ops with gradients gets them all the same."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    ops = torch.ops.tconv_swap
    x, w, b = (one.requires_grad_() for one in operands())
    expected = F.conv_transpose2d(x, w, b, 2, 1)
    grad_output = torch.randn_like(expected).requires_grad_()
    y = ops.conv_transpose2d_output.default.redispatch(keys, x, w, b, GEOMETRY, "kernel")
    found = torch.autograd.grad(y, (x, w, b), grad_output)
    wanted = torch.autograd.grad(expected, (x, w, b), grad_output, create_graph=True)
    of_gradients = ops.conv_transpose2d_gradients.default.redispatch(
        keys, grad_output, x, w, GEOMETRY, [True] * 3, "kernel"
    )
    found += torch.autograd.grad(of_gradients[0].square().sum(), (grad_output, w))
    wanted += torch.autograd.grad(wanted[0].square().sum(), (grad_output, w))
    for ours, theirs in zip([y, *of_gradients, *found], [expected, *wanted[:3], *wanted], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
    assert gpu.asked == []
    with torch.no_grad():
        for _ in range(3):
            y = ops.conv_transpose2d_output.default.redispatch(keys, x, w, b, GEOMETRY, "kernel")
            torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-2)
    assert gpu.asked == ["output"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("form", [NCHW, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_a_graph_goes_without_python(
    form: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, trained and served; and on another stream, where the weights have changed meanwhile."""
    torch.compiler.reset()
    route.forget()
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

    with MODES["fp32"].switched_on():
        for _ in range(3):
            step()
        refuse = lambda *_: pytest.fail("Python was asked")  # noqa: E731
        monkeypatch.setattr(graph_calls, "output", refuse)
        monkeypatch.setattr(graph_calls, "gradients", refuse)
        monkeypatch.setattr(call, "forward_calls", refuse)
        with torch.no_grad():
            layer.weight.mul_(2)
        step()
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
    route.forget()
    torch.compiler.reset()
