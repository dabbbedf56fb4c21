"""The expected time of the tiles of csrc/kernels/grad_weight/stride1.cu, and their segments and splits. The
functions are pure.

The constants are fitted to 651 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.07 in channels_last and 0.11 in NCHW (docs/selection.md).
"""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.kernels.common.pad_rows import copies_clocks
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.kernels.grad_weight.stride1_tile import (
    MAX_BYTES_PER_SUM,
    STEP_BYTES,
    Stride1Tile,
    copied_rows,
    row_bytes,
    tiles_of,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div

#: Clocks of a byte of both tensors and of partial sums; of the launches and of storing a block's sums, which each
#: further store takes as well.
BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS, FLUSH_CLOCKS = 0.00017, 0.00065, 17300
#: Clocks of a row beside its work; of its multiplies over those of the tensor cores; of a step of a fragment.
ROW_CLOCKS, MULTIPLY_CLOCKS, FRAGMENT_CLOCKS = 139, 0.654, 3.23
#: Clocks of a byte of a row of the input, and of grad_output, in NCHW and in channels_last, where the input is
#: transposed.
INPUT_BYTE_CLOCKS, INPUT_BYTE_CLOCKS_NHWC = 0.0174, 0.0341
OUTPUT_BYTE_CLOCKS, OUTPUT_BYTE_CLOCKS_NHWC = 0.0167, 0.001
#: How many times as long a row takes where the ring holds only one more than the rows of taps.
SHORT_RING = 1.1


def best_tile(problem: Problem, tile: Stride1Tile, device: Device) -> tuple[float, Stride1Tile]:
    """Returns the tile with the segments and splits that are expected to be the fastest, and its clocks."""
    g = problem.geometry
    col_tiles = g.batch * ceil_div(g.width, tile.cols)
    out_height, blocks = g.out_height, tiles_of(g, tile)
    max_splits = max(1, device.multiprocessors // blocks)
    max_splits = max(1, min(max_splits, PARTIAL_LIMIT_BYTES // weight_bytes(g)))
    max_rows = MAX_BYTES_PER_SUM // problem.dtype.itemsize // tile.cols
    row, best = row_clocks(problem, tile), None
    counts = range(ceil_div(out_height, max_rows), ceil_div(out_height, 8) + 1)
    for segment in dict.fromkeys(ceil_div(out_height, count) for count in counts):
        segments, flush = col_tiles * ceil_div(out_height, segment), max(1, max_rows // segment)
        splits = min(max_splits, segments)
        per_split, rounds = ceil_div(segments, splits), ceil_div(blocks * splits, device.multiprocessors)
        clocks = rounds * (per_split * segment * row + ceil_div(per_split, flush) * FLUSH_CLOCKS)
        if best is None or clocks < best[0]:
            best = clocks, segment, flush, splits
    assert best is not None
    clocks, segment, flush, splits = best
    clocks += BYTE_CLOCKS * tensor_bytes(g, problem.dtype.itemsize)
    clocks += PARTIAL_BYTE_CLOCKS * weight_bytes(g) * splits
    clocks += copies_clocks(copied_rows(problem, tile.linear), problem.dtype)
    return clocks, replace(tile, segment=segment, flush=flush, splits=splits)


def row_clocks(problem: Problem, tile: Stride1Tile) -> float:
    """Returns the expected clocks of a row of grad_output."""
    into, out = row_bytes(problem, tile)
    steps = tile.cols * problem.dtype.itemsize // STEP_BYTES
    if problem.channels_last:
        load = INPUT_BYTE_CLOCKS_NHWC * into + OUTPUT_BYTE_CLOCKS_NHWC * out
    else:
        # The last rows of a ring are loaded twice, so that the rows of taps are always contiguous.
        loaded = into * (tile.stages + tile.tap_rows - 1) // tile.stages
        load = INPUT_BYTE_CLOCKS * loaded + OUTPUT_BYTE_CLOCKS * out
    multiply = MULTIPLY_CLOCKS * (tile.warpgroups * tile.m_tiles * tile.columns // 2) * steps
    clocks = ROW_CLOCKS + multiply + FRAGMENT_CLOCKS * tile.fragments * steps + load
    return clocks * (SHORT_RING if tile.stages == tile.tap_rows + 1 else 1.0)
