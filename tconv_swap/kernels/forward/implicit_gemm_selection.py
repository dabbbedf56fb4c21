"""Selects the kernels of the forward implicit GEMM that a layer has over all its sizes: at most four, with which
representative sizes are expected to take little longer than with the best kernel for each. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.forward_schedules import (
    max_implicit_gemm_schedules,
    max_schedules_of_grad_input,
)
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.schedules import (
    FEW_IMAGES,
    FURTHER_SIZES,
    UNUSUAL,
    representative_sizes,
    select_covering,
)
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
from tconv_swap.runtime.disk_cache import disk_cache

#: The most bytes of an image where a tile takes more than two images: an offset within them has to stay below 2^31.
MANY_IMAGES_BYTES = 1 << 24
#: The candidates are the BEST of each representative size that has other tiles, and the BEST of those that compute any
#: size.
BEST = 4
#: Positions of a batch that leave multiprocessors idle.
FEW_POSITIONS = 1 << 14
#: Images of maps of one pixel.
ONE_PIXEL_BATCHES = (128, 4096)


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


def choose(problem: TileProblem, device: Device, count: int = 1) -> list[tuple[TileProblem, Tile]]:
    """Returns at most ``count`` tiles for this size, the one that is expected to be the fastest first: those of the
    layer's kernels, then those of other kernels that suit the size."""
    layer = of_any_size(problem)
    found = _ranked(kernels_of(layer, device), problem, device)
    if len(found) < count and count > 1:
        others = dict.fromkeys(_of_size(problem, device))
        found += [one for one in _ranked(others, problem, device) if one not in found]
    return [(seen, tile) for _, seen, tile in found[:count]]


@disk_cache
def kernels_of(layer: TileProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns the kernels of ``layer``, which ``of_any_size`` made; the first computes every size."""
    sizes, weights = representatives(layer)
    kept: dict[Schedule, None] = {}
    for size in _with_other_tiles(sizes):
        nearest = sorted(dict.fromkeys(_of_size(size, device)), key=lambda one: _clocks(one, size, device))
        kept.update(dict.fromkeys(nearest[:BEST]))
        kept.update(dict.fromkeys([one for one in nearest if one.computes_any_size][:BEST]))
    times = {one: [_clocks(one, size, device) for size in sizes] for one in kept}
    always = [one for one in times if one.computes_any_size]
    return select_covering(times, weights, always, _limit(layer, device))


def _with_other_tiles(sizes: Iterable[TileProblem]) -> Iterator[TileProblem]:
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


def representatives(layer: TileProblem) -> tuple[list[TileProblem], list[float]]:
    """Returns the sizes that represent all sizes of a layer, and the weight of each."""
    g = layer.geometry
    if layer.one_pixel:
        return [_sized(layer, batch, 1, 1) for batch in ONE_PIXEL_BATCHES], [1.0] * len(ONE_PIXEL_BATCHES)
    one_row = g.kernel[0] == g.stride[0] == 1 < g.kernel[1] and g.padding[0] == 0
    weighted = representative_sizes(
        one_row=one_row,
        patches=g.kernel == g.stride,
        channels=g.in_channels_per_group,
        further=FURTHER_SIZES,
    )
    if not one_row:
        weighted += [(size, UNUSUAL) for size in FEW_IMAGES]
    sized = [(_sized(layer, *size), weight) for size, weight in weighted]
    sized = [one for one in sized if min(one[0].geometry.out_height, one[0].geometry.out_width) > 0]
    return [size for size, _ in sized], [weight for _, weight in sized]


def _sized(layer: TileProblem, batch: int, height: int, width: int) -> TileProblem:
    return replace(layer, geometry=replace(layer.geometry, batch=batch, height=height, width=width))


def _limit(layer: TileProblem, device: Device) -> int:
    if layer.one_pixel:
        return 1
    return (
        max_schedules_of_grad_input(layer, device)
        if layer.of_grad_input
        else max_implicit_gemm_schedules(layer, device)
    )


def _of_size(problem: TileProblem, device: Device) -> Iterator[Schedule]:
    """Yields the kernels with tiles that suit this size, also those that its layer does not have."""
    layer = of_any_size(problem)
    aligned = replace(problem, aligned=True)
    both = not problem.input_channels_last and can_be_aligned(aligned)
    for posed in (problem, aligned) if both else (problem,):
        for seen, tile in candidates(posed, device):
            yield Schedule(_of_geometry(seen, layer.geometry), of_any_shape(tile))


def _clocks(schedule: Schedule, problem: TileProblem, device: Device) -> float:
    seen = schedule.sees(problem)
    if seen is None:
        return math.inf
    return expected_clocks(seen, schedule.tile_for(seen, device), device.multiprocessors)


def _ranked(
    among: Iterable[Schedule], problem: TileProblem, device: Device
) -> list[tuple[float, TileProblem, Tile]]:
    """Returns the tiles of those kernels that compute this size, with their expected clocks, the fastest first."""
    found = []
    for one in among:
        if (seen := one.sees(problem)) is not None:
            tile = one.tile_for(seen, device)
            found.append((expected_clocks(seen, tile, device.multiprocessors), seen, tile))
    return sorted(found, key=itemgetter(0))
