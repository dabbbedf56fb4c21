"""Which tiles of csrc/kernels/grad_weight/pixel_rows.cu a layer has, whatever its sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.common.space_to_depth import Planes, planes_of
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    PARTIAL_RATE,
    Lines,
    Tile,
    candidates,
    expected_clocks,
    in_slices,
    lines_of,
    lines_with,
    must_unfold,
    row_shifts,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div

#: Planes that one thread makes.
_MOST_PLANES = 36


@dataclass(frozen=True, slots=True)
class Schedule:
    """All of a kernel but its sizes; the tile in one slice."""

    unfold_rows: bool
    box: int
    tile: Tile


def choose(problem: Problem, device: Device, most: int) -> list[tuple[Lines, Tile]]:
    """How the layer's kernels compute the size, the one that is expected to be the fastest first."""
    found = []
    for one in schedules(of_any_size(problem, False), device, most):
        cut = _cut(problem, one, device)
        if cut is not None:
            found.append(cut)
    if len(found) > 1:
        found.sort(key=lambda cut: _clocks(problem, cut[0], cut[1], device))
    return found


@lru_cache(maxsize=1024)
def schedules(layer: Problem, device: Device, most: int) -> tuple[Schedule, ...]:
    """Those that a layer has, whatever its sizes."""
    shifted = any(row_shifts(layer.geometry))

    def of_size(problem: Problem) -> list[Schedule]:
        lines, tiles = lines_of(problem.geometry), list(candidates(problem.geometry))
        kinds = sorted({lines.unfold_rows, shifted})
        return [Schedule(unfold, lines.box, tile) for unfold in kinds for tile in tiles]

    def expected(problem: Problem, one: Schedule) -> float:
        cut = _cut(problem, one, device)
        assert cut is not None
        return _clocks(problem, cut[0], cut[1], device)

    return select_schedules(
        layer,
        most,
        of_size,
        lambda problem, one: _cut(problem, one, device) is not None,
        expected,
        lambda one: one.unfold_rows or not shifted,
    )


def lies_as_lines(geometry: Geometry) -> bool:
    """Whether boxes can bring the input from where it is."""
    pixels = geometry.height * geometry.width
    return planes_of(1, 1, (geometry.height, geometry.width)).pitch == pixels


def planes_of_lines(geometry: Geometry, lines: Lines) -> tuple[Planes, Planes]:
    """grad_output's and the input's."""
    g = geometry
    rows, cols = phases_of(g, lines)
    cells = g.height if lines.unfold_rows else ceil_div(g.out_height, g.stride[0]) + lines.lead
    out = planes_of(rows * cols, g.out_channels, (cells, g.width))
    return out, planes_of(1, g.in_channels, (g.height, g.width))


def phases_of(geometry: Geometry, lines: Lines) -> Pair:
    """Planes of grad_output, by rows and columns."""
    g = geometry
    period = g.stride[0] // gcd(g.stride[0], g.dilation[0])
    return g.kernel[0] if lines.unfold_rows else min(g.kernel[0], period), g.kernel[1]


def _cut(problem: Problem, one: Schedule, device: Device) -> tuple[Lines, Tile] | None:
    """The lines and slices of the size; None if the schedule does not compute it."""
    g = problem.geometry
    if must_unfold(g) and not one.unfold_rows:
        return None
    lines = lines_with(g, one.unfold_rows, one.box)
    out, into = planes_of_lines(g, lines)
    bytes_ = out.bytes(g.batch) + (0 if lies_as_lines(g) else into.bytes(g.batch))
    if out.planes > _MOST_PLANES or bytes_ > MAX_COPY_BYTES:
        return None
    tile = in_slices(g, lines.stages(g.batch), one.tile, device, bytes_)
    return None if tile is None else (lines, tile)


def _clocks(problem: Problem, lines: Lines, tile: Tile, device: Device) -> float:
    g = problem.geometry
    out, into = planes_of_lines(g, lines)
    copied = out.bytes(g.batch) + (0 if lies_as_lines(g) else into.bytes(g.batch))
    return expected_clocks(g, lines.stages(g.batch), tile, device) + 2 * copied / PARTIAL_RATE
