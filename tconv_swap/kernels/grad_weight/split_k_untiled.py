"""The partial sums of im2col_nchw, im2col_nhwc and stride1, which lie as the weight does, in float32, and the launch of
csrc/kernels/grad_weight/split_k_reduce_untiled.cu, which adds them up."""

from __future__ import annotations

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, int64, output, workspace

#: Limit of the partial sums; one copy of the gradient may exceed it.
PARTIAL_LIMIT_BYTES = 64 << 20
_THREADS = 256


def weight_bytes(geometry: Geometry) -> int:
    """Returns the bytes of the gradient in float32."""
    return 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps


def reduce(problem: Problem, splits: int, partial_at: int) -> Launch:
    """Returns the launch that adds up the partial sums and writes them in the layout of the weight."""
    g = problem.geometry
    threads_per_sum = next(
        threads_per_sum
        for threads_per_sum in (1, 2, 4, 8)
        if splits <= 4 * threads_per_sum or threads_per_sum == 8
    )
    columns = max(32, min(256, 2048 // g.taps // 32 * 32))
    columns = min(columns, round_up(g.out_channels_per_group, 8))
    if threads_per_sum == 1:
        grid = g.in_channels * ceil_div(g.out_channels_per_group, columns)
    else:
        grid = ceil_div(weight_bytes(g) // 4 * threads_per_sum, _THREADS)
    kernel = Kernel(
        "grad_weight/split_k_reduce_untiled.cu",
        "grad_weight_split_k_reduce_untiled",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            *g.layer_constants,
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            ("THREADS_PER_SUM", threads_per_sum),
            ("COLUMNS", columns),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=grid,
        block=_THREADS,
        arguments=(workspace(partial_at), output(0), int64(splits)),
        overlaps_previous=True,
    )
