"""What a block of csrc/kernels/grad_weight/im2col_nhwc.cu computes, and the expected time of a tile. The pixels of a
tile's stages and its splits are given by a launch, everything else is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_BOX, SHARED_BYTES_PER_CLOCK
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
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
#: Clocks of a stage beside its multiplies, of a split beside its stages, of the exchange of sums between two
#: blocks, and of the launch that reduces splits.
_STAGE_CLOCKS, _SPLIT_CLOCKS, _EXCHANGE_CLOCKS, _REDUCE_CLOCKS = 60, 4000, 6000, 3000
#: Bytes a clock: that a multiprocessor gets from the L2; of the whole GPU, of partial sums on their way to the L2 and
#: back.
_L2_RATE, _PARTIAL_RATE = 33, 2600


@dataclass(frozen=True, slots=True)
class Pixels:
    """The 32 pixels of the input in a stage: ``images`` x ``rows`` x ``cols``."""

    images: int
    rows: int
    cols: int


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


def every_pixels() -> Iterator[Pixels]:
    """Yields the pixels that a stage may have; of those that cover a map equally well the first are the best."""
    sides = [1 << bits for bits in range(STAGE_PIXELS.bit_length())]
    for cols, rows in itertools.product(reversed(sides), reversed(sides)):
        if cols * rows <= STAGE_PIXELS:
            yield Pixels(STAGE_PIXELS // (cols * rows), rows, cols)


def covers(geometry: Geometry, pixels: Pixels) -> bool:
    """Returns whether stages of these pixels may cover the images: rows that are contiguous are those of one image."""
    return pixels.images == 1 or not rows_are_contiguous(geometry)


def pixels_of(geometry: Geometry) -> Iterator[Pixels]:
    """Yields, for each number of columns, the stages that cover the images with the fewest stages."""
    for _, alike in itertools.groupby(every_pixels(), key=lambda one: one.cols):
        stages = [one for one in alike if covers(geometry, one)]
        if stages:
            yield min(stages, key=lambda one: stages_of(geometry, one))


def stages_of(geometry: Geometry, pixels: Pixels) -> int:
    """Returns the stages of all images."""
    g, p = geometry, pixels
    across = ceil_div(g.width, p.cols)
    if rows_are_contiguous(g):
        return ceil_div(g.batch * g.height, p.rows) * across
    return ceil_div(g.batch, p.images) * ceil_div(g.height, p.rows) * across


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


def candidates(geometry: Geometry, device: Device) -> Iterator[Tile]:
    """Yields the tiles that are compared."""
    g = geometry
    max_co_boxes = ceil_div(g.out_channels_per_group, BOX_CHANNELS)
    pixels = list(pixels_of(g))
    for (warpgroups, cols), rows, columns in itertools.product(
        _SHAPES, range(1, g.kernel[0] + 1), range(1, g.kernel[1] + 1)
    ):
        co_boxes = min(max_co_boxes, 4 * warpgroups // (rows * columns))
        if 2 * rows * columns * co_boxes <= 4 * warpgroups or cols >= 2 * max(32, g.in_channels_per_group):
            continue
        stages_of_tile = [
            Tile(one, (rows, columns), co_boxes, box_per_tap_col, warpgroups, cols, 1)
            for one, box_per_tap_col in itertools.product(pixels, (False, True))
        ]
        possible = [tile for tile in stages_of_tile if fits(g, tile, device)]
        if possible:
            best = min(possible, key=lambda tile: stages_of(g, tile.pixels) * stage_clocks(g, tile))
            yield from _with_split_choices(g, best, device)


def fits(geometry: Geometry, tile: Tile, device: Device) -> bool:
    """Returns whether boxes can load the tile, and a ring of stages fits the shared memory."""
    stride, pixels = geometry.stride, tile.pixels
    columns, rows = (tile.pitch(geometry) - 1) * stride[1], (pixels.rows - 1) * stride[0]
    return max(columns, rows) < MAX_BOX and tile.ring(geometry, device) >= MIN_STAGES


def _with_split_choices(geometry: Geometry, tile: Tile, device: Device) -> Iterator[Tile]:
    """Yields the tile with as many splits as fill all multiprocessors once, twice, three times."""
    stages, blocks = stages_of(geometry, tile.pixels), tiles_of(geometry, tile)
    for cluster in (1, 2):
        for splits in split_choices(stages, blocks, weight_bytes(geometry), cluster, device):
            yield replace(tile, splits=splits, cluster=cluster)


def split_choices(stages: int, blocks: int, bytes_of_copy: int, cluster: int, device: Device) -> list[int]:
    """Returns into how many splits ``stages`` stages may be cut. ``blocks``: of one split."""
    max_splits, min_splits = max(1, stages // 4), ceil_div(stages, MAX_STAGES_PER_SUM)
    found = []
    for waves in (1, 2, 3):
        splits = max(min_splits, min(max_splits, waves * device.multiprocessors // blocks))
        copies = max(1, splits // cluster)
        if splits >= cluster and (copies == 1 or copies * bytes_of_copy <= PARTIAL_LIMIT_BYTES):
            found.append(copies * cluster)
    return list(dict.fromkeys(found))


def stage_clocks(geometry: Geometry, tile: Tile) -> float:
    """Returns the expected clocks of a stage."""
    rows = tile.warpgroups * 128
    fragment_bytes = rows * STAGE_PIXELS * 4
    if tile.pixels.cols % 8 and tile.pitch(geometry) != tile.pixels.cols:
        fragment_bytes *= 2  # bank conflicts
    steps = STAGE_PIXELS // 8 * (rows // 64)
    copied = tile.copied_bytes(geometry)
    shared = steps * tile.cols * 32 + fragment_bytes + 2 * tile.input_bytes + copied
    return _STAGE_CLOCKS + max(
        steps * tile.cols / 2 * 1.1, copied / _L2_RATE, shared / SHARED_BYTES_PER_CLOCK
    )


def expected_clocks(geometry: Geometry, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of the product and of the reduction of its splits."""
    g = geometry
    counts = stages_of(g, tile.pixels), tiles_of(g, tile), weight_bytes(g)
    return clocks_of(stage_clocks(g, tile), *counts, tile.splits, tile.cluster, device)


def clocks_of(
    stage: float, stages: int, blocks: int, bytes_of_copy: int, splits: int, cluster: int, device: Device
) -> float:
    """Returns the same from the clocks of a stage, the stages of all pixels, and the blocks of one split."""
    waves = ceil_div(blocks * splits, device.multiprocessors)
    copies = splits // cluster
    partial = bytes_of_copy * (2 * copies + 1) / _PARTIAL_RATE + _REDUCE_CLOCKS
    if copies == 1:
        partial = bytes_of_copy / _PARTIAL_RATE
    per_split = ceil_div(stages, splits) * stage + _SPLIT_CLOCKS + (cluster - 1) * _EXCHANGE_CLOCKS
    return waves * per_split + partial
