"""The clocks that tiles of the forward implicit GEMM are expected to take for a size: they rank the tiles of a layer,
and those that load NCHW beside those that load a copy in channels_last. Pure functions of data.

The constants are fitted to 8,986 times of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu on an H100, in
clocks of 1.7 GHz; the standard deviation of the logarithm is 0.20 (docs/choice-by-cost.md).
"""

from __future__ import annotations

from math import gcd

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, group_taps
from tconv_swap.kernels.forward.implicit_gemm_memory import copies_of_stage, loaded_pixels
from tconv_swap.runtime.integers import ceil_div, round_up

CLOCKS_OF_MICROSECOND = 1700
#: Clocks of the launches, and of the one that copies an NCHW input to channels_last.
LAUNCH_CLOCKS, COPY_LAUNCH_CLOCKS = 12700, 3900
#: How many times as fast a plan has to be that copies its input: the copy takes memory.
COPY_MARGIN = 1.03
#: Clocks of a byte of input and output; further ones of a byte of NCHW output whose rows are no whole sectors of memory
#: (of SECTOR_BYTES); of a byte of the weights that is read or written to pack them, of a byte that is read or written
#: to copy an input, and of a byte of partial sums.
BYTE_CLOCKS, RAGGED_BYTE_CLOCKS, SECTOR_BYTES = 0.0003, 0.0004, 32
PACKED_BYTE_CLOCKS, COPIED_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.001, 0.0005, 0.001
#: Clocks of a byte of input for each group of output channels whose blocks read it, by threads and by the copy engine.
REREAD_BYTE_CLOCKS, REREAD_BYTE_CLOCKS_TMA = 0.00019, 0.00001
#: Clocks of a tile; of a multiply, over the multiplier's rate; of a byte of a stage's input and of its weights.
TILE_CLOCKS, MULTIPLY_CLOCKS = 800, 0.64
INPUT_BYTE_CLOCKS, WEIGHT_BYTE_CLOCKS = 0.024, 0.006
#: Clocks of one copy of a thread, where threads load the input; of a chunk by mma.sync.
THREAD_COPY_CLOCKS, CHUNK_CLOCKS = 7.3, 115
#: Clocks of a store in NCHW by wgmma's warps and by those of mma.sync, which store from registers; and of a store in
#: channels_last beyond those of 16 bytes.
STORE_CLOCKS, STORE_CLOCKS_MMA, SHORT_STORE_CLOCKS = 0.24, 0.44, 0.57
#: How much longer multiplies take: by mma.sync; the products of float32; by wgmma where threads load the input, and
#: where they transpose what the copy engine loads; with a pixel-major input.
MMA, IEEE, OF_THREADS, TRANSPOSED, PIXEL_MAJOR = 2.76, 3.3, 1.59, 1.7, 0.48
#: How much longer all of a tile takes whose weights are read in their own layout (its rows are stored slower); of
#: narrow maps, whose boxes for each shift are mostly in the L2; with two stages; with a warpgroup that is the only one
#: of a multiprocessor (all loaded by the copy engine).
OWN_LAYOUT, NARROW, TWO_STAGES, LONE_WARPGROUP = 1.13, 0.8, 1.5, 1.25
#: The same where threads load the input: the copies of several images; by mma.sync, a block that is the only one of a
#: multiprocessor; by wgmma, output rows stacked in several rows of positions, and the share by which rows of one
#: fragment take longer.
SEVERAL_IMAGES, LONE_BLOCK, STACKED, SHORT_ROWS = 4.4, 1.4, 1.65, 0.28
#: The copies of several images that a thread of wgmma's producers makes for a stage, from which each takes longer the
#: more there are, and the power of that (their offsets take registers).
MANY_COPIES, MANY_COPIES_POWER = 27, 1.5
#: The same of groups of channels by wgmma: their sums are short.
GROUPS = 1.48
#: Clocks for each position of a dense tile: the places of its outputs are computed by divisions.
DENSE_CLOCKS = 10
#: The share of a round's clocks that its blocks take because they load at the same time: half as many blocks save half
#: of it, fewer no more.
CROWDING = 0.3
#: Multiply-adds of a multiprocessor in a clock for each element of a word of 32 bits.
MULTIPLY_MACS = 1024


def expected_clocks(problem: TileProblem, tile: Tile, multiprocessors: int) -> float:
    """Returns the expected clocks of a size with this tile."""
    geometry, resident = problem.geometry, multiprocessors * tile.blocks_per_multiprocessor
    # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
    blocks = block_count(problem, tile)
    rounds = blocks // resident * tile.blocks_per_multiprocessor + ceil_div(
        blocks % resident, multiprocessors
    )
    loop = _loop_clocks(problem, tile) * (GROUPS if tile.wgmma and geometry.groups > 1 else 1.0)
    of_tile = TILE_CLOCKS + loop + _store_clocks(problem, tile)
    if not tile.wgmma and min(tile.blocks_per_multiprocessor, ceil_div(blocks, multiprocessors)) == 1:
        of_tile *= LONE_BLOCK
    if blocks <= resident:
        of_tile *= 1 - CROWDING * (1 - max(0.5, blocks / resident))
    inputs = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    packed = (
        geometry.in_channels_per_group * geometry.out_channels * geometry.taps * problem.item * problem.parts
    )
    copied = COPY_LAUNCH_CLOCKS + COPIED_BYTE_CLOCKS * 2 * inputs * problem.item
    row_bytes = geometry.out_width * problem.item
    ragged = not problem.output_channels_last and not tile.by_rows and row_bytes % SECTOR_BYTES
    readers = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile)) * len(
        group_taps(problem)
    )
    reread = readers * (REREAD_BYTE_CLOCKS_TMA if tile.tma else REREAD_BYTE_CLOCKS)
    clocks = (
        LAUNCH_CLOCKS
        + rounds * of_tile
        + reread * inputs * problem.item
        + BYTE_CLOCKS * (inputs + outputs) * problem.item
        + (RAGGED_BYTE_CLOCKS * outputs * problem.item if ragged else 0)
        + (0 if tile.tma_weights else PACKED_BYTE_CLOCKS * 2 * packed)
        + (copied if problem.nhwc_copy else 0)
        + (PARTIAL_BYTE_CLOCKS * 4 * outputs * tile.splits if tile.splits > 1 else 0)
    )
    return clocks * (COPY_MARGIN if problem.nhwc_copy else 1.0)


def _loop_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which a block loads and multiplies a tile."""
    elements_of_word = 4 // problem.item
    summed = round_up(problem.words, tile.chunk_words) * elements_of_word / tile.splits
    group_of_phases = group_taps(problem)
    taps = sum(group_of_phases) / len(group_of_phases)
    macs = tile.positions * tile.block_m * taps * summed
    multiply = MULTIPLY_CLOCKS * macs / (MULTIPLY_MACS * elements_of_word)
    weights = WEIGHT_BYTE_CLOCKS * tile.block_m * taps * summed * problem.item * problem.parts
    if not tile.tma:
        return _of_threads(problem, tile, multiply, weights)
    clocks = (multiply + weights) * (PIXEL_MAJOR if tile.pixel_major else 1.0)
    clocks += INPUT_BYTE_CLOCKS * loaded_pixels(problem, tile) * summed * problem.item
    warpgroups = tile.blocks_per_multiprocessor * tile.warps_m * tile.warps_n // 4
    clocks *= OWN_LAYOUT if tile.tma_weights else 1.0
    clocks *= NARROW if tile.cols < 8 and not problem.flat else 1.0
    clocks *= TWO_STAGES if tile.stages < 3 else 1.0
    clocks *= LONE_WARPGROUP if warpgroups == 1 else 1.0
    return clocks + (DENSE_CLOCKS * tile.positions if tile.dense else 0)


def _of_threads(problem: TileProblem, tile: Tile, multiply: float, weights: float) -> float:
    """Returns the same where threads load the input."""
    chunks = ceil_div(problem.words, tile.chunk_words) / tile.splits
    copies = copies_of_stage(problem, tile)
    loads = THREAD_COPY_CLOCKS * copies * chunks
    if tile.images > 1 and not tile.nchw_stages:
        loads *= SEVERAL_IMAGES
        if tile.wgmma:
            loads *= max(1.0, copies / MANY_COPIES) ** MANY_COPIES_POWER
    if not tile.wgmma:
        multiply *= MMA * (IEEE if problem.precision == "IEEE" else 1.0)
        return multiply + weights + loads + CHUNK_CLOCKS * chunks
    if tile.nchw_stages:
        return TRANSPOSED * multiply + weights + loads
    clocks = OF_THREADS * multiply + weights + loads
    clocks *= STACKED if problem.stack > 1 and tile.rows > 2 else 1.0
    return clocks if problem.flat else clocks * (1 + SHORT_ROWS * 8 / tile.cols)


def _store_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which a block stores a tile; in channels_last the loop's constants contain those of stores
    of 16 bytes."""
    channels = min(problem.block_channels(tile), problem.geometry.out_channels_per_group)
    rows = problem.stack if problem.stack > 1 else problem.phases[0]
    outputs = tile.positions * rows * problem.phases[1] * channels
    if problem.output_channels_last:
        most = 16 // (4 if tile.splits > 1 else problem.item)
        of_store = gcd(problem.geometry.out_channels_per_group, most)
        return SHORT_STORE_CLOCKS * outputs * (1 / of_store - 1 / most)
    of_store = _outputs_of_store(problem, tile)
    return (STORE_CLOCKS if tile.wgmma else STORE_CLOCKS_MMA) * outputs / of_store


def _outputs_of_store(problem: TileProblem, tile: Tile) -> int:
    """Returns the neighbouring outputs of one store in NCHW (forward/epilogue_warp.cuh, implicit_gemm_store.cuh)."""
    (phase_rows, phase_cols), stride = problem.phases, problem.geometry.stride[1]
    most = 16 // (4 if tile.splits > 1 else problem.item)
    if tile.by_rows and problem.flat:
        return gcd(2 * phase_rows * phase_cols, most)
    # The outputs of a warp's row, or of a position that has not all of its phases here.
    of_row = min(8, tile.cols) * phase_cols if phase_cols == stride else gcd(stride, phase_cols)
    if tile.wgmma:
        of_row = gcd(of_row, most)
        return of_row if problem.geometry.out_width % of_row == 0 else gcd(problem.out_row_multiple, of_row)
    return gcd(problem.out_row_multiple, 2 * phase_cols if phase_cols == stride else of_row, most)
