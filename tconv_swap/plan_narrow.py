"""Plans of the narrow forward kernel: few output channels, depthwise and narrow groups, phases with few taps."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from math import gcd

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.program import Constant, Kernel, Launch, Output, Plan, input_, int64, output

ELEMENT_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

INT32_MAX = 2**31 - 1


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
        return tuple((field.name.rstrip("_").upper(), value) for field, value in zip(fields(self), astuple(self), strict=True))

    @property
    def block_channels(self) -> int:
        return self.lanes_c * self.slices_c * self.thread_channels


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a geometry, as csrc/kernels/narrow.cuh sees it."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    out_size: int

    @property
    def step(self) -> int:
        """From a tap of a phase to its next."""
        return self.stride // gcd(self.stride, self.dilation)

    @property
    def reach(self) -> int:
        """Input pixels from one tap of a phase to its next."""
        return self.dilation // gcd(self.stride, self.dilation)

    @property
    def taps(self) -> int:
        """The most taps a phase has."""
        return _ceil(self.kernel, self.step)

    @property
    def cells(self) -> int:
        return _ceil(self.out_size, self.stride)

    def phase_taps(self, phase: int) -> list[int]:
        return [k for k in range(self.kernel) if (phase + self.padding - k * self.dilation) % self.stride == 0]

    @property
    def used_phases(self) -> int:
        """Phases that have a tap."""
        return sum(bool(self.phase_taps(phase)) for phase in range(self.stride))

    @property
    def offsets(self) -> list[int]:
        """Where a cell reads the input, relative to its own position."""
        return [
            (phase + self.padding - k * self.dilation) // self.stride
            for phase in range(self.stride)
            for k in self.phase_taps(phase)
        ]

    @property
    def lowest(self) -> int:
        return min(self.offsets)

    @property
    def span(self) -> int:
        return max(self.offsets) - self.lowest


def axes(geometry: Geometry) -> tuple[Axis, Axis]:
    sizes = (geometry.out_height, geometry.out_width)
    vertical, horizontal = (
        Axis(geometry.kernel[i], geometry.stride[i], geometry.padding[i], geometry.dilation[i], sizes[i])
        for i in (0, 1)
    )
    return vertical, horizontal


def _ceil(a: int, b: int) -> int:
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
        columns = _ceil(columns + horizontal.lowest % tile.load, tile.load) * tile.load
    return tile.block_groups * tile.chunk, rows, columns


def shared_bytes(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """The shared memory of a block, as the kernel lays it out."""
    vertical, _ = axes(geometry)
    channels, rows, columns = input_tile(geometry, tile, channels_last)
    if channels_last and tile.block_groups == 1:
        read = min(tile.load, 4)
        channels = read * (channels // read | 1)
    values = _ceil(tile.block_images * rows * columns * channels, 4) * 4
    vector = 4 if tile.thread_channels > 2 else tile.thread_channels
    tap = tile.lanes_c * tile.slices_c * _ceil(tile.thread_channels, vector) * vector
    if tile.phases_w != geometry.stride[1] and tap // vector % 2 == 0:
        tap += vector
    weight_rows = geometry.kernel[0] if tile.phases_h == vertical.stride else vertical.taps
    chunks = _ceil(geometry.in_channels_per_group, tile.chunk)
    weights = tile.chunk * (chunks if tile.resident else 1) * weight_rows * geometry.kernel[1] * tap
    buffers = 2 if tile.async_ else 1
    return 4 * (values * buffers + weights * (1 if tile.resident else buffers))


def row_tiles(geometry: Geometry, tile: Tile) -> int:
    """Tiles above each other, over the whole batch."""
    tiles = _ceil(axes(geometry)[0].cells, tile.lanes_h * tile.thread_rows)
    return tiles * _ceil(geometry.batch, tile.block_images)


def columns_of_tiles(geometry: Geometry, tile: Tile) -> int:
    """Tiles side by side, over all channels and rows of a cell that blocks own apart."""
    vertical, horizontal = axes(geometry)
    count = _ceil(horizontal.cells, tile.lanes_w * tile.thread_columns)
    count *= _ceil(geometry.groups, tile.block_groups)
    count *= _ceil(geometry.out_channels_per_group, tile.block_channels // tile.block_groups)
    return count * (vertical.stride // tile.phases_h)


def build(
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool,
    weight_channels_last: bool,
    has_bias: bool,
    tile: Tile,
    repeat: int,
    why: str,
) -> Plan:
    """The plan that runs ``tile``, each block ``repeat`` times. Inputs: input, weight, bias. Output: the output."""
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    kernel = Kernel(
        "forward_narrow.cu",
        "forward_narrow",
        (
            ("Element", ELEMENT_TYPES[dtype]),
            ("Index", "int" if image * tile.block_images <= INT32_MAX else "long long"),
            ("IN_CHANNELS", geometry.in_channels),
            ("OUT_CHANNELS", geometry.out_channels),
            ("GROUPS", geometry.groups),
            ("HEIGHT", geometry.height),
            ("WIDTH", geometry.width),
            ("OUT_HEIGHT", geometry.out_height),
            ("OUT_WIDTH", geometry.out_width),
            ("KERNEL_H", geometry.kernel[0]),
            ("KERNEL_W", geometry.kernel[1]),
            ("STRIDE_H", geometry.stride[0]),
            ("STRIDE_W", geometry.stride[1]),
            ("PADDING_H", geometry.padding[0]),
            ("PADDING_W", geometry.padding[1]),
            ("DILATION_H", geometry.dilation[0]),
            ("DILATION_W", geometry.dilation[1]),
            ("CHANNELS_LAST", channels_last),
            ("WEIGHT_CHANNELS_LAST", weight_channels_last),
            ("HAS_BIAS", has_bias),
            *tile.constants,
        ),
    )
    launch = Launch(
        kernel,
        grid=columns_of_tiles(geometry, tile) * _ceil(row_tiles(geometry, tile), repeat),
        block=threads(geometry, tile),
        arguments=(input_(0), input_(1), input_(2), output(0), int64(geometry.batch), int64(repeat)),
        shared_bytes=shared_bytes(geometry, tile, channels_last),
    )
    return Plan(
        "narrow",
        why,
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(launch,) if geometry.batch else (),
    )
