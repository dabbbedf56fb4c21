"""The tile of csrc/kernels/forward/stride1.cu, and the shared memory that it takes. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from tconv_swap.kernels.common.pad_rows import Rows, rows_of_images
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Pixels of a warpgroup.
PIXELS = 64
#: Bytes of shared memory for alignment to 1024 bytes and the barrier of the weights.
_EXTRA_BYTES = 1024 + 16
#: The most rows of the input in shared memory.
_MAX_STAGES = 4
#: The columns of a multiply that the kernel supports; the most sums of a thread; the consumer warpgroups of a block
#: (three were slower), and the output channels of a tile.
_WIDTHS, _MAX_SUMS, WARPGROUPS, CHANNELS = (64, 96, 128, 192, 256), 96, (1, 2), (32, 64)


@dataclass(frozen=True, slots=True)
class Stride1Kernel:
    """What is compiled in beside the layer.

    Attributes:
        warpgroups: consumers, each of which computes 64 pixels of a row.
        channels: output channels of a tile.
        stacked: whether all rows of taps are columns of one multiply; else each row of taps has a multiply of its own.
        stages: rows of the input in shared memory.
        unaligned_rows: whether a box takes consecutive pixels of a whole image, at any pixel; no tap may read beyond
            the ends of rows then. Else rows begin at multiples of 16 bytes, or are copied to rows that do.
        planes: 1 with aligned rows, else the channels whose distance in memory is a multiple of 16 bytes, or a divisor.
    """

    warpgroups: int
    channels: int
    stacked: bool
    stages: int
    unaligned_rows: bool
    planes: int

    def loads(self, problem: TileProblem) -> bool:
        """Whether it loads rows such as those of the problem, or of a copy."""
        return (self.unaligned_rows, self.planes) in _loaded_by(problem)

    def __str__(self) -> str:
        together = "together" if self.stacked else "apart"
        return f"{self.channels} channels x {self.warpgroups * PIXELS} pixels, rows of taps {together}"


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: 64 ``kernel.warpgroups`` pixels of a row and ``kernel.channels`` channels of the output at
    a time.

    Attributes:
        segment: output rows that a block computes one after another.
        blocks: blocks of each channel tile.
    """

    kernel: Stride1Kernel
    segment: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.kernel}, {self.segment} rows at a time"


def _alignment(problem: TileProblem) -> int:
    """Returns the elements of 16 bytes."""
    return 16 // problem.item


def _loaded_by(problem: TileProblem) -> Iterator[tuple[bool, int]]:
    """Yields ``unaligned_rows`` and ``planes`` of the kernels that load the rows of the input."""
    g, unit = problem.geometry, _alignment(problem)
    yield False, 1
    first = first_col(problem)
    if first >= 0 and first + g.out_width + g.kernel[1] - 1 <= g.width:
        # The smallest distance of two channels whose addresses differ by a multiple of 16 bytes.
        least = unit // gcd(unit, g.height * g.width)
        yield from ((True, planes) for planes in (1, 2) if planes % least == 0 == g.in_channels % planes)


def copied_rows(problem: TileProblem, kernel: Stride1Kernel) -> tuple[Rows, ...]:
    """Returns the rows of the input that are copied to longer ones before this kernel reads them."""
    g = problem.geometry
    if kernel.unaligned_rows:
        return ()
    rows = rows_of_images(0, g.batch * g.in_channels, g.height, g.width, problem.item)
    return () if rows is None else (rows,)


def first_col(problem: TileProblem) -> int:
    """Returns the distance from an output column to the first input column that a tap reads."""
    return problem.geometry.padding[1] - (problem.geometry.kernel[1] - 1)


def pitch(problem: TileProblem, kernel: Stride1Kernel) -> int:
    """Returns the pixels of a row of a box, such that the reads of a warp use all banks of shared memory."""
    g, unit = problem.geometry, _alignment(problem)
    left_pad = unit - 1 if kernel.unaligned_rows else first_col(problem) % unit
    read = kernel.warpgroups * PIXELS + g.kernel[1] - 1 + left_pad
    # Rows of four float32 channels are 8 words apart; so are rows of every other channel of 16 bits, which is the
    # next one in two planes.
    begin, period = (8, 32) if problem.item == 4 else (16, 32) if kernel.planes == 2 else (8, 16)
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


def packed_bytes(problem: TileProblem, kernel: Stride1Kernel) -> int:
    """Returns the bytes of the packed weights of all tiles of output channels."""
    tiles = ceil_div(problem.geometry.out_channels, kernel.channels)
    return tiles * weight_bytes(problem, kernel.channels, kernel.stacked)


def row_bytes(problem: TileProblem, kernel: Stride1Kernel) -> int:
    """Returns the bytes of an input row of all channels in shared memory."""
    plane = padded_channels(problem) // kernel.planes * pitch(problem, kernel) * problem.item
    return kernel.planes * round_up(plane, 128)


def shared_bytes(problem: TileProblem, kernel: Stride1Kernel) -> int:
    """Returns the bytes of shared memory of a block, as forward/stride1.cu lays it out; the kernel asserts that both
    agree."""
    weights = weight_bytes(problem, kernel.channels, kernel.stacked)
    factors = 2 * 4 * kernel.channels
    return weights + kernel.stages * (row_bytes(problem, kernel) + 16) + factors + _EXTRA_BYTES


def kernels(problem: TileProblem, device: Device) -> Iterator[Stride1Kernel]:
    """Yields the kernels that compute a problem that forward/stride1.py supports."""
    rows = problem.geometry.kernel[0]
    tiles = product(WARPGROUPS, CHANNELS, (True, False), _loaded_by(problem))
    for warpgroups, channels, stacked, (unaligned, planes) in tiles:
        columns = channels * rows if stacked else channels
        if columns not in _WIDTHS or rows * channels // 2 > _MAX_SUMS:
            continue
        for stages in range(_MAX_STAGES, 1, -1):
            kernel = Stride1Kernel(warpgroups, channels, stacked, stages, unaligned, planes)
            if pitch(problem, kernel) > 256:
                break
            if shared_bytes(problem, kernel) <= device.shared_memory_per_block:
                yield kernel
                break
