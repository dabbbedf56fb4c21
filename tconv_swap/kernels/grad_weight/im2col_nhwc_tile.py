"""What a block of csrc/kernels/grad_weight/im2col_nhwc.cu computes. The pixels of a tile's stages and its splits are
given by a launch, everything else is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_BOX
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Pixels of a stage; channels of a box: rows of 128 bytes.
STAGE_PIXELS, BOX_CHANNELS = 32, 32
#: Stages of the ring.
MIN_STAGES, MAX_STAGES = 3, 8
#: Stages that are multiplied into the same sums: the tensor cores truncate their sums.
MAX_STAGES_PER_SUM = 256
#: Bytes of shared memory beside the stages: barriers, and the alignment of the stages.
FIXED_BYTES = 1024 + 1024
#: Warpgroups that multiply, each 128 rows, and input channels, as registers allow.
_SHAPES = ((2, 128), (2, 96), (2, 64), (3, 96), (3, 64))


class Pixels(NamedTuple):
    """The 32 pixels of the input in a stage: ``images`` x ``rows`` x ``cols``."""

    images: int
    rows: int
    cols: int


#: Stands for the pixels of a kernel, which has any.
ANY = Pixels(1, 1, STAGE_PIXELS)


@dataclass(frozen=True, slots=True)
class Tile:
    """``taps`` x ``co_boxes`` x 32 output channels by ``cols`` input channels.
    Attributes:
        box_per_tap_col: each column of taps has a box of its own, so that no tap is shifted within a box.
        warpgroups: that multiply.
        splits: of the pixels.
        cluster: splits that a cluster of blocks adds up, 1 or 2.
    """

    pixels: Pixels
    taps: tuple[int, int]
    co_boxes: int
    box_per_tap_col: bool
    warpgroups: int
    cols: int
    splits: int
    cluster: int = 1

    @property
    def copies(self) -> int:
        """Returns the partial sums of the gradient that are left to be reduced."""
        return self.splits // self.cluster

    def shifts(self, geometry: Geometry) -> list[int]:
        """Returns for each column of taps how many columns after the first tap of its box it reads, in steps of
        the stride."""
        stride, dilation = geometry.stride[1], geometry.dilation[1]
        first_taps = self._first_taps(geometry)
        return [(k - first) * dilation // stride for k, first in enumerate(first_taps)]

    def _first_taps(self, geometry: Geometry) -> Sequence[int]:
        """Returns for each column of taps the first one that reads the same box."""
        if self.box_per_tap_col:
            return range(self.taps[1])
        return _first_taps(self.taps[1], geometry.stride[1], geometry.dilation[1])

    def pitch(self, geometry: Geometry) -> int:
        """Returns the columns of grad_output in a box."""
        return self.pixels.cols + (0 if self.box_per_tap_col else max(self.shifts(geometry)))

    def box_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes that a box of grad_output loads."""
        return self.pixels.images * self.pixels.rows * self.pitch(geometry) * BOX_CHANNELS * 4

    def boxes(self, geometry: Geometry) -> int:
        """Returns the boxes of grad_output in a stage."""
        return self.taps[0] * len(set(self._first_taps(geometry))) * self.co_boxes

    @property
    def input_bytes(self) -> int:
        """Returns the bytes of the input in a stage."""
        return STAGE_PIXELS * self.cols * 4

    def copied_bytes(self, geometry: Geometry) -> int:
        """Returns the bytes that are loaded for a stage."""
        return self.input_bytes + self.boxes(geometry) * self.box_bytes(geometry)

    def stage_bytes(self, geometry: Geometry) -> int:
        """Returns the shared memory of a stage."""
        return self.input_bytes + self.boxes(geometry) * round_up(self.box_bytes(geometry), 1024)

    def ring(self, geometry: Geometry, device: Device) -> int:
        """Returns how many stages the ring has."""
        room = device.shared_memory_per_block - FIXED_BYTES
        return min(MAX_STAGES, room // self.stage_bytes(geometry))

    def __str__(self) -> str:
        p = self.pixels
        return (
            f"{self.cols} channels x {self.taps[0]} x {self.taps[1]} taps of {self.co_boxes * BOX_CHANNELS}, "
            f"{p.images} x {p.rows} x {p.cols} pixels"
            f"{', a box per tap column' if self.box_per_tap_col else ''}, {self.splits} splits"
            f"{', reduced in pairs' if self.cluster == 2 else ''}"
        )


@lru_cache(maxsize=1024)
def _first_taps(taps: int, stride: int, dilation: int) -> tuple[int, ...]:
    return tuple(
        next(first for first in range(k + 1) if (k - first) * dilation % stride == 0) for k in range(taps)
    )


def rows_are_contiguous(geometry: Geometry) -> bool:
    """Returns whether the rows of all images follow one another, in both tensors, as the rows of one image do."""
    g = geometry
    reach = (g.kernel[0] - 1) * g.dilation[0] + 1
    return g.padding[0] == 0 and g.out_height == g.stride[0] * g.height and reach <= g.stride[0]


@lru_cache(maxsize=1)
def every_pixels() -> tuple[Pixels, ...]:
    """Returns the pixels that a stage may have; of those that cover a map equally well the first are the best."""
    sides = [1 << bits for bits in range(STAGE_PIXELS.bit_length())]
    return tuple(
        Pixels(STAGE_PIXELS // (cols * rows), rows, cols)
        for cols, rows in itertools.product(reversed(sides), reversed(sides))
        if cols * rows <= STAGE_PIXELS
    )


def covers(geometry: Geometry, pixels: Pixels) -> bool:
    """Returns whether stages of these pixels may cover the images: rows that are contiguous are those of one image."""
    return pixels.images == 1 or not rows_are_contiguous(geometry)


def stages_of(geometry: Geometry, pixels: Pixels) -> int:
    """Returns the stages of all images."""
    g, p = geometry, pixels
    across = ceil_div(g.width, p.cols)
    if rows_are_contiguous(g):
        return ceil_div(g.batch * g.height, p.rows) * across
    return ceil_div(g.batch, p.images) * ceil_div(g.height, p.rows) * across


@lru_cache(maxsize=256)
def stages_of_choices(geometry: Geometry) -> Mapping[Pixels, int]:
    """Returns the stages of all images, for all pixels whose stages may cover them."""
    return {pixels: stages_of(geometry, pixels) for pixels in every_pixels() if covers(geometry, pixels)}


def tiles_of(geometry: Geometry, tile: Tile) -> int:
    """Returns the blocks of one split, of all groups."""
    g = geometry
    return (
        ceil_div(g.in_channels_per_group, tile.cols)
        * ceil_div(g.out_channels_per_group, tile.co_boxes * BOX_CHANNELS)
        * tap_tiles(g, tile)
        * g.groups
    )


def tap_tiles(geometry: Geometry, tile: Tile) -> int:
    """Returns into how many tiles the taps are cut."""
    return prod(map(ceil_div, geometry.kernel, tile.taps))


def kernels(geometry: Geometry) -> Iterator[Tile]:
    """Yields the kernels that a layer may have: tiles whose stages have ``ANY`` pixels, with one split."""
    g = geometry
    max_co_boxes = ceil_div(g.out_channels_per_group, BOX_CHANNELS)
    for (warpgroups, cols), rows, columns in itertools.product(
        _SHAPES, range(1, g.kernel[0] + 1), range(1, g.kernel[1] + 1)
    ):
        co_boxes = min(max_co_boxes, 4 * warpgroups // (rows * columns))
        if 2 * rows * columns * co_boxes <= 4 * warpgroups or cols >= 2 * max(32, g.in_channels_per_group):
            continue
        for box_per_tap_col, cluster in itertools.product((False, True), (1, 2)):
            if not box_per_tap_col or columns > 1:
                yield Tile(ANY, (rows, columns), co_boxes, box_per_tap_col, warpgroups, cols, 1, cluster)


def fits(geometry: Geometry, tile: Tile, device: Device) -> bool:
    """Returns whether boxes can load the tile, and a ring of stages fits the shared memory."""
    stride, pixels = geometry.stride, tile.pixels
    columns, rows = (tile.pitch(geometry) - 1) * stride[1], (pixels.rows - 1) * stride[0]
    return max(columns, rows) < MAX_BOX and tile.ring(geometry, device) >= MIN_STAGES
