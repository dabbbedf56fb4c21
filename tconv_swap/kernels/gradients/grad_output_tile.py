"""The tile of grad_output in shared memory that the narrow kernels of both gradients read
(csrc/kernels/gradients/grad_output_tile.cuh): its size and its pitches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd

from tconv_swap.geometry import Geometry
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant

BANKS = 32
#: A lane's place in the fragments of a multiply: (row or column of 8, k of 4).
LANES = tuple((lane // 4, lane % 4) for lane in range(32))


@dataclass(frozen=True, slots=True)
class GradOutputTile:
    """The constants of csrc/kernels/gradients/grad_output_tile.cuh, whose top says what each is."""

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
        """Of all buffers."""
        return self.channels * self.plane * (2 if self.async_ else 1)


def chunk_taps(geometry: Geometry, tile: GradOutputTile) -> int:
    return tile.chunk_co * tile.chunk_kh * geometry.kernel[1]


def chunks(geometry: Geometry, tile: GradOutputTile) -> int:
    return geometry.out_channels_per_group // tile.chunk_co * (geometry.kernel[0] // tile.chunk_kh)


def rows(geometry: Geometry, tile: GradOutputTile) -> int:
    stride, dilation = geometry.stride[0], geometry.dilation[0]
    step = gcd(stride, dilation) if tile.chunk_kh > 1 else stride
    return ((tile.tile_h - 1) * stride + (tile.chunk_kh - 1) * dilation) // step + 1


def columns(geometry: Geometry, tile: GradOutputTile, channels_last: bool) -> int:
    load = 1 if channels_last else tile.load
    reach = (tile.tile_w - 1) * geometry.stride[1] + (geometry.kernel[1] - 1) * geometry.dilation[1] + 1
    return round_up(_shift(geometry, load) + reach, load)


def _shift(geometry: Geometry, load: int) -> int:
    return -geometry.padding[1] % load


def loads(geometry: Geometry, tile: GradOutputTile, channels_last: bool) -> int:
    """Accesses with which a thread brings its part of a tile."""
    elements = tile.channels * rows(geometry, tile) * columns(geometry, tile, channels_last)
    return ceil_div(elements // tile.load, tile.threads)


def load_widths(
    geometry: Geometry, channels: int, channels_last: bool, element_bytes: int, asynchronous: bool
) -> tuple[int, ...]:
    """Elements that may travel together: as many as alignment allows, up to 16 bytes; one where they part ways in
    shared memory and go there directly, and in NCHW for rows of any length."""
    if channels_last and asynchronous:
        return (1,)
    sizes = (geometry.out_channels, channels) if channels_last else (geometry.out_width,)
    load = 16 // element_bytes
    while any(size % load for size in sizes):
        load //= 2
    return (load,) if channels_last or load == 1 else (load, 1)


def of_one_pixel(geometry: Geometry) -> Geometry:
    """The layer's, whatever the size: layouts of tiles depend on no more."""
    return replace(geometry, batch=1, height=1, width=1, output_padding=(0, 0))


@lru_cache(maxsize=16384)
def laid_out(
    geometry: Geometry, tile: GradOutputTile, channels_last: bool, pixels: tuple[int, ...], taps_on_rows: bool
) -> tuple[GradOutputTile, float]:
    """The tile with the pitches at which a gather takes the fewest passes over the banks, and how many these are.

    ``pixels[i]`` is the pixel that the i-th row or k of a fragment reads, counted from the first; its taps are those
    of the other axis: of 8 columns (``taps_on_rows`` False: of 4 k, twice).
    """
    load = 1 if channels_last else min(tile.load, 4)
    stride = geometry.stride[1]
    across = columns(geometry, tile, channels_last)
    down = rows(geometry, tile)
    axes = (geometry.kernel, geometry.stride, geometry.dilation)
    shift, chunk = _shift(geometry, 1 if channels_last else tile.load), (tile.chunk_co, tile.chunk_kh)
    # A tile is made of the best alone: making one costs more than a look at what _passes remembers.
    best: tuple[float, int, int, int] | None = None
    for pixel_pitch in range(stride, stride + 9):
        if pixel_pitch != stride and (pixel_pitch % load or stride % load):
            continue
        row = ceil_div(across, stride) * pixel_pitch if pixel_pitch != stride else across
        for pad in range(0, BANKS, 4):
            pitch = round_up(row, 4) + pad
            plane = _plane(down * pitch, tile.channels, channels_last)
            # Places are told apart by their bank alone, but for those of one row.
            pitches = (pixel_pitch, pitch % BANKS + 256 * BANKS, plane % BANKS + 8192 * BANKS)
            passes = _passes(axes, shift, chunk, pitches, pixels, taps_on_rows)
            if best is None or (passes, plane) < best[:2]:
                best = (passes, plane, pixel_pitch, pitch)
            if down == 1 or passes == 1:
                break
    assert best is not None
    passes, plane, pixel_pitch, pitch = best
    return replace(tile, pixel_pitch=pixel_pitch, row_pitch=pitch, plane=plane), passes


def _plane(words: int, channels: int, channels_last: bool) -> int:
    """Where neighbouring threads write one channel each, these meet different banks."""
    if not channels_last or channels == 1:
        return words
    wanted = max(1, BANKS // channels)
    return words + (wanted - words) % BANKS


@lru_cache(maxsize=65536)
def _passes(
    axes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    shift: int,
    chunk: tuple[int, int],
    pitches: tuple[int, int, int],
    pixels: tuple[int, ...],
    taps_on_rows: bool,
) -> float:
    """Passes over the banks that a warp's gather takes, on average over the taps of a chunk."""
    kernel, stride, dilation = axes
    pixel_pitch, row_pitch, plane = pitches
    step = gcd(stride[0], dilation[0]) if chunk[1] > 1 else stride[0]
    places = []
    for tap in range(chunk[0] * chunk[1] * kernel[1]):
        rest, kw = divmod(tap, kernel[1])
        co, kh = divmod(rest, chunk[1])
        across, column = divmod(shift + kw * dilation[1], stride[1])
        places.append(co * plane + kh * dilation[0] // step * row_pitch + across * pixel_pitch + column)
    width = 8 if taps_on_rows else 4
    groups = [places[i : i + width] for i in range(0, len(places), width)][:16]
    total = 0
    for taps in groups:
        words = {
            pixels[t if taps_on_rows else g] * pixel_pitch + taps[(g if taps_on_rows else t) % len(taps)]
            for g, t in LANES
        }
        total += _most_in_a_bank(words)
    return total / len(groups)


def _most_in_a_bank(words: Iterable[int]) -> int:
    banks = [0] * BANKS
    for word in words:
        banks[word % BANKS] += 1
    return max(banks)


def divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def fitting(number: int, most: int, size: Callable[[int], int]) -> int | None:
    """The largest divisor whose size is at most ``most``."""
    fit = [n for n in divisors(number, number) if size(n) <= most]
    return fit[-1] if fit else None


def side_by_side(geometry: Geometry, channels_last: bool, element_bytes: int, most: int) -> list[int]:
    """Groups of a block: one, or in channels_last as many as make a pixel's piece of memory a sector of 32 bytes long,
    and fewer."""
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    wanted = ceil_div(32, channels * element_bytes)
    if not channels_last or wanted == 1:
        return [1]
    options = divisors(geometry.groups, most)
    enough = next((n for n in options if n >= wanted), options[-1])
    return [n for n in options if n <= enough][-2:]


def sectors(geometry: Geometry, tile: GradOutputTile, channels_last: bool, element_bytes: int) -> float:
    """Bytes that one tile's loads bring, in whole sectors of 32."""
    down, across = rows(geometry, tile), columns(geometry, tile, channels_last)
    if not channels_last:
        return tile.channels * down * (across * element_bytes + 32)
    if tile.channels == geometry.out_channels:
        return down * (across * tile.channels * element_bytes + 32)
    piece = tile.channels * element_bytes
    whole = piece % 32 == 0 and geometry.out_channels * element_bytes % 32 == 0
    return down * across * (piece if whole else piece + 32)
