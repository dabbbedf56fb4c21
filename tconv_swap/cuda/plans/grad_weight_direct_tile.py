"""What a block of csrc/kernels/grad_weight_direct.cu computes, and the tile that is expected to be the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tconv_swap.cuda.plans.grad_weight_rows_tile import (
    EXTRA_BYTES,
    PARTIAL_LIMIT_BYTES,
    PARTIAL_RATE,
    SLICE_CLOCKS,
    ceil_div,
    weight_bytes,
)
from tconv_swap.cuda.problem import Device
from tconv_swap.geometry import Geometry

#: Multiplies that follow one another into the same sums: the multiplier truncates. Of 8 pixels each.
MOST_MULTIPLIES = 1024
#: Elements of a box along a dimension; steps from one to the next.
BOX_LIMIT, STEP_LIMIT = 256, 8
#: Columns of grad_output that a stage's pixels lie apart.
COLUMN_LIMIT = 512
#: Of a ring, at least and at most.
FEWEST_STAGES, MOST_STAGES_IN_RING = 2, 8
#: Of inputs that wait to be turned (channels_last).
RAW_STAGES = 2
#: Warpgroups that multiply, each one's blocks of 64 rows, and columns: as registers allow.
_SHAPES = (
    *((2, 1, cols) for cols in (256, 192, 128, 96, 64)),
    *((2, 2, cols) for cols in (128, 96, 64)),
    *((2, blocks, 64) for blocks in (3, 4)),
    *((3, blocks, cols) for blocks, cols in ((1, 128), (1, 96), (2, 64), (1, 64))),
)
#: Bytes a clock that shared memory gives; clocks that a row of a box takes, and a stage beside its multiplies.
_SHARED_RATE, _ROW_CLOCKS, _STAGE_CLOCKS = 128, 4.0, 60


@dataclass(frozen=True, slots=True)
class Pixels:
    """Of the input, in a stage: ``images`` x ``rows`` x ``cols``, by ``box``; rows lie ``line`` pixels apart (NCHW)."""

    images: int
    rows: int
    cols: int
    line: int
    channels_last: bool = False

    @property
    def count(self) -> int:
        return self.images * self.rows * self.cols

    @property
    def box(self) -> int:
        """Pixels of a box: in rows of 128 bytes, if those of an image (NCHW) are more than half of it."""
        own = self.count if self.channels_last else self.rows * self.cols
        if own > 16 and (self.images == 1 or self.channels_last):
            return 32
        return next(box for box in (32, 16, 8) if own % box == 0)

    @property
    def boxes(self) -> int:
        if self.channels_last:
            return ceil_div(self.count, self.box)
        return self.images * ceil_div(self.rows * self.cols, self.box)

    def stages(self, geometry: Geometry) -> int:
        of_images = ceil_div(geometry.height, self.rows) * ceil_div(geometry.width, self.cols)
        return ceil_div(geometry.batch, self.images) * of_images


def lies_as_lines(geometry: Geometry, pixels: Pixels) -> bool:
    """Whether boxes can bring the input from where it lies."""
    if pixels.channels_last:
        return True
    return pixels.line == geometry.width and geometry.height * geometry.width % 4 == 0


def out_line(geometry: Geometry) -> int:
    """Columns from one row of grad_output to the next: rows are multiples of 16 bytes."""
    return ceil_div(geometry.out_width, 4) * 4


def pixels_of(geometry: Geometry, channels_last: bool) -> Iterator[Pixels]:
    """Stages that tile the images, or reach over their edge only where grad_output ends too (it might be infinite, and
    what lies beside it are the input's zeros)."""
    g = geometry
    size = g.height * g.width
    nothing_below, nothing_right = (
        stride * inside - padding >= out
        for stride, inside, padding, out in zip(
            g.stride, (g.height, g.width), g.padding, (g.out_height, g.out_width), strict=True
        )
    )
    if size % 8 == 0:
        for images in (1, 2, 4):
            if 16 <= images * size <= 64 and images <= g.batch:
                yield Pixels(images, g.height, g.width, g.width, channels_last)
    # In channels_last rows need not follow one another: eights, or as they are.
    eights = ceil_div(g.width, 8) * 8
    for cols in {g.width, eights} if channels_last and nothing_right else {g.width}:
        for rows in range(1, g.height):
            if rows * cols % 8 == 0 and 16 <= rows * cols <= 64 and (g.height % rows == 0 or nothing_below):
                yield Pixels(1, rows, cols, g.width, channels_last)
    for cols in (64, 56, 48, 40, 32, 24, 16):
        if cols <= eights and (g.width % cols == 0 or nothing_right):
            yield Pixels(
                1, 1, cols, g.width if channels_last else ceil_div(g.width, cols) * cols, channels_last
            )


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of taps x ``chunk`` output channels by ``cols`` input channels."""

    pixels: Pixels
    warpgroups: int
    blocks: int
    cols: int
    slices: int

    @property
    def rows(self) -> int:
        return self.warpgroups * self.blocks * 64

    def chunk(self, geometry: Geometry) -> int:
        unit = 32 if self.pixels.channels_last else 16
        return self.rows // geometry.kernel[1] // unit * unit

    def input_bytes(self) -> int:
        return 4 * self.pixels.boxes * self.pixels.box * self.cols

    def output_bytes(self, geometry: Geometry) -> int:
        columns = columns_of(geometry, self.pixels)
        rows = self.pixels.images * self.pixels.rows * self.chunk(geometry)
        return 4 * columns.blocks * columns.block * rows

    def stage_bytes(self, geometry: Geometry) -> int:
        return self.input_bytes() + self.output_bytes(geometry)

    def rows_of_boxes(self, geometry: Geometry) -> int:
        """That the copy engine brings for a stage."""
        if self.pixels.channels_last:
            return (4 * self.pixels.count * self.cols + self.output_bytes(geometry)) // 128
        row = 4 * columns_of(geometry, self.pixels).block
        return self.pixels.boxes * self.cols + self.output_bytes(geometry) // row

    @property
    def raw_bytes(self) -> int:
        """Of the inputs that wait to be turned."""
        return RAW_STAGES * 4 * self.pixels.count * self.cols if self.pixels.channels_last else 0

    def ring(self, geometry: Geometry, device: Device) -> int:
        """Stages of it."""
        room = device.shared_memory_per_block - EXTRA_BYTES - self.raw_bytes
        return min(MOST_STAGES_IN_RING, room // self.stage_bytes(geometry))

    def describe(self, geometry: Geometry) -> str:
        p = self.pixels
        return (
            f"{self.cols} channels x {geometry.kernel[1]} taps of {self.chunk(geometry)}, "
            f"{p.images} x {p.rows} x {p.cols} pixels, {self.slices} slices"
        )


def taps_together(geometry: Geometry, channels_last: bool) -> int:
    """Neighbouring taps whose words lie in different banks: a power of two that divides the stride."""
    g = geometry
    if channels_last or g.dilation[1] % 2 == 0:
        return 1
    return max(taps for taps in (1, 2, 4, 8) if g.stride[1] % taps == 0 and taps <= g.kernel[1])


@dataclass(frozen=True, slots=True)
class Columns:
    """Of grad_output in a stage: ``blocks`` of ``block``, from ``left`` columns before the first pixel's on."""

    left: int
    block: int
    blocks: int
    #: All columns that there are.
    whole: bool


def columns_of(geometry: Geometry, pixels: Pixels) -> Columns:
    """What the taps reach and what the bias adds up. In NCHW boxes begin at multiples of 16 bytes."""
    g = geometry
    if pixels.cols >= g.width:
        if pixels.channels_last:
            return Columns(0, ceil_div(g.out_width, 8) * 8, 1, whole=True)
        block = next(block for block in (8, 16, 32) if block >= min(32, g.out_width))
        return Columns(0, block, ceil_div(g.out_width, block), whole=True)
    reach = (pixels.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] + 1 - g.padding[1]
    reach = max(reach, pixels.cols * g.stride[1])
    if pixels.channels_last:
        return Columns(g.padding[1], ceil_div(g.padding[1] + reach, 8) * 8, 1, whole=False)
    left = ceil_div(g.padding[1], 4) * 4
    return Columns(left, 32, ceil_div(left + reach, 32), whole=False)


def tiles_of(geometry: Geometry, tile: Tile) -> int:
    """All groups', of one slice."""
    g = geometry
    chunks = ceil_div(g.out_channels_per_group, tile.chunk(g))
    return ceil_div(g.in_channels_per_group, tile.cols) * chunks * g.kernel[0] * g.groups


def candidates(geometry: Geometry, channels_last: bool, device: Device) -> Iterator[Tile]:
    """All tiles worth a thought."""
    g = geometry
    stages_of_pixels = dict.fromkeys(pixels_of(g, channels_last))
    for pixels, (warpgroups, blocks, cols) in itertools.product(stages_of_pixels, _SHAPES):
        one = Tile(pixels, warpgroups, blocks, cols, 1)
        chunk = one.chunk(g)
        if chunk == 0 or chunk > BOX_LIMIT or columns_of(g, pixels).block > BOX_LIMIT:
            continue
        if chunk >= 2 * max(32, g.out_channels_per_group) or cols >= 2 * max(64, g.in_channels_per_group):
            continue
        if (pixels.rows - 1) * g.stride[0] >= BOX_LIMIT or pixels.cols * g.stride[1] >= COLUMN_LIMIT:
            continue
        if (pixels.rows > 1 and g.stride[0] > STEP_LIMIT) or one.ring(g, device) < FEWEST_STAGES:
            continue
        stages = pixels.stages(g)
        most_slices = max(1, min(PARTIAL_LIMIT_BYTES // weight_bytes(g), stages // 4))
        least_slices = ceil_div(stages * pixels.count // 8, MOST_MULTIPLIES)
        blocks_of_slice = tiles_of(g, one)
        found = set()
        for waves in (1, 2, 3):
            slices = max(least_slices, min(most_slices, waves * device.multiprocessors // blocks_of_slice))
            found.add(max(1, slices))
        for slices in sorted(found):
            yield Tile(pixels, warpgroups, blocks, cols, slices)


def expected_clocks(geometry: Geometry, tile: Tile, device: Device) -> float:
    """Roughly, of the product, of what adds up its slices, and of a copy of the input before it."""
    g, pixels = geometry, tile.pixels
    steps = pixels.count // 8 * tile.warpgroups * tile.blocks
    stage = _STAGE_CLOCKS + max(
        steps * tile.cols / 2 * 1.1,
        steps * (tile.cols / 4 + 16) + tile.stage_bytes(g) / _SHARED_RATE,
        tile.rows_of_boxes(g) * _ROW_CLOCKS,
    )
    if tile.ring(g, device) < 3:
        stage *= 1.15
    waves = ceil_div(tiles_of(g, tile) * tile.slices, device.multiprocessors)
    stages = ceil_div(pixels.stages(g), tile.slices)
    partial = weight_bytes(g) * (2 * tile.slices + 1 if tile.slices > 1 else 2) / PARTIAL_RATE
    copied = 0 if lies_as_lines(g, pixels) else g.in_channels * g.height * pixels.line
    return waves * (stages * stage + SLICE_CLOCKS) + partial + 8 * g.batch * copied / PARTIAL_RATE
