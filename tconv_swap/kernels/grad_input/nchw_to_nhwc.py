"""Plans the gradient of the input, strides above 1, of 16-bit NCHW tensors from copies in channels_last: launches of
common/nchw_to_nhwc.py copy grad_output and the weight, and grad_input/implicit_gemm_tma.py computes from the copies and
stores NCHW. The functions are pure."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES, WorkspaceLayout
from tconv_swap.kernels.common.nchw_to_nhwc import Matrices, activation, transpose
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution
from tconv_swap.kernels.grad_input.implicit_gemm_shares import may_be_transposed
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import choose
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import clocks
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Part, input_, workspace

FAMILY = f"nchw_to_nhwc, {grad_input_tma.FAMILY}"
#: Clocks of each launch, measured over expected clocks of the tiles, and clocks of a byte of grad_input, which is
#: stored in short segments, and of a byte that is read or written to copy grad_output and the weight (fitted to 158
#: times of an H100, in clocks of 1.7 GHz).
LAUNCH_CLOCKS, MEASURED, STORED_BYTE_CLOCKS, COPIED_BYTE_CLOCKS = 6000, 1.02, 0.001, 0.0006


def ranked(problem: Problem, device: Device, count: int) -> list[Ranked]:
    """Returns at most ``count`` parts with their expected clocks, the one that is expected to be the fastest first.

    Inputs: grad_output, input, weight (16-byte aligned). Output: the gradient of the input. Workspace: the copies, at
    most ``MAX_COPY_BYTES``, and the sums of splits.
    """
    if not supports(problem, device):
        return []
    convolution = convolution_of_copies(problem)
    return [
        Ranked(
            expected(problem, tile, device, grad_output_is_copied=False),
            partial(_lower, problem, convolution, tile, device),
        )
        for tile in choose(convolution, device, count)
    ]


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the layer has kernels that read copies, and copies are possible."""
    convolution = as_convolution(problem)
    if not may_be_transposed(convolution, device) or problem.weight_channels_last:
        return False
    return sum(tensor.bytes for tensor in copied(problem)) <= MAX_COPY_BYTES and grad_input_tma.supports(
        convolution_of_copies(problem), device
    )


def convolution_of_copies(problem: Problem) -> StridedProblem:
    """Returns the problem that the copies pose: channels_last, with an output in NCHW."""
    copies = as_convolution(replace(problem, channels_last=True, weight_channels_last=True))
    return replace(copies, output_channels_last=False)


def expected(problem: Problem, tile: TmaTile, device: Device, grad_output_is_copied: bool) -> float:
    """Returns the expected clocks of the launch that computes and of those that copy the weight and, unless it is
    copied already, grad_output."""
    convolution = convolution_of_copies(problem)
    tensors = copied(problem)[1 if grad_output_is_copied else 0 :]
    return (
        LAUNCH_CLOCKS * (1 + len(tensors))
        + MEASURED * clocks(convolution, tile, device.multiprocessors)
        + STORED_BYTE_CLOCKS * problem.dtype.itemsize * convolution.grad_input_elements
        + COPIED_BYTE_CLOCKS * 2 * sum(tensor.bytes for tensor in tensors)
    )


def copied(problem: Problem) -> tuple[Matrices, Matrices]:
    """Returns grad_output and the weight as matrices to transpose."""
    g = problem.geometry
    weight = Matrices(g.in_channels, g.out_channels_per_group, g.taps, problem.dtype)
    return activation(g.output_shape, problem.dtype), weight


def _lower(problem: Problem, convolution: StridedProblem, tile: TmaTile, device: Device) -> Part:
    memory = WorkspaceLayout()
    # The sums of splits come first: the launch that adds them up reads them from the beginning.
    memory.reserve(grad_input_tma.partial_bytes(convolution, tile))
    grad_output, weight = copied(problem)
    copies = workspace(memory.reserve(grad_output.bytes)), workspace(memory.reserve(weight.bytes))
    part = grad_input_tma.lower(convolution, tile, device.multiprocessors, *copies)
    to_copy = (
        replace(transpose(grad_output, input_(0), copies[0], device), overlaps_previous=False),
        transpose(weight, input_(2), copies[1], device),
    )
    return Part(FAMILY, f"by way of channels_last; {part.why}", (*to_copy, *part.launches), memory.bytes)
