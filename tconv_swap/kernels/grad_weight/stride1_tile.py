"""What a block of csrc/kernels/grad_weight/stride1.cu computes, and the tile that is expected to be the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.pixel_rows_tile import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes of pixels of a multiply, of a row of a box of the input, and at whose multiples a box begins.
STEP_BYTES, BOX_BYTES, ALIGNMENT_BYTES = 32, 128, 16
#: Bytes of pixels of multiplies that follow one another into the same sums: the multiplier truncates.
MOST_BYTES = 1024 * STEP_BYTES
#: Output channels of a granule, which is what a warp multiplies of one column of taps.
GRANULE_CHANNELS = 16
#: Bytes of shared memory beside the slots and their barriers: what brings the slots to a multiple of 1024.
EXTRA_BYTES = 1024
MOST_SLOTS = 8
#: Rows of the input on their way to where they are turned, in channels_last; channels of a box there.
RAW_SLOTS, BOX_CHANNELS = 3, 32
#: Columns of a multiply, by what the kernel names.
WIDTHS = (64, 96, 128, 192, 256)
#: Sums of a thread, by warpgroups that multiply.
MOST_SUMS = {2: 128, 3: 96}

#: Bytes a clock that a multiprocessor gets from the L2; clocks of a row beside its multiplies, and of sums that leave.
FILL_RATE, ROW_CLOCKS, FLUSH_CLOCKS = 30, 100, 4000


@dataclass(frozen=True, slots=True)
class OutputRows:
    """How rows of grad_output begin in NCHW: at multiples of 16 bytes, or (``lines``) anywhere in an image's line, at
    most ``lead`` elements before; channels in ``planes`` whose distance is a multiple of 16 bytes."""

    lines: bool
    planes: int
    lead: int

    def serve(self, needed: OutputRows) -> bool:
        """Whether a kernel for these rows reads the ones that are ``needed``."""
        return self.lines == needed.lines and self.planes % needed.planes == 0 and self.lead >= needed.lead


@dataclass(frozen=True, slots=True)
class StripTile:
    """``tap_rows`` x ``channels`` of the input by 4 x ``units`` granules for each of ``warpgroups``; strips of
    ``strip`` pixels, ``segment`` rows of grad_output at a time, the sums of ``flush`` segments together; ``slots`` rows
    in shared memory; pixels in ``slices``."""

    tap_rows: int
    channels: int
    warpgroups: int
    units: int
    strip: int
    rows: OutputRows
    slots: int = 0
    segment: int = 0
    flush: int = 0
    slices: int = 0

    @property
    def columns(self) -> int:
        return self.tap_rows * self.channels

    @property
    def granules(self) -> int:
        return 4 * self.units * self.warpgroups

    def __str__(self) -> str:
        return (
            f"{self.channels} channels x {self.tap_rows} rows of taps x {self.granules} granules, "
            f"strips of {self.strip}, {self.slots} rows, {self.slices} slices"
        )


def alignment(problem: Problem) -> int:
    """Elements of 16 bytes."""
    return ALIGNMENT_BYTES // problem.dtype.itemsize


def in_lines(problem: Problem) -> bool:
    """Whether boxes of grad_output count pixels of an image, where its rows are no multiples of 16 bytes."""
    return not problem.channels_last and problem.geometry.out_width % alignment(problem) != 0


def planes_of(problem: Problem) -> int:
    """Channels from which one of grad_output lies at a multiple of 16 bytes as the first does."""
    if not in_lines(problem):
        return 1
    unit = alignment(problem)
    return unit // gcd(unit, problem.geometry.out_height * problem.geometry.out_width)


def granules_of(geometry: Geometry) -> int:
    return ceil_div(geometry.out_channels_per_group, GRANULE_CHANNELS) * geometry.kernel[1]


def output_channels(problem: Problem, tile: StripTile) -> int:
    """Of grad_output, that the granules of a block read."""
    last, taps = granules_of(problem.geometry) - 1, problem.geometry.kernel[1]
    firsts = range(0, last + 1, tile.granules)
    most = max(min(first + tile.granules - 1, last) // taps - first // taps + 1 for first in firsts)
    unit = BOX_CHANNELS if problem.channels_last else GRANULE_CHANNELS
    return round_up(most * GRANULE_CHANNELS, unit)


def output_pixels(problem: Problem, tile: StripTile) -> int:
    """Of a row of a box of grad_output; in NCHW an odd number of 16 bytes, so that a warp's reads meet all banks."""
    g, unit = problem.geometry, alignment(problem)
    read = tile.strip + g.kernel[1] - 1
    if problem.channels_last:
        return read
    return ceil_div(read + tile.rows.lead + unit, 2 * unit) * 2 * unit - unit


def output_rows(problem: Problem) -> OutputRows:
    """Those of the size."""
    g, unit = problem.geometry, alignment(problem)
    if in_lines(problem):
        lead = unit - gcd(unit, g.out_width, g.out_height * g.out_width)
        return OutputRows(True, planes_of(problem), lead)
    return OutputRows(False, 1, 0 if problem.channels_last else -g.padding[1] % unit)


def raw_slots(problem: Problem) -> int:
    return RAW_SLOTS if problem.channels_last else 0


def _row_bytes(problem: Problem, tile: StripTile) -> tuple[int, int]:
    """Of the input and of grad_output, in a slot."""
    channels, pixels = output_channels(problem, tile), output_pixels(problem, tile)
    item = problem.dtype.itemsize
    into = tile.channels * tile.strip * item
    if problem.channels_last:
        return into, channels // BOX_CHANNELS * round_up(pixels * BOX_CHANNELS * 4, 1024)
    planes = tile.rows.planes
    return into, planes * round_up(channels // planes * pixels * item, 128)


def shared_bytes(problem: Problem, tile: StripTile) -> int:
    """Mirrors grad_weight/stride1_layout.cuh, which asserts that they agree."""
    into, out = _row_bytes(problem, tile)
    raw = raw_slots(problem) * (into + 16)
    return (tile.slots + tile.tap_rows - 1) * into + tile.slots * (out + 16) + raw + EXTRA_BYTES


def tiles_of(geometry: Geometry, tile: StripTile) -> int:
    """Blocks of one slice."""
    return (
        ceil_div(granules_of(geometry), tile.granules)
        * ceil_div(geometry.in_channels_per_group, tile.channels)
        * ceil_div(geometry.kernel[0], tile.tap_rows)
        * geometry.groups
    )


def candidates(problem: Problem, device: Device) -> Iterator[StripTile]:
    """All tiles worth a thought, for rows as the size has them, without their segments and slices."""
    g = problem.geometry
    rows_of_output = output_rows(problem)
    box = BOX_BYTES // problem.dtype.itemsize
    for channels, rows, (warpgroups, most), strip in itertools.product(
        (32, 64, 128), range(1, g.kernel[0] + 1), MOST_SUMS.items(), (box, 2 * box)
    ):
        if channels * rows not in WIDTHS or channels >= 2 * max(32, g.in_channels_per_group):
            continue
        for units in (1, 2):
            tile = StripTile(rows, channels, warpgroups, units, strip, rows_of_output)
            if units * tile.columns // 2 > most or output_channels(problem, tile) > 256:
                continue
            if output_pixels(problem, tile) > 256:
                continue
            found = _with_slots(problem, tile, device)
            if found.slots:
                yield found


def _with_slots(problem: Problem, tile: StripTile, device: Device) -> StripTile:
    return replace(
        tile,
        slots=max(
            (
                slots
                for slots in range(tile.tap_rows + 1, MOST_SLOTS + tile.tap_rows)
                if shared_bytes(problem, replace(tile, slots=slots)) <= device.shared_memory_per_block
            ),
            default=0,
        ),
    )


def in_slices(problem: Problem, tile: StripTile, device: Device) -> StripTile:
    """With the segments that leave the last blocks the least to do alone."""
    g = problem.geometry
    strips = g.batch * ceil_div(g.width, tile.strip)
    most_slices = max(1, device.multiprocessors // tiles_of(g, tile))
    most_slices = max(1, min(most_slices, PARTIAL_LIMIT_BYTES // weight_bytes(g)))
    most_rows = MOST_BYTES // problem.dtype.itemsize // tile.strip
    made = []
    segments_of = range(ceil_div(g.out_height, most_rows), ceil_div(g.out_height, 8) + 1)
    for segment in dict.fromkeys(ceil_div(g.out_height, segments) for segments in segments_of):
        columns = strips * ceil_div(g.out_height, segment)
        flush = max(1, most_rows // segment)
        made.append(replace(tile, segment=segment, flush=flush, slices=min(most_slices, columns)))
    return min(made, key=lambda one: expected_clocks(problem, one, device))


def expected_clocks(problem: Problem, tile: StripTile, device: Device) -> float:
    """Roughly, of the product; what adds up its slices costs all tiles the same."""
    g = problem.geometry
    into, out = _row_bytes(problem, tile)
    if not problem.channels_last:
        into = into * (tile.slots + tile.tap_rows - 1) // tile.slots
    steps = tile.strip * problem.dtype.itemsize // STEP_BYTES
    multiplies = tile.warpgroups * tile.units * tile.columns // 2 * steps * 1.1
    row = max(multiplies + ROW_CLOCKS, (into + out) / FILL_RATE)
    columns = g.batch * ceil_div(g.width, tile.strip) * ceil_div(g.out_height, tile.segment)
    of_slice = ceil_div(columns, tile.slices)
    column = tile.segment * row + (tile.tap_rows - 1) * into / FILL_RATE
    waves = ceil_div(tiles_of(g, tile) * tile.slices, device.multiprocessors)
    return waves * (of_slice * column + ceil_div(of_slice, tile.flush) * FLUSH_CLOCKS)
