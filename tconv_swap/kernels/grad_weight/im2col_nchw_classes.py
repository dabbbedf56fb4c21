"""Which tiles of csrc/kernels/grad_weight/im2col_nchw.cu a layer has, whatever its sizes, and which of them computes
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
    in_slices,
    least_out_width,
    pixels_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.problem import Device, Problem

#: How many times as long other families took where these are the fastest (benchmarks/results/h200-ablation.json).
OTHERWISE = 1.4
#: The least work of the sizes that take them (grad_weight/implicit_gemm.py): they were measured to be faster there.
LEAST_MACS = 1 << 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of a kernel but its sizes: ``tile`` in one slice, its rows as far apart as it is wide."""

    tile: Tile
    columns: Columns
    least_out_width: int


def choose(problem: Problem, device: Device, most: int) -> list[Tile]:
    """The tiles of the layer's kernels that compute the size, the one that is expected to be the fastest first."""
    g = problem.geometry
    found = []
    for one in schedules(of_any_size(problem, False), device, most):
        cut = _cut(g, one, device)
        if cut is not None:
            found.append(cut)
    return sorted(found, key=lambda tile: expected_clocks(g, tile, device)) if len(found) > 1 else found


@lru_cache(maxsize=1024)
def schedules(layer: Problem, device: Device, most: int) -> tuple[Schedule, ...]:
    """Those that a layer has, whatever its sizes."""

    def of_size(problem: Problem) -> Iterator[Schedule]:
        for tile in candidates(problem.geometry, device):
            yield _schedule_of(problem.geometry, tile)

    def expected(problem: Problem, one: Schedule) -> float:
        cut = _cut(problem.geometry, one, device)
        assert cut is not None
        return expected_clocks(problem.geometry, cut, device)

    return select_schedules(
        layer,
        most,
        of_size,
        lambda problem, one: (
            problem.geometry.macs >= LEAST_MACS and _cut(problem.geometry, one, device) is not None
        ),
        expected,
        lambda one: True,
        every=1,
        otherwise=OTHERWISE,
    )


def _schedule_of(geometry: Geometry, tile: Tile) -> Schedule:
    p = tile.pixels
    columns = columns_of(geometry, p)
    least = least_out_width(geometry, p) if columns.whole else 0
    return Schedule(replace(tile, pixels=replace(p, line=p.cols)), columns, least)


def _cut(geometry: Geometry, one: Schedule, device: Device) -> Tile | None:
    """The tile with its slices and rows as of the size; None if the schedule does not compute it."""
    p = one.tile.pixels
    for pixels in _pixels_of(geometry):
        if (pixels.images, pixels.rows, pixels.cols, pixels.apart) == (p.images, p.rows, p.cols, p.apart):
            tile = replace(one.tile, pixels=pixels)
            if _schedule_of(geometry, tile) == one:
                return in_slices(geometry, tile, device)
    return None


@lru_cache(maxsize=64)
def _pixels_of(geometry: Geometry) -> tuple[Pixels, ...]:
    return tuple(pixels_of(geometry))
