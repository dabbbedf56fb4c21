"""Runs a single kernel on a GPU on random tensors: compares it with float64, in poisoned memory, and repeats its
bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.blocks.form import activate
from tconv_swap.cuda import call
from tconv_swap.cuda.choice import FORWARD, Mask
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.epilogue import Epilogue
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import Output, Part, Plan

FORMATS = (torch.contiguous_format, torch.channels_last)


class Run(NamedTuple):
    """The results, their operands, and the true values in float64.

    Attributes:
        tensors: input, weight and bias, if there is one, and with an epilogue the norm's weight, bias, running_mean and
            running_var, where there is one; or grad_output, input and weight.
        again: computes it once more, from ``tensors`` as they are then.
    """

    tensors: list[Tensor | None]
    found: list[Tensor]
    truths: list[Tensor]
    again: Callable[[], list[Tensor]]


def assert_kernel_matches(
    made: Plan | Part,
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: tuple[bool, bool],
    tolerance: float,
    mask: Mask = FORWARD,
    with_bias: bool = False,
    bias_tolerance: float | None = None,
    epilogue: Epilogue | None = None,
    affine: bool = True,
) -> Run:
    """Fails unless each output of a plan is within ``tolerance`` of float64, relative, in L2.

    Args:
        made: a part's outputs are those of the stage, in the layouts of ``channels_last``.
        channels_last: of the images and of the weight.
        mask: the gradients of input, weight and bias that it computes; none: the output.
        with_bias: of an output.
        epilogue: that the plan of an output has.
        affine: its norm has a weight and a bias.
        bias_tolerance: of the gradient of the bias, relative to the sum of magnitudes; ``tolerance`` where None.
    """
    g, (images_last, weight_last) = geometry, channels_last
    if isinstance(made, Part):
        made = Plan(
            made.family, made.why, _outputs(g, channels_last, mask), made.launches, made.workspace_bytes
        )
    handle = launch.add_plan(made, dtype, torch.device("cuda", 0), call.device_facts(0).architecture)

    def drawn(shape: tuple[int, ...], last: bool) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=FORMATS[last])

    x, w = drawn(g.input_shape, images_last), drawn(g.weight_shape, weight_last)
    tensors: list[Tensor | None]
    if any(mask):
        grad = drawn(g.output_shape, images_last)
        truths, scales = _gradients(g, grad, x, w, mask)
        # Tensors on which a gradient does not depend hold NaN.
        for operand, is_read in ((x, mask[1]), (w, mask[0])):
            if not is_read:
                operand.fill_(float("nan"))
        tensors = [grad, x, w]
    else:
        b = drawn((g.out_channels,), False) if with_bias else None
        tensors = [x, w, b]
        truths = [
            conv_transpose2d_reference(x, w, b, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
        ]
        if epilogue is not None:
            vectors, truths = _ended(truths[0], epilogue, affine)
            tensors += vectors
        scales = truths

    def run() -> list[Tensor]:
        # Freed at once, so that the next allocation gets this memory. All bits set are NaN in every dtype.
        torch.full((made.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        return torch.ops.tconv_swap.launch.default(handle, tensors)  # type: ignore[no-any-return]

    for one in run():
        one.fill_(float("nan"))
    found = run()
    for one, again in zip(found, run(), strict=True):
        assert torch.equal(one, again), f"other bits: {g} {made.why}"
    for one, truth, scale in zip(found, truths, scales, strict=True):
        assert one.shape == truth.shape
        error = (one.double() - truth).norm() / scale.norm().clamp_min(1e-30)
        is_bias = any(mask) and truth.dim() == 1
        most = tolerance if bias_tolerance is None or not is_bias else bias_tolerance
        assert error <= most, f"{g} {dtype} {made.why}"
    return Run(tensors, found, truths, run)


def _ended(y: Tensor, epilogue: Epilogue, affine: bool) -> tuple[list[Tensor | None], list[Tensor]]:
    """Returns weight, bias, running_mean and running_var of a norm, with about the moments of ``y``, and their
    epilogue."""
    vectors: list[Tensor | None] = [None] * 4
    if epilogue.normalizes:
        channels, spread = y.shape[1], float(y.std())
        drawn = [torch.randn(channels, device="cuda") for _ in range(3)]
        drawn[2] *= spread
        drawn.append((torch.rand(channels, device="cuda") + 0.5) * spread**2)
        vectors = [one.to(epilogue.parameters) for one in drawn]
        scale, shift, mean, variance = (one.double().view(1, -1, 1, 1) for one in vectors)  # type: ignore[union-attr]
        y = (y - mean) * (variance + epilogue.eps).rsqrt()
        if affine:
            y = y * scale + shift
        else:
            vectors[:2] = None, None
    return vectors, [activate(y, epilogue.activation, epilogue.slope)]


def _outputs(g: Geometry, channels_last: tuple[bool, bool], mask: Mask) -> tuple[Output, ...]:
    if not any(mask):
        return (Output(g.output_shape, channels_last[0]),)
    every = (
        Output(g.input_shape, channels_last[0]),
        Output(g.weight_shape, channels_last[1]),
        Output((g.out_channels,)),
    )
    return tuple(output for output, wanted in zip(every, mask, strict=True) if wanted)


def _gradients(
    g: Geometry, grad: Tensor, x: Tensor, w: Tensor, mask: Mask
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the gradients that ``mask`` selects in float64, and the scale of the error of each."""
    wide = [one.detach().double().requires_grad_() for one in (x, w)]
    y = conv_transpose2d_reference(*wide, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    exact = grad.double()
    truths = [*torch.autograd.grad(y, wide, exact), exact.sum((0, 2, 3))]
    # The terms of a sum may cancel.
    scales = [*truths[:2], exact.abs().sum((0, 2, 3))]
    return [[one for one, wanted in zip(of, mask, strict=True) if wanted] for of in (truths, scales)]  # type: ignore[return-value]
