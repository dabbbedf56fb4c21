"""Plans the gradient of the input, strides above 1, of 16-bit NCHW tensors from copies in channels_last: launches of
common/nchw_to_nhwc.py copy grad_output and the weight, and grad_input/implicit_gemm_tma.py computes from the copies and
stores NCHW. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES, WorkspaceLayout
from tconv_swap.kernels.common.nchw_to_nhwc import Matrices, activation, transpose
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import Schedule
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import ranked as ranked_tiles
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile, fills_chunks
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Part, input_, workspace

FAMILY = f"nchw_to_nhwc, {grad_input_tma.FAMILY}"
#: The copy engine loads multiples of so many channels of 16 bits.
TMA_CHANNELS = 8


def supports_some_size(layer: StridedProblem, device: Device) -> bool:
    """Returns whether the kernels that read copies compute sizes of a layer. In TF32 im2col was faster."""
    g = layer.geometry
    if layer.item != 2 or layer.input_channels_last or layer.weight_channels_last or layer.one_pixel:
        return False
    if device.architecture != "sm_90a" or max(layer.step) == 1 or not fills_chunks(layer):
        return False
    return g.in_channels_per_group % TMA_CHANNELS == g.out_channels % TMA_CHANNELS == 0


def supports(problem: StridedProblem, device: Device) -> bool:
    """Returns whether copies of this size are possible."""
    return (
        supports_some_size(problem, device)
        and sum(_copied_bytes(problem)) <= MAX_COPY_BYTES
        and grad_input_tma.supports(convolution_of_copies(problem), device)
    )


@lru_cache(maxsize=256)
def convolution_of_copies(problem: StridedProblem) -> StridedProblem:
    """Returns the problem that the copies pose: channels_last, with an output in NCHW."""
    return problem._replace(input_channels_last=True, weight_channels_last=True)


def ranked(among: Iterable[Schedule], problem: Problem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size, with their expected clocks, the one that is expected to
    be the fastest first.

    Inputs: grad_output, input, weight (16-byte aligned). Output: the gradient of the input. Workspace: the copies, at
    most ``MAX_COPY_BYTES``, and the sums of splits.
    """
    convolution = as_convolution(problem)
    if not supports(convolution, device):
        return []
    copies = convolution_of_copies(convolution)
    return [
        Ranked(expected(convolution, of_tiles), partial(_lower, problem, copies, tile, device))
        for of_tiles, tile in ranked_tiles(among, copies, device)
    ]


def ranked_from_copies(among: Iterable[Schedule], problem: Problem, device: Device) -> list[Ranked]:
    """Returns the same without the launches that copy: the parts read grad_output and weight in channels_last. Their
    expected clocks include the copy of the weight."""
    convolution = as_convolution(problem)
    if not supports(convolution, device):
        return []
    copies = convolution_of_copies(convolution)
    return [
        Ranked(
            expected(convolution, of_tiles, copied_share=0),
            partial(grad_input_tma.lower, copies, tile, device.multiprocessors),
        )
        for of_tiles, tile in ranked_tiles(among, copies, device)
    ]


def expected(problem: StridedProblem, of_tiles: float, copied_share: float = 1.0) -> float:
    """Returns the expected clocks of the launches that compute (``of_tiles``) and of those that copy the weight and
    grad_output. ``copied_share``: of the copy of grad_output; 0 if it is copied already."""
    grad_output, weight = _copied_bytes(problem)
    return of_tiles + copy_clocks(2 * (weight + copied_share * grad_output), 1 + copied_share)


def _copied_bytes(problem: StridedProblem) -> tuple[int, int]:
    """Returns the bytes of the copies of grad_output and the weight."""
    g = problem.geometry
    grad_output = g.batch * g.in_channels * g.height * g.width
    return grad_output * problem.item, g.in_channels_per_group * g.out_channels * g.taps * problem.item


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
        transpose(grad_output, input_(0), copies[0], device)._replace(overlaps_previous=False),
        transpose(weight, input_(2), copies[1], device),
    )
    return Part(FAMILY, f"by way of channels_last; {part.why}", (*to_copy, *part.launches), memory.bytes)
