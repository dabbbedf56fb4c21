"""The memory that a block of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu takes for one tile: shared
memory, and the registers of producer threads."""

from __future__ import annotations

import math as mathematics

from tconv_swap.kernels.common.hardware import MAX_BOX
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, dense_map
from tconv_swap.runtime.integers import ceil_div, round_up

#: Words of k of one multiply, and bytes of the packed weights of one tap for 16 channels and those words.
STEP_WORDS = 8
TAP_TILE_BYTES = 512
#: A stage that the copy engine writes begins at a multiple of so many 32-bit words, as its swizzle requires.
TMA_STAGE_WORDS = 256
#: Bytes of shared memory of each warp whose outputs are stored in whole lines.
LINE_BYTES = 2048
#: Bytes of the barrier at which the second warpgroup waits for the first.
STAGGER_BYTES = 8
#: Groups of producer warps of forward/implicit_gemm_wgmma.cu, which load the chunks alternately.
PRODUCER_GROUPS = 2


def power_of_two_dividing(n: int, limit: int) -> int:
    """Returns the largest power of two that divides ``n`` and is at most ``limit``, which is a power of two."""
    return mathematics.gcd(n, limit)


def aligned_to(start: int, of: int, modulus: int, rest: int) -> int:
    """Returns the smallest multiple of ``of``, at least ``start``, whose remainder modulo ``modulus`` is ``rest``."""
    n = round_up(start, of)
    while n % modulus != rest:
        n += of
    return n


def copied_elements(problem: TileProblem, tile: Tile) -> int:
    """Returns the elements of one copy to shared memory."""
    limit = 16 // problem.item
    if tile.nchw_stages:
        return limit
    if tile.wgmma and not problem.input_channels_last:
        limit = 4
    if problem.input_channels_last:
        return power_of_two_dividing(problem.geometry.in_channels_per_group, limit)
    return power_of_two_dividing(problem.row_multiple, power_of_two_dividing(tile.cols, limit))


def _halo_rows(problem: TileProblem, tile: Tile) -> int:
    """Returns the input rows of a tile, with its halo."""
    min_shift, max_shift = problem.shifts[0]
    return (tile.rows - 1) * problem.position_input_rows + 1 + max_shift - min_shift


def shared_bytes(problem: TileProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory of one block, as forward/implicit_gemm_layout.cuh lays it out; the kernels
    assert that both agree."""
    copy_pixels = 1 if problem.input_channels_last else copied_elements(problem, tile)
    min_shift, max_shift = problem.shifts[1]
    shifts, left_pad = max_shift - min_shift + 1, min_shift % copy_pixels
    halo_h = _halo_rows(problem, tile)
    halo_w = round_up(left_pad + tile.cols + shifts - 1, copy_pixels)
    images, rows, cols = tile.fragment
    narrow = tile.wgmma and cols < 8
    row_pitch = aligned_to(halo_w, copy_pixels, 8, cols) if rows > 1 else halo_w
    image_pitch = halo_h * row_pitch
    if images > 1:
        image_pitch = aligned_to(image_pitch, copy_pixels, 8, cols * rows % 8)
    if narrow:
        image_pitch = shifts * halo_h * tile.cols
    pixels = tile.images * image_pitch
    if tile.tma:
        if tile.shaped_pixels:
            pixels = tile.shaped_pixels
        elif narrow:
            pixels = shifts * round_up(tile.images * halo_h * tile.cols, 8)
        input_words = round_up(pixels * tile.chunk_words, TMA_STAGE_WORDS)
    elif tile.wgmma:
        planes = tile.chunk_words // 4
        input_words = tile.chunk_words * aligned_to(pixels, 1, 8, 1 if planes > 2 else 2)
    elif problem.input_channels_last:
        input_words = pixels * (tile.chunk_words + 4)
    else:
        input_words = tile.chunk_words * aligned_to(pixels, 8, 32, 8)
    input_words = round_up(input_words, 4)
    steps = tile.chunk_words // STEP_WORDS
    weight_bytes = steps * max(problem.group_taps) * problem.parts * tile.block_m // 16 * TAP_TILE_BYTES
    if tile.resident_weights:
        stages = tile.stages * input_words * 4 + ceil_div(problem.words, tile.chunk_words) * weight_bytes
    else:
        stages = tile.stages * (input_words * 4 + weight_bytes)
    if not tile.wgmma:
        return stages
    shared = stages + tile.warps_m * tile.warps_n * staged_bytes(problem, tile) + 16 * tile.stages
    if tile.stagger:
        shared += STAGGER_BYTES
    if tile.nchw_stages:
        nchw_stage = tile.images * halo_h * halo_w * tile.chunk_words * 4
        shared = round_up(shared + 16 * tile.nchw_stages, 128) + tile.nchw_stages * nchw_stage
    return shared


def supports_tma_nchw(problem: TileProblem, tile: Tile) -> bool:
    """Whether forward/implicit_gemm_tma_nchw.cu computes the problem with this tile."""
    geometry = problem.geometry
    # In a flat problem the pixels of an image form one row; no tile may lie in two images.
    row = geometry.width * geometry.height if problem.flat else geometry.width
    return (
        not problem.input_channels_last
        and problem.aligned
        and problem.row_multiple * problem.item % 16 == 0
        and tile.cols >= 8
        and row * problem.item % 16 == 0
        and (not problem.flat or row % tile.cols == 0)
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
        and nchw_box(problem, tile)[0] <= MAX_BOX
    )


def nchw_box(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the columns, channels and rows of a box of an NCHW input
    (forward/implicit_gemm_tma_nchw_producer.cuh)."""
    min_shift, max_shift = problem.shifts[1]
    columns = 16 // problem.item
    return (
        round_up(min_shift % columns + tile.cols + max_shift - min_shift, columns),
        tile.chunk_words * 4 // problem.item,
        _halo_rows(problem, tile),
    )


def box_shape(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the columns, rows and images of one box of the input (forward/implicit_gemm_tma_producer.cuh)."""
    if problem.flat:
        return tile.cols // ceil_div(tile.cols, MAX_BOX), 1, 1
    min_shift, max_shift = problem.shifts[1]
    cols = tile.cols if tile.cols < 8 else tile.cols + max_shift - min_shift
    return cols, _halo_rows(problem, tile), tile.images


def box_pixels(problem: TileProblem, tile: Tile) -> int:
    """Returns how many pixels a stage of a shaped tile is loaded with."""
    if tile.dense:
        return dense_map(problem).pixels(tile.positions)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    return tile.images * (tile.rows + most_h - least_h) * (tile.cols + most_w - least_w)


def loaded_pixels(problem: TileProblem, tile: Tile) -> int:
    """Returns how many pixels the copy engine loads a stage with: narrow maps once for each shift."""
    if tile.shaped_pixels:
        return box_pixels(problem, tile)
    if problem.flat:
        return tile.cols
    cols, rows, images = box_shape(problem, tile)
    least, most = problem.shifts[1]
    return cols * rows * images * (most - least + 1 if tile.cols < 8 else 1)


def copies_of_stage(problem: TileProblem, tile: Tile) -> float:
    """Returns how many copies to shared memory a thread makes for a stage of a tile whose input threads load."""
    least, most = problem.shifts[1]
    pixels = tile.positions
    if not problem.flat:
        pixels = tile.images * _halo_rows(problem, tile) * (tile.cols + most - least)
    threads = 32 * tile.producer_warps if tile.wgmma else tile.threads
    return pixels * tile.chunk_words * 4 / problem.item / copied_elements(problem, tile) / threads


def copied_rows(problem: TileProblem, tile: Tile) -> int:
    """Returns how many rows of pixels of one channel a stage of an NCHW input has."""
    rows = 1 if problem.flat else tile.images * _halo_rows(problem, tile)
    return rows * tile.chunk_words * 4 // problem.item


def producer_registers(problem: TileProblem, tile: Tile) -> int:
    """Estimates how many registers of a producer thread hold offsets and elements that are being copied
    (forward/implicit_gemm_wgmma.cu and forward/implicit_gemm_tma_nchw.cu)."""
    if tile.nchw_stages:
        columns, channels, rows = nchw_box(problem, tile)
        pieces = tile.images * rows * columns * channels * problem.item // 16
        return 2 * ceil_div(pieces, 32 * tile.producer_warps)
    copy = copied_elements(problem, tile)
    min_shift, max_shift = problem.shifts[1]
    copies_per_row = ceil_div(tile.cols + max_shift - min_shift, copy)
    copies = tile.images * _halo_rows(problem, tile) * copies_per_row * tile.chunk_words // 4
    copy_registers = 16 // problem.item * ceil_div(copy * problem.item, 4)
    slots = ceil_div(copies * PRODUCER_GROUPS, 32 * tile.producer_warps)
    return (2 * slots if slots <= 10 else slots + 8) + copy_registers


def stores_lines(problem: TileProblem, tile: Tile) -> bool:
    """Whether forward/epilogue_lines.cuh stores the outputs."""
    return (
        tile.whole_lines
        and problem.output_channels_last
        and problem.item == 2
        and tile.splits == 1
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


def staged_bytes(problem: TileProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory in which one warp collects a subtile of its outputs, as
    forward/epilogue_nchw.cuh lays it out."""
    if stores_lines(problem, tile):
        return LINE_BYTES
    if problem.output_channels_last:
        return 0
    item = problem.item if tile.splits == 1 else 4
    per_word = 4 // item
    phases = problem.phases
    room = tile.subtile_bytes // (tile.subtile_channels * 8 * phases[0] * phases[1] * item)
    fragments = 1 << max(1, room).bit_length() - 1
    cols = tile.warp_cols if tile.warp_cols <= fragments else power_of_two_dividing(tile.warp_cols, fragments)
    lines = power_of_two_dividing(
        tile.warp_images * tile.warp_rows, 1 << (fragments // cols).bit_length() - 1
    )
    pixels = cols * lines * 8 * phases[0] * phases[1]
    segment_words = min(4, 2 * phases[1] // per_word)
    return tile.subtile_channels * aligned_to(ceil_div(pixels, per_word), 4, 32, 4 * segment_words % 32) * 4
