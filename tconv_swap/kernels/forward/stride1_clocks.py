"""The clocks that tiles of csrc/kernels/forward/stride1.cu are expected to take for a size. Pure functions of data.

The constants are fitted to 1,384 times on H100s, of outputs and gradients of inputs, in clocks of 1.7 GHz; the standard
deviation of the logarithm is 0.11 without 17 of them, most of which are stalls of a host (docs/selection.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from tconv_swap.kernels.common.pad_rows import copies_clocks
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.forward.stride1_tile import (
    PIXELS,
    Stride1Kernel,
    Tile,
    copied_rows,
    packed_bytes,
    padded_channels,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div

#: Clocks of the launches, and of a byte of packed weights.
LAUNCH_CLOCKS, PACKED_BYTE_CLOCKS = 12300, 0.0123
#: Clocks of a byte of input and output, further ones of a byte of output whose rows are no whole sectors of memory (of
#: SECTOR_BYTES), and the share of the shorter one of these and of the blocks' that does not overlap with the other one.
BYTE_CLOCKS, RAGGED_BYTE_CLOCKS, SECTOR_BYTES, NOT_OVERLAPPED = 0.000583, 0.000325, 32, 0.222
#: Clocks of a row of the input.
ROW_CLOCKS = 552
#: Bytes of a multiply along k; its clocks, in TF32 and in 16 bits, whose pixels are read twice and joined, and those of
#: each of its columns, with one consumer warpgroup and with two.
STEP_BYTES = 32
READ_CLOCKS, READ_CLOCKS_16_BITS = 45.7, 87.8
COLUMN_CLOCKS = {1: 0.269, 2: 0.644}
#: Clocks of an output channel of a row in 16 bits where outputs are stored one at a time, because rows have an odd
#: number of them.
SINGLE_STORE_CLOCKS = 23.8
#: How many times as fast a tile has to be that reads longer rows of a copy: the implicit GEMM's kernels, which read the
#: rows as they lie, take 0.77 (16 bits) and 0.82 (TF32) of their expected clocks for large maps on an H200 (77 tiles).
COPY_MARGIN = 1.3
#: The fewest rows of a segment, but for lower maps: each segment reads the rows of the taps again.
MIN_SEGMENT = 8


def best_tile(problem: TileProblem, kernel: Stride1Kernel, device: Device) -> tuple[float, Tile]:
    """Returns the expected clocks of a size with this kernel, and the tile whose segments take the fewest."""
    rows, segment, blocks = min(_segments(problem, kernel, device), key=itemgetter(0))
    channel_tiles = ceil_div(problem.geometry.out_channels, kernel.channels)
    waves = ceil_div(channel_tiles * blocks, device.multiprocessors)
    loops = waves * rows * _row_clocks(problem, kernel)
    moves = _memory_clocks(problem)
    clocks = LAUNCH_CLOCKS + PACKED_BYTE_CLOCKS * packed_bytes(problem, kernel)
    clocks += max(loops, moves) + NOT_OVERLAPPED * min(loops, moves)
    if copied := copied_rows(problem, kernel):
        clocks = COPY_MARGIN * (clocks + copies_clocks(copied, problem.dtype))
    return clocks, Tile(kernel, segment, blocks)


def _segments(problem: TileProblem, kernel: Stride1Kernel, device: Device) -> Iterator[tuple[int, int, int]]:
    """Yields, from one segment of all rows on, the rows of the input that a block multiplies, the rows of a segment and
    the blocks of each channel tile."""
    g = problem.geometry
    column_tiles = g.batch * ceil_div(g.out_width, kernel.warpgroups * PIXELS)
    most_blocks = max(1, device.multiprocessors // ceil_div(g.out_channels, kernel.channels))
    for segments in range(1, ceil_div(g.out_height, MIN_SEGMENT) + 1):
        segment = ceil_div(g.out_height, segments)
        tiles = column_tiles * ceil_div(g.out_height, segment)
        blocks = min(most_blocks, tiles)
        yield ceil_div(tiles, blocks) * (segment + g.kernel[0] - 1), segment, blocks


def _memory_clocks(problem: TileProblem) -> float:
    """Returns the clocks in which the input is read and the output written."""
    g = problem.geometry
    clocks = BYTE_CLOCKS * problem.moved_bytes
    if g.out_width * problem.item % SECTOR_BYTES:
        clocks += RAGGED_BYTE_CLOCKS * g.batch * g.out_channels * g.out_height * g.out_width * problem.item
    return clocks


def _row_clocks(problem: TileProblem, kernel: Stride1Kernel) -> float:
    """Returns the clocks in which a block multiplies a row of the input and stores one of the output."""
    g = problem.geometry
    steps = g.kernel[1] * padded_channels(problem) * problem.item // STEP_BYTES
    columns = g.kernel[0] * kernel.channels
    read = READ_CLOCKS if problem.item == 4 else READ_CLOCKS_16_BITS
    clocks = ROW_CLOCKS + steps * (read + COLUMN_CLOCKS[kernel.warpgroups] * columns)
    if problem.item == 2 and g.out_width % 2:
        clocks += SINGLE_STORE_CLOCKS * kernel.channels
    return clocks
