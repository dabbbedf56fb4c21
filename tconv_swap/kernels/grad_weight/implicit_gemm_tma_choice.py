"""The kernels of csrc/kernels/grad_weight/implicit_gemm_tma.cu that a layer may have, and their expected times for a
size. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import (
    Work,
    expected_clocks,
    loaded_elements,
    works_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import clocks_of_sizes as clocks_of_work
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import Limits, TmaTile, candidates, limits_of
from tconv_swap.kernels.grad_weight.layer import pixel_tiles
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes."""

    problem: Problem
    tma_tile: TmaTile
    work: Work


def tiles_of(geometry: Geometry, limits: Limits, shape: tuple[int, int, int]) -> int:
    """Returns how many tiles of ``shape`` cover the pixels of a size with these limits; 0 if they do not compute it
    correctly."""
    if shape[0] > limits.images or not limits.fit(shape):
        return 0
    tiles = pixel_tiles(geometry, shape)
    return tiles if tiles < INT32_LIMIT else 0


def ranked(
    among: Iterable[Schedule], geometry: Geometry, device: Device
) -> list[tuple[float, int, Schedule]]:
    """Returns the expected clocks and the number of splits of the schedules that compute a size, the fastest expected
    first."""
    limits, timed = limits_of(geometry), []
    for one in among:
        if tiles := tiles_of(geometry, limits, one.tma_tile.tile.shape):
            elements = loaded_elements(geometry, one.work.channels_read)
            timed.append((*expected_clocks(one.work, tiles, elements, device), one))
    return sorted(timed, key=itemgetter(0))


def clocks_of_sizes(
    among: Iterable[Schedule], sizes: Sequence[Geometry], device: Device
) -> Iterator[tuple[Schedule, list[float]]]:
    """Yields schedules with their expected clocks for each size, infinite where one does not compute it. Of those
    that differ in nothing but the clocks of a tile, it yields the first of the fastest."""
    fastest: dict[tuple[tuple[int, int, int], tuple[int, int, int]], Schedule] = {}
    for one in among:
        alike = one.tma_tile.tile.shape, one.work.beside_clocks
        kept = fastest.setdefault(alike, one)
        if one.work.clocks < kept.work.clocks:
            fastest[alike] = one
    limits = [limits_of(g) for g in sizes]
    tiles: dict[tuple[int, int, int], list[int]] = {}
    elements: dict[int, list[int]] = {}
    for one in fastest.values():
        shape, read = one.tma_tile.tile.shape, one.work.channels_read
        if shape not in tiles:
            tiles[shape] = [tiles_of(g, most, shape) for g, most in zip(sizes, limits, strict=True)]
        if read not in elements:
            elements[read] = [loaded_elements(g, read) for g in sizes]
        loads = zip(tiles[shape], elements[read], strict=True)
        yield one, clocks_of_work(one.work, loads, device)


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device, sizes: tuple[Geometry, ...]) -> tuple[Schedule, ...]:
    """Returns all schedules with tiles that suit maps of these sizes."""
    found = sorted(candidates(layer, device, sizes), key=_oddness)
    return tuple(map(Schedule, repeat(layer), found, works_of(layer, found)))


def _oddness(tma_tile: TmaTile) -> tuple[int, bool]:
    """Orders tiles that are equally fast: few images first, then rows and columns that divide most maps."""
    _, *sides = tma_tile.tile.shape
    return tma_tile.tile.images, any(side & (side - 1) for side in sides)
