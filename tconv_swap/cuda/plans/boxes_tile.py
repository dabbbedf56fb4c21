"""What csrc/kernels/grad_input_boxes.cu computes with one tile, the memory and about the time that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tconv_swap.cuda.plans.grad_input_layout import StridedProblem
from tconv_swap.cuda.problem import Device

#: Bytes of a row: one pixel's, or one weight's, share of a chunk.
ROW_BYTES = 128
#: The engine's: elements of a box along an axis, and between two that it takes.
MOST_BOX = 256
MOST_STEP = 8
MOST_INPUT_STAGES = 8
MOST_WEIGHT_STAGES = 12
#: Of a block, beside those that multiply.
ASKING_THREADS = 64
#: Clocks that 64 cells take to be multiplied by 256 channels, one tap of one chunk; and bytes a clock from the L2 to
#: each multiprocessor (measured, benchmarks/NOTES.md).
MULTIPLY_CLOCKS = 512
FILL_BYTES = 33
#: Of the memory, of the whole GPU; clocks that a launch costs, and a tile beside its multiplies.
MEMORY_BYTES = 2300
LAUNCH_CLOCKS = 5000
TILE_CLOCKS = 1200


@dataclass(frozen=True, slots=True)
class BoxTile:
    """What one block computes. A multiply is 64 cells, 8 groups of 8; ``groups_along`` and ``multiplies_along`` say
    along which axis of the map ("h", "w", or images "n") they follow each other; "" with a flat problem."""

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
    input_stages: int = 2
    weight_stages: int = 3
    store_buffers: int = 1
    blocks_per_multiprocessor: int = 1
    cluster: int = 1
    splits: int = 1

    @property
    def narrow(self) -> bool:
        return self.cols < 8

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + ASKING_THREADS

    def __str__(self) -> str:
        text = f"{self.images}x{self.rows}x{self.cols} cells x {self.channels} channels, {self.warpgroups} warpgroups"
        text += f", clusters of {self.cluster}" if self.cluster > 1 else ""
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def flat(problem: StridedProblem) -> bool:
    """Whether the rows of all images are as far apart as those of one, and no tap is shifted."""
    return problem.flat and problem.geometry.height == problem.cells[0] * problem.step[0]


def box_size(problem: StridedProblem, tile: BoxTile) -> tuple[int, int]:
    """Rows and columns of grad_output's pixels of one phase that a tile reads."""
    shift_h, shift_w = problem.most_shift
    return tile.rows + shift_h, tile.cols + (0 if tile.narrow else shift_w)


def pitches(problem: StridedProblem, tile: BoxTile) -> dict[str, int]:
    """How far the groups and the multiplies of a warpgroup lie apart, in the input's stage and in what is stored."""
    if flat(problem):
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


def slice_count(problem: StridedProblem, tile: BoxTile) -> int:
    rows, cols = problem.phases_used
    return len(rows) * (problem.geometry.kernel[1] if tile.narrow else len(cols))


def chunks(problem: StridedProblem) -> int:
    return -(-problem.geometry.in_channels_per_group * problem.item // ROW_BYTES)


def input_bytes(problem: StridedProblem, tile: BoxTile) -> int:
    box_h, box_w = box_size(problem, tile)
    return tile.images * box_h * box_w * ROW_BYTES


def shared_bytes(problem: StridedProblem, tile: BoxTile) -> int:
    """Shared memory of one block; the kernel asserts that they agree."""
    return (
        1024
        + tile.input_stages * (-(-input_bytes(problem, tile) // 1024) * 1024 + 16)
        + tile.weight_stages * (tile.channels * ROW_BYTES + 16)
        + tile.warpgroups * tile.store_buffers * tile.m_tiles * 64 * ROW_BYTES
    )


def tile_counts(problem: StridedProblem, tile: BoxTile) -> tuple[int, int, int]:
    """Tiles of cells along the images, the rows and the columns."""
    batch, (cells_h, cells_w) = problem.geometry.batch, problem.cells
    if flat(problem):
        batch, cells_h = 1, batch * cells_h
    return -(-batch // tile.images), -(-cells_h // tile.rows), -(-cells_w // tile.cols)


def work_count(problem: StridedProblem, tile: BoxTile) -> int:
    """Turns of blocks, or of pairs of them."""
    images, rows, cols = tile_counts(problem, tile)
    geometry = problem.geometry
    blocks = -(-geometry.out_channels_per_group // tile.channels)
    return -(-images * rows * cols // tile.cluster) * blocks * geometry.groups * tile.splits


def block_room(tile: BoxTile, multiprocessors: int) -> int:
    """Blocks that find room at once, whole clusters of them. Of multiprocessors, clusters of 4 get those that lie
    together by 16 (an H200 has room for 32 such clusters on 132)."""
    whole = multiprocessors // 16 * 16 if tile.cluster == 4 else multiprocessors
    return whole * tile.blocks_per_multiprocessor // tile.cluster * tile.cluster


def clocks(problem: StridedProblem, tile: BoxTile, multiprocessors: int) -> float:
    """About how long it takes, what comes from memory left aside: it is the same for all tiles but what splits cost."""
    geometry = problem.geometry
    cells = tile.warpgroups * tile.m_tiles * 64
    taps = geometry.taps
    multiplies = taps * cells / 64 * tile.channels / 256 * MULTIPLY_CLOCKS
    weights = taps * tile.channels * ROW_BYTES / tile.cluster
    fill = slice_count(problem, tile) * input_bytes(problem, tile) + weights
    rounds = -(-work_count(problem, tile) * tile.cluster // block_room(tile, multiprocessors))
    steps = -(-chunks(problem) // tile.splits)
    turn = steps * max(multiplies, fill / FILL_BYTES) * tile.blocks_per_multiprocessor
    turn += TILE_CLOCKS * cells / 128 * tile.channels / 128
    total = rounds * turn
    if tile.splits > 1:
        count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        total += LAUNCH_CLOCKS + 2 * 4 * count * tile.splits / MEMORY_BYTES
    return total


def tiles(problem: StridedProblem, device: Device) -> Iterator[BoxTile]:
    """Tiles that the kernel can compute the problem with, in no order."""
    for shape in dict.fromkeys(_shapes(problem)):
        for cluster, splits, blocks in product((1, 2, 4), (1, 2, 4), (1, 2)):
            if splits > 1 and (problem.geometry.groups > 1 or splits > chunks(problem)):
                continue
            if blocks * shape.warpgroups > 2 or shape.channels * ROW_BYTES % (1024 * cluster):
                continue
            tile = replace(shape, cluster=cluster, splits=splits, blocks_per_multiprocessor=blocks)
            staged = _with_stages(problem, tile, device)
            if staged is not None:
                yield staged


def _with_stages(problem: StridedProblem, tile: BoxTile, device: Device) -> BoxTile | None:
    """The same with as many stages as look furthest ahead, and two places for what is stored if they fit beside."""
    out_item = 4 if tile.splits > 1 else problem.item
    taps = problem.geometry.taps / slice_count(problem, tile)
    best, found = 0.0, None
    for buffers in (1, 2):
        if tile.channels * out_item // ROW_BYTES % buffers:
            continue
        smallest = replace(tile, input_stages=0, weight_stages=0, store_buffers=buffers)
        room = (device.shared_memory_per_block + 1024) // tile.blocks_per_multiprocessor - 1024
        room -= shared_bytes(problem, smallest)
        one_input = shared_bytes(problem, replace(smallest, input_stages=1)) - shared_bytes(problem, smallest)
        for inputs in range(2, MOST_INPUT_STAGES + 1):
            weights = min(MOST_WEIGHT_STAGES, (room - inputs * one_input) // (tile.channels * ROW_BYTES + 16))
            if weights < 2:
                break
            ahead = min(inputs * taps, weights) + 0.01 * min(inputs, weights) + 0.1 * (buffers - 1)
            if ahead > best:
                best = ahead
                found = replace(tile, input_stages=inputs, weight_stages=weights, store_buffers=buffers)
    return found


def _shapes(problem: StridedProblem) -> Iterator[BoxTile]:
    geometry, cells_w = problem.geometry, problem.cells[1]
    channels = geometry.out_channels_per_group
    for warpgroups, m_tiles in ((2, 2), (2, 1), (1, 2), (1, 1)):
        widths = [n for n in (64, 96, 128, 256) if n // 2 * m_tiles <= 128]
        widths = [n for n in widths if n % 64 == 0 or n >= channels]
        # Of those that hold all channels the smallest, and those that do not.
        enough = [n for n in widths if n >= channels][:1]
        for width in enough + [n for n in widths if n < channels and n >= 128]:
            if flat(problem):
                for cols in {cells_w, 64, 32, 16, 8} if cells_w <= 64 * m_tiles else {64 * m_tiles, 64, 32}:
                    if cols > cells_w:
                        continue
                    rows = 64 * m_tiles // cols * warpgroups
                    made = BoxTile(1, rows, cols, "", "", m_tiles, warpgroups, warpgroups, width)
                    if _fits_engine(problem, made):
                        yield made
                continue
            narrow = 1 << (cells_w - 1).bit_length() if cells_w <= 4 else 8
            for groups, multiplies in product("hwn", "hwn"):
                if narrow < 8 and "w" in (groups, multiplies):
                    continue
                size = {"n": 1, "h": 8 // narrow, "w": narrow}
                size[groups] *= 8
                size[multiplies] *= m_tiles
                for along in "hn" if warpgroups > 1 else "h":
                    whole = dict(size)
                    whole[along] *= warpgroups
                    made = BoxTile(
                        whole["n"],
                        whole["h"],
                        whole["w"],
                        groups,
                        multiplies,
                        m_tiles,
                        warpgroups,
                        warpgroups if along == "h" else 1,
                        width,
                    )
                    if _fits_engine(problem, made):
                        yield made


def _fits_engine(problem: StridedProblem, tile: BoxTile) -> bool:
    box = box_size(problem, tile)
    spans = ((n - 1) * step + 1 for n, step in zip(box, problem.step, strict=True))
    return max(spans) <= MOST_BOX and tile.images <= MOST_BOX
