"""The expected time of a tile of csrc/kernels/forward/narrow_mma.cu: a sum of parts, fitted to measurements.

The fit is to 540 tiles of 6 layers on an H200 (docs/kernels/forward/narrow_mma.md). The mean error is 14 % for 16
bits and 12 % for float32 in NCHW, 7 % and 6 % in channels_last. The price of a line in NCHW was chosen by 90 other
tiles of 13 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.kernels.forward.narrow_mma_tile import Tile, halo, packed_bytes, product, store_elements
from tconv_swap.runtime.integers import ceil_div, round_up

MULTIPROCESSORS = 132
#: Multiplies for each product, by the number of parts of an element.
PRODUCTS = {1: 1, 2: 3, 3: 6}


@dataclass(frozen=True, slots=True)
class _Rates:
    """Microseconds on an H200 for one of each, with all multiprocessors busy."""

    #: A byte of the input tiles; a byte of the fragments read from shared memory; a byte of weights read from the
    #: caches.
    load: float
    fragment: float
    weight: float
    #: A multiply; an element of the output that is staged in shared memory; a unit of a warp.
    multiply: float
    staged: float
    unit: float
    #: A byte of the output, in sectors of 32 bytes; a store; a byte of the packed weights; the launches.
    written: float
    store: float
    packed: float
    launch: float


#: The key is the bytes of an element, and whether the layout is channels_last.
_RATES = {
    (2, False): _Rates(1.77e-7, 1.36e-8, 2.68e-8, 3.7e-6, 3.58e-7, 3.28e-5, 4.71e-7, 0.0, 9.7e-7, 5.7),
    (2, True): _Rates(6.5e-8, 1.68e-8, 2.99e-8, 4.56e-6, 5.0e-8, 9.6e-5, 9.5e-8, 1.5e-6, 1.1e-6, 9.3),
    (4, False): _Rates(1.29e-7, 7.5e-9, 2.4e-8, 3.69e-6, 1.04e-6, 3.9e-5, 2.29e-7, 0.0, 0.0, 2.7),
    (4, True): _Rates(4.9e-8, 1.65e-8, 2.93e-8, 4.11e-6, 2.97e-7, 7.9e-5, 6.5e-8, 1.04e-6, 0.0, 10.9),
}
#: Microseconds for each line of outputs of a tile in NCHW that is stored from shared memory, however short: its stores
#: fill no line of the caches together with those of another one, and its address takes instructions.
LINE_MICROSECONDS = 2e-5
#: The number of warps of a multiprocessor that hide half of each other's waits.
HIDING_WARPS = 6


def microseconds(geometry: Geometry, tile: Tile, item: int, channels_last: bool) -> float:
    """Returns the expected time on an H200."""
    rates = _RATES[item, channels_last]
    p = product(geometry, tile.stacked, tile.columns_fastest)
    vertical, horizontal = axes(geometry)
    tiles_h, tiles_w = ceil_div(vertical.positions, tile.tile_h), ceil_div(horizontal.positions, tile.tile_w)
    tiles = geometry.batch * tiles_h * tiles_w
    passes = p.passes if tile.stacked else p.passes * vertical.used

    rows = tile.tile_h // tile.unit_rows
    columns = tile.tile_w // 8 // tile.unit_cols
    units = geometry.groups * p.m_tiles * rows * columns
    # The units of all tiles, where a tile's last round of units counts in full even if some warps have none.
    done = (
        tiles * passes * rows * columns * geometry.groups * ceil_div(units, tile.warps) * tile.warps / units
    )
    window = tile.unit_rows + (p.v - 1) * p.v_step
    fragments = done * p.all_pairs * window * tile.unit_cols * 128 * item
    weights = done * p.all_pairs * p.v * 512 * tile.parts
    multiplies = done * p.all_pairs * p.v * tile.unit_rows * tile.unit_cols * PRODUCTS[tile.parts]
    staged = done * p.m_tiles * 16 * tile.unit_rows * tile.unit_cols * 8

    computing = tiles * passes * halo(geometry, tile, item, channels_last)[2] * rates.load
    computing += fragments * rates.fragment
    computing += weights * (rates.fragment if tile.resident else rates.weight)
    computing += multiplies * rates.multiply + staged * rates.staged + done * p.m_tiles * rates.unit
    computing *= 1 + HIDING_WARPS / (tile.warps * tile.blocks_per_multiprocessor)
    blocks = tiles * p.passes
    computing *= round_up(blocks, MULTIPROCESSORS) / blocks

    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    pixel = geometry.out_channels if channels_last else 1
    line = min(tile.tile_w * horizontal.stride, geometry.out_width) * pixel * item
    aligned = (
        geometry.out_width * pixel * item % 32 == 0
        and tile.tile_w * horizontal.stride * pixel * item % 32 == 0
    )
    written = outputs * item * (1.0 if aligned else (line + 32) / line)
    storing = (
        written * rates.written + outputs / store_elements(geometry, tile, item, channels_last) * rates.store
    )
    if not (channels_last or tile.direct):
        lines = geometry.batch * geometry.out_channels * geometry.out_height * tiles_w
        storing += lines * LINE_MICROSECONDS
    return computing + storing + p.passes * packed_bytes(geometry, tile) * rates.packed + rates.launch
