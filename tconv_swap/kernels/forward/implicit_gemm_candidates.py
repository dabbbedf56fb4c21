"""The kernels of the forward implicit GEMM that a layer may have: for which sizes each is right, and the tiles of a
size, ranked by their expected clocks. forward/selection.py selects among them. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_fit import power_above, rows_of_16, split_k
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    ALIGNED_PIXELS,
    Tile,
    TileProblem,
    can_be_aligned,
    of_any_size,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import best_shape, of_any_shape
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import row_fragments
from tconv_swap.kernels.problem import Device

#: The most bytes of an image where a tile takes more than two images: an offset within them has to stay below 2^31.
MANY_IMAGES_BYTES = 1 << 24
#: The candidates are the BEST of each representative size that has other tiles, and the BEST of those that compute any
#: size.
BEST = 4
#: Positions of a batch that leave multiprocessors idle.
FEW_POSITIONS = 1 << 14


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kernel of a layer.

    Attributes:
        problem: the layer (``of_any_size``) as the kernel sees it.
        tile: of any shape that the kernel takes at its launch; 2 splits stand for any number above 1.
    """

    problem: TileProblem
    tile: Tile

    @property
    def computes_any_size(self) -> bool:
        """Whether it is legal for all sizes of the layer."""
        posed, tile = self.problem, self.tile
        if posed.aligned or posed.nhwc_copy or tile.splits > 1:
            return False
        if posed.flat:
            return not (tile.pixel_major or tile.nchw_stages or tile.by_rows)
        return posed.one_pixel or not (tile.images > 2 or (tile.wgmma and tile.cols < 8))

    def sees(self, problem: TileProblem) -> TileProblem | None:
        """Returns a problem of this layer, of any size, as the kernel sees it; None if the kernel is not right for this
        size."""
        g, tile = problem.geometry, self.tile
        image = g.in_channels * g.height * g.width * problem.item
        if self.problem.nhwc_copy and g.batch * image > MAX_COPY_BYTES:
            return None
        outputs = g.batch * g.out_channels * g.out_height * g.out_width
        if tile.splits > 1 and 2 * 4 * outputs > WORKSPACE_LIMIT_BYTES:
            return None
        seen = _of_geometry(self.problem, g)
        if seen.aligned and not can_be_aligned(seen):
            return None
        return seen if self._suits_map(seen, image) else None

    def _suits_map(self, seen: TileProblem, image_bytes: int) -> bool:
        tile, width = self.tile, seen.geometry.width
        if not seen.flat:
            if tile.images > 2 and image_bytes > MANY_IMAGES_BYTES:
                return False
            return not (tile.wgmma and tile.cols < 8) or seen.positions[1] <= tile.cols
        pixels = seen.geometry.height * width
        # Images that are no whole tiles were not measured with wgmma.
        if seen.aligned and tile.wgmma and pixels % ALIGNED_PIXELS:
            return False
        if (tile.pixel_major or tile.nchw_stages) and pixels % tile.cols:
            return False
        # A warp stores whole rows.
        return not tile.by_rows or (8 * tile.warp_cols % width == 0 and width % 2 == 0)

    def tile_for(self, seen: TileProblem, device: Device) -> Tile:
        """Returns the tile with the shape and the splits that suit the size."""
        tile = self.tile
        if tile.shaped_pixels:
            tile = best_shape(seen, tile, device.multiprocessors)
        if tile.splits > 1:
            tile = tile._replace(splits=max(2, split_k(seen, tile, device.multiprocessors)))
        return tile


@lru_cache(maxsize=256)
def _of_geometry(problem: TileProblem, geometry: Geometry) -> TileProblem:
    return replace(problem, geometry=geometry)


def pool(sizes: Sequence[TileProblem], device: Device) -> tuple[Schedule, ...]:
    """Returns the kernels that are worth considering for a layer with these representative sizes."""
    kept: dict[Schedule, None] = {}
    for size in _with_other_tiles(sizes):
        nearest = sorted(dict.fromkeys(of_size(size, device)), key=lambda one: clocks(one, size, device))
        kept.update(dict.fromkeys(nearest[:BEST]))
        kept.update(dict.fromkeys([one for one in nearest if one.computes_any_size][:BEST]))
    return tuple(kept)


def _with_other_tiles(sizes: Sequence[TileProblem]) -> Iterator[TileProblem]:
    """Yields one of the sizes that have the same tiles: these are powers of two, but for rows of 16 and whole rows."""
    found = set()
    for size in sizes:
        rows, cols = size.positions
        few = size.geometry.batch * rows * cols <= FEW_POSITIONS
        kinds = rows_of_16(rows), row_fragments(size), few, can_be_aligned(replace(size, aligned=True))
        tiles = power_above(rows), power_above(cols), kinds
        if tiles not in found:
            found.add(tiles)
            yield size


def of_size(problem: TileProblem, device: Device) -> Iterator[Schedule]:
    """Yields the kernels with tiles that suit this size, also those that its layer does not have."""
    layer = of_any_size(problem)
    aligned = replace(problem, aligned=True)
    both = not problem.input_channels_last and can_be_aligned(aligned)
    for posed in (problem, aligned) if both else (problem,):
        for seen, tile in candidates(posed, device):
            yield Schedule(_of_geometry(seen, layer.geometry), of_any_shape(tile))


def clocks(schedule: Schedule, problem: TileProblem, device: Device) -> float:
    """Returns the expected clocks of a size; infinitely many if the kernel is not right for it."""
    seen = schedule.sees(problem)
    if seen is None:
        return math.inf
    return expected_clocks(seen, schedule.tile_for(seen, device), device.multiprocessors)


def ranked(
    among: Iterable[Schedule], problem: TileProblem, device: Device
) -> list[tuple[float, TileProblem, Tile]]:
    """Returns the tiles of those kernels that compute this size, with their expected clocks, the fastest first."""
    found = []
    for one in among:
        if (seen := one.sees(problem)) is not None:
            tile = one.tile_for(seen, device)
            found.append((expected_clocks(seen, tile, device.multiprocessors), seen, tile))
    return sorted(found, key=itemgetter(0))
