"""The tile of csrc/kernels/forward/narrow_mma.cu, the product of matrices that it computes, and the memory that it
takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tconv_swap.geometry import Geometry, phase_taps
from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.common.layer_sizes import of_any_size, power_of_two_dividing
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant

#: Bytes of one fragment of packed weights: 16 rows of M x 8 words of k.
FRAGMENT_BYTES = 512
#: Input channels of half a multiply.
HALF_CHANNELS = 8


class Tile(NamedTuple):
    """What a block and a warp compute. The comments at the top of csrc/kernels/forward/narrow_mma.cu and
    forward/narrow_mma_layout.cuh explain each field."""

    stacked: bool
    columns_fastest: bool
    tile_h: int
    tile_w: int
    unit_rows: int
    unit_cols: int
    warps: int
    resident: bool
    #: The number of 16-bit parts as which an element is multiplied.
    parts: int
    #: Whether outputs are stored from registers, without shared memory.
    direct: bool
    blocks_per_multiprocessor: int
    #: Powers of two, at most the elements of 16 bytes, that divide the rows of the input (in NCHW) and of the output.
    row_multiple: int
    out_row_multiple: int

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        """The fields as constants of the kernel, under their names in capitals."""
        return tuple((name.upper(), value) for name, value in self._asdict().items())

    def __str__(self) -> str:
        return f"{self.tile_h}x{self.tile_w} positions, {self.warps} warps"


@dataclass(frozen=True, slots=True)
class Product:
    """The product of matrices that one pass computes for one group, as forward/narrow_mma_layout.cuh defines it."""

    passes: int
    #: The vertical taps of a pass, and the input rows from one to the next.
    v: int
    v_step: int
    m_tiles: int
    pairs: int
    #: The halves of a multiply that the input channels of a group fill.
    group_halves: int
    #: The pairs of halves of all tiles of M together.
    all_pairs: int


def product(geometry: Geometry, stacked: bool, columns_fastest: bool) -> Product:
    """Returns the product of one pass; no size of the geometry changes it."""
    return _product(of_any_size(geometry), stacked, columns_fastest)


@lru_cache(maxsize=1024)
def _product(geometry: Geometry, stacked: bool, columns_fastest: bool) -> Product:
    vertical, _ = axes(geometry)
    stride, padding, dilation = geometry.stride[1], geometry.padding[1], geometry.dilation[1]
    shifts = {}
    for column in range(stride):
        taps = phase_taps(geometry.kernel[1], stride, dilation, (column + padding) % stride)
        if taps:
            shifts[column] = [(column + padding - k * dilation) // stride for k in taps]
    used, channels = list(shifts), geometry.out_channels_per_group
    rows = (geometry.stride[0] if stacked else 1) * len(used) * channels
    counts = []
    for first in range(0, rows, 16):
        reached: list[int] = []
        for m in range(first, min(first + 16, rows)):
            reached += shifts[used[m % len(used) if columns_fastest else m // channels % len(used)]]
        counts.append(max(reached) - min(reached) + 1)
    halves = ceil_div(geometry.in_channels_per_group, HALF_CHANNELS)
    pairs = [ceil_div(count * halves, 2) for count in counts]
    return Product(
        passes=1 if stacked else geometry.stride[0],
        v=vertical.span + 1 if stacked else vertical.taps,
        v_step=1 if stacked else vertical.reach,
        m_tiles=len(counts),
        pairs=max(pairs),
        group_halves=halves,
        all_pairs=sum(pairs),
    )


def packed_bytes(geometry: Geometry, p: Product, parts: int) -> int:
    """Returns the bytes of the packed weights of one pass."""
    return geometry.groups * p.m_tiles * p.pairs * p.v * parts * FRAGMENT_BYTES


def _aligned_to(start: int, modulus: int, rest: int) -> int:
    """Returns the smallest number, at least ``start``, whose remainder modulo ``modulus`` is ``rest``."""
    return start + (rest - start) % modulus


def copy_elements(geometry: Geometry, tile: Tile, item: int, channels_last: bool) -> int:
    """Returns the elements of one copy of the input."""
    return power_of_two_dividing(
        geometry.in_channels_per_group if channels_last else tile.row_multiple, 16 // item
    )


def halo(geometry: Geometry, p: Product, tile: Tile, item: int, channels_last: bool) -> tuple[int, int, int]:
    """Returns (rows, columns, bytes in shared memory) of the input that a tile reads."""
    _, horizontal = axes(geometry)
    words = geometry.groups * p.group_halves * HALF_CHANNELS * item // 4
    rows = tile.tile_h + (p.v - 1) * p.v_step
    copy = 1 if channels_last else copy_elements(geometry, tile, item, channels_last)
    left_pad = horizontal.lowest % copy
    columns = round_up(left_pad + tile.tile_w + horizontal.span, copy)
    pixels = rows * columns
    if channels_last:
        in_shared = pixels * (_aligned_to(words, 8, 4) if item == 2 else _aligned_to(words, 16, 8))
    else:
        in_shared = words * _aligned_to(pixels, 32, 8 if item == 2 else 4)
    return rows, columns, in_shared * 4


def registers(geometry: Geometry, p: Product, tile: Tile, item: int, channels_last: bool) -> int:
    """Estimates the registers that a thread needs so that nothing spills: fitted to the compiler's reports, and
    never too few for any of them."""
    rows, columns, _ = halo(geometry, p, tile, item, channels_last)
    elements = geometry.groups * p.group_halves * HALF_CHANNELS if channels_last else rows
    copies = elements * columns // copy_elements(geometry, tile, item, channels_last)
    slots = ceil_div(copies, 32 * tile.warps)
    sums = 4 * tile.unit_rows * tile.unit_cols
    window = 2 * (tile.unit_rows + (p.v - 1) * p.v_step) * tile.unit_cols
    if item == 4 and tile.direct:
        return int(62 + sums + 1.4 * tile.parts * window + 4 * slots)
    if item == 4:
        return int(85 + sums + 4.2 * window + 4 * slots)
    return int(72 + sums + 0.6 * window + (4 if channels_last else 9) * slots)


def _position_elements(geometry: Geometry, item: int, channels_last: bool) -> tuple[int, bool]:
    """Returns the neighbouring elements of an output row that belong to one position, and whether there is padding
    between positions in shared memory."""
    elements = geometry.stride[1] * (geometry.out_channels if channels_last else 1)
    return elements, channels_last and elements * item % 64 == 0


def store_elements(geometry: Geometry, tile: Tile, item: int, channels_last: bool) -> int:
    """Returns the elements of one store."""
    elements, padded = _position_elements(geometry, item, channels_last)
    limit = power_of_two_dividing(elements if padded else tile.tile_w * elements, 16 // item)
    return power_of_two_dividing(
        tile.out_row_multiple * (geometry.out_channels if channels_last else 1), limit
    )


def stores_directly(geometry: Geometry, item: int, channels_last: bool, columns_fastest: bool) -> bool:
    """Whether the 16 rows of a tile of M, without STACKED, are neighbours in memory and fill whole sectors, and
    all pixels have taps."""
    vertical, horizontal = axes(geometry)
    elements, _ = _position_elements(geometry, item, channels_last)
    if columns_fastest:
        neighbours = elements % 16 == 0
    else:
        neighbours = channels_last and elements * item % SECTOR_BYTES == 0
    return (
        neighbours
        and geometry.groups == 1
        and vertical.used == horizontal.used == 1
        and geometry.out_width % geometry.stride[1] == 0
    )


def shared_bytes(geometry: Geometry, p: Product, tile: Tile, item: int, channels_last: bool) -> int:
    """Returns the bytes of shared memory of a block, as csrc/kernels/forward/narrow_mma.cu lays it out."""
    weights = packed_bytes(geometry, p, tile.parts) if tile.resident else 0
    _, _, in_shared = halo(geometry, p, tile, item, channels_last)
    if tile.direct:
        return in_shared + weights
    elements, padded = _position_elements(geometry, item, channels_last)
    line = round_up(tile.tile_w * (elements * item + 16 * padded), 16)
    staged = line * tile.tile_h * (geometry.stride[0] if tile.stacked else 1)
    if not channels_last:
        staged = _aligned_to(staged // 4, 32, 4) * 4 * geometry.out_channels
    return in_shared + weights + staged
