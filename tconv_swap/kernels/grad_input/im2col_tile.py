"""The tiles of csrc/kernels/grad_input/im2col.cu, the shared memory that each takes, and its expected time.
grad_input/im2col_choice.py chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from tconv_swap.kernels.common.schedules import PATCHES
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.gradients.grad_output_tile import max_of_a_bank
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Words of 32 bits of one step of k, and of a stage of the weights.
STEP_WORDS = 8
BOX_WORDS = 32
#: Limits of TMA: elements of a box along a dimension, and the bytes of which a row's begin is a multiple.
MAX_BOX = 256
ALIGNMENT = 16
#: Columns of the first dimension of the tensor map where a box would have too many columns for one dimension.
COLUMN_BLOCK = 32
MAX_INPUT_STAGES = 6
#: Bytes of shared memory of a block beside its stages.
FIXED_BYTES = 1024
MAX_WEIGHT_STAGES = 10
#: Threads of a block beside its consumers.
PRODUCER_THREADS = 128
#: The most registers of a thread that hold offsets, where not all four neighbouring words of k have the same distances.
MAX_OFFSETS = 36
#: The same beside the accumulators of 256 channels: with more the compiler spills.
MAX_OFFSETS_256 = 20
#: Warpgroups, multiplies of 64 positions of each, channels: 128 accumulators a thread, or 64.
SHAPES = ((2, 2, 128), (2, 1, 256), (3, 1, 128), (2, 1, 128), (2, 2, 64), (2, 1, 64))
#: Bytes that a multiprocessor loads from the L2 in a clock; multiply-adds in a clock for each element of a word; bytes
#: of a line of shared memory, clocks that a row of a box takes for each line that it touches, and its fewest clocks
#: (fitted, docs/kernels/grad_input/im2col.md); bytes that a multiprocessor stores in a clock, and that the memory
#: moves;
#: clocks that a tile takes beside its multiplies, and that a launch takes.
LOAD_BYTES = 36
MULTIPLY_MACS = 1024
LINE_BYTES, LINE_CLOCKS, ROW_CLOCKS = 128, 3.3, 4
STORE_BYTES = 14
MEMORY_BYTES = 2300
TILE_CLOCKS = 1500
LAUNCH_CLOCKS = 5000


@dataclass(frozen=True, slots=True)
class Im2colTile:
    """The tile of a block: ``images`` x ``rows`` x ``cols`` positions, which are pixels of grad_input."""

    images: int
    rows: int
    cols: int
    m_tiles: int
    warpgroups: int
    channels: int
    #: Channels of grad_output in one stage, and columns of its box.
    stage_channels: int
    box_w: int
    #: Whether one thread has neighbouring positions.
    paired: bool = True
    input_stages: int = 2
    weight_stages: int = 2
    splits: int = 1

    @property
    def multiplies(self) -> int:
        """Returns how many multiplies of 64 positions a step of k has."""
        return self.m_tiles * self.warpgroups

    @property
    def positions(self) -> int:
        """Returns how many positions are multiplied; some of them may be outside of the tile."""
        return 64 * self.multiplies

    @property
    def threads(self) -> int:
        """Returns how many threads a block has."""
        return 128 * self.warpgroups + PRODUCER_THREADS

    def __str__(self) -> str:
        tile = f"{self.images}x{self.rows}x{self.cols} positions x {self.channels} channels"
        text = f"{tile}, {self.warpgroups} warpgroups"
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def word(problem: StridedProblem) -> int:
    """Returns how many elements a word has."""
    return 4 // problem.item


def column_block(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many columns the first dimension of the tensor map has if the columns take two, otherwise 1."""
    return COLUMN_BLOCK if tile.box_w > MAX_BOX else 1


def column_alignment(problem: StridedProblem, box_is_wide: bool) -> int:
    """Returns the number of columns of which the begin of a box is a multiple."""
    return COLUMN_BLOCK if box_is_wide else ALIGNMENT // problem.item


def alignment_columns(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many columns a box has before the first that a tap reaches, for alignment."""
    return -problem.geometry.padding[1] % column_alignment(problem, tile.box_w > MAX_BOX)


def min_box_w(problem: StridedProblem, cols: int) -> int:
    """Returns the fewest columns of a box that a tile of ``cols`` columns needs."""
    reached = (cols - 1) * problem.step[1] + problem.reach[1] + 1
    for wide in (False, True):
        align = column_alignment(problem, wide)
        width = round_up(-problem.geometry.padding[1] % align + reached, align)
        if width <= MAX_BOX or wide:
            return max(width, MAX_BOX + COLUMN_BLOCK) if wide else width
    raise AssertionError


def box_h(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many rows a box has."""
    return (tile.rows - 1) * problem.step[0] + problem.reach[0] + 1


def steps(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many steps of k one stage of the input has."""
    return tile.stage_channels * problem.geometry.taps // (STEP_WORDS * word(problem))


def round_stages(steps: int) -> int:
    """Returns how many stages of the input, of so many steps each, make a round: whole stages of the weights."""
    return 4 // gcd(4, steps)


def rounds(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many rounds the sum over k has."""
    channels = tile.stage_channels * round_stages(steps(problem, tile))
    return ceil_div(problem.geometry.in_channels_per_group, channels)


def offset(problem: StridedProblem, tile: Im2colTile, k: int) -> int:
    """Returns the elements from the first one that a position reads to its ``k``-th of a stage, as ``offset_of_k`` of
    grad_input/im2col.cu."""
    geometry = problem.geometry
    channel, tap = divmod(k, geometry.taps)
    kh, kw = divmod(tap, geometry.kernel[1])
    rows = channel * box_h(problem, tile) + kh * geometry.dilation[0]
    return rows * tile.box_w + kw * geometry.dilation[1]


def halves(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether the two taps of a word are loaded separately: no single word of the box holds both."""
    geometry = problem.geometry
    together = geometry.kernel[1] % 2 == 0 and geometry.dilation[1] == 1 and problem.step[1] % 2 == 0
    return word(problem) == 2 and not (together and alignment_columns(problem, tile) % 2 == 0)


def regular(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether all four neighbouring words of k have the same distances as the first four."""
    size = word(problem)
    offsets = [offset(problem, tile, k) for k in range(STEP_WORDS * steps(problem, tile) * size)]
    quad = 4 * size
    return all(at == offsets[k // quad * quad] + offsets[k % quad] for k, at in enumerate(offsets)) and all(
        offsets[k] - offsets[k - 1] == offsets[1] for k in range(1, len(offsets), 2) if size == 2
    )


def input_bytes(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns the bytes of one stage of the input."""
    return tile.images * tile.stage_channels * box_h(problem, tile) * tile.box_w * problem.item


def shared_bytes(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns the bytes of shared memory of one block; the kernel asserts that it agrees."""
    one_input, one_weight = _stage_bytes(problem, tile)
    return FIXED_BYTES + tile.input_stages * one_input + tile.weight_stages * one_weight


def _stage_bytes(problem: StridedProblem, tile: Im2colTile) -> tuple[int, int]:
    """Returns the bytes of shared memory of a stage of the input, and of one of the weights."""
    return round_up(input_bytes(problem, tile), 128) + 16, tile.channels * 4 * BOX_WORDS + 16


def tile_counts(problem: StridedProblem, tile: Im2colTile) -> tuple[int, int, int]:
    """Returns how many tiles there are along the images, the rows and the columns."""
    rows, cols = problem.positions
    return ceil_div(problem.geometry.batch, tile.images), ceil_div(rows, tile.rows), ceil_div(cols, tile.cols)


def work_count(problem: StridedProblem, tile: Im2colTile) -> int:
    """Returns how many work tiles all blocks have together."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = ceil_div(geometry.out_channels_per_group, tile.channels)
    return images * rows * cols * blocks * geometry.groups * tile.splits


def conflicts(problem: StridedProblem, tile: Im2colTile) -> float:
    """Returns how many passes over the banks of shared memory a load of the im2col operand takes, on average."""
    width, size, (step_h, step_w) = tile.cols, word(problem), problem.step
    image = tile.stage_channels * box_h(problem, tile) * tile.box_w
    existing = tile.images * tile.rows * width
    before = alignment_columns(problem, tile)

    def first_element(position: int) -> int:
        if position >= existing:
            return before
        rows = position // (width * tile.rows) * image + position // width % tile.rows * step_h * tile.box_w
        return before + rows + position % width * step_w

    passes = []
    quads = 1 if regular(problem, tile) else 2 * steps(problem, tile)
    read = range(0, quads, max(1, quads // 4))
    words = [[offset(problem, tile, (4 * quad + t) * size) for t in range(4)] for quad in read]
    for warp, half in product(range(0, 4 * tile.multiplies, 3), range(2)):
        lanes = range(half, 16, 2) if tile.paired else range(8 * half, 8 * half + 8)
        positions = [first_element(warp * 16 + lane) for lane in lanes]
        for quad in words:
            passes.append(max_of_a_bank({(first + at) // size for first in positions for at in quad}))
    return sum(passes) / len(passes)


def clocks(problem: StridedProblem, tile: Im2colTile, multiprocessors: int, passes: float) -> float:
    """Returns the expected clocks, without the time of the memory, which is the same for all tiles but for the cost of
    splits. ``passes``: over the banks of shared memory, for each load."""
    geometry = problem.geometry
    out_item = 4 if tile.splits > 1 else problem.item
    multiplies = tile.multiplies
    stage_steps = steps(problem, tile)
    row = tile.box_w * problem.item
    rows = input_bytes(problem, tile) / row / stage_steps
    weights = 4 * STEP_WORDS * tile.channels
    # Rows follow one another in shared memory, so they begin anywhere in a line.
    lines = (row + LINE_BYTES - gcd(row, LINE_BYTES)) / LINE_BYTES
    load = weights / LOAD_BYTES + rows * max(ROW_CLOCKS, LINE_CLOCKS * lines, row / LOAD_BYTES)
    loads = 16 * passes * (2 if halves(problem, tile) else 1)
    memory = multiplies * (loads + tile.channels / 4) + (weights + rows * row) / 128
    step = max(1.05 * multiplies * tile.channels / 2, memory, load)
    stages = rounds(problem, tile) * round_stages(stage_steps)
    count = stages * stage_steps / tile.splits
    store = tile.positions * tile.channels * out_item / STORE_BYTES
    waves = ceil_div(work_count(problem, tile), multiprocessors)
    total = waves * (count * step + store + TILE_CLOCKS)
    if tile.splits > 1:
        elements = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        total += LAUNCH_CLOCKS + 2 * 4 * elements * tile.splits / MEMORY_BYTES
    return total


def macs(problem: StridedProblem) -> int:
    """Returns how many multiply-adds the problem has."""
    geometry, (rows, cols) = problem.geometry, problem.positions
    positions = geometry.batch * rows * cols
    return positions * geometry.out_channels * geometry.in_channels_per_group * geometry.taps


def legal(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether the kernel computes this size correctly, and TMA can load its boxes."""
    if problem.geometry.width % column_block(problem, tile):
        return False
    if tile.splits > rounds(problem, tile) or (tile.splits > 1 and problem.geometry.groups > 1):
        return False
    # The boxes of all tiles of a row must begin at aligned columns.
    aligned = tile.cols * problem.step[1] % column_alignment(problem, tile.box_w > MAX_BOX) == 0
    return aligned or problem.positions[1] <= tile.cols


def tiles(problem: StridedProblem, device: Device) -> Iterator[Im2colTile]:
    """Yields the tiles with which the kernel can compute sizes of this layer, in no order. 2 splits stand for any
    number of splits above 1."""
    channels = _stage_channels(problem)
    if channels is None:
        return
    for shape in dict.fromkeys(_shapes(problem, channels)):
        for one in (shape, replace(shape, splits=2)):
            if one.splits > 1 and (rounds(problem, one) == 1 or problem.geometry.groups > 1):
                continue
            staged = _with_stages(problem, one, device)
            if staged is not None:
                yield staged


def variants(problem: StridedProblem, tile: Im2colTile, device: Device) -> Iterator[Im2colTile]:
    """Yields the tile with other layouts of shared memory and registers, in no order."""
    for box_w, paired in product(_padded(problem, tile.box_w), (True, False)):
        staged = _with_stages(problem, replace(tile, box_w=box_w, paired=paired), device)
        if staged is not None and _fits(problem, staged):
            yield staged


def _fits(problem: StridedProblem, tile: Im2colTile) -> bool:
    """Returns whether TMA can load its boxes, and registers can hold its offsets."""
    if max(tile.images, box_h(problem, tile)) > MAX_BOX or column_block(problem, tile) * MAX_BOX < tile.box_w:
        return False
    offsets = 2 * steps(problem, tile) * (2 if halves(problem, tile) else 1)
    limit = MAX_OFFSETS_256 if tile.channels == 256 else MAX_OFFSETS
    return offsets <= limit or regular(problem, tile)


def _stage_channels(problem: StridedProblem) -> int | None:
    """Returns how many channels a stage has: whole steps of k, at least four of them if possible."""
    step, taps = STEP_WORDS * word(problem), problem.geometry.taps
    group, groups = problem.geometry.in_channels_per_group, problem.geometry.groups
    fewest = step // gcd(step, taps)
    for channels in (fewest, 2 * fewest, 4 * fewest, 8 * fewest):
        count = channels * taps // step
        if groups > 1 and group % (channels * round_stages(count)):
            return None
        if count >= 4:
            return channels
    return None


def _shapes(problem: StridedProblem, channels: int) -> Iterator[Im2colTile]:
    out_channels = problem.geometry.out_channels_per_group
    for warpgroups, m_tiles, width in SHAPES:
        if width >= 2 * out_channels and width > 64:
            continue
        positions = 64 * m_tiles * warpgroups
        # The order decides between equals: long rows first, and few images.
        for cols in (64, 32, 128, 16, 256, 8, 4):
            for rows in range(positions // cols, 0, -1):
                images, rest = divmod(positions // cols, rows)
                box_w = min_box_w(problem, cols)
                shape = Im2colTile(images, rows, cols, m_tiles, warpgroups, width, channels, box_w)
                if rest == 0 and _fits(problem, shape):
                    yield shape
        if problem.geometry.kernel == problem.step:
            # Whole rows of maps of image patches (vision transformers); those of fewer columns fit tiles of 16 as well
            # (measured).
            cols = PATCHES[2]
            box_w = min_box_w(problem, cols)
            shape = Im2colTile(1, positions // cols, cols, m_tiles, warpgroups, width, channels, box_w)
            if _fits(problem, shape):
                yield shape


def _padded(problem: StridedProblem, box_w: int) -> list[int]:
    """Returns widths of a box: the smallest, and one with a few more columns that moves its rows by half of the
    banks."""
    half = 16 * word(problem)
    more = ceil_div(box_w - half, 2 * half) * 2 * half + half
    return [box_w] if box_w > MAX_BOX else [width for width in sorted({box_w, more}) if width <= MAX_BOX]


def _with_stages(problem: StridedProblem, tile: Im2colTile, device: Device) -> Im2colTile | None:
    """Returns the tile with the stages that hold the most steps of k, or None if two of each do not fit."""
    one_input, one_weight = _stage_bytes(problem, tile)
    room, one_stage = device.shared_memory_per_block - FIXED_BYTES, steps(problem, tile)
    best, found = 0.0, None
    for inputs in range(2, MAX_INPUT_STAGES + 1):
        weights = min(MAX_WEIGHT_STAGES, (room - inputs * one_input) // one_weight)
        if weights < 2:
            break
        steps_ahead = min(inputs * one_stage, 4 * weights) + 0.01 * min(inputs, weights)
        if steps_ahead > best:
            best, found = steps_ahead, (inputs, weights)
    return found and replace(tile, input_stages=found[0], weight_stages=found[1])
