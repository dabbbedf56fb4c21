"""Plans of csrc/kernels/{forward,gradients}/tiny.cu, for problems whose computation takes no longer than a launch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    Kernel,
    Launch,
    Output,
    Plan,
    input_,
    output,
    struct,
)

FAMILY = "tiny"
#: Multiply-adds up to which one launch of a simple kernel was measured to take no longer than several launches of fast
#: kernels (docs/kernels/tiny.md); the most products that a thread adds up; the most pixels that a warp adds up.
MAX_MACS = 1 << 16
MAX_SUM = 128
MAX_PIXELS = 512
_THREADS = 128
_WARPS = _THREADS // 32
_WHY = "one launch, nothing copied or packed"

Shape = tuple[int, ...]


def supports(problem: Problem) -> bool:
    """Returns whether one launch computes the problem no slower than several launches."""
    g = problem.geometry
    longest = g.taps * max(g.in_channels_per_group, g.out_channels_per_group)
    pixels = g.batch * max(g.height * g.width, g.out_height * g.out_width)
    return (
        problem.dtype in DTYPES
        and 0 < g.macs <= MAX_MACS
        and longest <= MAX_SUM
        and pixels <= MAX_PIXELS
        and math.prod(g.output_shape) <= MAX_MACS
    )


def replaces(made: Plan) -> bool:
    """Returns whether the plan of another family has more than one launch. A single fast kernel is faster."""
    return len(made.launches) > 1


def plan_forward(problem: Problem) -> Plan | None:
    """Returns the plan of a forward pass; None for larger problems. Inputs: input, weight, bias (or none), the first
    two with any strides. Output: the output."""
    if not supports(problem):
        return None
    g = problem.geometry
    count = math.prod(g.output_shape)
    images, weights = problem.channels_last, problem.weight_channels_last
    launch = Launch(
        _kernel("forward", problem),
        grid=ceil_div(count, _THREADS),
        block=_THREADS,
        arguments=(input_(0), input_(1), input_(2), output(0), *map(struct, range(4))),
        structs=(
            _problem(g, (count, 0, 0), (0, 0)),
            strides_of(g.input_shape, images),
            strides_of(g.weight_shape, weights),
            strides_of(g.output_shape, images),
        ),
        strides=((0, 1), (1, 2)),
    )
    return Plan(FAMILY, _WHY, (Output(g.output_shape, images),), (launch,))


def plan_backward(problem: Problem, output_mask: tuple[bool, ...]) -> Plan | None:
    """Returns the plan of the gradients in the mask; None for larger problems. Inputs: grad_output, input, weight
    with any strides. Outputs: the gradients."""
    if not supports(problem):
        return None
    g = problem.geometry
    images, weights = problem.channels_last, problem.weight_channels_last
    every = (Output(g.input_shape, images), Output(g.weight_shape, weights), Output((g.out_channels,)))
    outputs = tuple(one for one, wanted in zip(every, output_mask, strict=True) if wanted)
    counts = [math.prod(one.shape) if wanted else 0 for one, wanted in zip(every, output_mask, strict=True)]
    blocks = [ceil_div(count, own) for count, own in zip(counts, (_THREADS, _WARPS, _WARPS), strict=True)]
    launch = Launch(
        _kernel("gradients", problem),
        grid=sum(blocks),
        block=_THREADS,
        arguments=(
            *(input_(0), input_(1), input_(2)),
            *(_gradient(output_mask, index) for index in range(3)),
            *map(struct, range(6)),
        ),
        structs=(
            _problem(g, counts, (blocks[0], blocks[0] + blocks[1])),
            strides_of(g.output_shape, images),
            strides_of(g.input_shape, images),
            strides_of(g.weight_shape, weights),
            strides_of(g.input_shape, images),
            strides_of(g.weight_shape, weights),
        ),
        strides=((0, 1), (1, 2), (2, 3)),
    )
    return Plan(FAMILY, _WHY, outputs, (launch,))


def strides_of(shape: Shape, channels_last: bool) -> Shape:
    """Returns ``Strides`` of common/tiny.cuh for a dense tensor."""
    _, channels, height, width = shape
    if channels_last:
        return (channels * height * width, 1, channels * width, channels)
    return (channels * height * width, height * width, width, 1)


def _kernel(stage: str, problem: Problem) -> Kernel:
    constants = (("Element", ELEMENT_TYPES[problem.dtype]), ("THREADS", _THREADS))
    return Kernel(f"{stage}/tiny.cu", f"{stage}_tiny", constants)


def _gradient(output_mask: Sequence[bool], index: int) -> Argument:
    """Returns the argument of a gradient. No block writes one that the mask leaves out."""
    return output(sum(output_mask[:index]) if output_mask[index] else 0)


def _problem(g: Geometry, counts: Sequence[int], end_blocks: Sequence[int]) -> Shape:
    """Returns ``Problem`` of common/tiny.cuh."""
    return (
        *(g.in_channels, g.out_channels, g.in_channels_per_group, g.out_channels_per_group),
        *_axis(g, 0),
        *_axis(g, 1),
        *counts,
        *end_blocks,
        *(g.batch * g.height * g.width, g.batch * g.out_height * g.out_width),
    )


def _axis(g: Geometry, axis: int) -> Shape:
    stride, dilation = g.stride[axis], g.dilation[axis]
    step = stride // math.gcd(stride, dilation)
    return (
        *((g.height, g.width)[axis], (g.out_height, g.out_width)[axis]),
        *(g.kernel[axis], stride, g.padding[axis], dilation),
        *(step, step * dilation // stride),
    )
