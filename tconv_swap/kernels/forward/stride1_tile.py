"""The tile of csrc/kernels/forward/stride1.cu, the shared memory that it takes, and its expected time. Pure
functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Pixels of a warpgroup; bytes of a multiply along k.
PIXELS, _STEP_BYTES = 64, 32
#: Bytes of shared memory for alignment to 1024 bytes and the barrier of the weights.
_EXTRA_BYTES = 1024 + 16
#: The most rows of the input in shared memory.
_MAX_STAGES = 4
#: The columns of a multiply that the kernel supports; the most sums of a thread; the consumer warpgroups of a block
#: (three were slower).
_WIDTHS, _MAX_SUMS, WARPGROUPS = (64, 96, 128, 192, 256), 96, (1, 2)
#: Clocks that a row of the input takes in addition to its multiplies.
_ROW_CLOCKS = 400


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: 64 ``warpgroups`` pixels of a row and ``channels`` channels of the output at a time.

    Attributes:
        stacked: whether all rows of taps are columns of one multiply; else each row of taps has a multiply of its own.
        stages: rows of the input in shared memory.
        segment: output rows that a block computes one after another.
        blocks: blocks of each channel tile.
    """

    warpgroups: int
    channels: int
    stacked: bool
    stages: int
    segment: int
    blocks: int

    @property
    def kernel(self) -> tuple[int, int, bool, int]:
        """The fields that are compiled in."""
        return self.warpgroups, self.channels, self.stacked, self.stages

    def __str__(self) -> str:
        return (
            f"{self.channels} channels x {self.warpgroups * PIXELS} pixels, rows of taps "
            f"{'together' if self.stacked else 'apart'}, {self.segment} rows at a time"
        )


def _alignment(problem: TileProblem) -> int:
    """Returns the elements of 16 bytes."""
    return 16 // problem.item


def has_unaligned_rows(problem: TileProblem) -> bool:
    """Whether the bytes of a row of the input are no multiple of 16; boxes then take consecutive pixels of a whole
    image."""
    return problem.geometry.width % _alignment(problem) != 0


def planes_of(problem: TileProblem) -> int:
    """Returns the smallest distance of two channels whose addresses differ by a multiple of 16 bytes, with
    unaligned rows; elsewhere 1."""
    unit = _alignment(problem)
    if not has_unaligned_rows(problem):
        return 1
    return unit // gcd(unit, problem.geometry.height * problem.geometry.width)


def first_col(problem: TileProblem) -> int:
    """Returns the distance from an output column to the first input column that a tap reads."""
    return problem.geometry.padding[1] - (problem.geometry.kernel[1] - 1)


def pitch(problem: TileProblem, warpgroups: int) -> int:
    """Returns the pixels of a row of a box, such that the reads of a warp use all banks of shared memory."""
    g, unit = problem.geometry, _alignment(problem)
    left_pad = unit - 1 if has_unaligned_rows(problem) else first_col(problem) % unit
    read = warpgroups * PIXELS + g.kernel[1] - 1 + left_pad
    # Rows of four float32 channels are 8 words apart; so are rows of every other channel of 16 bits, which is the
    # next one in two planes.
    begin, period = (8, 32) if problem.item == 4 else (16, 32) if planes_of(problem) == 2 else (8, 16)
    return round_up(read - begin, period) + begin


def chunk_bytes(problem: TileProblem) -> int:
    """Returns the bytes of the input channels whose weights lie together."""
    return 64 if problem.geometry.in_channels * problem.item <= 64 else 128


def padded_channels(problem: TileProblem) -> int:
    """Returns the input channels, padded to whole chunks."""
    chunk = chunk_bytes(problem) // problem.item
    return round_up(problem.geometry.in_channels, chunk)


def weight_bytes(problem: TileProblem, channels: int, stacked: bool) -> int:
    """Returns the bytes of the packed weights of a tile of ``channels`` output channels."""
    g = problem.geometry
    rows = 2 * g.kernel[0] - 1 if stacked else g.kernel[0]
    return g.kernel[1] * padded_channels(problem) * problem.item * rows * channels


def _row_bytes(problem: TileProblem, warpgroups: int) -> int:
    """Returns the bytes of an input row of all channels in shared memory."""
    planes = planes_of(problem)
    plane = padded_channels(problem) // planes * pitch(problem, warpgroups) * problem.item
    return planes * round_up(plane, 128)


def shared_bytes(problem: TileProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory of a block, as forward/stride1.cu lays it out; the kernel asserts that both
    agree."""
    weights = weight_bytes(problem, tile.channels, tile.stacked)
    return weights + tile.stages * (_row_bytes(problem, tile.warpgroups) + 16) + _EXTRA_BYTES


def candidates(problem: TileProblem, device: Device) -> Iterator[Tile]:
    """Yields a tile for each kernel that computes the problem, with its best segments."""
    g = problem.geometry
    for warpgroups in WARPGROUPS:
        for channels in (32, 64):
            for stacked in (True, False):
                width = channels * g.kernel[0] if stacked else channels
                if (
                    width not in _WIDTHS
                    or g.kernel[0] * channels // 2 > _MAX_SUMS
                    or pitch(problem, warpgroups) > 256
                ):
                    continue
                room = (
                    device.shared_memory_per_block - _EXTRA_BYTES - weight_bytes(problem, channels, stacked)
                )
                stages = min(_MAX_STAGES, room // (_row_bytes(problem, warpgroups) + 16))
                if stages < 2:
                    continue
                channel_tiles = ceil_div(g.out_channels, channels)
                column_tiles = g.batch * ceil_div(g.out_width, warpgroups * PIXELS)
                made = []
                for segments in range(1, ceil_div(g.out_height, 8) + 1):
                    segment = ceil_div(g.out_height, segments)
                    tiles = column_tiles * ceil_div(g.out_height, segment)
                    blocks = min(max(1, device.multiprocessors // channel_tiles), tiles)
                    made.append(Tile(warpgroups, channels, stacked, stages, segment, blocks))
                yield min(made, key=lambda tile: expected_clocks(problem, tile, device))


def expected_clocks(problem: TileProblem, tile: Tile, device: Device) -> float:
    """Estimates the clocks of the forward pass, to rank tiles."""
    g = problem.geometry
    steps = g.kernel[1] * padded_channels(problem) * problem.item // _STEP_BYTES
    width = g.kernel[0] * tile.channels
    # Clocks of the multiplier, and of reads from shared memory. Pixels of 16 bits are read twice and joined.
    multiply, reads = width / 2, (16 if problem.item == 4 else 40) + width / 4
    step = 0.7 * max(multiply, reads) + 0.3 * (multiply + reads)
    row = max(
        tile.warpgroups * steps * step + _ROW_CLOCKS / tile.warpgroups,
        _row_bytes(problem, tile.warpgroups) / 25,
    )
    tiles = g.batch * ceil_div(g.out_width, tile.warpgroups * PIXELS) * ceil_div(g.out_height, tile.segment)
    channel_tiles = ceil_div(g.out_channels, tile.channels)
    waves = ceil_div(channel_tiles * tile.blocks, device.multiprocessors)
    return waves * ceil_div(tiles, tile.blocks) * (tile.segment + g.kernel[0] - 1) * row
