"""The tile of grad_output in shared memory that the narrow kernels of both gradients read
(csrc/kernels/gradients/grad_output_tile.cuh): its size and its pitches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd

from tconv_swap.geometry import Geometry
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant

BANKS = 32
#: For how many groups of taps, each read by one load, the passes over the banks are counted.
GROUPS_EXAMINED = 16


@dataclass(frozen=True, slots=True)
class GradOutputTile:
    """The constants of csrc/kernels/gradients/grad_output_tile.cuh, whose first comment explains each."""

    tile_h: int
    tile_w: int
    block_groups: int
    chunk_co: int
    chunk_kh: int
    load: int
    async_: bool
    threads: int
    pixel_pitch: int = 0
    row_pitch: int = 0
    plane: int = 0

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        names = [field.name for field in fields(self)]
        return tuple((name.rstrip("_").upper(), getattr(self, name)) for name in names)

    @property
    def channels(self) -> int:
        return self.block_groups * self.chunk_co

    @property
    def shared_words(self) -> int:
        """Returns the words of shared memory of all buffers."""
        return self.channels * self.plane * (2 if self.async_ else 1)


def chunk_taps(geometry: Geometry, tile: GradOutputTile) -> int:
    """Returns how many taps a chunk of a group has."""
    return tile.chunk_co * tile.chunk_kh * geometry.kernel[1]


def chunks(geometry: Geometry, tile: GradOutputTile) -> int:
    """Returns how many chunks the taps of a group have."""
    return geometry.out_channels_per_group // tile.chunk_co * (geometry.kernel[0] // tile.chunk_kh)


def rows(geometry: Geometry, tile: GradOutputTile) -> int:
    """Returns how many rows of grad_output the tile has."""
    stride, dilation = geometry.stride[0], geometry.dilation[0]
    step = gcd(stride, dilation) if tile.chunk_kh > 1 else stride
    return ((tile.tile_h - 1) * stride + (tile.chunk_kh - 1) * dilation) // step + 1


def columns(geometry: Geometry, tile: GradOutputTile, channels_last: bool) -> int:
    """Returns how many columns of grad_output the tile has."""
    load = 1 if channels_last else tile.load
    reach = (tile.tile_w - 1) * geometry.stride[1] + (geometry.kernel[1] - 1) * geometry.dilation[1] + 1
    return round_up(_left_padding(geometry, load) + reach, load)


def _left_padding(geometry: Geometry, load: int) -> int:
    """Returns how many columns are added on the left so that loads are aligned."""
    return -geometry.padding[1] % load


def loads(geometry: Geometry, tile: GradOutputTile, channels_last: bool) -> int:
    """Returns how many loads of a tile a thread makes."""
    elements = tile.channels * rows(geometry, tile) * columns(geometry, tile, channels_last)
    return ceil_div(elements // tile.load, tile.threads)


def load_widths(
    geometry: Geometry, channels: int, channels_last: bool, element_bytes: int, asynchronous: bool
) -> tuple[int, ...]:
    """Returns how many elements a load may have: as many as alignment allows, up to 16 bytes. It is one where cp.async
    stores neighbours to different rows of shared memory, and also in NCHW, for rows of any length."""
    if channels_last and asynchronous:
        return (1,)
    sizes = (geometry.out_channels, channels) if channels_last else (geometry.out_width,)
    load = 16 // element_bytes
    while any(size % load for size in sizes):
        load //= 2
    return (load,) if channels_last or load == 1 else (load, 1)


def of_one_pixel(geometry: Geometry) -> Geometry:
    """Returns the geometry of a layer without its sizes, on which the pitches of tiles do not depend."""
    return geometry._replace(batch=1, height=1, width=1, output_padding=(0, 0))


@lru_cache(maxsize=16384)
def with_pitches(
    geometry: Geometry, tile: GradOutputTile, channels_last: bool, pixels: tuple[int, ...], taps_on_rows: bool
) -> tuple[GradOutputTile, float]:
    """Returns the tile with the pitches at which a load of a fragment takes the fewest passes over the banks, and how
    many these are on average.

    ``pixels[i]`` is the pixel that row or k number i of a fragment reads, counted from the first. The other axis of the
    fragment has the taps: 8 columns (``taps_on_rows`` False: 4 k, twice).
    """
    load = 1 if channels_last else min(tile.load, 4)
    stride = geometry.stride[1]
    across = columns(geometry, tile, channels_last)
    down = rows(geometry, tile)
    axes = (geometry.kernel, geometry.stride, geometry.dilation)
    left_padding, chunk = (
        _left_padding(geometry, 1 if channels_last else tile.load),
        (tile.chunk_co, tile.chunk_kh),
    )
    # A tile is made only with the best pitches, because making one takes longer than a call of _passes, which is
    # cached.
    best: tuple[float, int, int, int] | None = None
    for pixel_pitch in range(stride, stride + 9):
        if pixel_pitch != stride and (pixel_pitch % load or stride % load):
            continue
        row = ceil_div(across, stride) * pixel_pitch if pixel_pitch != stride else across
        for pad in range(0, BANKS, 4):
            pitch = round_up(row, 4) + pad
            plane = _plane(down * pitch, tile.channels, channels_last)
            # Only the banks of the offsets matter, except for offsets within a row.
            pitches = (pixel_pitch, pitch % BANKS + 256 * BANKS, plane % BANKS + 8192 * BANKS)
            passes = _passes(axes, left_padding, chunk, pitches, pixels, taps_on_rows)
            if best is None or (passes, plane) < best[:2]:
                best = (passes, plane, pixel_pitch, pitch)
            if down == 1 or passes == 1:
                break
    assert best is not None
    passes, plane, pixel_pitch, pitch = best
    return replace(tile, pixel_pitch=pixel_pitch, row_pitch=pitch, plane=plane), passes


def _plane(words: int, channels: int, channels_last: bool) -> int:
    """Returns the words of a channel, padded so that neighbouring threads that write one channel each use different
    banks."""
    if not channels_last or channels == 1:
        return words
    wanted = max(1, BANKS // channels)
    return words + (wanted - words) % BANKS


@lru_cache(maxsize=65536)
def _passes(
    axes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    left_padding: int,
    chunk: tuple[int, int],
    pitches: tuple[int, int, int],
    pixels: tuple[int, ...],
    taps_on_rows: bool,
) -> float:
    """Returns how many passes over the banks a warp's load takes, on average over the taps of a chunk."""
    pixel_pitch, row_pitch, plane = pitches
    width = 8 if taps_on_rows else 4
    offsets = [
        co * plane + row * row_pitch + across * pixel_pitch + column
        for co, row, across, column in _first_taps(axes, left_padding, chunk, GROUPS_EXAMINED * width)
    ]
    groups = [offsets[i : i + width] for i in range(0, len(offsets), width)]
    bases = [pixel * pixel_pitch for pixel in pixels]
    # Groups whose taps are equally far apart take equally many passes.
    found: dict[tuple[int, ...], int] = {}
    total = 0
    for taps in groups:
        apart = tuple([tap - taps[0] for tap in taps])
        if apart not in found:
            # All pixels are read at each tap of the group, by one lane or, where taps are fewer than lanes, by several.
            found[apart] = max_of_a_bank({base + tap for base in bases for tap in apart})
        total += found[apart]
    return total / len(groups)


@lru_cache(maxsize=256)
def _first_taps(
    axes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    left_padding: int,
    chunk: tuple[int, int],
    count: int,
) -> list[tuple[int, int, int, int]]:
    """Returns where at most ``count`` taps of a chunk read: output channel, row of the tile, stride, column in it."""
    kernel, stride, dilation = axes
    step = gcd(stride[0], dilation[0]) if chunk[1] > 1 else stride[0]
    found = []
    for tap in range(min(count, chunk[0] * chunk[1] * kernel[1])):
        rest, kw = divmod(tap, kernel[1])
        co, kh = divmod(rest, chunk[1])
        found.append((co, kh * dilation[0] // step, *divmod(left_padding + kw * dilation[1], stride[1])))
    return found


def max_of_a_bank(words: set[int]) -> int:
    """Returns how many of the words lie in the bank that has most of them."""
    banks = [word % BANKS for word in words]
    if len(set(banks)) == len(banks):
        return 1
    counts = [0] * BANKS
    for bank in banks:
        counts[bank] += 1
    return max(counts)


def divisors(number: int, limit: int) -> list[int]:
    """Returns the divisors of a number up to a limit, in ascending order."""
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]


def largest_divisor(number: int, limit: int, size: Callable[[int], int]) -> int | None:
    """Returns the largest divisor whose size is at most ``limit``, or None if there is none."""
    fit = [n for n in divisors(number, number) if size(n) <= limit]
    return fit[-1] if fit else None


def groups_of_a_block(geometry: Geometry, channels_last: bool, element_bytes: int, limit: int) -> list[int]:
    """Returns numbers of groups of a block: one, or in channels_last the number whose channels of a pixel fill a sector
    of 32 bytes, and the next smaller one."""
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    wanted = ceil_div(32, channels * element_bytes)
    if not channels_last or wanted == 1:
        return [1]
    options = divisors(geometry.groups, limit)
    enough = next((n for n in options if n >= wanted), options[-1])
    return [n for n in options if n <= enough][-2:]


def loaded_bytes(geometry: Geometry, tile: GradOutputTile, channels_last: bool, element_bytes: int) -> float:
    """Returns how many bytes the loads of one tile move, in whole sectors of 32 bytes."""
    down, across = rows(geometry, tile), columns(geometry, tile, channels_last)
    if not channels_last:
        return tile.channels * down * (across * element_bytes + 32)
    if tile.channels == geometry.out_channels:
        return down * (across * tile.channels * element_bytes + 32)
    segment = tile.channels * element_bytes
    whole = segment % 32 == 0 and geometry.out_channels * element_bytes % 32 == 0
    return down * across * (segment if whole else segment + 32)
