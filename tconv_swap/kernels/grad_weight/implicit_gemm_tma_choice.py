"""The kernels of csrc/kernels/grad_weight/implicit_gemm_tma.cu that a layer may have, and their expected times for a
size. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import (
    Work,
    expected_clocks,
    loaded_elements,
    work_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import clocks_of_sizes as clocks_of_work
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import TmaTile, candidates, fits_map
from tconv_swap.kernels.grad_weight.layer import counts_in_32_bits, pixel_tiles
from tconv_swap.kernels.problem import Device, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes."""

    problem: Problem
    tma_tile: TmaTile
    work: Work


def schedule_of(problem: Problem, tma_tile: TmaTile) -> Schedule:
    """Returns the schedule of a layer's kernel with this tile."""
    return Schedule(problem, tma_tile, work_of(problem, tma_tile))


def tiles_of(geometry: Geometry, shape: tuple[int, int, int]) -> int:
    """Returns how many tiles of ``shape`` cover the pixels of a size; 0 if they do not compute it correctly."""
    fits = fits_map(shape, geometry) and counts_in_32_bits(geometry, shape)
    return pixel_tiles(geometry, shape) if fits else 0


def ranked(
    among: Iterable[Schedule], geometry: Geometry, device: Device
) -> list[tuple[float, int, Schedule]]:
    """Returns the expected clocks and the number of splits of the schedules that compute a size, the fastest expected
    first."""
    timed = []
    for one in among:
        if tiles := tiles_of(geometry, one.tma_tile.tile.shape):
            elements = loaded_elements(geometry, one.work.channels_read)
            timed.append((*expected_clocks(one.work, tiles, elements, device), one))
    return sorted(timed, key=itemgetter(0))


def clocks_of_sizes(
    among: Iterable[Schedule], sizes: Sequence[Geometry], device: Device
) -> Iterator[tuple[Schedule, list[float]]]:
    """Yields schedules with their expected clocks for each size, infinite where one does not compute it. Of those
    that differ in nothing but the clocks of a tile, it yields the first of the fastest."""
    fastest: dict[tuple[tuple[int, int, int], Work], Schedule] = {}
    for one in among:
        alike = one.tma_tile.tile.shape, one.work._replace(clocks=0.0)
        kept = fastest.setdefault(alike, one)
        if one.work.clocks < kept.work.clocks:
            fastest[alike] = one
    loads: dict[tuple[tuple[int, int, int], int], list[tuple[int, int]]] = {}
    for one in fastest.values():
        shape, work = one.tma_tile.tile.shape, one.work
        read = shape, work.channels_read
        if read not in loads:
            loads[read] = [(tiles_of(g, shape), loaded_elements(g, work.channels_read)) for g in sizes]
        yield one, clocks_of_work(work, loads[read], device)


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device, sizes: tuple[Geometry, ...]) -> tuple[Schedule, ...]:
    """Returns all schedules with tiles that suit maps of these sizes."""
    found = sorted(candidates(layer, device, sizes), key=_oddness)
    return tuple(schedule_of(layer, tma_tile) for tma_tile in found)


def _oddness(tma_tile: TmaTile) -> tuple[int, bool]:
    """Orders tiles that are equally fast: few images first, then rows and columns that divide most maps."""
    _, *sides = tma_tile.tile.shape
    return tma_tile.tile.images, any(side & (side - 1) for side in sides)
