"""Which tiles of csrc/kernels/grad_weight/im2col_nchw.cu a layer has over all sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    Columns,
    Pixels,
    Tile,
    candidates,
    columns_of,
    expected_clocks,
    pixels_of,
    with_splits,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache

#: How many times as long other families took where this one is the fastest
#: (benchmarks/results/h200-ablation.json).
OTHERWISE = 1.4
#: The least work of the sizes for which a layer's kernels are chosen: with less work they gain least.
MIN_MACS = 1 << 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is compiled into a kernel: the tile with one split, its row pitch set to its width."""

    tile: Tile
    columns: Columns


def choose(problem: Problem, device: Device, limit: int) -> list[Tile]:
    """Returns the tiles of the layer's kernels that compute the size, the fastest expected first."""
    g = problem.geometry
    found = []
    for one in schedules(of_any_size(problem, False), device, limit):
        tile = _tile_of(g, one, device)
        if tile is not None:
            found.append(tile)
    return sorted(found, key=lambda tile: expected_clocks(g, tile, device)) if len(found) > 1 else found


@disk_cache
def schedules(layer: Problem, device: Device, limit: int) -> tuple[Schedule, ...]:
    """Returns at most ``limit`` schedules that a layer has over all its sizes."""

    def of_size(problem: Problem) -> Iterator[Schedule]:
        for tile in candidates(problem.geometry, device):
            yield _schedule_of(problem.geometry, tile)

    def expected(problem: Problem, one: Schedule) -> float:
        tile = _tile_of(problem.geometry, one, device)
        assert tile is not None
        return expected_clocks(problem.geometry, tile, device)

    return select_schedules(
        layer,
        limit,
        of_size,
        lambda problem, one: (
            problem.geometry.macs >= MIN_MACS and _tile_of(problem.geometry, one, device) is not None
        ),
        expected,
        lambda one: True,
        every=1,
        otherwise=OTHERWISE,
    )


def _schedule_of(geometry: Geometry, tile: Tile) -> Schedule:
    """Returns the schedule that a tile belongs to."""
    return Schedule(replace(tile, pixels=_of_any_pitch(tile.pixels)), columns_of(geometry, tile.pixels))


def _of_any_pitch(pixels: Pixels) -> Pixels:
    return replace(pixels, row_pitch=pixels.cols)


def _tile_of(geometry: Geometry, one: Schedule, device: Device) -> Tile | None:
    """Returns the schedule's tile with the splits and row pitch of the size; None if the schedule does not
    compute it."""
    for pixels in _pixels_of(geometry).get(one.tile.pixels, ()):
        if columns_of(geometry, pixels) == one.columns:
            return with_splits(geometry, replace(one.tile, pixels=pixels), device)
    return None


@lru_cache(maxsize=64)
def _pixels_of(geometry: Geometry) -> dict[Pixels, list[Pixels]]:
    """Returns the stages that cover the images, by what is compiled into a kernel of them."""
    found: dict[Pixels, list[Pixels]] = {}
    for pixels in pixels_of(geometry):
        found.setdefault(_of_any_pitch(pixels), []).append(pixels)
    return found
