"""The clocks that tiles of the forward implicit GEMM are expected to take for a size in channels_last: they rank the
tiles of layers whose kernels take the shape of a tile at the launch. Pure functions of data.

The constants are fitted to 1,119 times of csrc/kernels/forward/implicit_gemm_tma.cu on an H100, of strided layers, in
clocks of 1.7 GHz (docs/choice-by-cost.md); MMA and those after it to the times beside them
(docs/kernels/forward/implicit_gemm_tma.md).
"""

from __future__ import annotations

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, group_taps
from tconv_swap.kernels.forward.implicit_gemm_memory import loaded_pixels
from tconv_swap.runtime.integers import ceil_div, round_up

#: Clocks of the launches; of a multiply, over the multiplier's rate; of a byte of a stage's input and of its weights;
#: of a byte of input and output; of a byte of the weights that is read or written to pack them, and of a byte of
#: partial sums.
LAUNCH_CLOCKS, MULTIPLY_CLOCKS = 12700, 0.64
INPUT_BYTE_CLOCKS, WEIGHT_BYTE_CLOCKS = 0.024, 0.006
BYTE_CLOCKS, PACKED_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.0003, 0.001, 0.001
#: How much longer a tile takes whose weights are read in their own layout: its rows are stored slower.
OWN_LAYOUT = 1.13
#: How much longer the multiplies of mma.sync take, with their loads; all of a tile of narrow maps, whose boxes for each
#: shift are mostly in the L2; of a tile with two stages; of one whose warpgroup is the only one of a multiprocessor.
MMA, NARROW, TWO_STAGES, LONE_WARPGROUP = 3.0, 0.8, 1.5, 1.25
#: Clocks for each position of a dense tile: the places of its outputs are computed by divisions.
DENSE_CLOCKS = 10
#: The share of a round's clocks that its blocks take because they load at the same time: half as many blocks save half
#: of it, fewer no more.
CROWDING = 0.3
#: Multiply-adds of a multiprocessor in a clock for each element of a word of 32 bits.
MULTIPLY_MACS = 1024


def expected_clocks(problem: TileProblem, tile: Tile, multiprocessors: int) -> float:
    """Returns the expected clocks of a size with this tile."""
    geometry, elements_of_word = problem.geometry, 4 // problem.item
    resident = multiprocessors * tile.blocks_per_multiprocessor
    # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
    blocks = block_count(problem, tile)
    rounds = ceil_div(blocks, resident) * tile.blocks_per_multiprocessor
    summed = round_up(problem.words, tile.chunk_words) * elements_of_word / tile.splits
    group_of_phases = group_taps(problem)
    taps = sum(group_of_phases) / len(group_of_phases)
    channels = problem.block_channels(tile)
    multiply = tile.positions * channels * taps * summed / (MULTIPLY_MACS * elements_of_word)
    of_tile = MULTIPLY_CLOCKS * multiply * (1.0 if tile.wgmma else MMA)
    if tile.tma:
        of_tile += INPUT_BYTE_CLOCKS * loaded_pixels(problem, tile) * summed * problem.item
        of_tile += WEIGHT_BYTE_CLOCKS * channels * taps * summed * problem.item
    warpgroups = tile.blocks_per_multiprocessor * tile.warps_m * tile.warps_n // 4
    of_tile *= OWN_LAYOUT if tile.tma_weights else 1.0
    of_tile *= NARROW if tile.tma and tile.cols < 8 else 1.0
    of_tile *= TWO_STAGES if tile.tma and tile.stages < 3 else 1.0
    of_tile *= LONE_WARPGROUP if tile.tma and warpgroups == 1 else 1.0
    of_tile += DENSE_CLOCKS * tile.positions if tile.dense else 0
    if blocks <= resident:
        of_tile *= 1 - CROWDING * (1 - max(0.5, blocks / resident))
    inputs = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    packed = geometry.in_channels_per_group * geometry.out_channels * geometry.taps * problem.item
    return (
        LAUNCH_CLOCKS
        + rounds * of_tile
        + BYTE_CLOCKS * (inputs + outputs) * problem.item
        + (0 if tile.tma_weights else PACKED_BYTE_CLOCKS * 2 * packed)
        + (PARTIAL_BYTE_CLOCKS * 4 * outputs * tile.splits if tile.splits > 1 else 0)
    )
