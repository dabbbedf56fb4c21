"""The shapes of the tiles of csrc/kernels/forward/implicit_gemm_tma.cu that a kernel takes at its launch, and which of
them fits a size. csrc/kernels/common/sizes.cuh has the same words. Pure functions of data.

A warpgroup multiplies rows of 8 positions, one below the other. Two warpgroups lie side by side, one below the other,
or in images of their own; or all positions of the tile are a row, wherever they begin (dense)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter

from tconv_swap.kernels.common.dense_map import Corners, are_legal, most_pixels
from tconv_swap.kernels.common.hardware import MAX_PIXELS
from tconv_swap.kernels.common.sizes import Words
from tconv_swap.kernels.forward.implicit_gemm_clocks import clocks_of_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    dense_map,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import box_pixels
from tconv_swap.runtime.integers import INT32_LIMIT

#: The ratio of the expected clocks of parts of the map that are expected to be nearly as fast.
NEARLY = 1.05
#: Bytes of a chunk of channels, which is 16 words at most.
MAX_CHUNK_BYTES = 64


def can_be_shaped(problem: TileProblem, tile: Tile) -> bool:
    """Returns whether a kernel takes the shape of such a tile at its launch."""
    return (
        tile.tma
        and problem.input_channels_last
        and max(problem.geometry.stride) > 1
        and problem.stack == 1
        and not problem.flat
        and tile.cols >= 8
        and tile.warp_images == tile.warp_cols == 1
    )


def of_any_shape(tile: Tile) -> Tile:
    """Returns a tile that is the same for all shapes that a kernel computes."""
    if not tile.shaped_pixels:
        return tile
    return tile._replace(images=tile.warps_n, rows=tile.warp_rows, cols=8, dense=False)


def shaped(problem: TileProblem, tile: Tile) -> Tile:
    """Returns the tile with room in a stage for the pixels of each of its shapes."""
    reach = dense_map(problem).reach
    pixels = [
        most_pixels(one.positions, reach) if one.dense else box_pixels(problem, one)
        for one in shapes(problem, tile)
    ]
    return tile._replace(shaped_pixels=max(pixels))


def shapes(problem: TileProblem, tile: Tile) -> list[Tile]:
    """Returns the tile in each shape of its kernel."""
    # A chunk of a dense tile may not have channels of two groups.
    group_bytes = problem.geometry.in_channels_per_group * problem.item
    may_be_dense = problem.geometry.groups == 1 or group_bytes % MAX_CHUNK_BYTES == 0
    return list(_shapes(of_any_shape(tile), may_be_dense))


@lru_cache(maxsize=1024)
def _shapes(tile: Tile, may_be_dense: bool) -> tuple[Tile, ...]:
    groups, rows = tile.warps_n, tile.warp_rows
    boxes = dict.fromkeys(((1, rows, 8 * groups), (1, rows * groups, 8), (groups, rows, 8)))
    found = [
        tile._replace(images=images, rows=height, cols=width, dense=False) for images, height, width in boxes
    ]
    return (*found, (found[-1])._replace(dense=True)) if may_be_dense else tuple(found)


def legal(problem: TileProblem, tile: Tile) -> bool:
    """Returns whether the kernel of a shaped tile computes this size in this shape."""
    if not tile.dense:
        return True
    if box_pixels(problem, tile) > min(tile.shaped_pixels, MAX_PIXELS):
        return False
    geometry = problem.geometry
    places = dense_map(problem).count(geometry.batch) + tile.positions
    outputs = geometry.batch * geometry.out_height * geometry.out_width
    return max(places, outputs) < INT32_LIMIT and are_legal(dense_corners(problem))


def best_shape(
    layer: TileProblem, tile: Tile, multiprocessors: int
) -> Callable[[TileProblem], tuple[float, Tile]]:
    """Returns a function of sizes of ``layer``, which is of any size: it returns a shaped tile in the shape that is
    expected to be the fastest, after its expected clocks. Of parts of the map that are nearly as fast it is the one
    with the fewest tiles."""
    of_shapes = [(clocks_of_tile(layer, one, multiprocessors), one) for one in shapes(layer, tile)]
    of_parts = [(clocks_of, one) for clocks_of, one in of_shapes if not one.dense]
    of_dense = [(clocks_of, one) for clocks_of, one in of_shapes if one.dense]

    def best_of(problem: TileProblem) -> tuple[float, Tile]:
        parts = [(clocks_of(problem), one) for clocks_of, one in of_parts]
        limit = NEARLY * min(parts, key=itemgetter(0))[0]
        near = [part for part in parts if part[0] <= limit]
        if len(near) > 1:
            near.sort(key=lambda part: (block_count(problem, part[1]), part[0]))
        dense = ((clocks_of(problem), one) for clocks_of, one in of_dense if legal(problem, one))
        return min((near[0], *dense), key=itemgetter(0))

    return best_of


def dense_corners(problem: TileProblem) -> Corners:
    """Returns the corners of the map of dense tiles."""
    geometry, ((least_h, _), (least_w, _)) = problem.geometry, problem.shifts
    return dense_map(problem).corners((least_h, least_w), (1, 1), (geometry.height, geometry.width))


def shape_words(problem: TileProblem, tile: Tile) -> Words:
    """Returns ``TileShape`` of csrc/kernels/common/sizes.cuh."""
    if tile.dense:
        own, pitch = 8 * tile.warp_rows, dense_map(problem).cols
        return 1, 1, tile.positions, 1, 0, 0, own, own, 8, pitch, box_pixels(problem, tile)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    height, width = tile.rows + most_h - least_h, tile.cols + most_w - least_w
    several = tile.warps_n > 1
    images = int(several and tile.images > 1)
    rows = tile.warp_rows if several and tile.rows > tile.warp_rows else 0
    cols = 8 if several and tile.cols > 8 else 0
    return (
        *(tile.images, tile.rows, tile.cols, 0, images, rows, cols),
        *((images * height + rows) * width + cols, width, width, box_pixels(problem, tile)),
    )
