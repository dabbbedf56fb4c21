"""What a block of csrc/kernels/grad_weight/stride1.cu computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.pad_rows import Rows, rows_of_images
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes of pixels of a multiply, of a row of a box of the input, and of the alignment of a box.
STEP_BYTES, BOX_BYTES, ALIGNMENT_BYTES = 32, 128, 16
#: Bytes of pixels that are multiplied into the same sums: the tensor cores truncate their sums.
MAX_BYTES_PER_SUM = 1024 * STEP_BYTES
#: Output channels of a fragment, which is what a warp multiplies for one column of taps.
FRAGMENT_CHANNELS = 16
#: Bytes of shared memory that align the stages to 1024 bytes.
EXTRA_BYTES = 1024
#: Pixels by which each plane's boxes of grad_output begin earlier than those of the plane before it.
PLANE_STAGGER = 8
#: Stages of the ring.
MAX_STAGES = 8
#: Rows of the input that wait to be transposed in channels_last; channels of a box there.
RAW_STAGES, BOX_CHANNELS = 3, 32
#: Columns (N) of a multiply that the kernel instantiates.
WIDTHS = (64, 96, 128, 192, 256)
#: Sums of a thread, by the number of warpgroups that multiply.
MAX_SUMS = {2: 128, 3: 96}


@dataclass(frozen=True, slots=True)
class Stride1Tile:
    """What a block computes.
    Attributes:
        tap_rows: rows of taps.
        channels: input channels.
        warpgroups: that multiply.
        m_tiles: tiles of 64 rows of a warpgroup, each four fragments of 16 output channels of one column of
            taps.
        cols: columns of the image that the block walks down.
        linear: whether a row of grad_output in NCHW begins anywhere in an image, which is addressed as one row of
            pixels; else at multiples of 16 bytes, or it is copied to a row that does.
        stages: rows of the image in shared memory.
        segment: rows of grad_output that are computed one after another.
        flush: segments that are added into the same sums.
        splits: of the segments of all images.
    """

    tap_rows: int
    channels: int
    warpgroups: int
    m_tiles: int
    cols: int
    linear: bool
    stages: int = 0
    segment: int = 0
    flush: int = 0
    splits: int = 0

    @property
    def columns(self) -> int:
        """Returns the columns (N) of the product."""
        return self.tap_rows * self.channels

    @property
    def fragments(self) -> int:
        """Returns the fragments of 16 rows of a block."""
        return 4 * self.m_tiles * self.warpgroups

    def __str__(self) -> str:
        return (
            f"{self.channels} channels x {self.tap_rows} rows of taps x {self.fragments} fragments, "
            f"{self.cols} columns, {self.stages} rows, {self.splits} splits"
        )


def alignment(problem: Problem) -> int:
    """Returns the elements of 16 bytes."""
    return ALIGNMENT_BYTES // problem.dtype.itemsize


def may_be_linear(problem: Problem) -> bool:
    """Returns whether a kernel may address the rows of grad_output linearly, at any size: no tap reads beyond their
    ends, and the channels of a group are whole planes."""
    g = problem.geometry
    return not problem.channels_last and g.padding[1] == 0 == g.out_channels_per_group % alignment(problem)


def planes_of(problem: Problem, tile: Stride1Tile) -> int:
    """Returns how many interleaved planes the channels of grad_output are: in each of them they lie a multiple of 16
    bytes apart."""
    return alignment(problem) if tile.linear else 1


def copied_rows(problem: Problem, linear: bool) -> list[Rows]:
    """Returns the rows of grad_output and of the input that are copied to longer ones before a kernel reads them."""
    if problem.channels_last:
        return []
    g, item = problem.geometry, problem.dtype.itemsize
    into = rows_of_images(1, g.batch * g.in_channels, g.height, g.width, item)
    out = None
    if not linear:
        out = rows_of_images(0, g.batch * g.out_channels, g.out_height, g.out_width, item)
    return [one for one in (out, into) if one is not None]


def fragments_of(geometry: Geometry) -> int:
    """Returns the fragments of a group."""
    return ceil_div(geometry.out_channels_per_group, FRAGMENT_CHANNELS) * geometry.kernel[1]


def output_channels(problem: Problem, tile: Stride1Tile) -> int:
    """Returns the channels of grad_output that the fragments of a block read."""
    geometry = problem.geometry
    blocks = _channel_blocks(fragments_of(geometry), geometry.kernel[1], tile.fragments)
    return round_up(blocks * FRAGMENT_CHANNELS, BOX_CHANNELS if problem.channels_last else FRAGMENT_CHANNELS)


@lru_cache(maxsize=1024)
def _channel_blocks(fragments: int, taps: int, of_block: int) -> int:
    """Returns the most blocks of 16 channels that the fragments of a block read, ``of_block`` of all ``fragments``."""
    last = fragments - 1
    firsts = range(0, fragments, of_block)
    return max(min(first + of_block - 1, last) // taps - first // taps + 1 for first in firsts)


def output_pixels(problem: Problem, tile: Stride1Tile) -> int:
    """Returns the pixels of a row of a box of grad_output; in NCHW an odd number of 16 bytes, so that a warp's
    loads have no bank conflicts."""
    g, unit = problem.geometry, alignment(problem)
    read = tile.cols + g.kernel[1] - 1
    if problem.channels_last:
        return read
    # A row begins at most unit - 1 pixels behind a multiple of 16 bytes, and there are unit planes.
    before = (1 + PLANE_STAGGER) * (unit - 1) if tile.linear else -g.padding[1] % unit
    return ceil_div(read + before + unit, 2 * unit) * 2 * unit - unit


def raw_stages(problem: Problem) -> int:
    """Returns the stages of the input that wait to be transposed."""
    return RAW_STAGES if problem.channels_last else 0


def row_bytes(problem: Problem, tile: Stride1Tile) -> tuple[int, int]:
    """Returns the bytes of a stage: of the input and of grad_output."""
    channels, pixels = output_channels(problem, tile), output_pixels(problem, tile)
    item = problem.dtype.itemsize
    into = tile.channels * tile.cols * item
    if problem.channels_last:
        return into, channels // BOX_CHANNELS * round_up(pixels * BOX_CHANNELS * 4, 1024)
    planes = planes_of(problem, tile)
    return into, planes * round_up(channels // planes * pixels * item, 128)


def shared_bytes(problem: Problem, tile: Stride1Tile) -> int:
    """Returns the dynamic shared memory of a block; grad_weight/stride1_layout.cuh asserts the same."""
    fixed, one_stage = _fixed_and_stage_bytes(problem, tile)
    return fixed + tile.stages * one_stage


def _fixed_and_stage_bytes(problem: Problem, tile: Stride1Tile) -> tuple[int, int]:
    """Returns the bytes of shared memory beside the stages, and of a stage."""
    into, out = row_bytes(problem, tile)
    raw = raw_stages(problem) * (into + 16)
    return (tile.tap_rows - 1) * into + raw + EXTRA_BYTES, into + out + 16


def tiles_of(geometry: Geometry, tile: Stride1Tile) -> int:
    """Returns the blocks of one split."""
    return (
        ceil_div(fragments_of(geometry), tile.fragments)
        * ceil_div(geometry.in_channels_per_group, tile.channels)
        * ceil_div(geometry.kernel[0], tile.tap_rows)
        * geometry.groups
    )


def candidates(problem: Problem, device: Device) -> Iterator[Stride1Tile]:
    """Yields the tiles that are compared for all sizes of a layer, without segments and splits."""
    g = problem.geometry
    box = BOX_BYTES // problem.dtype.itemsize
    for channels, rows, (warpgroups, max_sums), cols, linear in itertools.product(
        (32, 64, 128),
        range(1, g.kernel[0] + 1),
        MAX_SUMS.items(),
        (box, 2 * box),
        (False, True) if may_be_linear(problem) else (False,),
    ):
        if channels * rows not in WIDTHS or channels >= 2 * max(32, g.in_channels_per_group):
            continue
        for m_tiles in (1, 2):
            tile = Stride1Tile(rows, channels, warpgroups, m_tiles, cols, linear)
            if m_tiles * tile.columns // 2 > max_sums or output_channels(problem, tile) > 256:
                continue
            if output_pixels(problem, tile) > 256:
                continue
            found = _with_stages(problem, tile, device)
            if found.stages:
                yield found


def _with_stages(problem: Problem, tile: Stride1Tile, device: Device) -> Stride1Tile:
    """Returns the tile with as many stages as shared memory holds, or with 0 stages where those are too few."""
    most, fewest = MAX_STAGES + tile.tap_rows - 1, tile.tap_rows + 1
    fixed, one_stage = _fixed_and_stage_bytes(problem, tile)
    stages = min(most, (device.shared_memory_per_block - fixed) // one_stage)
    return replace(tile, stages=stages if stages >= fewest else 0)
