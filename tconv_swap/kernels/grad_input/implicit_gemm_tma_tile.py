"""The tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu, the shared memory that each takes, and its expected time.
grad_input/implicit_gemm_tma_choice.py chooses among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes that one pixel, or one weight, has of a chunk of channels: a row in shared memory.
ROW_BYTES = 128
#: Limits of TMA: elements of a box along a dimension, and the element stride.
MAX_BOX = 256
MAX_STEP = 8
#: Columns of a tile of narrow maps, which have fewer columns than the 8 positions of a group.
NARROW_COLS = 4
MAX_INPUT_STAGES = 8
MAX_WEIGHT_STAGES = 12
#: Threads of a block beside its consumers.
PRODUCER_THREADS = 64
#: Clocks of a multiply of 64 positions by 256 channels, for one tap of one chunk; bytes that a multiprocessor loads
#: from
#: the L2 in a clock (measured, docs/kernels/grad_input/implicit_gemm_tma.md), and bytes that it stores (fitted).
MULTIPLY_CLOCKS = 512
LOAD_BYTES = 38
STORE_BYTES = 14
#: Columns of the widest map of a dense tile: whole rows of a wider one are much more than the tile.
DENSE_COLS = 32
#: Bytes that the memory moves in a clock, and clocks that a launch takes.
MEMORY_BYTES = 2300
LAUNCH_CLOCKS = 5000


@dataclass(frozen=True, slots=True)
class TmaTile:
    """The tile of a block, in positions, which are pixels of grad_input. A multiply is 64 positions, 8 groups of 8;
    ``groups_along`` and ``multiplies_along`` say along which axis of the map ("h", "w", or images "n") they follow each
    other; "" with a flat map. ``dense`` (flat, too): the tile is so many positions in a row, wherever they begin, of
    maps of at most ``cols`` columns."""

    #: The positions of all warpgroups of a consumer.
    images: int
    rows: int
    cols: int
    groups_along: str
    multiplies_along: str
    m_tiles: int
    warpgroups: int
    #: Warpgroups that share the rows of an image; the others have images of their own.
    warpgroups_h: int
    channels: int
    #: The kernel lies within the stride, and the rows of all images are equally far apart: they are rows of one map.
    flat: bool = False
    input_stages: int = 2
    weight_stages: int = 3
    splits: int = 1
    dense: bool = False
    #: Groups of ``warpgroups`` warpgroups, each with tiles of its own (ping-pong).
    consumers: int = 1
    #: The sum goes over all chunks of a phase, then the next phase; otherwise over all phases of a chunk.
    phase_major: bool = False
    #: The tensor map of grad_output has a dimension for the phases of columns, so its boxes have no element stride
    #: there.
    phase_dimension: bool = False

    @property
    def positions(self) -> int:
        """Returns how many positions are multiplied; some of them may be outside of a tile that is not dense."""
        return 64 * self.m_tiles * self.warpgroups

    @property
    def narrow(self) -> bool:
        """Returns whether the tile has fewer columns than a group of positions."""
        return self.cols < 8

    @property
    def threads(self) -> int:
        """Returns how many threads a block has."""
        return 128 * self.warpgroups * self.consumers + PRODUCER_THREADS

    def __str__(self) -> str:
        positions = self.positions if self.dense else f"{self.images}x{self.rows}x{self.cols}"
        text = f"{positions} positions x {self.channels} channels, {self.warpgroups} warpgroups"
        text += f", {self.consumers} consumers" if self.consumers > 1 else ""
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def can_be_flat(problem: StridedProblem) -> bool:
    """Returns whether the rows of all images are as far apart as those of one image, and no tap is shifted."""
    return problem.flat and problem.geometry.height == problem.positions[0] * problem.step[0]


def box_size(problem: StridedProblem, tile: TmaTile) -> tuple[int, int]:
    """Returns the rows and columns of pixels of one phase of grad_output that a tile reads."""
    if tile.dense:
        width = problem.positions[1]
        return _dense_rows(tile, width), width
    shift_h, shift_w = problem.max_shift
    return tile.rows + shift_h, tile.cols + (0 if tile.narrow else shift_w)


def _dense_rows(tile: TmaTile, width: int) -> int:
    """Returns how many rows of a map hold a dense tile, wherever it begins."""
    return ceil_div(width - gcd(tile.positions, width) + tile.positions, width)


def pitches(problem: StridedProblem, tile: TmaTile) -> dict[str, int]:
    """Returns the distances between the groups and between the multiplies of a warpgroup, in pixels of a stage of the
    input and in positions of the tile."""
    if tile.flat:
        return dict(GROUP_PIXELS=8, MULTIPLY_PIXELS=64, GROUP_POSITIONS=8, MULTIPLY_POSITIONS=64)
    box_h, box_w = box_size(problem, tile)
    own_rows = tile.rows // tile.warpgroups_h
    found = {}
    for name, height, width in (("PIXELS", box_h, box_w), ("POSITIONS", own_rows, tile.cols)):
        one = {"w": 8, "h": max(1, 8 // tile.cols) * width, "n": height * width}
        found[f"GROUP_{name}"] = one[tile.groups_along]
        found[f"MULTIPLY_{name}"] = one[tile.multiplies_along] * (
            8 if tile.multiplies_along == tile.groups_along else 1
        )
    return found


def fetched_bytes(problem: StridedProblem) -> int:
    """Returns how many bytes of grad_output the L2 fetches at a time (docs/kernels/grad_input/implicit_gemm_tma.md).

    It is 256 only where the other 128 bytes are read soon: as the next chunk of a phase, or as the next column, whose
    phase has taps.
    """
    all_columns = len(problem.phases_used[1]) == problem.step[1]
    return 256 if phase_major(problem) or (chunks(problem) == 1 and all_columns) else 128


def phase_major(problem: StridedProblem) -> bool:
    """Returns whether the chunks of a phase follow each other: both chunks of a pixel are one fetch from memory."""
    return problem.max_shift == (0, 0) and chunks(problem) == 2


def phase_count(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns how many stages of the input a chunk has: phases that have taps, in a narrow map times columns of
    taps."""
    rows, cols = problem.phases_used
    return len(rows) * (problem.geometry.kernel[1] if tile.narrow else len(cols))


def chunks(problem: StridedProblem) -> int:
    """Returns how many chunks of channels the sum over k has."""
    return ceil_div(problem.geometry.in_channels_per_group * problem.item, ROW_BYTES)


def box_bytes(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the bytes of a box of grad_output."""
    box_h, box_w = box_size(problem, tile)
    return tile.images * box_h * box_w * ROW_BYTES


def input_bytes(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the most bytes of a box over all sizes that the tile computes."""
    if tile.dense:
        return max(width * _dense_rows(tile, width) for width in range(1, tile.cols + 1)) * ROW_BYTES
    return box_bytes(problem, tile)


def shared_bytes(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the bytes of shared memory of one block; the kernel asserts that it agrees."""
    fixed, one_input, one_weight = _bytes_of(problem, tile)
    return fixed + tile.input_stages * one_input + tile.weight_stages * one_weight


def _bytes_of(problem: StridedProblem, tile: TmaTile) -> tuple[int, int, int]:
    """Returns the bytes of shared memory beside the stages, of a stage of the input, and of one of the weights."""
    return (
        1024 + tile.consumers * (tile.warpgroups * 64 * ROW_BYTES + 8),
        round_up(input_bytes(problem, tile), 1024) + 16,
        tile.channels * ROW_BYTES + 16,
    )


def tile_counts(problem: StridedProblem, tile: TmaTile) -> tuple[int, int, int]:
    """Returns how many tiles there are along the images, the rows and the columns."""
    batch, (positions_h, positions_w) = problem.geometry.batch, problem.positions
    if tile.dense:
        return 1, 1, ceil_div(batch * positions_h * positions_w, tile.positions)
    if tile.flat:
        batch, positions_h = 1, batch * positions_h
    return ceil_div(batch, tile.images), ceil_div(positions_h, tile.rows), ceil_div(positions_w, tile.cols)


def work_count(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns how many work tiles all blocks have together."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = ceil_div(geometry.out_channels_per_group, tile.channels)
    return images * rows * cols * blocks * geometry.groups * tile.splits


def clocks(problem: StridedProblem, tile: TmaTile, multiprocessors: int) -> float:
    """Returns the expected clocks, without the time of the memory, which is the same for all tiles but for the cost of
    splits."""
    geometry = problem.geometry
    out_item = 4 if tile.splits > 1 else problem.item
    multiplies = geometry.taps * tile.positions / 64 * tile.channels / 256 * MULTIPLY_CLOCKS
    weights = geometry.taps * tile.channels * ROW_BYTES
    load = phase_count(problem, tile) * box_bytes(problem, tile) + weights
    steps = ceil_div(chunks(problem), tile.splits)
    main = steps * max(multiplies, load / LOAD_BYTES)
    store = tile.positions * tile.channels * out_item / STORE_BYTES
    total = ceil_div(work_count(problem, tile), multiprocessors) * (main + store)
    if tile.splits > 1:
        count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        total += LAUNCH_CLOCKS + 2 * 4 * count * tile.splits / MEMORY_BYTES
    return total


def legal(problem: StridedProblem, tile: TmaTile) -> bool:
    """Returns whether the kernel computes this size correctly, and TMA can load its boxes."""
    geometry, (step_h, step_w) = problem.geometry, problem.step
    if tile.flat and not can_be_flat(problem):
        return False
    if tile.dense and problem.positions[1] > tile.cols:
        return False
    if tile.splits > 1 and (geometry.groups > 1 or tile.splits > chunks(problem)):
        return False
    box_h, box_w = box_size(problem, tile)
    if tile.phase_dimension:
        return may_have_phase_dimension(problem, tile) and max((box_h - 1) * step_h + 1, box_w) <= MAX_BOX
    return max((box_h - 1) * step_h + 1, (box_w - 1) * step_w + 1) <= MAX_BOX


def tiles(problem: StridedProblem, device: Device) -> Iterator[TmaTile]:
    """Tiles that the kernel can compute sizes of this layer with, whatever its size, in no order; 2 splits stand for
    any number of them above 1."""
    for shape in dict.fromkeys(_shapes(problem)):
        for splits in (1, 2):
            if splits > 1 and (problem.geometry.groups > 1 or shape.consumers > 1 or chunks(problem) == 1):
                continue
            ordered = replace(shape, splits=splits, phase_major=phase_major(problem))
            staged = _with_stages(problem, ordered, device)
            if staged is not None:
                yield staged


def _with_stages(problem: StridedProblem, tile: TmaTile, device: Device) -> TmaTile | None:
    """Returns the tile with the stages that hold the most taps, or None if two of each do not fit."""
    taps = problem.geometry.taps / phase_count(problem, tile)
    fixed, one_input, one_weight = _bytes_of(problem, tile)
    room = device.shared_memory_per_block - fixed
    best, found = 0.0, None
    for inputs in range(2, MAX_INPUT_STAGES + 1):
        weights = min(MAX_WEIGHT_STAGES, (room - inputs * one_input) // one_weight)
        if weights < 2:
            break
        taps_ahead = min(inputs * taps, weights) + 0.01 * min(inputs, weights)
        if taps_ahead > best:
            best, found = taps_ahead, (inputs, weights)
    return found and replace(tile, input_stages=found[0], weight_stages=found[1])


def _shapes(problem: StridedProblem) -> Iterator[TmaTile]:
    channels = problem.geometry.out_channels_per_group
    for warpgroups, m_tiles in ((2, 2), (2, 1), (3, 1), (1, 2), (1, 1)):
        # A thread has 168 registers; with three warpgroups it has 144.
        max_accumulators = 64 if warpgroups == 3 else 128
        widths = [n for n in (64, 96, 128, 192, 256) if n // 2 * m_tiles <= max_accumulators]
        widths = [n for n in widths if n % 64 == 0 or n >= channels]
        # The smallest width that holds all channels, and the large ones that do not.
        enough = [n for n in widths if n >= channels][:1]
        for width in enough + [n for n in widths if n < channels and n in (128, 256)]:
            for shape in (*_flat_shapes(problem, warpgroups, m_tiles), *_mapped_shapes(warpgroups, m_tiles)):
                made = _for_tma(problem, replace(shape, channels=width))
                if made is not None:
                    yield made
                    if warpgroups == 1 and m_tiles * width == 256:
                        yield replace(made, consumers=2)


def _flat_shapes(problem: StridedProblem, warpgroups: int, m_tiles: int) -> Iterator[TmaTile]:
    """Yields tiles of flat maps, whose images are one map: dense tiles, and pieces of rows."""
    if not problem.flat:
        return
    own = 64 * m_tiles
    yield TmaTile(1, 1, DENSE_COLS, "", "", m_tiles, warpgroups, warpgroups, 0, flat=True, dense=True)
    # The order decides between equals: rows of more than 64 positions were slower.
    for cols in (64, 32, 16, 8, 128):
        if cols <= own:
            rows = own // cols * warpgroups
            yield TmaTile(1, rows, cols, "", "", m_tiles, warpgroups, warpgroups, 0, flat=True)


def _mapped_shapes(warpgroups: int, m_tiles: int) -> Iterator[TmaTile]:
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
        yield TmaTile(size["n"], size["h"], size["w"], groups, multiplies, m_tiles, warpgroups, shared, 0)


def may_have_phase_dimension(problem: StridedProblem, tile: TmaTile) -> bool:
    """Returns whether grad_output's columns are whole strides, and the tile reads boxes of one phase of them."""
    geometry = problem.geometry
    mapped = not (tile.narrow or tile.flat)
    return mapped and geometry.groups == 1 and geometry.width % problem.step[1] == 0


def _for_tma(problem: StridedProblem, tile: TmaTile) -> TmaTile | None:
    """Returns the tile, or None if TMA cannot load its boxes. A box that would have too many columns gets a dimension
    for the phases of columns."""
    if tile.dense:
        return tile
    (step_h, step_w), (box_h, box_w) = problem.step, box_size(problem, tile)
    if max((box_h - 1) * step_h + 1, box_w, tile.images) > MAX_BOX:
        return None
    if (box_w - 1) * step_w + 1 <= MAX_BOX:
        return tile
    return (
        replace(tile, phase_dimension=True)
        if problem.geometry.groups == 1 and not (tile.narrow or tile.flat)
        else None
    )
