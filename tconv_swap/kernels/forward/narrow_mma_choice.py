"""The tiles of csrc/kernels/forward/narrow_mma.cu that a layer has, whatever its sizes, and which of them computes one
size. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS, RESERVED_BYTES
from tconv_swap.kernels.common.layer_sizes import of_any_size, out_row_multiple, representative_sizes
from tconv_swap.kernels.common.schedules import select_covering
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.kernels.forward.narrow_mma_cost import microseconds
from tconv_swap.kernels.forward.narrow_mma_tile import (
    HALF_CHANNELS,
    Tile,
    packed_bytes,
    product,
    registers,
    shared_bytes,
    stores_directly,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import round_up

#: With fewer channels, with dilation and with groups, cuDNN computes in float32 even where TF32 is allowed.
MIN_TF32_CHANNELS = 16
#: Up to the first number of rows of M, all rows of a position are always stacked; above the second, each is a pass.
STACKED_ROWS = (16, 64)
#: Columns of a position that fill a tile of M.
MANY_COLUMNS = 16
#: Shapes of a unit: rows, and columns of 8 positions.
UNITS = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1))
#: Bytes of shared memory of a multiprocessor; the most bytes of weights that stay in shared memory.
SHARED_BYTES = 228 * 1024
MAX_RESIDENT_BYTES = 80 * 1024
#: How many of the best tiles for each nominal size compete for a layer's schedules.
FINALISTS = 6


def choose(problem: Problem, device: Device, most: int, count: int) -> list[Tile]:
    """Returns the ``count`` tiles that are expected to be the fastest for this size, the best first: those of the
    layer's at most ``most`` schedules, then, for tuning to measure, all others."""
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    # Copies and stores of 16 bytes are faster, whatever the other properties of a tile are.
    found = sorted(
        (tile for tile in schedules(layer, device, most) if is_right(problem.geometry, tile)),
        key=lambda tile: (-tile.row_multiple, -tile.out_row_multiple, expected_time(problem, tile)),
    )
    if len(found) < count:
        found = list(dict.fromkeys([*found, *rank(problem, device)]))
    return found[:count]


def is_right(geometry: Geometry, tile: Tile) -> bool:
    """Whether the tile computes the rows of this size."""
    if geometry.width % tile.row_multiple or geometry.out_width % tile.out_row_multiple:
        return False
    return not tile.direct or geometry.out_width % geometry.stride[1] == 0


@disk_cache
def schedules(layer: Problem, device: Device, most: int) -> tuple[Tile, ...]:
    """Returns at most ``most`` tiles for all sizes of ``layer``, which ``of_any_size`` made: first those that any
    size can take, for rows of any length, then about as many for rows of a multiple of 16 bytes."""
    multiples = row_multiples(layer)
    shares = {1: (most,), 2: (most - most // 2, most // 2)}[len(multiples)]
    found: dict[Tile, None] = {}
    for multiple, share in zip(multiples, shares, strict=True):
        if share == 0:
            continue
        found.update(dict.fromkeys(_covering(layer, device, multiple, share)))
    return tuple(found)


def row_multiples(layer: Problem) -> tuple[tuple[int, int], ...]:
    """Returns pairs of numbers that divide the rows of the input (in NCHW) and of the output: a pair for all
    sizes, and one for some sizes that are faster."""
    limit = 16 // layer.dtype.itemsize
    by_output: dict[int, tuple[int, int]] = {}
    for multiple in (1, limit):
        of_output = out_row_multiple(layer.geometry, multiple, limit)
        if layer.channels_last and layer.geometry.out_channels % limit:
            by_output.setdefault(of_output, (1, of_output))
        elif not layer.channels_last:
            by_output.setdefault(multiple, (multiple, of_output))
    return tuple(by_output.values()) or ((1, 1),)


def _covering(layer: Problem, device: Device, multiples: tuple[int, int], most: int) -> tuple[Tile, ...]:
    """Returns the tiles that are best for the nominal sizes with rows of such multiples."""
    standing, weights = representative_sizes(layer.geometry)
    sizes = [
        (replace(layer, geometry=size), weight)
        for size, weight in zip(standing, weights, strict=True)
        if size.width % multiples[0] == 0 == size.out_width % multiples[1]
    ]
    largest = max((sized for sized, _ in sizes), key=lambda sized: sized.geometry.width)
    times = {
        tile: [expected_time(sized, tile) for sized, _ in sizes]
        for tile in candidates(largest, device, multiples)
    }
    finalists: set[Tile] = set()
    for of_size in zip(*times.values(), strict=True):
        expected = dict(zip(times, of_size, strict=True))
        finalists.update(nsmallest(FINALISTS, expected, key=expected.__getitem__))
    return select_covering(
        {tile: times[tile] for tile in times if tile in finalists}, [weight for _, weight in sizes], (), most
    )


def rank(problem: Problem, device: Device, multiples: tuple[int, int] | None = None) -> list[Tile]:
    """Returns all tiles for this size, or for rows of such multiples, the one that is expected to be the fastest
    first."""
    return sorted(candidates(problem, device, multiples), key=lambda tile: expected_time(problem, tile))


def expected_time(problem: Problem, tile: Tile) -> float:
    return microseconds(problem.geometry, tile, problem.dtype.itemsize, problem.channels_last)


def candidates(problem: Problem, device: Device, multiples: tuple[int, int] | None = None) -> Iterator[Tile]:
    """Yields the tiles that are worth comparing for this size, or for rows of such multiples."""
    geometry = problem.geometry
    if multiples is None:
        multiples = max(
            one
            for one in row_multiples(replace(problem, geometry=of_any_size(geometry)))
            if geometry.width % one[0] == 0 == geometry.out_width % one[1]
        )
    vertical, horizontal = axes(geometry)
    rows = _rows(geometry)
    for stacked in (True, False):
        if rows <= STACKED_ROWS[0] if not stacked else rows > STACKED_ROWS[1]:
            continue
        columns_fastest = not problem.channels_last and (stacked or horizontal.stride >= MANY_COLUMNS)
        p = product(geometry, stacked, columns_fastest)
        direct = not stacked and stores_directly(
            geometry, problem.dtype.itemsize, problem.channels_last, columns_fastest
        )
        for unit_rows, unit_cols in UNITS:
            # Of tiles of equal cost the first one is chosen: that with longer lines in memory.
            for tile_w in (128, 64, 32, 16, 8):
                if tile_w % (8 * unit_cols) or tile_w >= 2 * max(8, horizontal.positions):
                    continue
                for tile_h in (unit_rows, 2 * unit_rows, 4 * unit_rows):
                    if tile_h >= 2 * max(unit_rows, vertical.positions):
                        continue
                    units = geometry.groups * p.m_tiles * (tile_h // unit_rows) * (tile_w // 8 // unit_cols)
                    for warps in (4, 8):
                        # Where outputs are stored from registers, many warps that share weights are faster
                        # (measured).
                        if units < warps > 4 or (direct and warps < 8 <= units):
                            continue
                        for resident in (True, False):
                            tile = Tile(
                                stacked,
                                columns_fastest,
                                tile_h,
                                tile_w,
                                unit_rows,
                                unit_cols,
                                warps,
                                resident,
                                parts_of(problem),
                                direct,
                                1,
                                *multiples,
                            )
                            blocks = _blocks(problem, tile, device)
                            if blocks:
                                yield replace(tile, blocks_per_multiprocessor=blocks)


def _blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Returns how many blocks of the tile fit a multiprocessor."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    if tile.resident and packed_bytes(geometry, tile) > MAX_RESIDENT_BYTES:
        return 0
    shared = shared_bytes(geometry, tile, item, problem.channels_last)
    if shared > device.shared_memory_per_block:
        return 0
    needed = registers(geometry, tile, item, problem.channels_last)
    if needed > MAX_REGISTERS:
        return 0
    room = min(SHARED_BYTES, device.shared_memory_per_block + RESERVED_BYTES)
    # Registers are allocated in multiples of 8.
    return min(room // (shared + RESERVED_BYTES), REGISTERS // (32 * tile.warps * round_up(needed, 8)))


def parts_of(problem: Problem) -> int:
    """Returns the number of 16-bit parts as which an element is multiplied: float32 has two where cuDNN rounds to
    TF32, and three elsewhere."""
    geometry = problem.geometry
    if problem.dtype != torch.float32:
        return 1
    channels = min(geometry.in_channels, geometry.out_channels)
    rounded = geometry.groups == 1 and geometry.dilation == (1, 1) and channels >= MIN_TF32_CHANNELS
    return 2 if problem.precision == "tf32" and rounded else 3


def useful_share(geometry: Geometry) -> float:
    """Returns the share of all products that are neither padding nor taps that an output does not have."""
    vertical, horizontal = axes(geometry)
    stacked = _rows(geometry) <= STACKED_ROWS[0]
    p = product(geometry, stacked, stacked or horizontal.stride >= MANY_COLUMNS)
    useful = geometry.taps * geometry.in_channels_per_group * geometry.out_channels_per_group
    passes = 1 if stacked else round(p.passes * vertical.used)
    return useful / (passes * p.all_pairs * p.v * 16 * 2 * HALF_CHANNELS)


def _rows(geometry: Geometry) -> int:
    """Returns the outputs of a position, of one group, in columns that have taps."""
    _, horizontal = axes(geometry)
    return geometry.stride[0] * round(horizontal.used * horizontal.stride) * geometry.out_channels_per_group
