"""The structs of csrc/kernels/common/sizes.cuh, by which a launch passes sizes to a kernel, as 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dense_map import DenseMap
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, dense_map
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Multiplies of a tile of ``GradWeightTmaSizes`` (``steps``).
MAX_TILE_STEPS = 16

Words = tuple[int, ...]


def signed(word: int) -> int:
    """Returns the signed integer of the same 32 bits."""
    return word - 2 * INT32_LIMIT if word >= INT32_LIMIT else word


def divisor(value: int) -> Words:
    """Returns ``Divisor``, which divides numbers below 2^31 by ``value``, a number from 1 to 2^31 - 1."""
    shift = (value - 1).bit_length()
    return value, signed(ceil_div(1 << (31 + shift), value)), shift


def image_sizes(geometry: Geometry, counted: tuple[int, int] | None = None) -> Words:
    """Returns ``ImageSizes``, for kernels that find their pixels one by one: those of the input, or of a map with
    ``counted`` rows and columns."""
    rows, columns = counted or (geometry.height, geometry.width)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *divisor(rows),
        *divisor(columns),
    )


def segment_sizes(geometry: Geometry, tile: tuple[int, int], segment_tiles: int, split: bool) -> Words:
    """Returns ``SegmentSizes``, for kernels whose blocks compute segments of ``segment_tiles`` tiles. ``tile`` is its
    rows and columns of the input. With ``split`` the partial sums go to the workspace."""
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(tile[0], segment_tiles, int(split)),
        *divisor(ceil_div(geometry.height, tile[0])),
        *divisor(ceil_div(geometry.width, tile[1])),
    )


def patch_sizes(geometry: Geometry, tile: int) -> Words:
    """Returns ``PatchSizes``, for kernels whose tiles are ``tile`` consecutive pixels of an image."""
    pixels = geometry.height * geometry.width
    tiles = ceil_div(pixels, tile)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(pixels, geometry.batch * tiles),
        *divisor(tiles),
        *divisor(geometry.width),
    )


def large_kernel_sizes(geometry: Geometry, step: int, splits: int) -> Words:
    """Returns ``LargeKernelSizes``, for the kernel whose steps are ``step`` pixels of a row."""
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        splits,
        *divisor(geometry.height),
        *divisor(ceil_div(geometry.width, step)),
    )


def pad_images_sizes(batch: int, height: int, width: int, columns: int, pitch: int, segment: int) -> Words:
    """Returns ``PadImagesSizes``, for the kernel that copies images to rows of ``columns``."""
    pixels = height * columns
    return (
        *(batch, height, width, pixels, pitch, segment),
        *divisor(ceil_div(pixels, segment)),
        *divisor(columns),
    )


def im2col_nchw_sizes(
    geometry: Geometry,
    stage: tuple[int, int, int],
    pitch: int,
    boxes: tuple[int, int],
    left_halo: int,
    run_steps: int,
    ring: int,
    splits: int,
    in_weight_order: bool,
) -> Words:
    """Returns ``Im2colNchwSizes``, for the kernel whose stages are ``stage`` images, rows and columns of the input,
    with ``pitch`` pixels from a row to the next. ``boxes``: of the input for each image, and of grad_output side by
    side. ``ring``: its stages."""
    g, (images, rows, cols) = geometry, stage
    return (
        *(g.batch, g.height, g.width, g.out_width, images, rows, cols, pitch),
        *(ceil_div(g.height, rows), ceil_div(g.width, cols), splits, int(in_weight_order)),
        *(*boxes, left_halo, images * run_steps, ring),
        *divisor(run_steps),
    )


def grad_weight_stride1_sizes(
    geometry: Geometry, columns: int, segment: int, flush: int, splits: int
) -> Words:
    """Returns ``GradWeightStride1Sizes``, for the kernel whose tiles are ``segment`` rows and ``columns`` columns."""
    return (
        *(geometry.batch, geometry.out_height, geometry.out_width, segment, flush, splits),
        *divisor(ceil_div(geometry.width, columns)),
        *divisor(ceil_div(geometry.out_height, segment)),
    )


def tile_counts(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the numbers of tiles along the images, the rows and the columns; a flat problem, and dense tiles, have
    all tiles along the columns."""
    batch, (rows, cols) = problem.geometry.batch, problem.positions
    if tile.dense:
        return 1, 1, ceil_div(dense_map(problem).count(batch), tile.positions)
    if problem.flat:
        return 1, 1, ceil_div(batch * rows * cols, tile.cols)
    return ceil_div(batch, tile.images), ceil_div(rows, tile.rows), ceil_div(cols, tile.cols)


def grad_weight_tile_sizes(
    geometry: Geometry, tile: tuple[int, int, int], splits: int, flush: int, through_workspace: bool
) -> Words:
    """Returns ``GradWeightTileSizes``, for kernels that add up the gradient of the weight over tiles of pixels.

    ``tile``: its images, rows and columns. ``flush``: tiles after which sums go to the workspace, or 0 where they go
    there at the end only.
    """
    images, rows, cols = (
        ceil_div(size, cut)
        for size, cut in zip((geometry.batch, geometry.height, geometry.width), tile, strict=True)
    )
    split_tiles, longer = divmod(images * rows * cols, splits)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(splits, split_tiles, longer, flush or INT32_LIMIT - 1, int(through_workspace)),
        *divisor(rows * cols),
        *divisor(cols),
    )


def implicit_gemm_tma_sizes(
    geometry: Geometry,
    tile: tuple[int, int, int],
    box: tuple[int, int, int],
    copied_bytes: int,
    ring: int,
    steps: Sequence[int],
    splits: int,
    flush: int,
    through_workspace: bool,
) -> Words:
    """Returns ``GradWeightTmaSizes``, for the kernel whose stages are tiles of ``tile`` images, rows and columns of the
    input.

    ``box``: of grad_output: its columns, the bytes from one to the next, and its pixels from 8 pixels of a multiply to
    the next 8. ``ring``: its stages. ``steps``: for each multiply, where its pixels begin in a box, in units of 16
    bytes.
    """
    tiles = grad_weight_tile_sizes(geometry, tile, splits, flush, through_workspace)
    return *tiles, *tile, *box, copied_bytes, ring, *steps, *(0,) * (MAX_TILE_STEPS - len(steps))


def im2col_nhwc_sizes(
    geometry: Geometry, stage: tuple[int, int, int], ring: int, splits: int, through_workspace: bool
) -> Words:
    """Returns ``Im2colNhwcSizes``, for the kernel whose stages are ``stage`` images, rows and columns of the input,
    powers of two. ``ring``: its stages."""
    tiles = grad_weight_tile_sizes(geometry, stage, splits, 0, through_workspace)
    return *tiles, *stage, stage[2].bit_length() - 1, ring


def tile_sizes(problem: TileProblem, tile: Tile) -> Words:
    """Returns ``Sizes``, for kernels that divide the map into tiles of positions."""
    dense = dense_map(problem) if tile.dense else None
    return map_sizes(problem.geometry, problem.positions, tile_counts(problem, tile), tile.splits, dense)


def map_sizes(
    geometry: Geometry,
    positions: tuple[int, int],
    tiles: tuple[int, int, int],
    splits: int = 1,
    dense: DenseMap | None = None,
) -> Words:
    """Returns ``Sizes`` for a map with these rows and columns of ``positions``, and ``tiles`` as above. Dense
    tiles count positions by the places of their map."""
    (positions_h, positions_w), (images, rows, cols) = positions, tiles
    counted_h, counted_w = (dense.rows, dense.cols) if dense else positions
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(positions_h, positions_w, images * rows * cols),
        *divisor(rows * cols),
        *divisor(cols),
        *divisor(counted_h * counted_w),
        *divisor(counted_w),
        *divisor(splits),
    )


def im2col_tile_shape(
    tile: tuple[int, int, int],
    box: tuple[int, int],
    alignment_columns: int,
    wide: bool,
    paired: bool,
    input_stage: tuple[int, int],
    stages: tuple[int, int],
) -> Words:
    """Returns ``Im2colTileShape``, for a tile of these images, rows and columns of positions, and a box of these rows
    and columns. ``input_stage``: the bytes that it is loaded with, and those to the next one. ``stages``: of the input
    and of the weights."""
    images, rows, cols = tile
    return (
        *(images, rows, box[1], box[0] * box[1], alignment_columns, int(wide), int(paired)),
        *(*input_stage, *stages),
        *divisor(cols),
        *divisor(rows * cols),
    )
