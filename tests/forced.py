"""A plan run by itself on a GPU, as the tests force it: poisoned memory, the same bits again, the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.cuda import call, launch
from tconv_swap.cuda.problem import Problem
from tconv_swap.cuda.program import Output, Part, Plan
from tconv_swap.geometry import Geometry


def check_forced_forward(
    made: Plan,
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: tuple[bool, bool],
    with_bias: bool,
    tolerance: float,
    device: str = "cuda",
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Run the plan on random tensors and judge its output; ``channels_last``: of the input and of the weight.

    Returns the input, and a function that runs the plan on it once more.
    """
    handle = launch.add_plan(made, dtype, torch.device(device, 0), call.device_facts(0).architecture)
    formats = (torch.contiguous_format, torch.channels_last)
    x, w = (
        torch.randn(shape, device=device).to(dtype).contiguous(memory_format=formats[last])
        for shape, last in zip((geometry.input_shape, geometry.weight_shape), channels_last, strict=True)
    )
    b = torch.randn(geometry.out_channels, device=device).to(dtype) if with_bias else None

    def run() -> Tensor:
        y: Tensor = torch.ops.tconv_swap.launch.default(handle, [x, w, b])[0]
        return y

    run().fill_(float("nan"))  # freed at once: the next call takes its memory
    y = run()
    assert torch.equal(y, run())
    g = geometry
    expected = conv_transpose2d_reference(
        x, w, b, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    assert y.shape == expected.shape
    error = (y.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= tolerance, f"{geometry} {made.why}"
    return x, run


def check_forced_gradients(part: Part, posed: Problem, with_bias: bool, tolerance: float) -> None:
    """Run a part that computes the gradients of input and weight, and ``with_bias`` of the bias, on random tensors."""
    g = posed.geometry
    layouts = (posed.channels_last, posed.weight_channels_last, False)
    shapes = (g.input_shape, g.weight_shape, (g.out_channels,))
    outputs = tuple(map(Output, shapes, layouts))[: 2 + with_bias]
    made = Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
    handle = launch.add_plan(made, posed.dtype, torch.device("cuda", 0), call.device_facts(0).architecture)
    formats = (torch.contiguous_format, torch.channels_last)
    grad, x, weight = (
        torch.randn(shape, device="cuda").to(posed.dtype).contiguous(memory_format=formats[last])
        for shape, last in zip((g.output_shape, *shapes), (posed.channels_last, *layouts), strict=False)
        if len(shape) == 4
    )

    def run() -> list[Tensor]:
        return torch.ops.tconv_swap.launch.default(handle, [grad, x, weight])  # type: ignore[no-any-return]

    for one in run():  # freed at once: the next call takes its memory
        one.fill_(float("nan"))
    torch.full((made.workspace_bytes // 4 + 1,), float("nan"), device="cuda")
    gradients = run()
    assert all(torch.equal(a, b) for a, b in zip(gradients, run(), strict=True))

    wide = [one.double().requires_grad_() for one in (x, weight)]
    y = conv_transpose2d_reference(*wide, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    expected = [*torch.autograd.grad(y, wide, grad.double()), grad.double().sum((0, 2, 3))]
    scales = [expected[0].norm(), expected[1].norm(), grad.double().abs().sum((0, 2, 3)).norm()]
    for gradient, truth, scale in zip(gradients, expected, scales, strict=False):
        assert gradient.shape == truth.shape
        error = (gradient.double() - truth).norm() / scale.clamp_min(1e-30)
        assert error <= tolerance, f"{g} {made.why}"


def check_forced_grad_input(
    part: Part, posed: Problem, tolerance: float, channels_last: bool | None = None
) -> None:
    """Run a part that computes the gradient of the input on random tensors; ``channels_last``: of the gradient, where
    it does not lie as grad_output does."""
    g = posed.geometry
    if channels_last is None:
        channels_last = posed.channels_last
    made = Plan(
        part.family,
        part.why,
        (Output(g.input_shape, channels_last),),
        part.launches,
        part.workspace_bytes,
    )
    handle = launch.add_plan(made, posed.dtype, torch.device("cuda", 0), call.device_facts(0).architecture)
    formats = (torch.contiguous_format, torch.channels_last)
    grad, weight = (
        torch.randn(shape, device="cuda").to(posed.dtype).contiguous(memory_format=formats[last])
        for shape, last in (
            (g.output_shape, posed.channels_last),
            (g.weight_shape, posed.weight_channels_last),
        )
    )

    def run() -> Tensor:
        grad_input: Tensor = torch.ops.tconv_swap.launch.default(handle, [grad, weight, weight])[0]
        return grad_input

    run().fill_(float("nan"))  # freed at once: the next call takes its memory
    torch.full((made.workspace_bytes // 4 + 1,), float("nan"), device="cuda")
    grad_input = run()
    assert torch.equal(grad_input, run())
    x = torch.zeros(g.input_shape, device="cuda", dtype=torch.float64, requires_grad=True)
    y = conv_transpose2d_reference(
        x, weight.double(), None, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    (expected,) = torch.autograd.grad(y, x, grad.double())
    error = (grad_input.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= tolerance, f"{g} {made.why}"


def check_forced_weight_gradient(made: Plan, posed: Problem, tolerance: float) -> None:
    """Run a plan that computes the gradient of the weight, and that of the bias where it has two outputs, on random
    tensors."""
    g = posed.geometry
    handle = launch.add_plan(made, posed.dtype, torch.device("cuda", 0), call.device_facts(0).architecture)
    lies = torch.channels_last if posed.channels_last else torch.contiguous_format
    grad, x = (
        torch.randn(shape, device="cuda").to(posed.dtype).contiguous(memory_format=lies)
        for shape in (g.output_shape, g.input_shape)
    )

    def run() -> list[Tensor]:
        return torch.ops.tconv_swap.launch.default(handle, [grad, x, None])  # type: ignore[no-any-return]

    for one in run():  # freed at once: the next call takes its memory
        one.fill_(float("nan"))
    torch.full((made.workspace_bytes // 4 + 1,), float("nan"), device="cuda")
    gradients = run()
    assert all(torch.equal(a, b) for a, b in zip(gradients, run(), strict=True))

    weight = torch.zeros(g.weight_shape, dtype=torch.float64, device="cuda", requires_grad=True)
    y = conv_transpose2d_reference(
        x, weight, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    (expected,) = torch.autograd.grad(y, weight, grad.double())
    assert gradients[0].shape == expected.shape
    error = (gradients[0].double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= tolerance, f"{g} {made.why}"
    if len(gradients) > 1:
        scale = grad.double().abs().sum((0, 2, 3))
        error = (gradients[1].double() - grad.double().sum((0, 2, 3))).norm() / scale.norm()
        assert error <= tolerance, f"bias of {g} {made.why}"
