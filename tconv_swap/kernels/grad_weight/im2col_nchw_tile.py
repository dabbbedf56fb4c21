"""What a block of csrc/kernels/grad_weight/im2col_nchw.cu computes, and the tile that is expected to be the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    EXTRA_BYTES,
    PARTIAL_LIMIT_BYTES,
    PARTIAL_RATE,
    SLICE_CLOCKS,
    weight_bytes,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Multiplies that follow one another into the same sums: the multiplier truncates. Of 8 pixels each.
MOST_MULTIPLIES = 1024
#: Elements of a box along a dimension; steps from one to the next.
BOX_LIMIT, STEP_LIMIT = 256, 8
#: Columns of grad_output that a stage's pixels lie apart.
COLUMN_LIMIT = 512
#: Of a ring, at least and at most.
FEWEST_STAGES, MOST_STAGES_IN_RING = 2, 8
#: Warpgroups that multiply, each one's blocks of 64 rows, and columns: as registers allow.
_SHAPES = (
    *((2, 1, cols) for cols in (256, 192, 128, 96, 64)),
    *((2, 2, cols) for cols in (128, 96, 64)),
    *((2, blocks, 64) for blocks in (3, 4)),
    *((3, blocks, cols) for blocks, cols in ((1, 128), (1, 96), (2, 64), (1, 64))),
)
#: Bytes a clock that shared memory gives; clocks of a box's row, of a step of 64 rows for its words, and of a stage
#: beside its multiplies. With them the tiles that were measured come in that order but for 14 x 14 maps.
_SHARED_RATE, _ROW_CLOCKS, _WORDS_CLOCKS, _STAGE_CLOCKS = 128, 4.0, 12, 60


@dataclass(frozen=True, slots=True)
class Pixels:
    """Of the input, in a stage: ``images`` x ``rows`` x ``cols``, by ``box``; rows lie ``line`` pixels apart."""

    images: int
    rows: int
    cols: int
    line: int
    #: Whether boxes hold the columns of grad_output around the stage's pixels, of rows of any length.
    apart: bool = False

    @property
    def count(self) -> int:
        return self.images * self.rows * self.cols

    @property
    def box(self) -> int:
        """Pixels of a box: in rows of 128 bytes, if those of an image are more than half of it; of one row, if rows
        do not follow one another."""
        if self.apart:
            return next(box for box in (32, 16, 8) if self.cols % box == 0)
        whole = 32 if self.images == 1 and self.rows * self.cols > 16 else self.rows * self.cols
        return next(box for box in (32, 16, 8) if whole % box == 0)

    @property
    def boxes(self) -> int:
        return self.images * ceil_div(self.rows * self.cols, self.box)

    def stages(self, geometry: Geometry) -> int:
        of_images = ceil_div(geometry.height, self.rows) * ceil_div(geometry.width, self.cols)
        return ceil_div(geometry.batch, self.images) * of_images


def least_out_width(geometry: Geometry, pixels: Pixels) -> int:
    """Of outputs that stages of whole rows may have, without output padding; 0 where they may have any."""
    g = geometry
    if pixels.line != g.width or pixels.cols != g.width:
        return 0
    return g.out_width - g.output_padding[1]


def lies_as_lines(geometry: Geometry, pixels: Pixels) -> bool:
    """Whether boxes can bring the input from where it lies."""
    return pixels.line == geometry.width and geometry.height * geometry.width % 4 == 0


def out_line(geometry: Geometry) -> int:
    """Columns from one row of grad_output to the next: rows are multiples of 16 bytes."""
    return round_up(geometry.out_width, 4)


def pixels_of(geometry: Geometry) -> Iterator[Pixels]:
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
                yield Pixels(images, g.height, g.width, g.width)
    for rows in range(1, g.height):
        if rows * g.width % 8 == 0 and 16 <= rows * g.width <= 64 and (g.height % rows == 0 or nothing_below):
            yield Pixels(1, rows, g.width, g.width)
    for rows, cols in ((1, 64), (2, 32), (1, 32), (4, 16), (8, 8)):
        fits_below, fits_right = g.height % rows == 0 or nothing_below, g.width % cols == 0 or nothing_right
        if cols <= round_up(g.width, 8) and fits_below and fits_right and rows <= g.height:
            yield Pixels(1, rows, cols, round_up(g.width, cols), apart=True)
    for cols in (64, 56, 48, 40, 32, 24, 16):
        if cols <= round_up(g.width, 8) and (g.width % cols == 0 or nothing_right):
            yield Pixels(1, 1, cols, round_up(g.width, cols))


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
        return self.rows // geometry.kernel[1] // 16 * 16

    def input_bytes(self) -> int:
        return 4 * self.pixels.boxes * self.pixels.box * self.cols

    def output_rows(self, geometry: Geometry) -> int:
        """Rows that boxes of grad_output bring."""
        of_block = self.pixels.images * self.pixels.rows * self.chunk(geometry)
        return columns_of(geometry, self.pixels).blocks * of_block

    def stage_bytes(self, geometry: Geometry) -> int:
        block = columns_of(geometry, self.pixels).block
        return self.input_bytes() + 4 * block * self.output_rows(geometry)

    def ring(self, geometry: Geometry, device: Device) -> int:
        """Stages of it."""
        room = device.shared_memory_per_block - EXTRA_BYTES
        return min(MOST_STAGES_IN_RING, room // self.stage_bytes(geometry))

    def describe(self, geometry: Geometry) -> str:
        p = self.pixels
        return (
            f"{self.cols} channels x {geometry.kernel[1]} taps of {self.chunk(geometry)}, "
            f"{p.images} x {p.rows} x {p.cols} pixels, {self.slices} slices"
        )


def taps_together(geometry: Geometry) -> int:
    """Neighbouring taps whose words lie in different banks: a power of two that divides the stride."""
    g = geometry
    if g.dilation[1] % 2 == 0:
        return 1
    return max(taps for taps in (1, 2, 4, 8) if g.stride[1] % taps == 0 and taps <= g.kernel[1])


@dataclass(frozen=True, slots=True)
class Columns:
    """Of grad_output in a stage: ``blocks`` of ``block`` words, from ``left`` columns before the first pixel's on."""

    left: int
    block: int
    blocks: int
    #: All columns that there are.
    whole: bool


def columns_of(geometry: Geometry, pixels: Pixels) -> Columns:
    """What the taps reach and what the bias adds up. Boxes begin at multiples of 16 bytes."""
    g = geometry
    if pixels.cols >= g.width and not pixels.apart:
        block = next(block for block in (8, 16, 32) if block >= min(32, g.out_width))
        return Columns(0, block, ceil_div(g.out_width, block), whole=True)
    reach = (pixels.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] + 1 - g.padding[1]
    left = round_up(g.padding[1], 4)
    return Columns(left, 32, ceil_div(left + max(reach, pixels.cols * g.stride[1]), 32), whole=False)


def tiles_of(geometry: Geometry, tile: Tile) -> int:
    """All groups', of one slice."""
    g = geometry
    chunks = ceil_div(g.out_channels_per_group, tile.chunk(g))
    return ceil_div(g.in_channels_per_group, tile.cols) * chunks * g.kernel[0] * g.groups


def candidates(geometry: Geometry, device: Device) -> Iterator[Tile]:
    """Yields the tiles that fit, in one slice."""
    for pixels, (warpgroups, blocks, cols) in itertools.product(dict.fromkeys(pixels_of(geometry)), _SHAPES):
        tile = Tile(pixels, warpgroups, blocks, cols, 1)
        if fits(geometry, tile, device):
            yield tile


def fits(geometry: Geometry, tile: Tile, device: Device) -> bool:
    """Whether a block has room for a tile, which is no larger than there is work for."""
    g, pixels, chunk = geometry, tile.pixels, tile.chunk(geometry)
    if chunk == 0 or chunk > BOX_LIMIT:
        return False
    if chunk >= 2 * max(32, g.out_channels_per_group) or tile.cols >= 2 * max(64, g.in_channels_per_group):
        return False
    if (pixels.rows - 1) * g.stride[0] >= BOX_LIMIT or pixels.cols * g.stride[1] >= COLUMN_LIMIT:
        return False
    return (pixels.rows == 1 or g.stride[0] <= STEP_LIMIT) and tile.ring(g, device) >= FEWEST_STAGES


def in_slices(geometry: Geometry, tile: Tile, device: Device) -> Tile | None:
    """With the slices that are expected to be the fastest; None where sums as short as they have to be leave too
    many."""
    g, stages = geometry, tile.pixels.stages(geometry)
    most_slices = max(1, min(PARTIAL_LIMIT_BYTES // weight_bytes(g), stages // 4))
    least_slices = ceil_div(stages * tile.pixels.count // 8, MOST_MULTIPLIES)
    blocks = tiles_of(g, tile)
    found = {
        max(1, least_slices, min(most_slices, waves * device.multiprocessors // blocks))
        for waves in (1, 2, 3)
    }
    cut = [
        replace(tile, slices=slices)
        for slices in sorted(found)
        if slices == 1 or slices * weight_bytes(g) <= PARTIAL_LIMIT_BYTES
    ]
    return min(cut, key=lambda one: expected_clocks(g, one, device)) if cut else None


def expected_clocks(geometry: Geometry, tile: Tile, device: Device) -> float:
    """Roughly, of the product, of what adds up its slices, and of a copy of the input before it."""
    g, pixels = geometry, tile.pixels
    steps = pixels.count // 8 * tile.warpgroups * tile.blocks
    stage = _STAGE_CLOCKS + max(
        steps * (tile.cols * 0.55 + _WORDS_CLOCKS),
        steps * (tile.cols / 4 + 16) + tile.stage_bytes(g) / _SHARED_RATE,
        (pixels.boxes * tile.cols + tile.output_rows(g)) * _ROW_CLOCKS,
    )
    if tile.ring(g, device) < 3:
        stage *= 1.15
    if pixels.cols % 4:
        stage *= 1.2
    waves = ceil_div(tiles_of(g, tile) * tile.slices, device.multiprocessors)
    stages = ceil_div(pixels.stages(g), tile.slices)
    partial = weight_bytes(g) * (2 * tile.slices + 1 if tile.slices > 1 else 2) / PARTIAL_RATE
    copied = 0 if lies_as_lines(g, pixels) else g.in_channels * g.height * pixels.line
    return waves * (stages * stage + SLICE_CLOCKS) + partial + 8 * g.batch * copied / PARTIAL_RATE
