"""The expected time of a tile of csrc/kernels/forward/narrow_mma.cu: a sum of parts, fitted to measurements.

The fit is to 2,574 times of 73 layers on an H200 (docs/kernels/forward/narrow_mma.md). The standard deviation of the
logarithm is 0.14 in 16 bits and NCHW and 0.11 to 0.12 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.kernels.forward.narrow_mma_tile import (
    Tile,
    copy_elements,
    halo,
    packed_bytes,
    product,
    store_elements,
)
from tconv_swap.runtime.integers import ceil_div, round_up

MULTIPROCESSORS = 132
#: Multiplies for each product, by the number of parts of an element.
PRODUCTS = {1: 1, 2: 3, 3: 6}


@dataclass(frozen=True, slots=True)
class _Rates:
    """Microseconds on an H200 for one of each, with all multiprocessors busy."""

    #: A byte of the input tiles in shared memory; a copy of them; what a copy of 2 bytes takes longer, for which the
    #: thread waits.
    byte: float
    copy: float
    waited: float
    #: A byte of the fragments read from shared memory; a byte of weights read from the caches.
    fragment: float
    weight: float
    #: A multiply; an element of the output that is staged in shared memory; a unit of a warp.
    multiply: float
    staged: float
    unit: float
    #: A byte of the input in memory; a byte of the output, in sectors of 32 bytes; a store; a line of outputs of a tile
    #: in NCHW that is stored from shared memory, however short: its stores fill no line of the caches together with
    #: those of another one; a byte of the packed weights; the launches.
    input: float
    written: float
    store: float
    line: float
    packed: float
    launch: float
    #: The number of warps of a multiprocessor that hide half of each other's waits; the share of the time that goes by
    #: whole rounds of all blocks that run at the same time, while the rest goes by the busiest multiprocessor's.
    hiding: float
    rounds: float


#: In 16 bits and NCHW, where threads wait for their loads: further microseconds of a byte of the input with more than
#: NEAR_BYTES of input and output, which the L2 does not hold.
FAR_INPUT, NEAR_BYTES = 1.5e-7, 48 << 20
#: The key is the bytes of an element, and whether the layout is channels_last.
_RATES = {
    (2, False): _Rates(
        *(3.1e-8, 1.46e-7, 1.99e-7, 1.88e-8, 2.11e-8, 3.89e-7, 9.14e-8, 3.0e-5),
        *(1.89e-7, 1.49e-7, 4.08e-7, 1.15e-5, 4.5e-7, 6.23, 21.3, 0.62),
    ),
    (2, True): _Rates(
        *(0.0, 2.03e-7, 8.35e-7, 1.56e-8, 1.52e-8, 1.66e-6, 5.86e-8, 5.79e-5),
        *(2.46e-7, 1.58e-7, 4.64e-7, 0.0, 4.59e-7, 6.34, 16.9, 0.43),
    ),
    (4, False): _Rates(
        *(3.96e-8, 8.29e-8, 0.0, 1.68e-8, 3.23e-8, 3.12e-6, 3.97e-7, 1.88e-5),
        *(2.37e-7, 1.06e-7, 8.54e-7, 7.93e-6, 9.96e-7, 6.49, 7.25, 0.45),
    ),
    (4, True): _Rates(
        *(1.83e-8, 2.34e-7, 0.0, 1.0e-8, 1.9e-8, 2.96e-6, 1.83e-7, 8.92e-5),
        *(1.73e-7, 9.22e-8, 9.1e-7, 0.0, 9.41e-7, 6.53, 11.2, 0.50),
    ),
}


class Size(NamedTuple):
    """What the time depends on of a size, whatever the tile."""

    batch: int
    #: Rows and columns of positions.
    positions: Pair
    inputs: int
    outputs: int
    #: Rows of outputs of all images and channels, and the columns of each.
    rows: int
    columns: int
    #: The elements that must move.
    elements: int


@lru_cache(maxsize=256)
def size_of(geometry: Geometry) -> Size:
    """Returns the size of a geometry."""
    g, (vertical, horizontal) = geometry, axes(geometry)
    rows, columns = g.batch * g.out_channels * g.out_height, g.out_width
    return Size(
        g.batch,
        (vertical.positions, horizontal.positions),
        g.batch * g.in_channels * g.height * g.width,
        rows * columns,
        rows,
        columns,
        g.elements,
    )


def microseconds_of_tile(
    layer: Geometry, tile: Tile, item: int, channels_last: bool
) -> Callable[[Size], float]:
    """Returns the expected time on an H200 as a function of sizes of ``layer``: what they have in common is computed
    once."""
    rates = _RATES[item, channels_last]
    p = product(layer, tile.stacked, tile.columns_fastest)
    vertical, horizontal = axes(layer)
    passes = p.passes if tile.stacked else p.passes * vertical.used
    groups, warps = layer.groups, tile.warps

    rows = tile.tile_h // tile.unit_rows
    columns = tile.tile_w // 8 // tile.unit_cols
    units = groups * p.m_tiles * rows * columns
    # The units of all tiles, where a tile's last round of units counts in full even if some warps have none.
    rounds = ceil_div(units, warps)
    window = tile.unit_rows + (p.v - 1) * p.v_step
    products = PRODUCTS[tile.parts]

    in_shared = halo(layer, p, tile, item, channels_last)[2]
    copy_bytes = item * copy_elements(layer, tile, item, channels_last)
    of_copy = rates.copy + (rates.waited if copy_bytes == 2 else 0.0)
    of_weight = rates.fragment if tile.resident else rates.weight
    waiting = 1 + rates.hiding / (warps * tile.blocks_per_multiprocessor)
    at_a_time = MULTIPROCESSORS * tile.blocks_per_multiprocessor

    pixel = layer.out_channels if channels_last else 1
    tile_columns = tile.tile_w * horizontal.stride
    whole_sectors = tile_columns * pixel * item % 32 == 0
    of_store = store_elements(layer, tile, item, channels_last)
    packing = p.passes * packed_bytes(layer, p, tile.parts) * rates.packed
    may_be_far = item == 2 and not channels_last

    def microseconds(size: Size) -> float:
        tiles_h, tiles_w = -(-size.positions[0] // tile.tile_h), -(-size.positions[1] // tile.tile_w)
        tiles = size.batch * tiles_h * tiles_w
        done = tiles * passes * rows * columns * groups * rounds * warps / units
        fragments = done * p.all_pairs * window * tile.unit_cols * 128 * item
        weights = done * p.all_pairs * p.v * 512 * tile.parts
        multiplies = done * p.all_pairs * p.v * tile.unit_rows * tile.unit_cols * products
        staged = done * p.m_tiles * 16 * tile.unit_rows * tile.unit_cols * 8

        copied = tiles * passes * in_shared
        computing = copied * rates.byte + copied / copy_bytes * of_copy
        computing += fragments * rates.fragment
        computing += weights * of_weight
        computing += multiplies * rates.multiply + staged * rates.staged + done * p.m_tiles * rates.unit
        computing *= waiting
        blocks = tiles * p.passes
        busiest = (1 - rates.rounds) * round_up(blocks, MULTIPROCESSORS) + rates.rounds * round_up(
            blocks, at_a_time
        )
        computing *= busiest / blocks

        line = min(tile_columns, size.columns) * pixel * item
        aligned = whole_sectors and size.columns * pixel * item % 32 == 0
        written = size.outputs * item * (1.0 if aligned else (line + 32) / line)
        storing = written * rates.written + size.outputs / of_store * rates.store
        if not tile.direct:
            storing += size.rows * tiles_w * rates.line
        far = may_be_far and size.elements * item > NEAR_BYTES
        reading = size.inputs * item * (rates.input + (FAR_INPUT if far else 0.0)) + packing
        return computing + storing + reading + rates.launch

    return microseconds
