"""The memory that one tile of csrc/kernels/forward_{tile,wgmma,turned,boxes}.cu takes: shared memory, and the registers
of threads that fill."""

from __future__ import annotations

import math as mathematics

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, group_taps
from tconv_swap.runtime.integers import ceil_div, round_up

#: Words of k of one multiply, and bytes of the packed weights of one tap for 16 channels and those words.
STEP_WORDS = 8
TAP_TILE_BYTES = 512
#: A stage that boxes fill begins at a multiple of so many words.
BOX_WORDS = 256
#: Elements that one box has at most in each dimension.
BOX_MOST = 256
#: Of shared memory for each warp whose outputs leave in whole lines.
LINE_BYTES = 2048
#: Of the barrier at which the second warpgroup waits for the first.
STAGGER_BYTES = 8
#: Groups of warps of forward/implicit_gemm_wgmma.cu that take turns to bring the input.
FILL_GROUPS = 2


def power_of_two_dividing(n: int, most: int) -> int:
    """The largest power of two up to ``most``, itself one, that divides ``n``."""
    return mathematics.gcd(n, most)


def aligned_to(start: int, of: int, modulus: int, rest: int) -> int:
    """The smallest multiple of ``of`` from ``start`` on that leaves ``rest`` modulo ``modulus``."""
    n = round_up(start, of)
    while n % modulus != rest:
        n += of
    return n


def _copy_elements(problem: TileProblem, tile: Tile) -> int:
    """Elements of one copy to shared memory."""
    most = 16 // problem.item
    if tile.raw_stages:
        return most
    if tile.wgmma and not problem.input_channels_last:
        most = 4
    if problem.input_channels_last:
        return power_of_two_dividing(problem.geometry.in_channels_per_group, most)
    return power_of_two_dividing(problem.row_multiple, power_of_two_dividing(tile.cols, most))


def shared_bytes(problem: TileProblem, tile: Tile) -> int:
    """Shared memory of one block; mirrors forward/implicit_gemm_layout.cuh, which asserts that they agree."""
    copy_pixels = 1 if problem.input_channels_last else _copy_elements(problem, tile)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    lead = least_w % copy_pixels
    halo_h = (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h
    halo_w = round_up(lead + tile.cols + most_w - least_w, copy_pixels)
    images, rows, cols = tile.fragment
    narrow = tile.wgmma and cols < 8
    row_pitch = aligned_to(halo_w, copy_pixels, 8, cols) if rows > 1 else halo_w
    image_pitch = halo_h * row_pitch
    if images > 1:
        image_pitch = aligned_to(image_pitch, copy_pixels, 8, cols * rows % 8)
    if narrow:
        image_pitch = (most_w - least_w + 1) * halo_h * tile.cols
    pixels = tile.images * image_pitch
    if tile.boxes:
        if narrow:
            pixels = (most_w - least_w + 1) * round_up(tile.images * halo_h * tile.cols, 8)
        input_words = round_up(pixels * tile.chunk_words, BOX_WORDS)
    elif tile.wgmma:
        planes = tile.chunk_words // 4
        input_words = tile.chunk_words * aligned_to(pixels, 1, 8, 1 if planes > 2 else 2)
    elif problem.input_channels_last:
        input_words = pixels * (tile.chunk_words + 4)
    else:
        input_words = tile.chunk_words * aligned_to(pixels, 8, 32, 8)
    input_words = round_up(input_words, 4)
    steps = tile.chunk_words // STEP_WORDS
    weight_bytes = steps * max(group_taps(problem)) * problem.parts * tile.block_m // 16 * TAP_TILE_BYTES
    if tile.weights_stay:
        stages = tile.stages * input_words * 4 + ceil_div(problem.words, tile.chunk_words) * weight_bytes
    else:
        stages = tile.stages * (input_words * 4 + weight_bytes)
    if not tile.wgmma:
        return stages
    shared = stages + tile.warps_m * tile.warps_n * staged_bytes(problem, tile) + 16 * tile.stages
    if tile.stagger:
        shared += STAGGER_BYTES
    if tile.raw_stages:
        raw = tile.images * halo_h * halo_w * tile.chunk_words * 4
        shared = round_up(shared + 16 * tile.raw_stages, 128) + tile.raw_stages * raw
    return shared


def turns(problem: TileProblem, tile: Tile) -> bool:
    """Whether forward/implicit_gemm_tma_nchw.cu computes the problem with this tile."""
    geometry = problem.geometry
    # Where all cells stand in a row, so do the pixels of an image; no tile lies in two.
    row = geometry.width * geometry.height if problem.flat else geometry.width
    return (
        not problem.input_channels_last
        and problem.aligned
        and tile.cols >= 8
        and row * problem.item % 16 == 0
        and (not problem.flat or row % tile.cols == 0)
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
        and raw_box(problem, tile)[0] <= BOX_MOST
    )


def raw_box(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Columns, channels and rows of a box of an NCHW input (forward/implicit_gemm_tma_nchw_producer.cuh)."""
    (least_h, most_h), (least_w, most_w) = problem.shifts
    columns = 16 // problem.item
    return (
        round_up(least_w % columns + tile.cols + most_w - least_w, columns),
        tile.chunk_words * 4 // problem.item,
        (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h,
    )


def box_shape(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Columns, rows and images of one box of the input (forward/implicit_gemm_tma_producer.cuh)."""
    if problem.flat:
        return tile.cols // ceil_div(tile.cols, BOX_MOST), 1, 1
    (least_h, most_h), (least_w, most_w) = problem.shifts
    cols = tile.cols if tile.cols < 8 else tile.cols + most_w - least_w
    return cols, (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h, tile.images


def fill_registers(problem: TileProblem, tile: Tile) -> int:
    """About how many registers of a filling thread of forward/implicit_gemm_wgmma.cu hold places and what is on its
    way there."""
    if tile.raw_stages:
        columns, channels, rows = raw_box(problem, tile)
        pieces = tile.images * rows * columns * channels * problem.item // 16
        return 2 * ceil_div(pieces, 32 * tile.fill_warps)
    copy = _copy_elements(problem, tile)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    halo_h = (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h
    halo_w = ceil_div(tile.cols + most_w - least_w, copy)
    places = tile.images * halo_h * halo_w * tile.chunk_words // 4
    place = 16 // problem.item * ceil_div(copy * problem.item, 4)
    slots = ceil_div(places * FILL_GROUPS, 32 * tile.fill_warps)
    return (2 * slots if slots <= 10 else slots + 8) + place


def stores_lines(problem: TileProblem, tile: Tile) -> bool:
    """Whether outputs leave by forward/epilogue_lines.cuh."""
    return (
        tile.whole_lines
        and problem.output_channels_last
        and problem.item == 2
        and tile.splits == 1
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


def staged_bytes(problem: TileProblem, tile: Tile) -> int:
    """Shared memory of one warp for a part of its outputs; mirrors forward/epilogue_warp.cuh."""
    if stores_lines(problem, tile):
        return LINE_BYTES
    if problem.output_channels_last:
        return 0
    item = problem.item if tile.splits == 1 else 4
    per_word = 4 // item
    phases = problem.phases
    most = tile.part_bytes // (tile.part_channels * 8 * phases[0] * phases[1] * item)
    fragments = 1 << max(1, most).bit_length() - 1
    cols = tile.warp_cols if tile.warp_cols <= fragments else power_of_two_dividing(tile.warp_cols, fragments)
    lines = power_of_two_dividing(
        tile.warp_images * tile.warp_rows, 1 << (fragments // cols).bit_length() - 1
    )
    pixels = cols * lines * 8 * phases[0] * phases[1]
    run_words = min(4, 2 * phases[1] // per_word)
    return tile.part_channels * aligned_to(ceil_div(pixels, per_word), 4, 32, 4 * run_words % 32) * 4
