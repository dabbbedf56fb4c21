"""The tiles of csrc/kernels/forward_narrow.cu: what they are, what they need, what they are expected to take."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from math import gcd

from tconv_swap.geometry import Geometry, phase_taps
from tconv_swap.program import Constant

#: The kernel's inner loop is unrolled: longer ones take more than a second to compile and leave the instruction cache.
UNROLLED_MULTIPLY_ADDS = 3000
MAX_THREADS = 384
MIN_SUMS = 8
MAX_SUMS = 96
MAX_LOADS = 10
REPEATS = (1, 2, 4, 8, 16, 32)

# What a tile takes, fitted to 2,400 random tiles of 15 layers on an H200 (benchmarks/NOTES.md, "forward: narrow"):
# cycles of one multiprocessor for each instruction of a warp, or what else the line says.
CYCLES_MULTIPLY_ADD = 1.38 / 4
CYCLES_READ_INPUT = 0.6
CYCLES_READ_WEIGHT = {1: 0.33, 2: 0.33, 4: 0.66}  # by the words of the access
CYCLES_LOAD = 3.7
CYCLES_LOAD_WEIGHT = 14.0
CYCLES_SECTOR = 0.5  # a 32-byte piece of the output that one store instruction touches
CYCLES_STEP = 600.0  # latency of one chunk of one tile
CYCLES_PER_MICROSECOND = 1755.0
BYTES_PER_MICROSECOND = 4.28e6
SHARE_OF_MEMORY_TIME = 0.7  # the rest hides behind the arithmetic


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block and a thread own; the top of csrc/kernels/forward_narrow.cu says what each is."""

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
    min_blocks: int

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        names = (field.name.rstrip("_").upper() for field in fields(self))
        return tuple(zip(names, astuple(self), strict=True))

    @property
    def block_channels(self) -> int:
        return self.lanes_c * self.slices_c * self.thread_channels

    @property
    def sums(self) -> int:
        """Outputs that a thread owns."""
        return self.phases_h * self.phases_w * self.thread_rows * self.thread_columns * self.thread_channels


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a geometry, as csrc/kernels/narrow.cuh sees it."""

    kernel: int
    stride: int
    #: Input pixels from one tap of a phase to its next.
    reach: int
    #: The most taps a phase has, and whether all have as many.
    taps: int
    full: bool
    #: Share of the phases that have a tap.
    used: float
    cells: int
    #: A cell reads the inputs from ``lowest`` to ``lowest + span`` after its own position.
    lowest: int
    span: int


@lru_cache(maxsize=1024)
def axes(geometry: Geometry) -> tuple[Axis, Axis]:
    """The vertical and the horizontal axis."""
    sizes = (geometry.out_height, geometry.out_width)
    vertical, horizontal = (_axis(geometry, index, sizes[index]) for index in (0, 1))
    return vertical, horizontal


def _axis(geometry: Geometry, index: int, out_size: int) -> Axis:
    kernel, stride, dilation = geometry.kernel[index], geometry.stride[index], geometry.dilation[index]
    padding = geometry.padding[index]
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
        cells=ceil_div(out_size, stride),
        lowest=min(offsets),
        span=max(offsets) - min(offsets),
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def threads(geometry: Geometry, tile: Tile) -> int:
    columns = geometry.stride[1] // tile.phases_w * tile.lanes_w
    return tile.lanes_c * columns * tile.slices_c * tile.lanes_h * tile.block_images


def input_tile(geometry: Geometry, tile: Tile, channels_last: bool) -> tuple[int, int, int]:
    """(channels, rows, columns) of the input that a block keeps of one image."""
    vertical, horizontal = axes(geometry)
    whole = tile.phases_h == vertical.stride
    rows = tile.lanes_h * tile.thread_rows + (vertical.span if whole else (vertical.taps - 1) * vertical.reach)
    columns = tile.lanes_w * tile.thread_columns + horizontal.span
    if not channels_last:
        columns = ceil_div(columns + horizontal.lowest % tile.load, tile.load) * tile.load
    return tile.block_groups * tile.chunk, rows, columns


def input_loads(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """Accesses with which a thread brings its part of one chunk."""
    channels, rows, columns = input_tile(geometry, tile, channels_last)
    return ceil_div(tile.block_images * channels * rows * columns // tile.load, threads(geometry, tile))


def shared_bytes(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """The shared memory of a block, as the kernel lays it out."""
    vertical, horizontal = axes(geometry)
    channels, rows, columns = input_tile(geometry, tile, channels_last)
    if channels_last and tile.block_groups == 1:
        read = min(tile.load, 4)
        channels = read * (channels // read | 1)
    values = ceil_div(tile.block_images * rows * columns * channels, 4) * 4
    vector = _vector(tile)
    tap = tile.lanes_c * tile.slices_c * ceil_div(tile.thread_channels, vector) * vector
    if tile.phases_w != horizontal.stride and tap // vector % 2 == 0:
        tap += vector
    weight_rows = vertical.kernel if tile.phases_h == vertical.stride else vertical.taps
    chunks = ceil_div(geometry.in_channels_per_group, tile.chunk) if tile.resident else 1
    weights = tile.chunk * chunks * weight_rows * horizontal.kernel * tap
    buffers = 2 if tile.async_ else 1
    return 4 * (values * buffers + weights * (1 if tile.resident else buffers))


def _vector(tile: Tile) -> int:
    return 4 if tile.thread_channels > 2 else tile.thread_channels


def row_tiles(geometry: Geometry, tile: Tile) -> int:
    """Tiles below each other, over the whole batch."""
    tiles = ceil_div(axes(geometry)[0].cells, tile.lanes_h * tile.thread_rows)
    return tiles * ceil_div(geometry.batch, tile.block_images)


def columns_of_tiles(geometry: Geometry, tile: Tile) -> int:
    """Tiles side by side, times those of other channels and, where blocks own them apart, rows of a cell."""
    vertical, horizontal = axes(geometry)
    count = ceil_div(horizontal.cells, tile.lanes_w * tile.thread_columns)
    count *= ceil_div(geometry.groups, tile.block_groups)
    count *= ceil_div(geometry.out_channels_per_group, tile.block_channels // tile.block_groups)
    return count * (vertical.stride // tile.phases_h)


def window(geometry: Geometry, tile: Tile) -> tuple[int, int]:
    """(rows, columns) of the input that a thread reads of a channel."""
    vertical, horizontal = axes(geometry)
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


def registers(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """What the compiler needs of a thread without spilling, fitted to its reports, on the safe side."""
    read = min(tile.load, 4) if channels_last and tile.block_groups == 1 else 1
    return int(
        64
        + 0.92 * tile.sums
        + 5.9 * input_loads(geometry, tile, channels_last)
        + 1.4 * read * window(geometry, tile)[0]
        + 2.2 * tile.thread_channels
    )


def unrolled(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """Multiply-adds in the kernel's innermost loop."""
    vertical, horizontal = axes(geometry)
    taps_h = vertical.kernel if tile.phases_h == vertical.stride else vertical.taps
    taps_w = horizontal.kernel if tile.phases_w == horizontal.stride else horizontal.taps
    read = min(tile.load, 4) if channels_last and tile.block_groups == 1 else 1
    return taps_h * taps_w * tile.thread_rows * tile.thread_columns * tile.thread_channels * read


def sectors(geometry: Geometry, tile: Tile, channels_last: bool, element_bytes: int) -> float:
    """32-byte pieces of the output that a warp's stores touch, summed over them (csrc/kernels/narrow.cuh has the
    runs and their widths)."""
    stride = geometry.stride[1]
    run = 1
    whole_pixels = not channels_last or tile.thread_channels == geometry.out_channels
    if tile.phases_w == stride and whole_pixels:
        run = (tile.thread_columns if tile.adjacent else 1) * stride
    pitch = geometry.out_width
    if channels_last:
        pitch = pitch * geometry.out_channels if run > 1 else geometry.out_channels_per_group
        run *= tile.thread_channels
    width = 1
    while 2 * width * element_bytes <= 16 and run % (2 * width) == 0 and pitch % (2 * width) == 0:
        width *= 2
    # Lanes that follow each other `apart` elements apart, before the next piece of memory begins.
    if channels_last and not whole_pixels:
        lanes, apart = min(32, tile.lanes_c), run
        if tile.block_channels == geometry.out_channels and tile.phases_w != stride:
            lanes = 32
    else:
        lanes = min(32, stride // tile.phases_w * tile.lanes_w)
        apart = run
        if tile.phases_w != stride:
            apart = tile.thread_channels if channels_last else 1
            if tile.adjacent and tile.thread_columns > 1:
                lanes = min(lanes, stride)
    touched = min(lanes, ceil_div(lanes * apart * element_bytes, 32)) * (32 / lanes)
    return tile.sums / width * max(touched, width * element_bytes)


def microseconds(
    geometry: Geometry, tile: Tile, channels_last: bool, element_bytes: int, multiprocessors: int
) -> tuple[float, int]:
    """What the kernel is expected to take on an H200, to rank tiles and to compare with other kernels, and the best
    number of tiles for a block to walk down."""
    per_tile, per_block = _cycles(geometry, tile, channels_last, element_bytes)
    memory = SHARE_OF_MEMORY_TIME * geometry.elements * element_bytes / BYTES_PER_MICROSECOND
    slots = multiprocessors * blocks_per_multiprocessor(geometry, tile, channels_last)
    chunks = ceil_div(geometry.in_channels_per_group, tile.chunk)
    across, down = columns_of_tiles(geometry, tile), row_tiles(geometry, tile)

    def expected(repeat: int) -> float:
        blocks = across * ceil_div(down, repeat)
        rounds = blocks / slots
        if rounds <= 1:
            uneven = ceil_div(blocks, multiprocessors) * multiprocessors / blocks
        else:
            uneven = 1 + 0.5 * (ceil_div(blocks, slots) / rounds - 1)
        cycles = blocks * (repeat * per_tile + per_block) / multiprocessors * uneven
        return (cycles + CYCLES_STEP * chunks * repeat * max(1.0, rounds)) / CYCLES_PER_MICROSECOND + memory

    repeats = [r for r in REPEATS if r == 1 or (r <= down and across * down >= r * multiprocessors)]
    return min((expected(repeat), repeat) for repeat in repeats)


def blocks_per_multiprocessor(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    warps = ceil_div(threads(geometry, tile), 32)
    by_registers = 65536 // (registers(geometry, tile, channels_last) * 32 * warps)
    by_shared_memory = 227 * 1024 // (shared_bytes(geometry, tile, channels_last) + 1024)
    return max(1, min(by_registers, by_shared_memory, 64 // warps, 32))


def _cycles(geometry: Geometry, tile: Tile, channels_last: bool, element_bytes: int) -> tuple[float, float]:
    """Cycles of a multiprocessor for each tile, and once for each block."""
    vertical, horizontal = axes(geometry)
    block = threads(geometry, tile)
    warps = ceil_div(block, 32)
    chunks = ceil_div(geometry.in_channels_per_group, tile.chunk)
    channels = chunks * tile.chunk
    whole_h, whole_w = tile.phases_h == vertical.stride, tile.phases_w == horizontal.stride
    used = 1.0 if whole_h else vertical.used
    taps_h = vertical.kernel if whole_h else vertical.kernel / vertical.stride
    taps = taps_h * (horizontal.kernel if whole_w else horizontal.taps)
    rows, columns = window(geometry, tile)
    vector = _vector(tile)
    loaded_taps = (vertical.kernel if whole_h else vertical.taps) * horizontal.kernel
    weight_loads = channels * tile.block_channels * loaded_taps * used / block * CYCLES_LOAD_WEIGHT
    per_tile = (
        channels * taps * tile.thread_rows * tile.thread_columns * tile.thread_channels * CYCLES_MULTIPLY_ADD
        + channels * rows * columns * used * CYCLES_READ_INPUT
        + channels * taps * ceil_div(tile.thread_channels, vector) * CYCLES_READ_WEIGHT[vector]
        + chunks * input_loads(geometry, tile, channels_last) * used * CYCLES_LOAD
        + sectors(geometry, tile, channels_last, element_bytes) * CYCLES_SECTOR
    )
    if tile.resident:
        return warps * per_tile, warps * weight_loads
    return warps * (per_tile + weight_loads), 0.0
