"""What csrc/kernels/grad_input/implicit_gemm_tma.cu computes with one tile, the memory and about the time that it
takes (which tile computes which size: grad_input/implicit_gemm_tma_choice.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes of a row: one pixel's, or one weight's, share of a chunk.
ROW_BYTES = 128
#: The engine's: elements of a box along an axis, and between two that it takes.
MOST_BOX = 256
MOST_STEP = 8
#: Of a tile of maps of fewer columns than the 8 cells that lie together.
NARROW_COLS = 4
MOST_INPUT_STAGES = 8
MOST_WEIGHT_STAGES = 12
#: Of a block, beside those that multiply.
ASKING_THREADS = 64
#: Clocks that 64 cells take to be multiplied by 256 channels, one tap of one chunk; bytes a clock from the L2 to each
#: multiprocessor (measured, docs/kernels/grad_input_boxes.md), and of its outputs to the memory (fitted).
MULTIPLY_CLOCKS = 512
FILL_BYTES = 38
STORE_BYTES = 14
#: Columns of the widest map that a tile of cells in a row takes: whole rows of a wider one are much more than the tile.
DENSE_COLS = 32
#: Bytes a clock of the memory, and clocks that a launch costs.
MEMORY_BYTES = 2300
LAUNCH_CLOCKS = 5000


@dataclass(frozen=True, slots=True)
class BoxTile:
    """What one block computes. A multiply is 64 cells, 8 groups of 8; ``groups_along`` and ``multiplies_along`` say
    along which axis of the map ("h", "w", or images "n") they follow each other; "" with a flat map. ``dense`` (flat,
    too): the tile is so many cells in a row, wherever they begin, of maps of ``cols`` columns at most."""

    #: Of cells: all warpgroups' together.
    images: int
    rows: int
    cols: int
    groups_along: str
    multiplies_along: str
    m_tiles: int
    warpgroups: int
    #: Those that share an image's rows; the others have images of their own.
    warpgroups_h: int
    channels: int
    #: Kernel within the stride and rows of all images as far apart as those of one: they are rows of one map.
    flat: bool = False
    input_stages: int = 2
    weight_stages: int = 3
    splits: int = 1
    dense: bool = False
    #: Of so many warpgroups, each with tiles of its own.
    teams: int = 1
    #: All chunks of a slice, then the next slice; else all slices of a chunk.
    slices_first: bool = False
    #: Phases of columns are a dimension of their own of grad_output's map: its boxes have no step along the columns.
    phased: bool = False

    @property
    def cells(self) -> int:
        """Cells that are multiplied; of a tile that is not dense, some may be none."""
        return 64 * self.m_tiles * self.warpgroups

    @property
    def narrow(self) -> bool:
        return self.cols < 8

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups * self.teams + ASKING_THREADS

    def __str__(self) -> str:
        cells = self.cells if self.dense else f"{self.images}x{self.rows}x{self.cols}"
        text = f"{cells} cells x {self.channels} channels, {self.warpgroups} warpgroups"
        text += f", {self.teams} teams" if self.teams > 1 else ""
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def can_be_flat(problem: StridedProblem) -> bool:
    """Whether the rows of all images are as far apart as those of one, and no tap is shifted."""
    return problem.flat and problem.geometry.height == problem.positions[0] * problem.step[0]


def box_size(problem: StridedProblem, tile: BoxTile) -> tuple[int, int]:
    """Rows and columns of grad_output's pixels of one phase that a tile reads."""
    if tile.dense:
        width = problem.positions[1]
        return _dense_rows(tile, width), width
    shift_h, shift_w = problem.most_shift
    return tile.rows + shift_h, tile.cols + (0 if tile.narrow else shift_w)


def _dense_rows(tile: BoxTile, width: int) -> int:
    """Rows of a map that hold a tile, wherever it begins."""
    return ceil_div(width - gcd(tile.cells, width) + tile.cells, width)


def pitches(problem: StridedProblem, tile: BoxTile) -> dict[str, int]:
    """How far the groups and the multiplies of a warpgroup lie apart, in the input's stage and in what is stored."""
    if tile.flat:
        return dict(GROUP_PIXELS=8, MULTIPLY_PIXELS=64, GROUP_PLACES=8, MULTIPLY_PLACES=64)
    box_h, box_w = box_size(problem, tile)
    own_rows = tile.rows // tile.warpgroups_h
    found = {}
    for name, height, width in (("PIXELS", box_h, box_w), ("PLACES", own_rows, tile.cols)):
        one = {"w": 8, "h": max(1, 8 // tile.cols) * width, "n": height * width}
        found[f"GROUP_{name}"] = one[tile.groups_along]
        found[f"MULTIPLY_{name}"] = one[tile.multiplies_along] * (
            8 if tile.multiplies_along == tile.groups_along else 1
        )
    return found


def fetched_bytes(problem: StridedProblem) -> int:
    """Returns how many bytes of grad_output the L2 fetches at a time (docs/kernels/grad_input_boxes.md).

    256 only where the rest of them is read at once: as the next chunk of a slice, or as the next column, whose phase
    has taps.
    """
    all_columns = len(problem.phases_used[1]) == problem.step[1]
    return 256 if slices_first(problem) or (chunks(problem) == 1 and all_columns) else 128


def slices_first(problem: StridedProblem) -> bool:
    """Whether the chunks of a slice follow each other: two that memory brings at once."""
    return problem.most_shift == (0, 0) and chunks(problem) == 2


def slice_count(problem: StridedProblem, tile: BoxTile) -> int:
    rows, cols = problem.phases_used
    return len(rows) * (problem.geometry.kernel[1] if tile.narrow else len(cols))


def chunks(problem: StridedProblem) -> int:
    return ceil_div(problem.geometry.in_channels_per_group * problem.item, ROW_BYTES)


def box_bytes(problem: StridedProblem, tile: BoxTile) -> int:
    """Of a box of grad_output."""
    box_h, box_w = box_size(problem, tile)
    return tile.images * box_h * box_w * ROW_BYTES


def input_bytes(problem: StridedProblem, tile: BoxTile) -> int:
    """The same of any size that the tile takes, at most."""
    if tile.dense:
        return max(width * _dense_rows(tile, width) for width in range(1, tile.cols + 1)) * ROW_BYTES
    return box_bytes(problem, tile)


def shared_bytes(problem: StridedProblem, tile: BoxTile) -> int:
    """Shared memory of one block; the kernel asserts that they agree."""
    return (
        1024
        + tile.input_stages * (round_up(input_bytes(problem, tile), 1024) + 16)
        + tile.weight_stages * (tile.channels * ROW_BYTES + 16)
        + tile.teams * (tile.warpgroups * 64 * ROW_BYTES + 8)
    )


def tile_counts(problem: StridedProblem, tile: BoxTile) -> tuple[int, int, int]:
    """Tiles of cells along the images, the rows and the columns."""
    batch, (cells_h, cells_w) = problem.geometry.batch, problem.positions
    if tile.dense:
        return 1, 1, ceil_div(batch * cells_h * cells_w, tile.cells)
    if tile.flat:
        batch, cells_h = 1, batch * cells_h
    return ceil_div(batch, tile.images), ceil_div(cells_h, tile.rows), ceil_div(cells_w, tile.cols)


def work_count(problem: StridedProblem, tile: BoxTile) -> int:
    """Turns of blocks."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = ceil_div(geometry.out_channels_per_group, tile.channels)
    return images * rows * cols * blocks * geometry.groups * tile.splits


def clocks(problem: StridedProblem, tile: BoxTile, multiprocessors: int) -> float:
    """About how long it takes, what comes from memory left aside: it is the same for all tiles but what splits cost."""
    geometry = problem.geometry
    out_item = 4 if tile.splits > 1 else problem.item
    multiplies = geometry.taps * tile.cells / 64 * tile.channels / 256 * MULTIPLY_CLOCKS
    weights = geometry.taps * tile.channels * ROW_BYTES
    fill = slice_count(problem, tile) * box_bytes(problem, tile) + weights
    steps = ceil_div(chunks(problem), tile.splits)
    main = steps * max(multiplies, fill / FILL_BYTES)
    store = tile.cells * tile.channels * out_item / STORE_BYTES
    total = ceil_div(work_count(problem, tile), multiprocessors) * (main + store)
    if tile.splits > 1:
        count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        total += LAUNCH_CLOCKS + 2 * 4 * count * tile.splits / MEMORY_BYTES
    return total


def legal(problem: StridedProblem, tile: BoxTile) -> bool:
    """Whether the kernel is right for this size, and the engine can bring its boxes."""
    geometry, (step_h, step_w) = problem.geometry, problem.step
    if tile.flat and not can_be_flat(problem):
        return False
    if tile.dense and problem.positions[1] > tile.cols:
        return False
    if tile.splits > 1 and (geometry.groups > 1 or tile.splits > chunks(problem)):
        return False
    box_h, box_w = box_size(problem, tile)
    if tile.phased:
        return may_be_phased(problem, tile) and max((box_h - 1) * step_h + 1, box_w) <= MOST_BOX
    return max((box_h - 1) * step_h + 1, (box_w - 1) * step_w + 1) <= MOST_BOX


def tiles(problem: StridedProblem, device: Device) -> Iterator[BoxTile]:
    """Tiles that the kernel can compute sizes of this layer with, whatever its size, in no order; 2 splits stand for
    any number of them above 1."""
    for shape in dict.fromkeys(_shapes(problem)):
        for splits in (1, 2):
            if splits > 1 and (problem.geometry.groups > 1 or shape.teams > 1 or chunks(problem) == 1):
                continue
            ordered = replace(shape, splits=splits, slices_first=slices_first(problem))
            staged = _with_stages(problem, ordered, device)
            if staged is not None:
                yield staged


def _with_stages(problem: StridedProblem, tile: BoxTile, device: Device) -> BoxTile | None:
    """The same with as many stages as look furthest ahead, if there is room for two of each."""
    taps = problem.geometry.taps / slice_count(problem, tile)
    none = shared_bytes(problem, replace(tile, input_stages=0, weight_stages=0))
    one_input = shared_bytes(problem, replace(tile, input_stages=1, weight_stages=0)) - none
    room = device.shared_memory_per_block - none
    best, found = 0.0, None
    for inputs in range(2, MOST_INPUT_STAGES + 1):
        weights = min(MOST_WEIGHT_STAGES, (room - inputs * one_input) // (tile.channels * ROW_BYTES + 16))
        if weights < 2:
            break
        ahead = min(inputs * taps, weights) + 0.01 * min(inputs, weights)
        if ahead > best:
            best, found = ahead, replace(tile, input_stages=inputs, weight_stages=weights)
    return found


def _shapes(problem: StridedProblem) -> Iterator[BoxTile]:
    channels = problem.geometry.out_channels_per_group
    for warpgroups, m_tiles in ((2, 2), (2, 1), (3, 1), (1, 2), (1, 1)):
        # A thread has 168 registers, one of three warpgroups 144.
        most_sums = 64 if warpgroups == 3 else 128
        widths = [n for n in (64, 96, 128, 192, 256) if n // 2 * m_tiles <= most_sums]
        widths = [n for n in widths if n % 64 == 0 or n >= channels]
        # Of those that hold all channels the smallest, and those that do not.
        enough = [n for n in widths if n >= channels][:1]
        for width in enough + [n for n in widths if n < channels and n in (128, 256)]:
            for shape in (*_flat_shapes(problem, warpgroups, m_tiles), *_mapped_shapes(warpgroups, m_tiles)):
                made = _for_engine(problem, replace(shape, channels=width))
                if made is not None:
                    yield made
                    if warpgroups == 1 and m_tiles * width == 256:
                        yield replace(made, teams=2)


def _flat_shapes(problem: StridedProblem, warpgroups: int, m_tiles: int) -> Iterator[BoxTile]:
    """All rows are of one map: so many cells in a row, or pieces of rows."""
    if not problem.flat:
        return
    own = 64 * m_tiles
    yield BoxTile(1, 1, DENSE_COLS, "", "", m_tiles, warpgroups, warpgroups, 0, flat=True, dense=True)
    # Equals in this order: rows of more than 64 cells were the slower.
    for cols in (64, 32, 16, 8, 128):
        if cols <= own:
            rows = own // cols * warpgroups
            yield BoxTile(1, rows, cols, "", "", m_tiles, warpgroups, warpgroups, 0, flat=True)


def _mapped_shapes(warpgroups: int, m_tiles: int) -> Iterator[BoxTile]:
    for width, groups, multiplies, along in product(
        (NARROW_COLS, 8), "hwn", "hwn", "hn" if warpgroups > 1 else "h"
    ):
        if width < 8 and "w" in (groups, multiplies):
            continue
        size = {"n": 1, "h": 8 // width, "w": width}
        size[groups] *= 8
        size[multiplies] *= m_tiles
        size[along] *= warpgroups
        shared = warpgroups if along == "h" else 1
        yield BoxTile(size["n"], size["h"], size["w"], groups, multiplies, m_tiles, warpgroups, shared, 0)


def may_be_phased(problem: StridedProblem, tile: BoxTile) -> bool:
    """Whether grad_output's columns are whole strides, and boxes of one phase of them what the tile reads."""
    geometry = problem.geometry
    mapped = not (tile.narrow or tile.flat)
    return mapped and geometry.groups == 1 and geometry.width % problem.step[1] == 0


def _for_engine(problem: StridedProblem, tile: BoxTile) -> BoxTile | None:
    """The tile, if the engine can bring its boxes: by phases only what has too many columns otherwise."""
    if tile.dense:
        return tile
    (step_h, step_w), (box_h, box_w) = problem.step, box_size(problem, tile)
    if max((box_h - 1) * step_h + 1, box_w, tile.images) > MOST_BOX:
        return None
    if (box_w - 1) * step_w + 1 <= MOST_BOX:
        return tile
    return (
        replace(tile, phased=True)
        if problem.geometry.groups == 1 and not (tile.narrow or tile.flat)
        else None
    )
