"""The tile of csrc/kernels/forward/narrow_ffma.cu, and the threads, registers and shared memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from tconv_swap.geometry import Geometry, phase_taps
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant

#: The kernel's inner loop is unrolled: longer ones take more than a second to compile and leave the instruction
#: cache.
UNROLLED_MULTIPLY_ADDS = 3000
MAX_THREADS = 384
MIN_SUMS = 8
MAX_SUMS = 96
#: Registers that ``registers`` adds to the compiler's average, so that no tile spills.
REGISTER_MARGIN = 34


class Tile(NamedTuple):
    """What a block and a thread compute. The comment at the top of csrc/kernels/forward/narrow_ffma.cu explains each
    field."""

    phases_h: int
    phases_w: int
    thread_rows: int
    thread_columns: int
    thread_channels: int
    adjacent: bool
    lanes_c: int
    lanes_w: int
    slices_c: int
    lanes_h: int
    block_images: int
    block_groups: int
    chunk: int
    load: int
    resident: bool
    async_: bool
    partial: int
    min_blocks: int
    #: A power of two that divides the rows of the output.
    out_row_multiple: int

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        """The fields as constants of the kernel, under their names in capitals."""
        return tuple((name.rstrip("_").upper(), value) for name, value in self._asdict().items())

    @property
    def block_channels(self) -> int:
        return self.lanes_c * self.slices_c * self.thread_channels

    @property
    def sums(self) -> int:
        """The outputs that a thread computes."""
        return self.phases_h * self.phases_w * self.thread_rows * self.thread_columns * self.thread_channels


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a geometry, as csrc/kernels/common/phases.cuh sees it."""

    kernel: int
    stride: int
    #: Input pixels from one tap of a phase to the next tap of that phase.
    reach: int
    #: The most taps of a phase, and whether all phases have as many.
    taps: int
    full: bool
    #: The share of the phases that have a tap.
    used: float
    #: Positions: groups of ``stride`` neighbouring outputs, one of each phase.
    positions: int
    #: A position reads the inputs from ``lowest`` to ``lowest + span`` after its own place.
    lowest: int
    span: int


#: The vertical and the horizontal axis.
Axes = tuple[Axis, Axis]


@lru_cache(maxsize=1024)
def axes(geometry: Geometry) -> Axes:
    """Returns the vertical and the horizontal axis."""
    sizes = (geometry.out_height, geometry.out_width)
    vertical, horizontal = (
        replace(
            _axis(
                geometry.kernel[index],
                geometry.stride[index],
                geometry.padding[index],
                geometry.dilation[index],
            ),
            positions=ceil_div(sizes[index], geometry.stride[index]),
        )
        for index in (0, 1)
    )
    return vertical, horizontal


@lru_cache(maxsize=1024)
def _axis(kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """Returns one axis of a layer; a size sets its ``positions``."""
    common = gcd(stride, dilation)
    taps = [phase_taps(kernel, stride, dilation, (phase + padding) % stride) for phase in range(stride)]
    offsets = [(phase + padding - k * dilation) // stride for phase in range(stride) for k in taps[phase]]
    return Axis(
        kernel=kernel,
        stride=stride,
        reach=dilation // common,
        taps=ceil_div(kernel, stride // common),
        full=len({len(t) for t in taps}) == 1,
        used=sum(bool(t) for t in taps) / stride,
        positions=0,
        lowest=min(offsets),
        span=max(offsets) - min(offsets),
    )


def threads(geometry: Geometry, tile: Tile) -> int:
    columns = geometry.stride[1] // tile.phases_w * tile.lanes_w
    return tile.lanes_c * columns * tile.slices_c * tile.lanes_h * tile.block_images


def _input_tile(of_layer: Axes, tile: Tile, channels_last: bool) -> tuple[int, int, int]:
    """Returns (channels, rows, columns) of one image's input that a block keeps in shared memory."""
    vertical, horizontal = of_layer
    whole = tile.phases_h == vertical.stride
    rows = tile.lanes_h * tile.thread_rows + (
        vertical.span if whole else (vertical.taps - 1) * vertical.reach
    )
    columns = tile.lanes_w * tile.thread_columns + horizontal.span
    if not channels_last:
        columns = round_up(columns + horizontal.lowest % tile.load, tile.load)
    return tile.block_groups * tile.chunk, rows, columns


class SharedLayout(NamedTuple):
    """The layout of a block's shared memory, in 32-bit words."""

    #: The distance from a pixel, row, channel and image of the input tile to the next one, and the size of the tile.
    pixel: int
    row: int
    channel: int
    image: int
    input: int
    #: The distance from the weights of a tap and of a channel slice to the next ones, and the size of all weights.
    tap: int
    slice: int
    weights: int


class Loading(NamedTuple):
    """How a block loads the input."""

    #: The threads of a block.
    threads: int
    #: Channels, rows and columns of one image's input that a block keeps in shared memory.
    input_tile: tuple[int, int, int]
    #: With how many loads a thread loads its share of one chunk.
    loads: int


class Footprint(NamedTuple):
    """What a block of a tile takes, whatever the size of the images. Its first fields are those of ``Loading``."""

    threads: int
    input_tile: tuple[int, int, int]
    loads: int
    #: Of a thread (an estimate).
    registers: int
    layout: SharedLayout
    shared_bytes: int


def loading(geometry: Geometry, tile: Tile, channels_last: bool) -> Loading:
    """Returns how a block loads the input."""
    count, held = threads(geometry, tile), _input_tile(axes(geometry), tile, channels_last)
    channels, rows, columns = held
    return Loading(count, held, ceil_div(tile.block_images * channels * rows * columns // tile.load, count))


def footprint(geometry: Geometry, tile: Tile, channels_last: bool) -> Footprint:
    """Returns what a block takes."""
    loaded = loading(geometry, tile, channels_last)
    needed = registers(axes(geometry), tile, channels_last, loaded.loads)
    return footprint_of(geometry, tile, channels_last, loaded, needed)


def footprint_of(
    geometry: Geometry, tile: Tile, channels_last: bool, loaded: Loading, registers: int
) -> Footprint:
    """Returns the same of a tile whose loading and registers are known."""
    layout = _shared_layout(geometry, tile, channels_last, loaded.input_tile)
    buffers = 2 if tile.async_ else 1
    shared = 4 * (layout.input * buffers + layout.weights * (1 if tile.resident else buffers))
    return Footprint(*loaded, registers, layout, shared)


def _shared_layout(
    geometry: Geometry, tile: Tile, channels_last: bool, held: tuple[int, int, int]
) -> SharedLayout:
    """Returns the layout of shared memory that csrc/kernels/forward/narrow_ffma.cu uses."""
    vertical, horizontal = axes(geometry)
    channels, rows, columns = held
    pixel = 1
    if channels_last:
        read = read_width(tile, channels_last)
        pixel = channels if tile.block_groups > 1 else read * (channels // read | 1)
    row = columns * pixel
    channel = 1 if channels_last else rows * row
    image = rows * row if channels_last else channels * channel

    vector = weight_vector(tile)
    slice_ = round_up(tile.thread_channels, vector)
    tap = tile.lanes_c * tile.slices_c * slice_
    if tile.phases_w != horizontal.stride and tap // vector % 2 == 0:
        tap += vector
    weight_rows = vertical.kernel if tile.phases_h == vertical.stride else vertical.taps
    chunks = ceil_div(geometry.in_channels_per_group, tile.chunk) if tile.resident else 1
    weights = tile.chunk * chunks * weight_rows * horizontal.kernel * tap
    return SharedLayout(
        pixel, row, channel, image, round_up(tile.block_images * image, 4), tap, slice_, weights
    )


def read_width(tile: Tile, channels_last: bool) -> int:
    """Returns the input channels that a thread reads from shared memory at a time."""
    return min(tile.load, 4) if channels_last and tile.block_groups == 1 else 1


def weight_vector(tile: Tile) -> int:
    """Returns the weights that a thread reads from shared memory at a time."""
    return 4 if tile.thread_channels > 2 else tile.thread_channels


def row_tiles(geometry: Geometry, tile: Tile) -> int:
    """Returns the tiles below each other, over the whole batch."""
    tiles = ceil_div(axes(geometry)[0].positions, tile.lanes_h * tile.thread_rows)
    return tiles * ceil_div(geometry.batch, tile.block_images)


def columns_of_tiles(geometry: Geometry, tile: Tile) -> int:
    """Returns the tiles side by side, times the tiles of channels, times the rows of a position where each row has
    blocks of its own."""
    vertical, horizontal = axes(geometry)
    count = ceil_div(horizontal.positions, tile.lanes_w * tile.thread_columns)
    count *= ceil_div(geometry.groups, tile.block_groups)
    count *= ceil_div(geometry.out_channels_per_group, tile.block_channels // tile.block_groups)
    return count * (vertical.stride // tile.phases_h)


def window(of_layer: Axes, tile: Tile) -> tuple[int, int]:
    """Returns (rows, columns) of one channel of the input that a thread reads."""
    vertical, horizontal = of_layer
    columns = tile.thread_columns
    if tile.phases_w == horizontal.stride:
        once = columns + horizontal.span if tile.adjacent else columns * (horizontal.span + 1)
    elif horizontal.full and (tile.adjacent or tile.lanes_w == 1):
        once = columns + (horizontal.taps - 1) * horizontal.reach
    else:
        once = columns * horizontal.taps
    whole = tile.phases_h == vertical.stride
    down = vertical.span if whole else (vertical.taps - 1) * vertical.reach
    return tile.thread_rows + down, min(once, columns * horizontal.kernel)


def registers(of_layer: Axes, tile: Tile, channels_last: bool, loads: int) -> int:
    """Estimates the registers that a thread needs so that nothing spills: fitted to the compiler's reports, and
    never too few for any of them."""
    return int(
        39
        + REGISTER_MARGIN
        + 0.92 * tile.sums * (2 if tile.partial else 1)
        + 5.9 * loads
        + 1.4 * read_width(tile, channels_last) * window(of_layer, tile)[0]
        + 2.2 * tile.thread_channels
    )


def unrolled(of_layer: Axes, tile: Tile, channels_last: bool) -> int:
    """Returns the multiply-adds of the kernel's unrolled innermost loop."""
    vertical, horizontal = of_layer
    taps_h = vertical.kernel if tile.phases_h == vertical.stride else vertical.taps
    taps_w = horizontal.kernel if tile.phases_w == horizontal.stride else horizontal.taps
    pixels = tile.thread_rows * tile.thread_columns
    return taps_h * taps_w * pixels * tile.thread_channels * read_width(tile, channels_last)
