"""The kernels of the forward implicit GEMM that a layer may have: for which sizes each is right, and the tiles of a
size, ranked by their expected clocks. forward/selection.py selects among them. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import clocks_of_tile
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


class Schedule(NamedTuple):
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
        seen = _of_geometry(self.problem, problem.geometry)
        return seen if self.suits(seen) else None

    def suits(self, seen: TileProblem) -> bool:
        """Whether the kernel is right for a size, as it sees this."""
        if seen.nhwc_copy and seen.inputs * seen.item > MAX_COPY_BYTES:
            return False
        if self.tile.splits > 1 and 2 * 4 * seen.outputs > WORKSPACE_LIMIT_BYTES:
            return False
        return (not seen.aligned or can_be_aligned(seen)) and self._suits_map(seen)

    def _suits_map(self, seen: TileProblem) -> bool:
        tile, width = self.tile, seen.geometry.width
        if not seen.flat:
            if tile.images > 2 and seen.inputs * seen.item > MANY_IMAGES_BYTES * seen.geometry.batch:
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


@lru_cache(maxsize=256)
def _of_geometry(problem: TileProblem, geometry: Geometry) -> TileProblem:
    return problem._replace(geometry=geometry)


class Timer:
    """Times a kernel of a layer: what sizes have in common is computed once.

    Attributes:
        tile_for: returns the expected clocks of a size that the kernel is right for, as it sees this, and the tile with
            the shape and the splits that suit the size.
    """

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self.schedule, tile = schedule, schedule.tile
        if tile.splits > 1:
            self.tile_for = _split(schedule, device.multiprocessors)
        elif tile.shaped_pixels:
            self.tile_for = best_shape(schedule.problem, tile, device.multiprocessors)
        else:
            clocks_of = clocks_of_tile(schedule.problem, tile, device.multiprocessors)
            self.tile_for = lambda seen: (clocks_of(seen), tile)

    def clocks(self, seen: TileProblem) -> float:
        """Returns the expected clocks of a size; infinitely many if the kernel is not right for it."""
        return self.tile_for(seen)[0] if self.schedule.suits(seen) else math.inf


@lru_cache(maxsize=1024)
def _timer(schedule: Schedule, device: Device) -> Timer:
    return Timer(schedule, device)


def _split(schedule: Schedule, multiprocessors: int) -> Callable[[TileProblem], tuple[float, Tile]]:
    """Returns ``Timer.tile_for`` of a kernel whose sums are split."""
    layer, tile = schedule.problem, schedule.tile
    in_best_shape = best_shape(layer, tile, multiprocessors) if tile.shaped_pixels else None
    of_tiles: dict[Tile, Callable[[TileProblem], float]] = {}

    def tile_for(seen: TileProblem) -> tuple[float, Tile]:
        whole = tile if in_best_shape is None else in_best_shape(seen)[1]
        found = whole._replace(splits=max(2, split_k(seen, whole, multiprocessors)))
        if found not in of_tiles:
            of_tiles[found] = clocks_of_tile(layer, found, multiprocessors)
        return of_tiles[found](seen), found

    return tile_for


def pool(sizes: Sequence[TileProblem], device: Device) -> Iterator[tuple[Schedule, list[float]]]:
    """Yields the kernels that are worth considering for a layer with these representative sizes, and the expected
    clocks of each size; infinitely many where a kernel is not right for it."""
    timers: dict[Schedule, Timer] = {}
    kept: dict[Timer, None] = {}
    for size in _with_other_tiles(sizes):
        timed: dict[Timer, float] = {}
        for seen, one in _seen_and_kernels(size, device):
            timer = timers.get(one) or timers.setdefault(one, Timer(one, device))
            if timer not in timed:
                timed[timer] = timer.clocks(seen)
        nearest = sorted(timed, key=timed.__getitem__)
        kept.update(dict.fromkeys(nearest[:BEST]))
        of_any_size = (timer for timer in nearest if timer.schedule.computes_any_size)
        kept.update(dict.fromkeys(islice(of_any_size, BEST)))
    posed: dict[TileProblem, list[TileProblem]] = {}
    for timer in kept:
        layer = timer.schedule.problem
        if layer not in posed:
            posed[layer] = [_of_geometry(layer, size.geometry) for size in sizes]
        yield timer.schedule, [timer.clocks(seen) for seen in posed[layer]]


def _with_other_tiles(sizes: Sequence[TileProblem]) -> Iterator[TileProblem]:
    """Yields one of the sizes that have the same tiles: these are powers of two, but for rows of 16 and whole rows."""
    found = set()
    for size in sizes:
        rows, cols = size.positions
        few = size.geometry.batch * rows * cols <= FEW_POSITIONS
        kinds = rows_of_16(rows), row_fragments(size), few, can_be_aligned(size._replace(aligned=True))
        tiles = power_above(rows), power_above(cols), kinds
        if tiles not in found:
            found.add(tiles)
            yield size


def of_size(problem: TileProblem, device: Device) -> Iterator[Schedule]:
    """Yields the kernels with tiles that suit this size, also those that its layer does not have."""
    return (one for _, one in _seen_and_kernels(problem, device))


def _seen_and_kernels(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Schedule]]:
    """Yields the same, each after the problem as it sees this."""
    aligned = problem._replace(aligned=True)
    both = not problem.input_channels_last and can_be_aligned(aligned)
    for posed in (problem, aligned) if both else (problem,):
        for seen, tile in candidates(posed, device):
            yield seen, Schedule(of_any_size(seen), of_any_shape(tile))


def ranked(
    among: Iterable[Schedule], problem: TileProblem, device: Device
) -> list[tuple[float, TileProblem, Tile]]:
    """Returns the tiles of those kernels that compute this size, with their expected clocks, the fastest first."""
    found = []
    for one in among:
        if (seen := one.sees(problem)) is not None:
            clocks, tile = _timer(one, device).tile_for(seen)
            found.append((clocks, seen, tile))
    return sorted(found, key=itemgetter(0))
