"""What a block of csrc/kernels/grad_weight/im2col_nchw.cu computes, and the expected time of a tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_STEP, SHARED_BYTES_PER_CLOCK
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    EXTRA_BYTES,
    PARTIAL_LIMIT_BYTES,
    PARTIAL_RATE,
    SPLIT_CLOCKS,
    weight_bytes,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Multiplies, of 8 pixels each, into the same sums: the tensor cores truncate their sums.
MAX_MULTIPLIES = 1024
#: Columns of grad_output that a stage's pixels may span: the bits that the kernel packs them into.
COLUMN_LIMIT = 512
#: Stages of the ring.
MIN_STAGES, MAX_STAGES = 2, 8
#: Warpgroups that multiply, tiles of 64 rows of each, and input channels, as registers allow.
_SHAPES = (
    *((2, 1, cols) for cols in (256, 192, 128, 96, 64)),
    *((2, 2, cols) for cols in (128, 96, 64)),
    *((2, m_tiles, 64) for m_tiles in (3, 4)),
    *((3, m_tiles, cols) for m_tiles, cols in ((1, 128), (1, 96), (2, 64), (1, 64))),
)
#: The most registers of a thread that hold accumulators and addresses of fragments in stages with a halo, by the number
#: of warpgroups: with more the compiler spills 24 to 280 bytes, which took 1.3 times as long.
MAX_REGISTERS = {2: 160, 3: 112}
#: Clocks of a box's row, of loading a step's A fragments of 64 rows, and of a
#: stage beside its multiplies. With them the measured tiles are ordered correctly except for 14 x 14 maps.
_ROW_CLOCKS, _FRAGMENT_CLOCKS, _STAGE_CLOCKS = 4.0, 12, 60


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixels of the input in a stage: ``images`` x ``rows`` x ``cols``, loaded by boxes.
    Attributes:
        row_pitch: pixels from one row of the input to the next.
        has_halo: boxes of grad_output hold the columns around the stage's pixels, in rows of any length.
    """

    images: int
    rows: int
    cols: int
    row_pitch: int
    has_halo: bool = False

    @property
    def count(self) -> int:
        """Returns how many pixels a stage has."""
        return self.images * self.rows * self.cols

    @property
    def box(self) -> int:
        """Returns the pixels of a box: rows of 128 bytes if an image has more than half of that; pixels of one
        row if rows are not contiguous."""
        if self.has_halo:
            return next(box for box in (32, 16, 8) if self.cols % box == 0)
        pixels = 32 if self.images == 1 and self.rows * self.cols > 16 else self.rows * self.cols
        return next(box for box in (32, 16, 8) if pixels % box == 0)

    @property
    def boxes(self) -> int:
        """Returns the boxes of a stage."""
        return self.images * ceil_div(self.rows * self.cols, self.box)

    def stages(self, geometry: Geometry) -> int:
        """Returns the stages of all images."""
        in_image = ceil_div(geometry.height, self.rows) * ceil_div(geometry.width, self.cols)
        return ceil_div(geometry.batch, self.images) * in_image


def input_read_in_place(geometry: Geometry, pixels: Pixels) -> bool:
    """Returns whether boxes can load the input without a copy of it."""
    return pixels.row_pitch == geometry.width and geometry.height * geometry.width % 4 == 0


def out_row_pitch(geometry: Geometry) -> int:
    """Returns the columns from one row of grad_output to the next: rows are multiples of 16 bytes."""
    return round_up(geometry.out_width, 4)


def pixels_of(geometry: Geometry) -> Iterator[Pixels]:
    """Yields the stages that cover the images.
    A stage may reach beyond an image's edge only where grad_output ends too. Otherwise grad_output might be infinite
    there, and its product with the zeros beyond the input would be NaN.
    """
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
    # Narrower rows, copied to the pitch of such stages: where boxes hold as many columns, one kernel computes both.
    for cols in (8, 16, 32):
        for rows in range(1, g.height + 1) if cols // 2 < g.width < cols and nothing_right else ():
            if 16 <= rows * cols <= 64 and (g.height % rows == 0 or nothing_below):
                yield Pixels(1, rows, cols, cols)
    for rows, cols in ((1, 64), (2, 32), (1, 32), (4, 16), (8, 8)):
        fits_below, fits_right = g.height % rows == 0 or nothing_below, g.width % cols == 0 or nothing_right
        if cols <= round_up(g.width, 8) and fits_below and fits_right and rows <= g.height:
            yield Pixels(1, rows, cols, round_up(g.width, cols), has_halo=True)
    for cols in (64, 56, 48, 40, 32, 24, 16):
        if cols <= round_up(g.width, 8) and (g.width % cols == 0 or nothing_right):
            yield Pixels(1, 1, cols, round_up(g.width, cols))


@dataclass(frozen=True, slots=True)
class Tile:
    """A row of taps x ``tile_co`` output channels by ``cols`` input channels.
    Attributes:
        warpgroups: that multiply.
        m_tiles: tiles of 64 rows of a warpgroup.
        splits: of the pixels.
    """

    pixels: Pixels
    warpgroups: int
    m_tiles: int
    cols: int
    splits: int

    @property
    def rows(self) -> int:
        """Returns the rows (taps times output channels) of the product."""
        return self.warpgroups * self.m_tiles * 64

    def tile_co(self, geometry: Geometry) -> int:
        """Returns the output channels of each tap, a multiple of 16."""
        return self.rows // geometry.kernel[1] // 16 * 16

    def input_bytes(self) -> int:
        """Returns the bytes of the input in a stage."""
        return 4 * self.pixels.boxes * self.pixels.box * self.cols

    def output_rows(self, geometry: Geometry) -> int:
        """Returns the rows that boxes of grad_output load."""
        rows_of_box = self.pixels.images * self.pixels.rows * self.tile_co(geometry)
        return columns_of(geometry, self.pixels).boxes * rows_of_box

    def stage_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory of a stage."""
        box_cols = columns_of(geometry, self.pixels).box_cols
        return self.input_bytes() + 4 * box_cols * self.output_rows(geometry)

    def ring(self, geometry: Geometry, device: Device) -> int:
        """Returns how many stages the ring has."""
        room = device.shared_memory_per_block - EXTRA_BYTES
        return min(MAX_STAGES, room // self.stage_bytes(geometry))

    def describe(self, geometry: Geometry) -> str:
        """Returns the tile in words."""
        p = self.pixels
        return (
            f"{self.cols} channels x {geometry.kernel[1]} taps of {self.tile_co(geometry)}, "
            f"{p.images} x {p.rows} x {p.cols} pixels, {self.splits} splits"
        )


def fragment_taps(geometry: Geometry) -> int:
    """Returns how many neighbouring taps share 16 rows of the product without bank conflicts: a power of two
    that divides the stride."""
    g = geometry
    if g.dilation[1] % 2 == 0:
        return 1
    return max(taps for taps in (1, 2, 4, 8) if g.stride[1] % taps == 0 and taps <= g.kernel[1])


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of grad_output in a stage.
    Attributes:
        left_halo: columns before the first pixel's.
        box_cols: columns of a box.
        boxes: side by side.
        whole: the boxes hold all columns that there are.
    """

    left_halo: int
    box_cols: int
    boxes: int
    whole: bool


def columns_of(geometry: Geometry, pixels: Pixels) -> Columns:
    """Returns the columns that the taps read and the bias adds up; boxes begin at multiples of 16 bytes."""
    g = geometry
    if pixels.cols >= g.width and not pixels.has_halo:
        box_cols = next(cols for cols in (8, 16, 32) if cols >= min(32, g.out_width))
        return Columns(0, box_cols, ceil_div(g.out_width, box_cols), whole=True)
    reach = (pixels.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] + 1 - g.padding[1]
    left_halo = round_up(g.padding[1], 4)
    return Columns(
        left_halo, 32, ceil_div(left_halo + max(reach, pixels.cols * g.stride[1]), 32), whole=False
    )


def tiles_of(geometry: Geometry, tile: Tile) -> int:
    """Returns the blocks of one split, of all groups."""
    g = geometry
    co_tiles = ceil_div(g.out_channels_per_group, tile.tile_co(g))
    return ceil_div(g.in_channels_per_group, tile.cols) * co_tiles * g.kernel[0] * g.groups


def candidates(geometry: Geometry, device: Device) -> Iterator[Tile]:
    """Yields the tiles that fit, with one split."""
    for pixels, (warpgroups, m_tiles, cols) in itertools.product(dict.fromkeys(pixels_of(geometry)), _SHAPES):
        tile = Tile(pixels, warpgroups, m_tiles, cols, 1)
        if fits(geometry, tile, device):
            yield tile


def fits(geometry: Geometry, tile: Tile, device: Device) -> bool:
    """Returns whether a block has room for a tile that is no larger than its work."""
    g, pixels, tile_co = geometry, tile.pixels, tile.tile_co(geometry)
    if tile_co == 0 or tile_co > MAX_BOX:
        return False
    if tile_co >= 2 * max(32, g.out_channels_per_group) or tile.cols >= 2 * max(64, g.in_channels_per_group):
        return False
    registers = tile.m_tiles * (tile.cols + pixels.count) // 2
    if pixels.has_halo and registers > MAX_REGISTERS[tile.warpgroups]:
        return False
    if (pixels.rows - 1) * g.stride[0] >= MAX_BOX or pixels.cols * g.stride[1] >= COLUMN_LIMIT:
        return False
    return (pixels.rows == 1 or g.stride[0] <= MAX_STEP) and tile.ring(g, device) >= MIN_STAGES


def with_splits(geometry: Geometry, tile: Tile, device: Device) -> Tile | None:
    """Returns the tile with the number of splits that is expected to be the fastest; None where more splits are needed,
    because the tensor cores truncate long sums, than the workspace holds."""
    g, stages = geometry, tile.pixels.stages(geometry)
    max_splits = max(1, min(PARTIAL_LIMIT_BYTES // weight_bytes(g), stages // 4))
    min_splits = ceil_div(stages * tile.pixels.count // 8, MAX_MULTIPLIES)
    blocks = tiles_of(g, tile)
    found = {
        max(1, min_splits, min(max_splits, waves * device.multiprocessors // blocks)) for waves in (1, 2, 3)
    }
    cut = [
        replace(tile, splits=splits)
        for splits in sorted(found)
        if splits == 1 or splits * weight_bytes(g) <= PARTIAL_LIMIT_BYTES
    ]
    return min(cut, key=lambda one: expected_clocks(g, one, device)) if cut else None


def expected_clocks(geometry: Geometry, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of the product, of the reduction of its splits, and of a copy of the input
    before it."""
    g, pixels = geometry, tile.pixels
    steps = pixels.count // 8 * tile.warpgroups * tile.m_tiles
    stage = _STAGE_CLOCKS + max(
        steps * (tile.cols * 0.55 + _FRAGMENT_CLOCKS),
        steps * (tile.cols / 4 + 16) + tile.stage_bytes(g) / SHARED_BYTES_PER_CLOCK,
        (pixels.boxes * tile.cols + tile.output_rows(g)) * _ROW_CLOCKS,
    )
    if tile.ring(g, device) < 3:
        stage *= 1.15
    if pixels.cols % 4:
        stage *= 1.2
    waves = ceil_div(tiles_of(g, tile) * tile.splits, device.multiprocessors)
    stages = ceil_div(pixels.stages(g), tile.splits)
    partial = weight_bytes(g) * (2 * tile.splits + 1 if tile.splits > 1 else 2) / PARTIAL_RATE
    copied = 0 if input_read_in_place(g, pixels) else g.in_channels * g.height * pixels.row_pitch
    return waves * (stages * stage + SPLIT_CLOCKS) + partial + 8 * g.batch * copied / PARTIAL_RATE
