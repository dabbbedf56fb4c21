"""Which tiles of csrc/kernels/grad_weight/pixel_rows.cu a layer has over all sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.common.space_to_depth import Planes, planes_of
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    PARTIAL_RATE,
    PixelRows,
    Tile,
    candidates,
    expected_clocks,
    pixel_rows_of,
    pixel_rows_with,
    with_splits,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import ceil_div

#: Clocks at 1.7 GHz, measured over counted, of images of one row, of a multiple of 8 pixels, and of others: geometric
#: means of 5, 98 and 32 layers and sizes on an H100, whose logarithms deviate by 0.06, 0.11 and 0.13.
_ONE_ROW, _EIGHTS, _OTHERS = 1.06, 1.23, 1.55
#: Planes of grad_output that one thread of space_to_depth writes.
_MAX_PLANES = 36


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is compiled into a kernel: its boxes, and the tile with one split."""

    box: int
    tile: Tile


def choose(problem: Problem, device: Device, limit: int) -> list[tuple[PixelRows, Tile]]:
    """Returns the tiles of the layer's kernels that compute the size, with their rows of pixels, the fastest
    expected first."""
    found = []
    for one in schedules(of_any_size(problem, False), device, limit):
        tile = _tile_of(problem, one, device)
        if tile is not None:
            found.append(tile)
    if len(found) > 1:
        found.sort(key=lambda one: clocks_of(problem, one[0], one[1], device))
    return found


@disk_cache
def schedules(layer: Problem, device: Device, limit: int) -> tuple[Schedule, ...]:
    """Returns at most ``limit`` schedules that a layer has over all its sizes."""

    def of_size(problem: Problem) -> list[Schedule]:
        box = pixel_rows_of(problem.geometry).box
        return [Schedule(box, tile) for tile in candidates(problem.geometry)]

    def expected(problem: Problem, one: Schedule) -> float:
        tile = _tile_of(problem, one, device)
        assert tile is not None
        return clocks_of(problem, tile[0], tile[1], device)

    return select_schedules(
        layer,
        limit,
        of_size,
        lambda problem, one: _tile_of(problem, one, device) is not None,
        expected,
        lambda one: True,
    )


def input_read_in_place(geometry: Geometry) -> bool:
    """Returns whether boxes can load the input without a copy of it."""
    pixels = geometry.height * geometry.width
    return planes_of(1, 1, (geometry.height, geometry.width)).pitch == pixels


def planes_of_pixel_rows(geometry: Geometry, pixel_rows: PixelRows) -> tuple[Planes, Planes]:
    """Returns the layouts of the copies of grad_output and of the input."""
    g = geometry
    rows, cols = phases_of(g, pixel_rows)
    plane_rows = (
        g.height if pixel_rows.im2col_rows else ceil_div(g.out_height, g.stride[0]) + pixel_rows.zero_rows
    )
    out = planes_of(rows * cols, g.out_channels, (plane_rows, g.width))
    return out, planes_of(1, g.in_channels, (g.height, g.width))


def phases_of(geometry: Geometry, pixel_rows: PixelRows) -> Pair:
    """Returns the planes of grad_output along rows and columns."""
    g = geometry
    return g.kernel[0] if pixel_rows.im2col_rows else row_phases(g), g.kernel[1]


def row_phases(geometry: Geometry) -> int:
    """Returns the residues of the rows of taps in a stride, each of which has planes that taps read shifted."""
    g = geometry
    return min(g.kernel[0], g.stride[0] // gcd(g.stride[0], g.dilation[0]))


def _tile_of(problem: Problem, one: Schedule, device: Device) -> tuple[PixelRows, Tile] | None:
    """Returns the rows of pixels and the schedule's tile with the splits of the size; None if the schedule does
    not compute it."""
    g = problem.geometry
    pixel_rows = pixel_rows_with(g, one.box)
    out, into = planes_of_pixel_rows(g, pixel_rows)
    bytes_ = out.bytes(g.batch) + (0 if input_read_in_place(g) else into.bytes(g.batch))
    if out.planes > _MAX_PLANES or bytes_ > MAX_COPY_BYTES:
        return None
    tile = with_splits(g, pixel_rows.stages(g.batch), one.tile, device, bytes_)
    return None if tile is None else (pixel_rows, tile)


def clocks_of(problem: Problem, pixel_rows: PixelRows, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of the copies, the product and the reduction of its splits."""
    g = problem.geometry
    out, into = planes_of_pixel_rows(g, pixel_rows)
    copied = out.bytes(g.batch) + (0 if input_read_in_place(g) else into.bytes(g.batch))
    counted = expected_clocks(g, pixel_rows.stages(g.batch), tile, device) + 2 * copied / PARTIAL_RATE
    measured = _EIGHTS if g.height * g.width % 8 == 0 else _OTHERS
    return counted * (_ONE_ROW if g.height == 1 else measured)
