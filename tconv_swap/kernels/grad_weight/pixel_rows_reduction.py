"""The launch of csrc/kernels/grad_weight/pixel_rows_reduce.cu, which adds up the slices of the gradient of the
weight."""

from __future__ import annotations

from tconv_swap.kernels.grad_weight.pixel_rows_tile import weight_bytes
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, int64, output, workspace

_THREADS = 256


def reduce(problem: Problem, slices: int, partial_at: int) -> Launch:
    """The slices' sums, added up, in the order of the weight."""
    g = problem.geometry
    sharers = next(sharers for sharers in (1, 2, 4, 8) if slices <= 4 * sharers or sharers == 8)
    columns = max(32, min(256, 2048 // g.taps // 32 * 32))
    columns = min(columns, round_up(g.out_channels_per_group, 8))
    if sharers == 1:
        grid = g.in_channels * ceil_div(g.out_channels_per_group, columns)
    else:
        grid = ceil_div(weight_bytes(g) // 4 * sharers, _THREADS)
    kernel = Kernel(
        "grad_weight/pixel_rows_reduce.cu",
        "grad_weight_pixel_rows_reduce",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            *g.layer_constants,
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            ("SHARERS", sharers),
            ("COLUMNS", columns),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=grid,
        block=_THREADS,
        arguments=(workspace(partial_at), output(0), int64(slices)),
        overlaps_previous=True,
    )
