"""The clocks that tiles of the forward implicit GEMM are expected to take for a size: they select the kernels of a
layer, and the one that computes a size. Pure functions of data.

The constants are fitted to 26,087 times of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu on H100s, in
clocks of 1.7 GHz, and those of large maps to 2,563 more; the standard deviation of the logarithm is 0.13, of large maps
0.18 (docs/selection.md).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.common.limits import MAX_REMEMBERED
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    blocks_of_map_tile,
    dense_map,
    map_tiles,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    copied_elements,
    copied_rows,
    copies_of_stage,
    loaded_pixels,
)
from tconv_swap.runtime.integers import ceil_div, round_up

#: Clocks of the launches.
LAUNCH_CLOCKS = 13800
#: How many times as fast a plan has to be that copies its input: the copy takes memory.
COPY_MARGIN = 1.03
#: Clocks of a byte of input and output; of a byte of the weights that is read or written to pack them, and of partial
#: sums.
BYTE_CLOCKS, PACKED_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.000341, 0.000728, 0.00127
#: Further clocks of a byte of NCHW output whose rows are no whole sectors of memory: where threads load the input of
#: wgmma, where they transpose it, and elsewhere; by wgmma and without transposing also with more than NEAR_BYTES of
#: input and output, which the L2 has not always.
NEAR_BYTES = 48 << 20
RAGGED_OF_THREADS, RAGGED_TRANSPOSED, RAGGED_BYTE_CLOCKS = 0.000169, 0.000318, 0.000657
RAGGED_FAR = 0.00048
#: Clocks of a byte of input for each further group of output channels whose blocks read it, where threads load it.
REREAD_BYTE_CLOCKS = 0.000148
#: Multiply-adds of a multiprocessor in a clock for each element of a word of 32 bits; the clocks that a multiply takes
#: over those, where the copy engine loads the input, where threads do in TF32 and in 16 bits, where they transpose what
#: it loads, and by mma.sync; how many times as long the three products of float32 take.
MULTIPLY_MACS = 1024
MULTIPLY_CLOCKS, OF_THREADS, OF_THREADS_16_BITS, TRANSPOSED = 0.823, 0.405, 0.527, 0.956
MMA, IEEE = 1.36, 3.84
#: Clocks of a byte of a stage's weights; how many times as long weights of more than LARGE_WEIGHTS bytes take, which
#: the L2 has not always.
WEIGHT_BYTE_CLOCKS, LARGE_WEIGHTS, FAR_WEIGHTS = 0.0131, 16 << 20, 1.18
#: The share by which a block takes longer than one of two that share a multiprocessor, if the other one is missing.
LONE_BLOCK = 0.567
#: By wgmma, groups of channels: their sums are short.
GROUPS = 1.21

#: Loaded by the copy engine: clocks of a tile, of each position of a dense tile whose outputs are in channels_last
#: (their places are computed by divisions, for few outputs each), and of a byte of a stage's input; how many times as
#: long the latter takes whose pixels are no whole sectors of memory, and of narrow maps that are loaded, once for each
#: shift, by single sectors; the share of the shorter one of loads and multiplies that does not overlap with the other
#: one; and how many times as long the loop takes with weights that are read in their own layout (whose sums are stored
#: slower), and with two stages.
TILE_CLOCKS, DENSE_CLOCKS, INPUT_BYTE_CLOCKS = 215, 7.05, 0.0161
RAGGED_PIXELS, NARROW, NOT_OVERLAPPED = 2.27, 1.4, 0.317
OWN_LAYOUT, TWO_STAGES = 1.08, 1.31

#: Loaded by threads, by wgmma: clocks of a copy of a thread and of a byte that it copies, and how many times as long
#: they take in 16 bits, and of several images; the share by which they take longer, for each MANY_COPIES above
#: MANY_COPIES that a thread makes for a stage, beside sums of 128 registers; and clocks of a row of pixels of a
#: channel, over the threads, and further ones with more than NEAR_BYTES of input and output.
COPY_CLOCKS, COPY_BYTE_CLOCKS, COPIED_ROW_CLOCKS, FAR_ROW_CLOCKS = 5.98, 7.07, 20.4, 304
COPY_16_BITS, SEVERAL_IMAGES = 0.916, 1.52
MANY_COPIES, CROWDED, CROWDED_FRAGMENTS = 16, 0.81, 32
#: How many times as long the loop takes with two stages, with two warpgroups of consumers, with one that is the only
#: one of a multiprocessor, and in 16 bits where the taps of a row are WIDE_REACH pixels or more apart, at stride 1.
TWO_STAGES_OF_THREADS, TWO_WARPGROUPS, ONE_WARPGROUP = 1.27, 1.21, 1.18
WIDE_REACH, WIDE_16_BITS = 4, 1.22
#: Where the copy engine loads NCHW and threads transpose it: clocks of a row of pixels of a channel.
TRANSPOSED_ROW_CLOCKS = 6.77

#: By mma.sync: clocks of a copy in NCHW and in channels_last, and of a byte that is copied; how many times as long they
#: take with several images, and with narrow maps; the share by which they take longer in NCHW and 16 bits, which pass
#: through registers, for each MMA_MANY_COPIES above MMA_MANY_COPIES that a thread makes for a stage; how many times as
#: long a tile takes whose block is the only one of a multiprocessor, and with more than MANY_PHASES phases.
MMA_COPY_CLOCKS, MMA_COPY_CLOCKS_NHWC, MMA_COPY_BYTE_CLOCKS = 0.06, 0.145, 0.0258
MMA_SEVERAL_IMAGES, MMA_NARROW, MMA_MANY_COPIES, MMA_CROWDED = 1.17, 1.76, 64, 0.71
MMA_ONE_BLOCK, MANY_PHASES, MMA_MANY_PHASES = 1.25, 4, 1.21

#: Clocks of a store in NCHW by wgmma's warps, where the copy engine loads the input, of whole rows, and where threads
#: load it, then of a byte as well; and by mma.sync, which stores from registers, in NCHW and in channels_last.
STORE_CLOCKS, STORE_CLOCKS_OF_ROWS = 0.281, 0.2
STORE_CLOCKS_OF_THREADS, STORED_BYTE_CLOCKS = 0.177, 0.0219
STORE_CLOCKS_MMA, STORE_CLOCKS_MMA_NHWC = 0.505, 0.334
#: How many times as long NCHW stores of a flat problem take whose rows go on in the next one: of single outputs by
#: wgmma's warps, and of at most SHORT_STORE_BYTES by mma.sync.
FLAT_SINGLES, FLAT_SHORT_MMA, SHORT_STORE_BYTES = 2.79, 2.12, 4
#: Further clocks of a row of outputs of a tile in NCHW by wgmma with more than NEAR_BYTES of input and output, where
#: the copy engine loads the input and where threads do.
FAR_STORED_ROW_CLOCKS, FAR_STORED_ROW_CLOCKS_OF_THREADS = 1.84, 4.9
#: In channels_last by wgmma's warps: clocks of a store beyond those of 16 bytes, and of a byte, and how many times as
#: long the latter takes where blocks of their own store each group of phases.
SHORT_STORE_CLOCKS, STORED_BYTE_CLOCKS_NHWC, OF_PHASES = 0.395, 0.0103, 1.93


#: What the clocks of a tile depend on of a size: whether the L2 has not always its input and output; the largest power
#: of two that divides its rows of outputs, at most that of a store; and the pitch of a dense map.
_Kind = tuple[bool, int, int]


def expected_clocks(problem: TileProblem, tile: Tile, multiprocessors: int) -> float:
    """Returns the expected clocks of a size with this tile."""
    return clocks_of_tile(problem, tile, multiprocessors)(problem)


def clocks_of_tile(layer: TileProblem, tile: Tile, multiprocessors: int) -> Callable[[TileProblem], float]:
    """Returns the same as a function of sizes of ``layer``, which is of any size: what their clocks have in common is
    computed once."""
    blocks, sharing = blocks_of_map_tile(layer, tile), tile.blocks_per_multiprocessor
    resident, lone_block = multiprocessors * sharing, LONE_BLOCK if sharing > 1 else 0.0
    in_segments = layer.output_channels_last or tile.by_rows
    readers = ceil_div(layer.geometry.out_channels_per_group, layer.block_channels(tile))
    reread = REREAD_BYTE_CLOCKS * (readers * len(layer.group_taps) - 1)
    packing = PACKED_BYTE_CLOCKS * 2 * _weight_bytes(layer)
    are_alike = not tile.dense and (not tile.wgmma or (tile.tma and layer.output_channels_last))
    of_kinds: dict[_Kind | None, float] = {}

    def clocks_of(problem: TileProblem) -> float:
        # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
        rounds, rest = divmod(map_tiles(problem, tile) * blocks, resident)
        rounds = rounds * sharing - -rest // multiprocessors
        lone = lone_block if 0 < rest <= multiprocessors else 0.0
        kind = None if are_alike else _kind_of(problem, tile)
        if kind not in of_kinds:
            if len(of_kinds) == MAX_REMEMBERED:
                of_kinds.clear()
            of_kinds[kind] = _tile_clocks(problem, tile)
        clocks = LAUNCH_CLOCKS + (rounds + lone) * of_kinds[kind] + BYTE_CLOCKS * problem.moved_bytes
        if not in_segments and problem.out_width * problem.item % SECTOR_BYTES:
            clocks += _ragged_byte_clocks(problem, tile) * problem.outputs * problem.item
        if not tile.tma:
            clocks += reread * problem.inputs * problem.item
        if not tile.tma_weights:
            clocks += packing
        if tile.splits > 1:
            clocks += PARTIAL_BYTE_CLOCKS * 4 * problem.outputs * tile.splits
        if problem.nhwc_copy:
            clocks += copy_clocks(2 * problem.inputs * problem.item)
            clocks *= COPY_MARGIN
        return clocks

    return clocks_of


def _kind_of(problem: TileProblem, tile: Tile) -> _Kind:
    """Returns the kind of a size."""
    multiple = 0 if problem.output_channels_last else gcd(problem.out_width, 16 // problem.item)
    return _is_far(problem), multiple, dense_map(problem).cols if tile.dense else 0


def _ragged_byte_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the further clocks of a byte of NCHW output whose rows are no whole sectors of memory."""
    if tile.nchw_stages:
        return RAGGED_TRANSPOSED
    clocks = RAGGED_OF_THREADS if tile.wgmma and not tile.tma else RAGGED_BYTE_CLOCKS
    return clocks + (RAGGED_FAR if tile.wgmma and _is_far(problem) else 0.0)


def _is_far(problem: TileProblem) -> bool:
    return problem.moved_bytes > NEAR_BYTES


def _weight_bytes(problem: TileProblem) -> int:
    geometry = problem.geometry
    weights = geometry.in_channels_per_group * geometry.out_channels * geometry.taps
    return weights * problem.item * problem.parts


def _tile_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which a block loads, multiplies and stores a tile."""
    of_word, groups = 4 // problem.item, problem.group_taps
    summed = round_up(problem.words, tile.chunk_words) * of_word / tile.splits
    chunks, taps = ceil_div(problem.words, tile.chunk_words) / tile.splits, sum(groups) / len(groups)
    multiply = tile.positions * tile.block_m * taps * summed / (MULTIPLY_MACS * of_word)
    weights = WEIGHT_BYTE_CLOCKS * tile.block_m * taps * summed * problem.item * problem.parts
    if tile.tma:
        loop = _loop_of_tma(problem, tile, multiply, weights, summed)
    elif tile.nchw_stages:
        loop = TRANSPOSED * multiply + TRANSPOSED_ROW_CLOCKS * copied_rows(problem, tile) * chunks
    elif tile.wgmma:
        multiply *= OF_THREADS_16_BITS if problem.item == 2 else OF_THREADS
        loop = multiply + weights + _copy_clocks(problem, tile) * chunks
        loop *= _of_consumers(problem, tile)
    else:
        multiply *= MMA * (IEEE if problem.precision == "IEEE" else 1.0)
        loop = multiply + weights + _copy_clocks_mma(problem, tile) * chunks
        loop *= MMA_ONE_BLOCK if tile.blocks_per_multiprocessor == 1 else 1.0
        loop *= MMA_MANY_PHASES if problem.phases[0] * problem.phases[1] > MANY_PHASES else 1.0
    if problem.geometry.groups > 1 and tile.wgmma and not tile.nchw_stages:
        loop *= GROUPS
    return loop + _store_clocks(problem, tile)


def _of_consumers(problem: TileProblem, tile: Tile) -> float:
    """Returns how many times as long the loop of wgmma takes where threads load the input."""
    warpgroups, (least, most) = tile.warps_m * tile.warps_n // 4, problem.shifts[1]
    share = TWO_STAGES_OF_THREADS if tile.stages == 2 else 1.0
    if warpgroups > 1:
        share *= TWO_WARPGROUPS
    elif tile.blocks_per_multiprocessor == 1:
        share *= ONE_WARPGROUP
    wide = max(problem.geometry.stride) == 1 and most - least >= WIDE_REACH
    return share * (WIDE_16_BITS if wide and problem.item == 2 else 1.0)


def _loop_of_tma(problem: TileProblem, tile: Tile, multiply: float, weights: float, summed: float) -> float:
    """Returns the clocks in which the copy engine loads a tile and a block multiplies it."""
    if _weight_bytes(problem) > LARGE_WEIGHTS:
        weights *= FAR_WEIGHTS
    ragged = problem.geometry.in_channels * problem.item % SECTOR_BYTES
    inputs = INPUT_BYTE_CLOCKS * loaded_pixels(problem, tile) * summed * problem.item
    by_sectors = _is_narrow(problem, tile) and tile.chunk_words * 4 == SECTOR_BYTES
    inputs *= (RAGGED_PIXELS if ragged else 1.0) * (NARROW if by_sectors else 1.0)
    multiply, loads = MULTIPLY_CLOCKS * multiply, weights + inputs
    loop = max(multiply, loads) + NOT_OVERLAPPED * min(multiply, loads)
    loop *= (OWN_LAYOUT if tile.tma_weights else 1.0) * (TWO_STAGES if tile.stages == 2 else 1.0)
    places = DENSE_CLOCKS * tile.positions if tile.dense and problem.output_channels_last else 0.0
    return TILE_CLOCKS + loop + places


def _copy_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which producer threads load a stage."""
    copies = copies_of_stage(problem, tile)
    clocks = copies * (COPY_CLOCKS + COPY_BYTE_CLOCKS * copied_elements(problem, tile) * problem.item)
    clocks *= (COPY_16_BITS if problem.item == 2 else 1.0) * (SEVERAL_IMAGES if tile.images > 1 else 1.0)
    fragments = tile.warp_fragments * problem.phases[0] * problem.phases[1]
    if fragments >= CROWDED_FRAGMENTS and copies > MANY_COPIES:
        clocks *= 1 + CROWDED * (copies - MANY_COPIES) / MANY_COPIES
    of_row = COPIED_ROW_CLOCKS + (FAR_ROW_CLOCKS if _is_far(problem) else 0.0)
    return clocks + of_row * copied_rows(problem, tile) / (32 * tile.producer_warps)


def _copy_clocks_mma(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which the threads of mma.sync load a stage."""
    of_thread = copies_of_stage(problem, tile)
    copies = of_thread * tile.threads
    of_copy = MMA_COPY_CLOCKS_NHWC if problem.input_channels_last else MMA_COPY_CLOCKS
    clocks = copies * (of_copy + MMA_COPY_BYTE_CLOCKS * copied_elements(problem, tile) * problem.item)
    clocks *= MMA_SEVERAL_IMAGES if tile.images > 1 else 1.0
    if problem.item == 2 and not problem.input_channels_last and of_thread > MMA_MANY_COPIES:
        clocks *= 1 + MMA_CROWDED * (of_thread - MMA_MANY_COPIES) / MMA_MANY_COPIES
    return clocks * (MMA_NARROW if _is_narrow(problem, tile) else 1.0)


def _is_narrow(problem: TileProblem, tile: Tile) -> bool:
    return tile.cols < 8 and not problem.flat


def _store_clocks(problem: TileProblem, tile: Tile) -> float:
    """Returns the clocks in which a block stores a tile."""
    channels = min(problem.block_channels(tile), problem.geometry.out_channels_per_group)
    rows = problem.stack if problem.stack > 1 else problem.phases[0]
    outputs = tile.positions * rows * problem.phases[1] * channels
    item = 4 if tile.splits > 1 else problem.item
    if not problem.output_channels_last:
        return _store_clocks_nchw(problem, tile, outputs)
    most = 16 // item
    of_store = gcd(problem.geometry.out_channels_per_group, most)
    if not tile.wgmma:
        return STORE_CLOCKS_MMA_NHWC * outputs / of_store
    of_byte = STORED_BYTE_CLOCKS_NHWC * (OF_PHASES if len(problem.group_taps) > 1 else 1.0)
    return SHORT_STORE_CLOCKS * outputs * (1 / of_store - 1 / most) + of_byte * outputs * problem.item


def _store_clocks_nchw(problem: TileProblem, tile: Tile, outputs: int) -> float:
    """Returns the clocks in which a block stores its ``outputs`` in NCHW."""
    of_store = _outputs_of_store(problem, tile)
    stores, crosses_rows = outputs / of_store, problem.flat and not tile.by_rows
    if not tile.wgmma:
        short = crosses_rows and of_store * problem.item <= SHORT_STORE_BYTES
        return STORE_CLOCKS_MMA * stores * (FLAT_SHORT_MMA if short else 1.0)
    stores *= FLAT_SINGLES if crosses_rows and of_store == 1 else 1.0
    if tile.nchw_stages or tile.by_rows:
        return (STORE_CLOCKS_OF_ROWS if tile.by_rows else STORE_CLOCKS) * stores
    stored_rows = outputs / (tile.cols * problem.phases[1]) if _is_far(problem) else 0.0
    if tile.tma:
        return STORE_CLOCKS * stores + FAR_STORED_ROW_CLOCKS * stored_rows
    clocks = STORE_CLOCKS_OF_THREADS * stores + STORED_BYTE_CLOCKS * outputs * problem.item
    return clocks + FAR_STORED_ROW_CLOCKS_OF_THREADS * stored_rows


def _outputs_of_store(problem: TileProblem, tile: Tile) -> int:
    """Returns the neighbouring outputs of one store in NCHW (forward/epilogue_nchw.cuh, implicit_gemm_store.cuh)."""
    phase_cols, stride = problem.phases[1], problem.geometry.stride[1]
    most = 16 // (4 if tile.splits > 1 else problem.item)
    if tile.by_rows:
        return most if problem.out_width % most == 0 else gcd(problem.out_row_multiple, most)
    # The outputs of a warp's row, or of a position that has not all of its phases here.
    of_row = min(8, tile.cols) * phase_cols if phase_cols == stride else gcd(stride, phase_cols)
    if tile.wgmma:
        of_row = gcd(of_row, most)
        return of_row if problem.out_width % of_row == 0 else gcd(problem.out_row_multiple, of_row)
    return gcd(problem.out_row_multiple, 2 * phase_cols if phase_cols == stride else of_row, most)
