"""The structs of csrc/kernels/common/sizes.cuh: what kernels are told about sizes at a launch, as 32-bit words."""

from __future__ import annotations

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

Words = tuple[int, ...]


def signed(word: int) -> int:
    """The signed integer of the same 32 bits."""
    return word - 2 * INT32_LIMIT if word >= INT32_LIMIT else word


def divisor(value: int) -> Words:
    """``Divisor``: what divides numbers below 2^31 by ``value``, from 1 to 2^31 - 1."""
    shift = (value - 1).bit_length()
    return value, signed(ceil_div(1 << (31 + shift), value)), shift


def image_sizes(geometry: Geometry, counted: tuple[int, int] | None = None) -> Words:
    """``ImageSizes``, of the kernels that find their pixels one by one: those of the input, or of a map of so many
    ``counted`` rows and columns."""
    rows, columns = counted or (geometry.height, geometry.width)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *divisor(rows),
        *divisor(columns),
    )


def walk_sizes(geometry: Geometry, tile: tuple[int, int], repeat: int, split: bool) -> Words:
    """``WalkSizes``, of the kernels whose blocks walk down ``repeat`` tiles of so many rows and columns of the input;
    with ``split`` their sums go to the workspace."""
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(tile[0], repeat, int(split)),
        *divisor(ceil_div(geometry.height, tile[0])),
        *divisor(ceil_div(geometry.width, tile[1])),
    )


def run_sizes(geometry: Geometry, tile: int) -> Words:
    """``RunSizes``, of the kernels whose tiles are so many pixels of an image that follow each other."""
    pixels = geometry.height * geometry.width
    tiles = ceil_div(pixels, tile)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(pixels, geometry.batch * tiles),
        *divisor(tiles),
        *divisor(geometry.width),
    )


def step_sizes(geometry: Geometry, step: int, splits: int) -> Words:
    """``StepSizes``, of the kernel whose steps are so many pixels of a row."""
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        splits,
        *divisor(geometry.height),
        *divisor(ceil_div(geometry.width, step)),
    )


def part_sizes(
    batch: int, source: tuple[int, int], pixel_rows: int, cells: tuple[int, int], pitch: int, segment: int
) -> Words:
    """``PartSizes``, of the kernel that parts ``source`` rows and columns to lines of ``cells``."""
    count = cells[0] * cells[1]
    return (
        *(batch, *source, pixel_rows, count, pitch, segment),
        *divisor(ceil_div(count, segment)),
        *divisor(cells[1]),
    )


def line_sizes(geometry: Geometry, slices: int) -> Words:
    """``LineSizes``, of the kernel whose pixels lie in lines."""
    return geometry.batch, geometry.width, geometry.height * geometry.width, slices


def stage_sizes(
    geometry: Geometry, line: int, tile: tuple[int, int], slices: int, in_weight_order: bool
) -> Words:
    """``StageSizes``, of the kernel whose stages are so many rows and columns of the input."""
    down, across = ceil_div(geometry.height, tile[0]), ceil_div(geometry.width, tile[1])
    return geometry.batch, geometry.out_width, line, down, across, slices, int(in_weight_order)


def grad_weight_strip_sizes(geometry: Geometry, strip: int, segment: int, flush: int, slices: int) -> Words:
    """``GradWeightStripSizes``, of the kernel whose columns are ``segment`` rows in a strip of so many columns."""
    return (
        *(geometry.batch, geometry.out_height, geometry.out_width, segment, flush, slices),
        *divisor(ceil_div(geometry.width, strip)),
        *divisor(ceil_div(geometry.out_height, segment)),
    )


def tile_counts(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Tiles along the images, the rows and the columns; of a flat problem, all along the columns."""
    batch, (cells_h, cells_w) = problem.geometry.batch, problem.positions
    if problem.flat:
        return 1, 1, ceil_div(batch * cells_h * cells_w, tile.cols)
    return ceil_div(batch, tile.images), ceil_div(cells_h, tile.rows), ceil_div(cells_w, tile.cols)


def pixel_sizes(
    geometry: Geometry, tile: tuple[int, int, int], slices: int, flush: int, through_workspace: bool
) -> Words:
    """``PixelSizes``, of the kernels that sum up the weight's gradient over tiles of so many images, rows and columns.
    ``flush``: 0 for never before the end."""
    images, rows, cols = (
        ceil_div(size, cut)
        for size, cut in zip((geometry.batch, geometry.height, geometry.width), tile, strict=True)
    )
    slice_tiles, longer = divmod(images * rows * cols, slices)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(slices, slice_tiles, longer, flush or INT32_LIMIT - 1, int(through_workspace)),
        *divisor(rows * cols),
        *divisor(cols),
    )


def tile_sizes(problem: TileProblem, tile: Tile) -> Words:
    """``Sizes``, of the kernels that cut the map into tiles of cells."""
    return cell_sizes(problem, tile_counts(problem, tile), tile.splits)


def cell_sizes(problem: TileProblem, tiles: tuple[int, int, int], splits: int) -> Words:
    """The same with so many ``tiles`` along the images, the rows and the columns."""
    return map_sizes(problem.geometry, problem.positions, tiles, splits)


def map_sizes(
    geometry: Geometry, cells: tuple[int, int], tiles: tuple[int, int, int], splits: int = 1
) -> Words:
    """The same of a map of so many ``cells``."""
    (cells_h, cells_w), (images, rows, cols) = cells, tiles
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(cells_h, cells_w, images * rows * cols),
        *divisor(rows * cols),
        *divisor(cols),
        *divisor(cells_h * cells_w),
        *divisor(cells_w),
        *divisor(splits),
    )
