"""What a block of csrc/kernels/grad_weight/pixel_rows.cu computes, the expected time of a tile, and what the
kernels that leave float32 splits share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Limit of the partial sums; one copy of the gradient may exceed it.
PARTIAL_LIMIT_BYTES = 64 << 20
#: Pixels of a stage, rows of a tile.
STAGE_PIXELS, TILE_ROWS = 32, 128
#: Stages that are multiplied into the same sums: the tensor cores truncate their sums.
MAX_STAGES_PER_SUM = 256
#: Bytes of shared memory beside the stages: the barriers, and the alignment of the stages to 1024 bytes.
EXTRA_BYTES = 1024 + 256
#: The operand that two blocks of a cluster load for each other (MULTICAST of grad_weight/pixel_rows_layout.cuh).
NONE, INPUT, OUTPUT = 0, 1, 2

#: Bytes a clock that a multiprocessor gets from the L2; clocks of a split beside its stages.
L2_RATE, SPLIT_CLOCKS = 33, 4000
#: Bytes a clock of the whole GPU, of partial sums on their way to the L2 and back.
PARTIAL_RATE = 1500


@dataclass(frozen=True, slots=True)
class PixelRows:
    """How an image's pixels lie along k: as one row of ``pixels``.
    grad_output has a plane for every column of taps and phase of rows, which the taps read shifted by whole
    rows of the image; with ``im2col_rows`` it has a plane for every tap.

    Attributes:
        zero_rows: rows of zeros before each plane of grad_output.
        pixels: of an image of the input.
        box: pixels that lie side by side in shared memory: 8, 16 or 32.
    """

    im2col_rows: bool
    zero_rows: int
    pixels: int
    box: int

    def stages(self, batch: int) -> int:
        """Returns the stages of all images."""
        return ceil_div(batch * ceil_div(self.pixels, self.box) * self.box, STAGE_PIXELS)


def row_shifts(geometry: Geometry) -> list[int]:
    """Returns by how many whole rows each row of taps is shifted."""
    g = geometry
    return [(k * g.dilation[0] - g.padding[0]) // g.stride[0] for k in range(g.kernel[0])]


def zero_rows_of(geometry: Geometry) -> int:
    """Returns the rows of zeros before each plane that taps read shifted by whole rows."""
    return max(0, -min(row_shifts(geometry)))


def pixel_rows_with(geometry: Geometry, box: int) -> PixelRows:
    """Returns the rows of pixels with this box. Every tap has a plane where boxes, which begin at multiples of
    16 bytes, cannot begin at every row of the image."""
    im2col_rows = geometry.width % 4 != 0 and any(row_shifts(geometry))
    zero_rows = 0 if im2col_rows else zero_rows_of(geometry)
    return PixelRows(im2col_rows, zero_rows, geometry.height * geometry.width, box)


def pixel_rows_of(geometry: Geometry) -> PixelRows:
    """Returns the rows of pixels that cost the least at this size."""
    pixels = geometry.height * geometry.width

    def used(box: int) -> float:
        return pixels / round_up(pixels, box)

    best = max(used(box) for box in (8, 16, 32))
    box = next(box for box in (32, 16, 8) if used(box) >= 0.85 * best)
    return pixel_rows_with(geometry, box)


@dataclass(frozen=True, slots=True)
class Tile:
    """128 rows x ``cols`` columns: input channels by chunks of ``chunk`` output channels, each chunk of one
    tap.
    Attributes:
        swapped: the rows are output channels, the columns input channels.
        multicast: the operand that two blocks of a cluster load for each other: NONE, INPUT or OUTPUT.
        splits: of the pixels.
    """

    cols: int
    swapped: bool
    chunk: int
    multicast: int
    splits: int

    @property
    def input_side(self) -> int:
        """Returns the input channels of the tile."""
        return self.cols if self.swapped else TILE_ROWS

    @property
    def output_side(self) -> int:
        """Returns the output channels of the tile, counted for each tap."""
        return TILE_ROWS if self.swapped else self.cols

    @property
    def input_box_channels(self) -> int:
        """Returns the channels of a box of the input."""
        return self.input_side // (2 if self.multicast == INPUT else 1)

    @property
    def output_box_channels(self) -> int:
        """Returns the channels of a box of grad_output."""
        return gcd(self.chunk, self.output_side // (2 if self.multicast == OUTPUT else 1))

    @property
    def stage_bytes(self) -> int:
        """Returns the shared memory of a stage."""
        return (TILE_ROWS + self.cols) * STAGE_PIXELS * 4

    def __str__(self) -> str:
        shared = ("", ", the input multicast to two blocks", ", grad_output multicast to two blocks")[
            self.multicast
        ]
        return (
            f"{self.input_side} channels x {self.output_side // self.chunk} taps of {self.chunk}{shared}, "
            f"{self.splits} splits"
        )


def tiles_of(geometry: Geometry, tile: Tile) -> tuple[int, int]:
    """Returns the tiles of a group along input channels, and along taps and output channels."""
    chunks = geometry.taps * ceil_div(geometry.out_channels_per_group, tile.chunk)
    return (
        ceil_div(geometry.in_channels_per_group, tile.input_side),
        ceil_div(chunks, tile.output_side // tile.chunk),
    )


def blocks_of(geometry: Geometry, tile: Tile) -> int:
    """Returns the blocks of all groups and splits."""
    along_input, along_output = tiles_of(geometry, tile)
    return along_input * along_output * geometry.groups * tile.splits


def weight_bytes(geometry: Geometry) -> int:
    """Returns the bytes of the gradient in float32."""
    return 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps


def candidates(geometry: Geometry) -> Iterator[Tile]:
    """Yields the tiles that are compared, with one split."""
    for cols, swapped, chunk, multicast in itertools.product(
        (256, 192, 128), (False, True), (256, 128, 64), (NONE, INPUT, OUTPUT)
    ):
        one = Tile(cols, swapped, chunk, multicast, 1)
        if one.output_side % chunk or chunk >= 2 * max(64, geometry.out_channels_per_group):
            continue
        along_input, along_output = tiles_of(geometry, one)
        if (multicast == INPUT and along_output % 2) or (multicast == OUTPUT and along_input % 2):
            continue
        yield one


def with_splits(geometry: Geometry, stages: int, tile: Tile, device: Device, copied: int) -> Tile | None:
    """Returns the tile with the number of splits that is expected to be the fastest; None where more splits are needed,
    because the tensor cores truncate long sums, than the workspace holds.
    Args:
        stages: of all pixels.
        copied: bytes of the copies in the workspace beside the sums.
    """
    max_splits = max(1, min(PARTIAL_LIMIT_BYTES // weight_bytes(geometry), stages // 4))
    min_splits = ceil_div(stages, MAX_STAGES_PER_SUM)
    max_bytes = max(PARTIAL_LIMIT_BYTES, MAX_COPY_BYTES - copied)
    if min_splits > 1 and min_splits * weight_bytes(geometry) > max_bytes:
        return None
    blocks = blocks_of(geometry, tile)
    found = {
        max(1, min_splits, min(max_splits, waves * device.multiprocessors // blocks)) for waves in (1, 2, 3)
    }
    cut = [replace(tile, splits=splits) for splits in sorted(found)]
    return min(cut, key=lambda one: expected_clocks(geometry, stages, one, device))


def expected_clocks(geometry: Geometry, stages: int, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of the product and of the reduction of its splits."""
    own = tile.stage_bytes
    if tile.multicast == INPUT:
        own -= tile.input_side * STAGE_PIXELS * 2
    elif tile.multicast == OUTPUT:
        own -= tile.output_side * STAGE_PIXELS * 2
    stage = max(tile.cols * 4 * 1.1, own / L2_RATE, tile.stage_bytes / 64)
    waves = ceil_div(blocks_of(geometry, tile), device.multiprocessors)
    stages = ceil_div(stages, tile.splits)
    partial = weight_bytes(geometry) * (2 * tile.splits + 1) / PARTIAL_RATE
    return waves * (stages * stage + SPLIT_CLOCKS) + partial
