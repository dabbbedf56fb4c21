"""What a block of csrc/kernels/grad_weight/pixel_rows.cu computes, and the tile that is expected to be the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Of the sums that slices keep; one copy of the gradient where that is more.
PARTIAL_LIMIT_BYTES = 64 << 20
#: Pixels of a stage, rows of a tile.
STAGE_PIXELS, TILE_ROWS = 32, 128
#: Stages whose multiplies follow one another into the same sums: the multiplier truncates.
MOST_STAGES = 256
#: Bytes of shared memory beside the stages: barriers, and what brings the stages to a multiple of 1024.
EXTRA_BYTES = 1024 + 256
#: Which operand two blocks of a cluster bring together (grad_weight/pixel_rows_layout.cuh).
NOBODY, INPUT, OUTPUT = 0, 1, 2

#: Bytes a clock that a multiprocessor gets from the L2, and clocks of a slice beside its stages.
FILL_RATE, SLICE_CLOCKS = 33, 4000
#: Bytes a clock of the whole chip, of partial sums on their way to the L2 and back.
PARTIAL_RATE = 1500


@dataclass(frozen=True, slots=True)
class Lines:
    """How an image's pixels lie along k, in one line. grad_output has a plane for every column of taps and phase of
    rows, which taps read shifted by whole rows; with ``unfold_rows`` one for every tap."""

    unfold_rows: bool
    #: Rows of zeros before each plane of grad_output.
    lead: int
    #: Pixels of the input in a line.
    length: int
    #: Of those, how many lie together in shared memory: 8, 16 or 32.
    box: int

    def stages(self, batch: int) -> int:
        return ceil_div(batch * ceil_div(self.length, self.box) * self.box, STAGE_PIXELS)


def row_shifts(geometry: Geometry) -> list[int]:
    """The whole rows by which taps are shifted."""
    g = geometry
    return [(k * g.dilation[0] - g.padding[0]) // g.stride[0] for k in range(g.kernel[0])]


def lines_with(geometry: Geometry, unfold_rows: bool, box: int) -> Lines:
    lead = 0 if unfold_rows else max(0, -min(row_shifts(geometry)))
    return Lines(unfold_rows, lead, geometry.height * geometry.width, box)


def must_unfold(geometry: Geometry) -> bool:
    """Whether boxes, which begin at multiples of 16 bytes, cannot begin at every row."""
    return geometry.width % 4 != 0 and any(row_shifts(geometry))


def lines_of(geometry: Geometry) -> Lines:
    """Those that cost the least, of the sizes."""
    length = geometry.height * geometry.width

    def filled(box: int) -> float:
        return length / (round_up(length, box))

    best = max(filled(box) for box in (8, 16, 32))
    box = next(box for box in (32, 16, 8) if filled(box) >= 0.85 * best)
    return lines_with(geometry, must_unfold(geometry), box)


@dataclass(frozen=True, slots=True)
class Tile:
    """128 x ``cols``: input channels by chunks of output channels, each of one tap; ``swapped``: the other way."""

    cols: int
    swapped: bool
    chunk: int
    shares: int
    slices: int

    @property
    def input_side(self) -> int:
        return self.cols if self.swapped else TILE_ROWS

    @property
    def output_side(self) -> int:
        return TILE_ROWS if self.swapped else self.cols

    @property
    def input_copy(self) -> int:
        """Channels that one copy brings."""
        return self.input_side // (2 if self.shares == INPUT else 1)

    @property
    def output_copy(self) -> int:
        return gcd(self.chunk, self.output_side // (2 if self.shares == OUTPUT else 1))

    @property
    def stage_bytes(self) -> int:
        return (TILE_ROWS + self.cols) * STAGE_PIXELS * 4

    @property
    def blocks_of_cluster(self) -> int:
        return 1 if self.shares == NOBODY else 2

    def __str__(self) -> str:
        shared = ("", ", the input shared by two", ", grad_output shared by two")[self.shares]
        return (
            f"{self.input_side} channels x {self.output_side // self.chunk} taps of {self.chunk}{shared}, "
            f"{self.slices} slices"
        )


def tiles_of(geometry: Geometry, tile: Tile) -> tuple[int, int]:
    """Of one group: along input channels; along taps and output channels."""
    chunks = geometry.taps * ceil_div(geometry.out_channels_per_group, tile.chunk)
    return (
        ceil_div(geometry.in_channels_per_group, tile.input_side),
        ceil_div(chunks, tile.output_side // tile.chunk),
    )


def blocks_of(geometry: Geometry, tile: Tile) -> int:
    along_input, along_output = tiles_of(geometry, tile)
    return along_input * along_output * geometry.groups * tile.slices


def weight_bytes(geometry: Geometry) -> int:
    return 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps


def candidates(geometry: Geometry) -> Iterator[Tile]:
    """All tiles worth a thought, in one slice."""
    for cols, swapped, chunk, shares in itertools.product(
        (256, 192, 128), (False, True), (256, 128, 64), (NOBODY, INPUT, OUTPUT)
    ):
        one = Tile(cols, swapped, chunk, shares, 1)
        if one.output_side % chunk or chunk >= 2 * max(64, geometry.out_channels_per_group):
            continue
        along_input, along_output = tiles_of(geometry, one)
        if (shares == INPUT and along_output % 2) or (shares == OUTPUT and along_input % 2):
            continue
        yield one


def in_slices(geometry: Geometry, stages: int, tile: Tile, device: Device, copied: int) -> Tile | None:
    """With the slices that are expected to be the fastest; None where sums as short as they have to be leave too many.
    ``stages``: of all pixels; ``copied``: bytes of tensors that lie in the workspace beside the sums."""
    most_slices = max(1, min(PARTIAL_LIMIT_BYTES // weight_bytes(geometry), stages // 4))
    least_slices = ceil_div(stages, MOST_STAGES)
    most_bytes = max(PARTIAL_LIMIT_BYTES, MAX_COPY_BYTES - copied)
    if least_slices > 1 and least_slices * weight_bytes(geometry) > most_bytes:
        return None
    blocks = blocks_of(geometry, tile)
    found = {
        max(1, least_slices, min(most_slices, waves * device.multiprocessors // blocks))
        for waves in (1, 2, 3)
    }
    cut = [replace(tile, slices=slices) for slices in sorted(found)]
    return min(cut, key=lambda one: expected_clocks(geometry, stages, one, device))


def expected_clocks(geometry: Geometry, stages: int, tile: Tile, device: Device) -> float:
    """Roughly, of the product and of what adds up its slices."""
    own = tile.stage_bytes
    if tile.shares == INPUT:
        own -= tile.input_side * STAGE_PIXELS * 2
    elif tile.shares == OUTPUT:
        own -= tile.output_side * STAGE_PIXELS * 2
    stage = max(tile.cols * 4 * 1.1, own / FILL_RATE, tile.stage_bytes / 64)
    waves = ceil_div(blocks_of(geometry, tile), device.multiprocessors)
    stages = ceil_div(stages, tile.slices)
    partial = weight_bytes(geometry) * (2 * tile.slices + 1) / PARTIAL_RATE
    return waves * (stages * stage + SLICE_CLOCKS) + partial
