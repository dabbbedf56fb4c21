"""What csrc/kernels/grad_input/im2col.cu computes with one tile, the memory and about the time that it takes (which
tile computes which size: grad_input/im2col_choice.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from tconv_swap.kernels.common.schedules import PATCHES
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Words of 32 bits of one step of k, and of the weights' stage.
STEP_WORDS = 8
BOX_WORDS = 32
#: The engine's: elements of a box along an axis, bytes that a row of it begins at a multiple of.
MOST_BOX = 256
ALIGNMENT = 16
#: Columns that the engine counts as a dimension of their own where a box is wider than it may be.
FOLD = 32
MOST_INPUT_STAGES = 6
MOST_WEIGHT_STAGES = 10
#: Of a block, beside those that multiply.
ASKING_THREADS = 128
#: Of a thread, that hold offsets, where four neighbouring words of k do not lie alike.
MOST_OFFSETS = 36
#: The same beside the sums of 256 channels: beyond it the compiler spills.
MOST_OFFSETS_256 = 20
#: Warpgroups, multiplies of 64 cells of each, channels: of 128 sums a thread, or 64.
SHAPES = ((2, 2, 128), (2, 1, 256), (3, 1, 128), (2, 1, 128), (2, 2, 64), (2, 1, 64))
#: Bytes a clock from the L2 to each multiprocessor; multiply-adds a clock for each element of a word; lines of shared
#: memory, clocks that a row of a box takes for each that it touches, and at least (fitted,
#: docs/kernels/grad_input_unfolded.md); bytes a clock of its outputs and of the memory, clocks that a tile takes beside
#: its multiplies, and a launch.
FILL_BYTES = 36
MULTIPLY_MACS = 1024
LINE_BYTES, LINE_CLOCKS, ROW_CLOCKS = 128, 3.3, 4
STORE_BYTES = 14
MEMORY_BYTES = 2300
TILE_CLOCKS = 1500
LAUNCH_CLOCKS = 5000


@dataclass(frozen=True, slots=True)
class UnfoldedTile:
    """What one block computes: cells of ``images`` x ``rows`` x ``cols``, as many multiplies as hold them."""

    images: int
    rows: int
    cols: int
    m_tiles: int
    warpgroups: int
    channels: int
    #: Of grad_output in one stage; columns of its box.
    stage_channels: int
    box_w: int
    #: Neighbouring cells are one thread's.
    paired: bool = True
    input_stages: int = 2
    weight_stages: int = 2
    splits: int = 1

    @property
    def multiplies(self) -> int:
        """Of 64 cells."""
        return self.m_tiles * self.warpgroups

    @property
    def cells(self) -> int:
        """Cells that are multiplied; some may be none."""
        return 64 * self.multiplies

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + ASKING_THREADS

    def __str__(self) -> str:
        text = f"{self.images}x{self.rows}x{self.cols} cells x {self.channels} channels, {self.warpgroups} warpgroups"
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def word(problem: StridedProblem) -> int:
    """Elements of a word."""
    return 4 // problem.item


def fold(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Columns that are a dimension of their own, 1 if none are."""
    return FOLD if tile.box_w > MOST_BOX else 1


def alignment(problem: StridedProblem, box_is_wide: bool) -> int:
    """Columns: a box begins at a multiple of so many."""
    return FOLD if box_is_wide else ALIGNMENT // problem.item


def lead(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Columns of a box before the first that a tap reaches."""
    return -problem.geometry.padding[1] % alignment(problem, tile.box_w > MOST_BOX)


def least_box_w(problem: StridedProblem, cols: int) -> int:
    reached = (cols - 1) * problem.step[1] + problem.reach[1] + 1
    for wide in (False, True):
        align = alignment(problem, wide)
        width = round_up(-problem.geometry.padding[1] % align + reached, align)
        if width <= MOST_BOX or wide:
            return max(width, MOST_BOX + FOLD) if wide else width
    raise AssertionError


def box_h(problem: StridedProblem, tile: UnfoldedTile) -> int:
    return (tile.rows - 1) * problem.step[0] + problem.reach[0] + 1


def steps(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Steps of k of one stage of the input."""
    return tile.stage_channels * problem.geometry.taps // (STEP_WORDS * word(problem))


def round_stages(steps: int) -> int:
    """Stages of so many steps that are whole stages of the weights, too."""
    return 4 // gcd(4, steps)


def rounds(problem: StridedProblem, tile: UnfoldedTile) -> int:
    channels = tile.stage_channels * round_stages(steps(problem, tile))
    return ceil_div(problem.geometry.in_channels_per_group, channels)


def place(problem: StridedProblem, tile: UnfoldedTile, k: int) -> int:
    """Elements from a cell's first to the ``k``-th of a stage; mirrors grad_input/im2col.cu."""
    geometry = problem.geometry
    channel, tap = divmod(k, geometry.taps)
    kh, kw = divmod(tap, geometry.kernel[1])
    rows = channel * box_h(problem, tile) + kh * geometry.dilation[0]
    return rows * tile.box_w + kw * geometry.dilation[1]


def halves(problem: StridedProblem, tile: UnfoldedTile) -> bool:
    """Whether the two taps of a word are loaded apart: they do not lie in one word of the box, of any cell."""
    geometry = problem.geometry
    together = geometry.kernel[1] % 2 == 0 and geometry.dilation[1] == 1 and problem.step[1] % 2 == 0
    return word(problem) == 2 and not (together and lead(problem, tile) % 2 == 0)


def regular(problem: StridedProblem, tile: UnfoldedTile) -> bool:
    """Whether any four words of k lie to one another as the first four do."""
    size = word(problem)
    places = [place(problem, tile, k) for k in range(STEP_WORDS * steps(problem, tile) * size)]
    four = 4 * size
    return all(at == places[k // four * four] + places[k % four] for k, at in enumerate(places)) and all(
        places[k] - places[k - 1] == places[1] for k in range(1, len(places), 2) if size == 2
    )


def input_bytes(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Of one stage."""
    return tile.images * tile.stage_channels * box_h(problem, tile) * tile.box_w * problem.item


def shared_bytes(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Shared memory of one block; the kernel asserts that they agree."""
    return (
        1024
        + tile.input_stages * (round_up(input_bytes(problem, tile), 128) + 16)
        + tile.weight_stages * (tile.channels * 4 * BOX_WORDS + 16)
    )


def tile_counts(problem: StridedProblem, tile: UnfoldedTile) -> tuple[int, int, int]:
    """Tiles along the images, the rows and the columns."""
    rows, cols = problem.positions
    return ceil_div(problem.geometry.batch, tile.images), ceil_div(rows, tile.rows), ceil_div(cols, tile.cols)


def work_count(problem: StridedProblem, tile: UnfoldedTile) -> int:
    """Turns of blocks."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = ceil_div(geometry.out_channels_per_group, tile.channels)
    return images * rows * cols * blocks * geometry.groups * tile.splits


def conflicts(problem: StridedProblem, tile: UnfoldedTile) -> float:
    """How many passes over the banks of shared memory a load of the cells' words takes, on average."""
    width, size = tile.cols, word(problem)
    image = tile.stage_channels * box_h(problem, tile) * tile.box_w
    existing = tile.images * tile.rows * width

    def cell_place(cell: int) -> int:
        if cell >= existing:
            return lead(problem, tile)
        rows = cell // (width * tile.rows) * image + cell // width % tile.rows * problem.step[0] * tile.box_w
        return lead(problem, tile) + rows + cell % width * problem.step[1]

    passes = []
    fours = 1 if regular(problem, tile) else 2 * steps(problem, tile)
    words = [[place(problem, tile, (4 * four + t) * size) for t in range(4)] for four in range(fours)]
    for warp, half in product(range(0, 4 * tile.multiplies, 3), range(2)):
        cells = [cell_place(warp * 16 + (2 * g + half if tile.paired else g + 8 * half)) for g in range(8)]
        for four in words[:: max(1, fours // 4)]:
            banks: dict[int, set[int]] = {}
            for cell, at in product(cells, four):
                found = (cell + at) // size
                banks.setdefault(found % 32, set()).add(found)
            passes.append(max(map(len, banks.values())))
    return sum(passes) / len(passes)


def clocks(problem: StridedProblem, tile: UnfoldedTile, multiprocessors: int, passes: float) -> float:
    """About how long it takes, what comes from memory left aside: it is the same for all tiles but what splits cost.
    ``passes``: over the banks, of a load."""
    geometry = problem.geometry
    out_item = 4 if tile.splits > 1 else problem.item
    multiplies = tile.multiplies
    row = tile.box_w * problem.item
    rows = input_bytes(problem, tile) / row / steps(problem, tile)
    weights = 4 * STEP_WORDS * tile.channels
    # Rows follow one another, so they begin anywhere in a line.
    lines = (row + LINE_BYTES - gcd(row, LINE_BYTES)) / LINE_BYTES
    fill = weights / FILL_BYTES + rows * max(ROW_CLOCKS, LINE_CLOCKS * lines, row / FILL_BYTES)
    loads = 16 * passes * (2 if halves(problem, tile) else 1)
    memory = multiplies * (loads + tile.channels / 4) + (weights + rows * row) / 128
    step = max(1.05 * multiplies * tile.channels / 2, memory, fill)
    stages = rounds(problem, tile) * round_stages(steps(problem, tile))
    count = stages * steps(problem, tile) / tile.splits
    store = tile.cells * tile.channels * out_item / STORE_BYTES
    turns = ceil_div(work_count(problem, tile), multiprocessors)
    total = turns * (count * step + store + TILE_CLOCKS)
    if tile.splits > 1:
        elements = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        total += LAUNCH_CLOCKS + 2 * 4 * elements * tile.splits / MEMORY_BYTES
    return total


def macs(problem: StridedProblem) -> int:
    """Multiply-adds."""
    geometry, (rows, cols) = problem.geometry, problem.positions
    cells = geometry.batch * rows * cols
    return cells * geometry.out_channels * geometry.in_channels_per_group * geometry.taps


def legal(problem: StridedProblem, tile: UnfoldedTile) -> bool:
    """Whether the kernel is right for this size, and the engine can bring its boxes."""
    if problem.geometry.width % fold(problem, tile):
        return False
    if tile.splits > rounds(problem, tile) or (tile.splits > 1 and problem.geometry.groups > 1):
        return False
    # Boxes of one tile after another begin where they may.
    aligned = tile.cols * problem.step[1] % alignment(problem, tile.box_w > MOST_BOX) == 0
    return aligned or problem.positions[1] <= tile.cols


def tiles(problem: StridedProblem, device: Device) -> Iterator[UnfoldedTile]:
    """Tiles that the kernel can compute sizes of this layer with, whatever its size, in no order; 2 splits stand for
    any number of them above 1."""
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


def variants(problem: StridedProblem, tile: UnfoldedTile, device: Device) -> Iterator[UnfoldedTile]:
    """The tile with other places in shared memory and in registers, in no order."""
    for box_w, paired in product(_padded(problem, tile.box_w), (True, False)):
        staged = _with_stages(problem, replace(tile, box_w=box_w, paired=paired), device)
        if staged is not None and _fits(problem, staged):
            yield staged


def _fits(problem: StridedProblem, tile: UnfoldedTile) -> bool:
    """Whether its boxes are ones of the engine, and its offsets find registers."""
    if max(tile.images, box_h(problem, tile)) > MOST_BOX or fold(problem, tile) * MOST_BOX < tile.box_w:
        return False
    offsets = 2 * steps(problem, tile) * (2 if halves(problem, tile) else 1)
    most = MOST_OFFSETS_256 if tile.channels == 256 else MOST_OFFSETS
    return offsets <= most or regular(problem, tile)


def _stage_channels(problem: StridedProblem) -> int | None:
    """Channels of a stage: whole steps of k, four of them if there are few."""
    step, taps = STEP_WORDS * word(problem), problem.geometry.taps
    group, groups = problem.geometry.in_channels_per_group, problem.geometry.groups
    least = step // gcd(step, taps)
    for channels in (least, 2 * least, 4 * least, 8 * least):
        count = channels * taps // step
        if groups > 1 and group % (channels * round_stages(count)):
            return None
        if count >= 4:
            return channels
    return None


def _shapes(problem: StridedProblem, channels: int) -> Iterator[UnfoldedTile]:
    out_channels = problem.geometry.out_channels_per_group
    for warpgroups, m_tiles, width in SHAPES:
        if width >= 2 * out_channels and width > 64:
            continue
        cells = 64 * m_tiles * warpgroups
        # Equals in this order: long rows, and few images.
        for cols in (64, 32, 128, 16, 256, 8, 4):
            for rows in range(cells // cols, 0, -1):
                images, rest = divmod(cells // cols, rows)
                box_w = least_box_w(problem, cols)
                shape = UnfoldedTile(images, rows, cols, m_tiles, warpgroups, width, channels, box_w)
                if rest == 0 and _fits(problem, shape):
                    yield shape
        if problem.geometry.kernel == problem.step:
            # Whole rows of maps of patches; those of fewer columns fit tiles of 16 as well (measured).
            cols = PATCHES[2]
            box_w = least_box_w(problem, cols)
            shape = UnfoldedTile(1, cells // cols, cols, m_tiles, warpgroups, width, channels, box_w)
            if _fits(problem, shape):
                yield shape


def _padded(problem: StridedProblem, box_w: int) -> list[int]:
    """Widths of a box: the least, and a few more columns where that parts its rows by half a turn over the banks."""
    half = 16 * word(problem)
    more = ceil_div(box_w - half, 2 * half) * 2 * half + half
    return [box_w] if box_w > MOST_BOX else [width for width in sorted({box_w, more}) if width <= MOST_BOX]


def _with_stages(problem: StridedProblem, tile: UnfoldedTile, device: Device) -> UnfoldedTile | None:
    """The same with as many stages as look furthest ahead, if there is room for two of each."""
    none = shared_bytes(problem, replace(tile, input_stages=0, weight_stages=0))
    one_input = shared_bytes(problem, replace(tile, input_stages=1, weight_stages=0)) - none
    one_weight = tile.channels * 4 * BOX_WORDS + 16
    room = device.shared_memory_per_block - none
    best, found = 0.0, None
    for inputs in range(2, MOST_INPUT_STAGES + 1):
        weights = min(MOST_WEIGHT_STAGES, (room - inputs * one_input) // one_weight)
        if weights < 2:
            break
        ahead = min(inputs * steps(problem, tile), 4 * weights) + 0.01 * min(inputs, weights)
        if ahead > best:
            best, found = ahead, replace(tile, input_stages=inputs, weight_stages=weights)
    return found
