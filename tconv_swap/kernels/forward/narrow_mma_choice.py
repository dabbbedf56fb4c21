"""The tiles of csrc/kernels/forward/narrow_mma.cu that a layer may have, and those that suit one size. Pure functions
of data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS, RESERVED_BYTES
from tconv_swap.kernels.common.layer_sizes import of_any_size, out_row_multiple
from tconv_swap.kernels.common.schedules import pool
from tconv_swap.kernels.forward.narrow import rounds
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.kernels.forward.narrow_mma_cost import Size, microseconds_of_tile, size_of
from tconv_swap.kernels.forward.narrow_mma_tile import (
    Tile,
    packed_bytes,
    product,
    registers,
    shared_bytes,
    stores_directly,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import round_up

#: Up to the first number of rows of M, all rows of a position are always stacked; above the second, each is a pass.
STACKED_ROWS = (16, 64)
#: Columns of a position that fill a tile of M.
MANY_COLUMNS = 16
#: Shapes of a unit: rows, and columns of 8 positions.
UNITS = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1))
#: Bytes of shared memory of a multiprocessor; the most bytes of weights that stay in shared memory.
SHARED_BYTES = 228 * 1024
MAX_RESIDENT_BYTES = 80 * 1024


def computes(problem: Problem, tile: Tile) -> bool:
    """Returns whether the tile's kernel computes the rows of this size."""
    geometry = problem.geometry
    if geometry.width % tile.row_multiple or geometry.out_width % tile.out_row_multiple:
        return False
    return not tile.direct or geometry.out_width % geometry.stride[1] == 0


def pool_of(sizes: Sequence[Problem], device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that a layer of these sizes may have: the best for rows of any length, and for rows of a
    multiple of 16 bytes."""
    layer = _of_any_size(sizes[0])
    (any_row, _), *_ = row_multiples(layer)
    of_tiles: dict[Tile, Callable[[Size], float]] = {}

    def expected(problem: Problem, tile: Tile) -> float:
        if tile not in of_tiles:
            of_tiles[tile] = expected_time(layer, tile)
        return of_tiles[tile](size_of(problem.geometry))

    return pool(
        sizes,
        lambda problem: of_size(problem, device),
        computes,
        expected,
        lambda tile: tile.row_multiple == any_row,
    )


def of_size(problem: Problem, device: Device) -> Iterator[Tile]:
    """Yields the tiles for this size, for every multiple that its rows have."""
    for multiples in row_multiples(_of_any_size(problem)):
        if problem.geometry.width % multiples[0] == 0 == problem.geometry.out_width % multiples[1]:
            yield from candidates(problem, device, multiples)


def _of_any_size(problem: Problem) -> Problem:
    return problem._replace(geometry=of_any_size(problem.geometry))


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


def expected_time(layer: Problem, tile: Tile) -> Callable[[Size], float]:
    """Returns the expected time in microseconds as a function of sizes of the layer."""
    return microseconds_of_tile(layer.geometry, tile, layer.dtype.itemsize, layer.channels_last)


def candidates(problem: Problem, device: Device, multiples: tuple[int, int]) -> Iterator[Tile]:
    """Yields the tiles that are worth comparing for rows of such multiples."""
    geometry = problem.geometry
    vertical, horizontal = axes(geometry)
    layer, rows = _of_any_size(problem), _rows(geometry)
    for stacked in (True, False):
        if rows <= STACKED_ROWS[0] if not stacked else rows > STACKED_ROWS[1]:
            continue
        columns_fastest = not problem.channels_last and (stacked or horizontal.stride >= MANY_COLUMNS)
        direct = not stacked and stores_directly(
            geometry, problem.dtype.itemsize, problem.channels_last, columns_fastest
        )
        for tile in _of_layer(layer, device, multiples, stacked, columns_fastest, direct):
            if tile.tile_w < 2 * max(8, horizontal.positions) and tile.tile_h < 2 * max(
                tile.unit_rows, vertical.positions
            ):
                yield tile


@lru_cache(maxsize=64)
def _of_layer(
    layer: Problem,
    device: Device,
    multiples: tuple[int, int],
    stacked: bool,
    columns_fastest: bool,
    direct: bool,
) -> tuple[Tile, ...]:
    """Returns the same for maps of any size, also tiles that are larger than a map."""
    geometry, item, channels_last = layer.geometry, layer.dtype.itemsize, layer.channels_last
    p, parts = product(geometry, stacked, columns_fastest), parts_of(layer)
    packed = packed_bytes(geometry, p, parts)
    found = []
    # Of tiles of equal cost the first one is chosen: that with longer lines in memory.
    for (rows, cols), tile_w, units_down in itertools.product(UNITS, (128, 64, 32, 16, 8), (1, 2, 4)):
        if tile_w % (8 * cols):
            continue
        units = geometry.groups * p.m_tiles * units_down * (tile_w // 8 // cols)
        for warps in (4, 8):
            # Where outputs are stored from registers, many warps that share weights are faster (measured).
            if units < warps > 4 or (direct and warps < 8 <= units):
                continue
            shape = (stacked, columns_fastest, units_down * rows, tile_w, rows, cols, warps)
            tile = Tile(*shape, False, parts, direct, 1, *multiples)
            needed = registers(geometry, p, tile, item, channels_last)
            if needed > MAX_REGISTERS:
                continue
            shared = shared_bytes(geometry, p, tile, item, channels_last)
            for resident in (True, False) if packed <= MAX_RESIDENT_BYTES else (False,):
                blocks = _blocks(shared + packed * resident, needed, warps, device)
                if blocks:
                    found.append(tile._replace(resident=resident, blocks_per_multiprocessor=blocks))
    return tuple(found)


def _blocks(shared: int, registers: int, warps: int, device: Device) -> int:
    """Returns how many blocks fit a multiprocessor."""
    if shared > device.shared_memory_per_block:
        return 0
    room = min(SHARED_BYTES, device.shared_memory_per_block + RESERVED_BYTES)
    # Registers are allocated in multiples of 8.
    return min(room // (shared + RESERVED_BYTES), REGISTERS // (32 * warps * round_up(registers, 8)))


def parts_of(problem: Problem) -> int:
    """Returns the number of 16-bit parts as which an element is multiplied: float32 has two where cuDNN rounds to
    TF32, and three elsewhere."""
    if problem.dtype != torch.float32:
        return 1
    return 2 if problem.is_tf32 and rounds(problem.geometry) else 3


def _rows(geometry: Geometry) -> int:
    """Returns the outputs of a position, of one group, in columns that have taps."""
    _, horizontal = axes(geometry)
    return geometry.stride[0] * round(horizontal.used * horizontal.stride) * geometry.out_channels_per_group
