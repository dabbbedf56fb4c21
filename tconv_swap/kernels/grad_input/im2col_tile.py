"""The tiles of csrc/kernels/grad_input/im2col.cu, and the shared memory that each takes. A tile is a kernel, the shape
that a launch gives it, and a number of splits. grad_input/im2col_choice.py chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from tconv_swap.kernels.common.hardware import MAX_BOX, TMA_ALIGNMENT
from tconv_swap.kernels.common.schedules import PATCHES
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Words of 32 bits of one step of k, and of a stage of the weights; the steps of such a stage.
STEP_WORDS = 8
BOX_WORDS = 32
BOX_STEPS = BOX_WORDS // STEP_WORDS
#: Positions of one multiply.
MULTIPLY_POSITIONS = 64
#: Columns of the first dimension of the tensor map where a box would have too many columns for one dimension.
COLUMN_BLOCK = 32
MAX_INPUT_STAGES = 6
MAX_WEIGHT_STAGES = 10
#: The stages begin at a multiple of so many bytes of shared memory, behind the barriers of all stages and the table of
#: offsets, which has so many bytes for each load of a word and stage of the weights.
STAGE_ALIGNMENT = 1024
BARRIER_BYTES, OFFSET_BYTES = 2 * 8 * (MAX_INPUT_STAGES + MAX_WEIGHT_STAGES), 2 * BOX_WORDS
#: Threads of a block beside its consumers.
PRODUCER_THREADS = 128
#: Columns of a shape: powers of two, the usual ones first, and for maps of several rows whose taps overlap those of
#: usual maps between them. Seven eighths of the positions that are multiplied are of the tile, or more.
COLUMNS, MAP_COLUMNS = (64, 32, 128, 16, 256, 8, 4), (20, 24, 28, 40, 48, 56)
#: Warpgroups, multiplies of 64 positions of each, and channels of the kernels: 128 accumulators a thread, or 64.
BLOCKS = ((2, 2, 128), (2, 1, 256), (3, 1, 128), (2, 1, 128), (2, 2, 64), (2, 1, 64))
#: The channels that a multiply may have: a block has no more than those that hold all of a layer.
MULTIPLY_CHANNELS = (16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 128, 256)


class Im2colKernel(NamedTuple):
    """What is compiled: a block multiplies ``m_tiles`` times 64 positions in each of its ``warpgroups``, for so many
    ``channels``."""

    m_tiles: int
    warpgroups: int
    channels: int
    #: Channels of grad_output in one stage, and its steps of k.
    stage_channels: int
    steps: int
    #: Whether it stores partial sums of several splits.
    partial: bool = False

    @property
    def multiplies(self) -> int:
        """Returns how many multiplies of 64 positions a step of k has."""
        return self.m_tiles * self.warpgroups

    @property
    def positions(self) -> int:
        """Returns how many positions are multiplied; some of them may be outside of the tile."""
        return MULTIPLY_POSITIONS * self.multiplies

    @property
    def threads(self) -> int:
        """Returns how many threads a block has."""
        return 128 * self.warpgroups + PRODUCER_THREADS

    @property
    def round_stages(self) -> int:
        """Returns how many stages of the input make a round: the fewest that take a whole number of stages of the
        weights."""
        return BOX_STEPS // gcd(BOX_STEPS, self.steps)


class Im2colShape(NamedTuple):
    """What a launch gives a kernel: the tile of a block is ``images`` x ``rows`` x ``cols`` positions, which are pixels
    of grad_input."""

    images: int
    rows: int
    cols: int
    #: Columns of the box of one stage.
    box_w: int
    #: Whether one thread has neighbouring positions.
    paired: bool = True
    input_stages: int = 2
    weight_stages: int = 2

    def suits(self, rows: int, cols: int) -> bool:
        """Returns whether a tile of several images has whole ones, of so many rows and columns, the positions of a
        multiply of each, or parts of single rows: smaller parts of maps share little of what they load."""
        is_whole = self.rows >= rows and self.cols >= cols
        return 1 in (self.images, rows) or is_whole or self.rows * self.cols >= MULTIPLY_POSITIONS

    @property
    def wide(self) -> bool:
        """Returns whether its box has more columns than TMA takes in one dimension."""
        return self.box_w > MAX_BOX

    @property
    def column_block(self) -> int:
        """Returns how many columns the first dimension of the tensor map has if the columns take two, otherwise 1."""
        return COLUMN_BLOCK if self.wide else 1


class Im2colTile(NamedTuple):
    """A kernel, the shape of its tile, and the number of parts that the sum over k is split in."""

    kernel: Im2colKernel
    shape: Im2colShape
    splits: int = 1

    def __str__(self) -> str:
        shape, kernel = self.shape, self.kernel
        tile = f"{shape.images}x{shape.rows}x{shape.cols} positions x {kernel.channels} channels"
        text = f"{tile}, {kernel.warpgroups} warpgroups"
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


@lru_cache(maxsize=4096)
def as_read(problem: StridedProblem) -> StridedProblem:
    """Returns the problem as the kernel reads it. In channels_last the channels of a pixel are columns of its row, if
    they are one group and its taps follow one another: kernel, stride and padding are that many times as wide, and the
    weight in channels_last has that order too."""
    g, channels = problem.geometry, problem.geometry.in_channels
    if not (problem.input_channels_last and problem.weight_channels_last):
        return problem
    if g.groups > 1 or g.dilation[1] > 1:
        return problem
    wide = g._replace(
        in_channels=1,
        width=g.width * channels,
        kernel=(g.kernel[0], g.kernel[1] * channels),
        padding=(g.padding[0], g.padding[1] * channels),
        output_padding=(g.output_padding[0], 0),
    )
    wide = wide._replace(output_padding=(g.output_padding[0], problem.positions[1] - wide.out_width))
    return problem._replace(
        geometry=wide,
        step=(problem.step[0], problem.step[1] * channels),
        input_channels_last=False,
        weight_channels_last=False,
    )


def word(problem: StridedProblem) -> int:
    """Returns how many elements a word has."""
    return 4 // problem.item


def column_alignment(problem: StridedProblem, box_is_wide: bool) -> int:
    """Returns the number of columns of which the begin of a box is a multiple."""
    return COLUMN_BLOCK if box_is_wide else TMA_ALIGNMENT // problem.item


def alignment_columns(problem: StridedProblem, box_is_wide: bool) -> int:
    """Returns how many columns a box has before the first that a tap reaches, for alignment."""
    return -problem.geometry.padding[1] % column_alignment(problem, box_is_wide)


def min_box_w(problem: StridedProblem, cols: int) -> int:
    """Returns the fewest columns of a box that a tile of ``cols`` columns needs."""
    reached = (cols - 1) * problem.step[1] + problem.reach[1] + 1
    for wide in (False, True):
        align = column_alignment(problem, wide)
        width = round_up(-problem.geometry.padding[1] % align + reached, align)
        if width <= MAX_BOX or wide:
            return max(width, MAX_BOX + COLUMN_BLOCK) if wide else width
    raise AssertionError


def box_h(problem: StridedProblem, shape: Im2colShape) -> int:
    """Returns how many rows a box has."""
    return (shape.rows - 1) * problem.step[0] + problem.reach[0] + 1


def rounds(problem: StridedProblem, kernel: Im2colKernel) -> int:
    """Returns how many rounds the sum over k has."""
    return ceil_div(problem.geometry.in_channels_per_group, kernel.stage_channels * kernel.round_stages)


def offset(problem: StridedProblem, k: int) -> tuple[int, int, int]:
    """Returns the channels, rows and columns of a box from the first element that a position reads to its ``k``-th of a
    stage, as ``offset_of_k`` of grad_input/im2col.cu."""
    geometry = problem.geometry
    channel, tap = divmod(k, geometry.taps)
    kh, kw = divmod(tap, geometry.kernel[1])
    return channel, kh * geometry.dilation[0], kw * geometry.dilation[1]


def halves(problem: StridedProblem) -> bool:
    """Returns whether the two taps of a word are loaded separately: no word of a box, wide or not, holds both."""
    geometry = problem.geometry
    together = geometry.kernel[1] % 2 == 0 and geometry.dilation[1] == 1 and problem.step[1] % 2 == 0
    return word(problem) == 2 and not (together and alignment_columns(problem, False) % 2 == 0)


def head_bytes(problem: StridedProblem, kernel: Im2colKernel) -> int:
    """Returns the bytes of shared memory before the stages: the barriers and the table of offsets of a round."""
    boxes = kernel.round_stages * kernel.steps // BOX_STEPS
    return round_up(BARRIER_BYTES + boxes * OFFSET_BYTES * (2 if halves(problem) else 1), STAGE_ALIGNMENT)


def input_bytes(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> int:
    """Returns the bytes of one stage of the input."""
    return shape.images * kernel.stage_channels * box_h(problem, shape) * shape.box_w * problem.item


def input_pitch(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> int:
    """Returns the bytes from one stage of the input to the next."""
    return round_up(input_bytes(problem, kernel, shape), 128)


def weight_bytes(kernel: Im2colKernel) -> int:
    """Returns the bytes of one stage of the weights."""
    return kernel.channels * 4 * BOX_WORDS


def shared_bytes(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns the bytes of shared memory of one block."""
    kernel, shape = tile.kernel, tile.shape
    inputs = shape.input_stages * input_pitch(problem, kernel, shape)
    head = STAGE_ALIGNMENT + head_bytes(problem, kernel)
    return head + inputs + shape.weight_stages * weight_bytes(kernel)


def tile_counts(problem: StridedProblem, shape: Im2colShape) -> tuple[int, int, int]:
    """Returns how many tiles there are along the images, the rows and the columns."""
    rows, cols = problem.positions
    return (
        ceil_div(problem.geometry.batch, shape.images),
        ceil_div(rows, shape.rows),
        ceil_div(cols, shape.cols),
    )


def work_count(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many work tiles all blocks have together."""
    images, rows, cols = tile_counts(problem, tile.shape)
    return images * rows * cols * blocks(problem, tile.kernel) * tile.splits


def blocks(problem: StridedProblem, kernel: Im2colKernel) -> int:
    """Returns how many blocks of channels all groups have."""
    geometry = problem.geometry
    return ceil_div(geometry.out_channels_per_group, kernel.channels) * geometry.groups


def macs(problem: StridedProblem) -> int:
    """Returns how many multiply-adds the problem has."""
    geometry, (rows, cols) = problem.geometry, problem.positions
    positions = geometry.batch * rows * cols
    return positions * geometry.out_channels * geometry.in_channels_per_group * geometry.taps


def legal(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether the kernel computes this size correctly, and TMA can load its boxes."""
    shape = tile.shape
    if problem.geometry.width % shape.column_block or not may_split(problem, tile):
        return False
    return is_aligned(problem, shape) or problem.positions[1] <= shape.cols


def may_split(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether the sum over k has so many parts, which are computed in one group only."""
    return tile.splits == 1 or (tile.splits <= rounds(problem, tile.kernel) and problem.geometry.groups == 1)


def is_aligned(problem: StridedProblem, shape: Im2colShape) -> bool:
    """Returns whether the boxes of all tiles of a row begin at aligned columns."""
    return shape.cols * problem.step[1] % column_alignment(problem, shape.wide) == 0


def kernels(problem: StridedProblem, device: Device) -> Iterator[Im2colKernel]:
    """Yields the kernels that compute sizes of this layer."""
    out_channels = problem.geometry.out_channels_per_group
    exact = next(channels for channels in MULTIPLY_CHANNELS if channels >= min(out_channels, 256))
    blocks = ((warpgroups, m_tiles, min(channels, exact)) for warpgroups, m_tiles, channels in BLOCKS)
    for warpgroups, m_tiles, channels in dict.fromkeys(blocks):
        for stage_channels, steps in _stages(problem):
            kernel = Im2colKernel(m_tiles, warpgroups, channels, stage_channels, steps)
            if next(shapes(problem, kernel, device), None) is not None:
                yield kernel
                if rounds(problem, kernel) > 1 and problem.geometry.groups == 1:
                    yield kernel._replace(partial=True)
                break


def shapes(problem: StridedProblem, kernel: Im2colKernel, device: Device) -> Iterator[Im2colShape]:
    """Yields the shapes that a kernel may get, with the narrowest boxes."""
    # The order decides between equal shapes: those with long rows and few images come first.
    has_halo = problem.geometry.kernel != problem.step
    for cols in (*COLUMNS, *MAP_COLUMNS) if has_halo and not problem.one_row else COLUMNS:
        lines = kernel.positions // cols
        for rows in range(lines, 0, -1):
            images = lines // rows
            if (images > 1 or rows == lines) and 8 * images * rows >= 7 * lines:
                yield from _shape(problem, kernel, (images, rows, cols), device)
    if not has_halo:
        # Whole rows of maps of image patches (vision transformers). For maps of fewer columns tiles of 16 columns are
        # as fast (measured).
        cols = PATCHES[2]
        yield from _shape(problem, kernel, (1, kernel.positions // cols, cols), device)


def _shape(
    problem: StridedProblem, kernel: Im2colKernel, tile: tuple[int, int, int], device: Device
) -> Iterator[Im2colShape]:
    """Yields the shape of this tile, if TMA can load its boxes and shared memory holds them."""
    staged = with_stages(problem, kernel, Im2colShape(*tile, min_box_w(problem, tile[2])), device)
    if staged is not None:
        yield staged


def variants(
    problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, device: Device
) -> Iterator[Im2colShape]:
    """Yields the shape with other layouts of shared memory and registers, in no order."""
    for box_w, paired in product(_padded(problem, shape.box_w), (True, False)):
        staged = with_stages(problem, kernel, shape._replace(box_w=box_w, paired=paired), device)
        if staged is not None:
            yield staged


def _stages(problem: StridedProblem) -> Iterator[tuple[int, int]]:
    """Yields the channels and the steps that a stage may have, the one with the fewest steps of all first: whole steps
    of whole channels, at least four if possible, and in one group all of k, filled up to whole stages of the
    weights."""
    step, taps = STEP_WORDS * word(problem), problem.geometry.taps
    group, groups = problem.geometry.in_channels_per_group, problem.geometry.groups
    whole = round_up(ceil_div(group * taps, step), BOX_STEPS)
    fewest = step // gcd(step, taps)
    for channels in (fewest, 2 * fewest, 4 * fewest, 8 * fewest):
        count = channels * taps // step
        of_round = channels * BOX_STEPS // gcd(BOX_STEPS, count)
        if groups > 1 and group % of_round:
            return
        if count >= BOX_STEPS:
            if groups == 1 and whole < ceil_div(group, of_round) * of_round * taps // step:
                yield ceil_div(whole * step, taps), whole
            yield channels, count
            return


def _padded(problem: StridedProblem, box_w: int) -> list[int]:
    """Returns widths of a box: the smallest, and one with a few more columns that moves its rows by half of the
    banks."""
    half = 16 * word(problem)
    more = ceil_div(box_w - half, 2 * half) * 2 * half + half
    return [box_w] if box_w > MAX_BOX else [width for width in sorted({box_w, more}) if width <= MAX_BOX]


def with_stages(
    problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, device: Device
) -> Im2colShape | None:
    """Returns the shape with the stages that hold the most steps of k, or None if TMA cannot load its boxes or two
    stages of each operand do not fit."""
    if max(shape.images, box_h(problem, shape)) > MAX_BOX or shape.column_block * MAX_BOX < shape.box_w:
        return None
    one_input, one_weight = input_pitch(problem, kernel, shape), weight_bytes(kernel)
    room = device.shared_memory_per_block - STAGE_ALIGNMENT - head_bytes(problem, kernel)
    best, found = 0.0, None
    for inputs in range(2, MAX_INPUT_STAGES + 1):
        weights = min(MAX_WEIGHT_STAGES, (room - inputs * one_input) // one_weight)
        if weights < 2:
            break
        steps_ahead = min(inputs * kernel.steps, BOX_STEPS * weights) + 0.01 * min(inputs, weights)
        if steps_ahead > best:
            best, found = steps_ahead, (inputs, weights)
    return found and shape._replace(input_stages=found[0], weight_stages=found[1])
