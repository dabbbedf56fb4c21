"""What a block of csrc/kernels/grad_weight/im2col_nhwc.cu computes, and the tile that is expected to be the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    EXTRA_BYTES,
    FILL_RATE,
    MOST_STAGES,
    PARTIAL_LIMIT_BYTES,
    SLICE_CLOCKS,
    STAGE_PIXELS,
    weight_bytes,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Channels of a box: rows of 128 bytes.
BOX = 32
#: Elements of a box along a dimension; steps from one to the next.
BOX_LIMIT, STEP_LIMIT = 256, 8
#: Of a ring, at least and at most.
FEWEST_STAGES, MOST_STAGES_IN_RING = 3, 8
#: Warpgroups that multiply, each 128 rows, and columns: as registers allow.
_SHAPES = ((2, 128), (2, 96), (2, 64), (3, 96), (3, 64))
#: Bytes a clock that shared memory gives; clocks of a stage beside its multiplies, of two blocks that exchange
#: sums, and of a launch that adds up.
_SHARED_RATE, _STAGE_CLOCKS, _EXCHANGE_CLOCKS, _REDUCE_CLOCKS = 128, 60, 6000, 3000
#: Bytes a clock of the whole chip, of partial sums on their way to the L2 and back.
_PARTIAL_RATE = 2600


@dataclass(frozen=True, slots=True)
class Pixels:
    """Of the input, in a stage: ``images`` x ``rows`` x ``cols``, 32 of them."""

    images: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Tile:
    """``taps`` x ``chunks`` x 32 output channels by ``cols`` input channels; ``flat``: each tap has its own box."""

    pixels: Pixels
    taps: tuple[int, int]
    chunks: int
    flat: bool
    warpgroups: int
    cols: int
    slices: int
    #: Slices that a cluster of blocks adds up: 1 or 2.
    together: int = 1

    @property
    def copies(self) -> int:
        """Of the gradient, that are left to be added up."""
        return self.slices // self.together

    def shifts(self, geometry: Geometry) -> list[int]:
        """How many columns further than the first of its box each column of taps reads, in steps of the stride."""
        stride, dilation = geometry.stride[1], geometry.dilation[1]
        firsts = self._firsts(geometry)
        return [(k - first) * dilation // stride for k, first in enumerate(firsts)]

    def _firsts(self, geometry: Geometry) -> list[int]:
        stride, dilation = geometry.stride[1], geometry.dilation[1]
        return [
            k if self.flat else next(first for first in range(k + 1) if (k - first) * dilation % stride == 0)
            for k in range(self.taps[1])
        ]

    def pitch(self, geometry: Geometry) -> int:
        """Columns of grad_output in a box."""
        return self.pixels.cols + max(self.shifts(geometry))

    def box_bytes(self, geometry: Geometry) -> int:
        """What a box of grad_output brings."""
        return self.pixels.images * self.pixels.rows * self.pitch(geometry) * BOX * 4

    def boxes(self, geometry: Geometry) -> int:
        """Of grad_output."""
        return self.taps[0] * len(set(self._firsts(geometry))) * self.chunks

    @property
    def input_bytes(self) -> int:
        return STAGE_PIXELS * self.cols * 4

    def copied_bytes(self, geometry: Geometry) -> int:
        return self.input_bytes + self.boxes(geometry) * self.box_bytes(geometry)

    def stage_bytes(self, geometry: Geometry) -> int:
        return self.input_bytes + self.boxes(geometry) * round_up(self.box_bytes(geometry), 1024)

    def ring(self, geometry: Geometry, device: Device) -> int:
        """Stages of it."""
        room = device.shared_memory_per_block - EXTRA_BYTES
        return min(MOST_STAGES_IN_RING, room // self.stage_bytes(geometry))

    def __str__(self) -> str:
        p = self.pixels
        return (
            f"{self.cols} channels x {self.taps[0]} x {self.taps[1]} taps of {self.chunks * BOX}, "
            f"{p.images} x {p.rows} x {p.cols} pixels{' flat' if self.flat else ''}, {self.slices} slices"
            f"{', two by two' if self.together == 2 else ''}"
        )


def rows_follow(geometry: Geometry) -> bool:
    """Whether the images' rows follow one another in both tensors as in one image."""
    g = geometry
    reach = (g.kernel[0] - 1) * g.dilation[0] + 1
    return g.padding[0] == 0 and g.out_height == g.stride[0] * g.height and reach <= g.stride[0]


def pixels_of(geometry: Geometry) -> Iterator[Pixels]:
    """Stages that tile the images, or reach over their edge only where grad_output ends too (it might be infinite, and
    what lies beside it are the input's zeros). Of so many columns the fewest."""
    g = geometry
    nothing_below, nothing_right = _nothing_beyond(g)
    merged = rows_follow(g)
    height = g.height * (g.batch if merged else 1)
    for cols in (32, 16, 8, 4, 2, 1):
        if cols >= 2 * g.width or not (nothing_right or g.width % cols == 0):
            continue
        stages = [
            Pixels(STAGE_PIXELS // (rows * cols), rows, cols)
            for rows in (32, 16, 8, 4, 2, 1)
            if rows * cols <= STAGE_PIXELS and rows < 2 * height and (nothing_below or g.height % rows == 0)
        ]
        stages = [one for one in stages if one.images == 1 or not (merged or one.images >= 2 * g.batch)]
        if stages:
            yield min(stages, key=lambda one: stages_of(g, one))


def _nothing_beyond(geometry: Geometry) -> tuple[bool, bool]:
    """Whether grad_output ends, below and on the right, where the input does."""
    g = geometry
    return (
        g.stride[0] * g.height - g.padding[0] >= g.out_height,
        g.stride[1] * g.width - g.padding[1] >= g.out_width,
    )


def tiles_images(geometry: Geometry, pixels: Pixels) -> bool:
    """Whether stages may have these pixels: that they tile the images, or may reach over their edge."""
    g = geometry
    nothing_below, nothing_right = _nothing_beyond(g)
    if not ((nothing_below or g.height % pixels.rows == 0) and (nothing_right or g.width % pixels.cols == 0)):
        return False
    return pixels.images == 1 or not rows_follow(g)


def stages_of(geometry: Geometry, pixels: Pixels) -> int:
    g, p = geometry, pixels
    across = ceil_div(g.width, p.cols)
    if rows_follow(g):
        return ceil_div(g.batch * g.height, p.rows) * across
    return ceil_div(g.batch, p.images) * ceil_div(g.height, p.rows) * across


def tiles_of(geometry: Geometry, tile: Tile) -> int:
    """All groups', of one slice."""
    g = geometry
    return (
        ceil_div(g.in_channels_per_group, tile.cols)
        * ceil_div(g.out_channels_per_group, tile.chunks * BOX)
        * tap_tiles(g, tile)
        * g.groups
    )


def tap_tiles(geometry: Geometry, tile: Tile) -> int:
    return prod(map(ceil_div, geometry.kernel, tile.taps))


def candidates(geometry: Geometry, device: Device) -> Iterator[Tile]:
    """All tiles worth a thought."""
    g = geometry
    most_chunks = ceil_div(g.out_channels_per_group, BOX)
    pixels = list(pixels_of(g))
    for (warpgroups, cols), rows, columns in itertools.product(
        _SHAPES, range(1, g.kernel[0] + 1), range(1, g.kernel[1] + 1)
    ):
        chunks = min(most_chunks, 4 * warpgroups // (rows * columns))
        if 2 * rows * columns * chunks <= 4 * warpgroups or cols >= 2 * max(32, g.in_channels_per_group):
            continue
        stages_of_tile = [
            Tile(one, (rows, columns), chunks, flat, warpgroups, cols, 1)
            for one, flat in itertools.product(pixels, (False, True))
        ]
        possible = [tile for tile in stages_of_tile if has_boxes(g, tile, device)]
        if possible:
            best = min(possible, key=lambda tile: stages_of(g, tile.pixels) * stage_clocks(g, tile))
            yield from _sliced(g, best, device)


def has_boxes(geometry: Geometry, tile: Tile, device: Device) -> bool:
    """Whether boxes can bring it, and a ring of stages finds room."""
    stride, pixels = geometry.stride, tile.pixels
    columns, rows = (tile.pitch(geometry) - 1) * stride[1], (pixels.rows - 1) * stride[0]
    return max(columns, rows) < BOX_LIMIT and tile.ring(geometry, device) >= FEWEST_STAGES


def _sliced(geometry: Geometry, tile: Tile, device: Device) -> Iterator[Tile]:
    """The tile, with as many slices as make all multiprocessors busy once, twice, three times."""
    stages, blocks = stages_of(geometry, tile.pixels), tiles_of(geometry, tile)
    for together in (1, 2):
        for slices in slice_choices(stages, blocks, weight_bytes(geometry), together, device):
            yield replace(tile, slices=slices, together=together)


def slice_choices(stages: int, blocks: int, bytes_of_copy: int, together: int, device: Device) -> list[int]:
    """Into how many parts so many stages may be cut. ``blocks``: of one slice."""
    most, least = max(1, stages // 4), ceil_div(stages, MOST_STAGES)
    found = []
    for waves in (1, 2, 3):
        slices = max(least, min(most, waves * device.multiprocessors // blocks))
        copies = max(1, slices // together)
        if slices >= together and (copies == 1 or copies * bytes_of_copy <= PARTIAL_LIMIT_BYTES):
            found.append(copies * together)
    return list(dict.fromkeys(found))


def stage_clocks(geometry: Geometry, tile: Tile) -> float:
    """Of a stage, roughly."""
    rows = tile.warpgroups * 128
    words = rows * STAGE_PIXELS * 4
    if tile.pixels.cols % 8 and tile.pitch(geometry) != tile.pixels.cols:
        words *= 2  # lanes meet in banks
    steps = STAGE_PIXELS // 8 * (rows // 64)
    copied = tile.copied_bytes(geometry)
    shared = steps * tile.cols * 32 + words + 2 * tile.input_bytes + copied
    return _STAGE_CLOCKS + max(steps * tile.cols / 2 * 1.1, copied / FILL_RATE, shared / _SHARED_RATE)


def expected_clocks(geometry: Geometry, tile: Tile, device: Device) -> float:
    """Roughly, of the product and of what adds up its slices."""
    g = geometry
    counts = stages_of(g, tile.pixels), tiles_of(g, tile), weight_bytes(g)
    return clocks_of(stage_clocks(g, tile), *counts, tile.slices, tile.together, device)


def clocks_of(
    stage: float, stages: int, blocks: int, bytes_of_copy: int, slices: int, together: int, device: Device
) -> float:
    """The same from clocks of a stage, stages of all pixels, and blocks of one slice."""
    waves = ceil_div(blocks * slices, device.multiprocessors)
    copies = slices // together
    partial = bytes_of_copy * (2 * copies + 1) / _PARTIAL_RATE + _REDUCE_CLOCKS
    if copies == 1:
        partial = bytes_of_copy / _PARTIAL_RATE
    of_slice = ceil_div(stages, slices) * stage + SLICE_CLOCKS + (together - 1) * _EXCHANGE_CLOCKS
    return waves * of_slice + partial
