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
    prefetch: bool
    unroll: int
    min_blocks: int

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return tuple((field.name.upper(), value) for field, value in zip(fields(self), astuple(self), strict=True))

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
    def span(self) -> int:
        """Inputs that a cell reads, less one."""
        offsets = [
            (phase + self.padding - k * self.dilation) // self.stride
            for phase in range(self.stride)
            for k in self.phase_taps(phase)
        ]
        return max(offsets) - min(offsets)


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


def input_tile(geometry: Geometry, tile: Tile) -> tuple[int, int, int]:
    """(channels, rows, columns) of the input that a block keeps of one image."""
    vertical, horizontal = axes(geometry)
    whole = tile.phases_h == vertical.stride
    rows = tile.lanes_h * tile.thread_rows + (vertical.span if whole else (vertical.taps - 1) * vertical.reach)
    return tile.block_groups * tile.chunk, rows, tile.lanes_w * tile.thread_columns + horizontal.span


def shared_bytes(geometry: Geometry, tile: Tile, channels_last: bool) -> int:
    """The kernel's static shared memory."""
    vertical, _ = axes(geometry)
    channels, rows, columns = input_tile(geometry, tile)
    values = tile.block_images * rows * columns * ((channels | 1) if channels_last else channels)
    vector = 4 if tile.thread_channels > 2 else tile.thread_channels
    tap = tile.lanes_c * tile.slices_c * _ceil(tile.thread_channels, vector) * vector
    if tile.phases_w != geometry.stride[1] and tap // vector % 2 == 0:
        tap += vector
    weight_rows = geometry.kernel[0] if tile.phases_h == vertical.stride else vertical.taps
    return 4 * (_ceil(values, 4) * 4 + tile.chunk * weight_rows * geometry.kernel[1] * tap)


def grid(geometry: Geometry, tile: Tile) -> int:
    vertical, horizontal = axes(geometry)
    blocks = _ceil(geometry.batch, tile.block_images)
    blocks *= _ceil(vertical.cells, tile.lanes_h * tile.thread_rows)
    blocks *= _ceil(horizontal.cells, tile.lanes_w * tile.thread_columns)
    blocks *= _ceil(geometry.groups, tile.block_groups)
    blocks *= _ceil(geometry.out_channels_per_group, tile.block_channels // tile.block_groups)
    return blocks * (vertical.stride // tile.phases_h)


def build(
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool,
    weight_channels_last: bool,
    has_bias: bool,
    tile: Tile,
    why: str,
) -> Plan:
    """The plan that runs ``tile``. Inputs: input, weight, bias. Output: the output."""
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
        grid=grid(geometry, tile),
        block=threads(geometry, tile),
        arguments=(input_(0), input_(1), input_(2), output(0), int64(geometry.batch)),
    )
    return Plan(
        "narrow",
        why,
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(launch,) if geometry.batch else (),
    )
