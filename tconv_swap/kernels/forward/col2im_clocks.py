"""The clocks that tiles of csrc/kernels/forward/col2im.cu are expected to take for a size. Pure functions of data.

The constants are fitted to 2,994 times of an H200, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.11 (docs/kernels/forward/col2im.md).
"""

from __future__ import annotations

from tconv_swap.kernels.forward.col2im_tile import (
    Tile,
    column_tiles,
    input_rows,
    output_rounds,
    parts,
    product_columns,
    products,
    row_tiles,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

LAUNCH_CLOCKS = 11100
#: Clocks of a multiprocessor for a multiply-add of a padded product in float32, whose elements are split into parts (in
#: 16 bits they cost nothing beside the rest); for a product that is stored to shared memory; for a byte of a stage.
MULTIPLY_CLOCKS, PRODUCT_CLOCKS, STAGE_BYTE_CLOCKS = 6.15 / 4096, 0.937 / 32, 0.0309
#: The number of warps of a multiprocessor that hide half of each other's waits.
HIDING_WARPS = 1.6
#: Clocks of a step that other blocks do not share: for each product of a pixel, and for each round in which all threads
#: add up outputs of a row.
CHAIN_CLOCKS, ROUND_CLOCKS = 7.13, 449
#: Clocks of a byte of the input, and of a byte of NCHW output whose rows are no whole sectors of memory.
INPUT_BYTE_CLOCKS, RAGGED_BYTE_CLOCKS, SECTOR_BYTES = 0.00006, 0.00209, 32


def expected_clocks(problem: Problem, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of a size that the tile's kernel computes."""
    g, item = problem.geometry, problem.dtype.itemsize
    tiles_w, tiles_h = column_tiles(problem, tile)[1], row_tiles(problem, tile, device)
    tiles = g.batch * tiles_w * tiles_h
    pixels, channels = tile.columns * tile.step_rows, round_up(g.in_channels, 16)
    shared = pixels * (products(g) * PRODUCT_CLOCKS + channels * item * STAGE_BYTE_CLOCKS)
    if parts(problem) > 1:
        shared += pixels * channels * product_columns(g) * MULTIPLY_CLOCKS
    sharing = min(tile.blocks_per_multiprocessor, ceil_div(tiles, device.multiprocessors))
    shared *= sharing * (1 + HIDING_WARPS / (sharing * tile.warps))
    alone = CHAIN_CLOCKS * products(g) + ROUND_CLOCKS * output_rounds(problem, tile)
    steps = ceil_div(input_rows(g, tiles_h), tile.step_rows)
    steps *= ceil_div(tiles, device.multiprocessors * tile.blocks_per_multiprocessor)
    clocks = LAUNCH_CLOCKS + steps * (shared + alone)
    clocks += INPUT_BYTE_CLOCKS * g.batch * g.in_channels * g.height * g.width * item
    if g.out_width * item % SECTOR_BYTES and not problem.channels_last:
        clocks += RAGGED_BYTE_CLOCKS * g.batch * g.out_channels * g.out_height * g.out_width * item
    return clocks
