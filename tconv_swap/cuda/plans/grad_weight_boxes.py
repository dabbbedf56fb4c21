"""The tiles of csrc/kernels/grad_weight_boxes.cu: which there are, what memory they take (grad_weight_boxes.cuh in
Python), how long they may be expected to take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from tconv_swap.cuda.integers import ceil_div, round_up
from tconv_swap.cuda.plans.grad_weight_cost import WORKSPACE_LIMIT_BYTES
from tconv_swap.cuda.plans.grad_weight_tile import Tile, pixel_tiles, tap_blocks, weight_tiles
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.geometry import Pair

#: The warp that asks for boxes; those that add up the bias.
ASKING_THREADS, BIAS_THREADS = 32, 96
REGISTERS = 65536
#: What a thread needs besides its sums.
OTHER_REGISTERS = 28

ROW_BYTES, BOX_CHANNELS, BOX_ALIGNMENT = 128, 64, 1024
#: Elements of the tensor that a box may span along each dimension, and the largest step between those it takes.
BOX_SPAN, BOX_STEP = 256, 8
#: Pixels of one multiply.
STEP_PIXELS = 16
MOST_STAGES, LEAST_STAGES = 8, 3
MOST_BOXES = 32

#: Bytes of one multiprocessor and clock: what the L2 brings, what memory brings, what becomes of partial sums.
L2_RATE, MEMORY_RATE, PARTIAL_RATE = 37, 15, 16
#: Of a tile, of a block to begin and to end, of a launch that adds up.
TILE_CLOCKS, BLOCK_CLOCKS, REDUCTION_CLOCKS = 100, 3000, 4000


@dataclass(frozen=True, slots=True)
class Boxes:
    """``tile`` says what a block computes. ``flat``: a box of grad_output for each tap column, none shifted."""

    tile: Tile
    flat: bool

    @property
    def input_blocks(self) -> int:
        return self.tile.block_m // BOX_CHANNELS

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.tile.block_n, BOX_CHANNELS)

    @property
    def fits_registers(self) -> bool:
        # Each quarter of a multiprocessor has its own, and one warp at least besides those that multiply.
        warps = self.tile.threads // 128 + 1
        return self.tile.sums + OTHER_REGISTERS <= min(255, REGISTERS // (128 * warps) // 8 * 8)

    def __str__(self) -> str:
        return f"{self.tile}{', flat' if self.flat else ''}"


@dataclass(frozen=True, slots=True)
class Axis:
    """The taps of one axis in a block: how many phases they touch, and how far they reach within one."""

    pitch: int
    period: int
    phases: int
    reach: int


def axis_of(problem: Problem, tile: Tile, axis: int) -> Axis:
    g = problem.geometry
    pitch = tile.tap_step[axis] * g.dilation[axis]
    period = g.stride[axis] // math.gcd(g.stride[axis], pitch)
    count = tile.taps[axis]
    return Axis(pitch, period, min(count, period), (count - 1) * pitch // g.stride[axis])


def box_shape(problem: Problem, boxes: Boxes) -> tuple[int, int, int]:
    """Images, rows and columns of a box of grad_output."""
    tile = boxes.tile
    rows = tile.rows + axis_of(problem, tile, 0).reach
    return tile.images, rows, tile.cols + (0 if boxes.flat else axis_of(problem, tile, 1).reach)


def box_count(problem: Problem, boxes: Boxes) -> int:
    """Boxes of grad_output of one stage."""
    tile = boxes.tile
    cols = tile.taps[1] if boxes.flat else axis_of(problem, tile, 1).phases
    return axis_of(problem, tile, 0).phases * cols * boxes.channel_blocks


def stage_bytes(problem: Problem, boxes: Boxes) -> int:
    def aligned(pixels: int) -> int:
        return round_up(pixels * ROW_BYTES, BOX_ALIGNMENT)

    box = math.prod(box_shape(problem, boxes))
    return boxes.input_blocks * aligned(boxes.tile.pixels) + box_count(problem, boxes) * aligned(box)


def shared_bytes(problem: Problem, boxes: Boxes) -> int:
    return BOX_ALIGNMENT + boxes.tile.stages * (stage_bytes(problem, boxes) + 16)


def _runs_lie_right(problem: Problem, boxes: Boxes) -> bool:
    """Whether the two runs of 8 pixels of each multiply lie in one piece, and always as far from each other."""
    tile = boxes.tile
    _, rows, cols = box_shape(problem, boxes)

    def position(k: int) -> int:
        area = tile.rows * tile.cols
        return (k // area * rows + k // tile.cols % tile.rows) * cols + k % tile.cols

    distance = position(8) - position(0)
    return all(
        position(k) == position(k // 16 * 16) + k // 8 % 2 * distance + k % 8 for k in range(tile.pixels)
    )


@lru_cache(maxsize=64)
def reached(problem: Problem, axis: int) -> frozenset[int]:
    """Rows (columns) of the output that some pixel of the input reaches."""
    g = problem.geometry
    size, out, stride = (g.height, g.width)[axis], (g.out_height, g.out_width)[axis], g.stride[axis]
    offsets = [k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis])]
    return frozenset(q * stride + o for o in offsets for q in range(size) if 0 <= q * stride + o < out)


@lru_cache(maxsize=256)
def _meets_unreached(problem: Problem, axis: int, cut: int) -> bool:
    """Whether pixels of tiles of ``cut`` rows (columns) beyond the input, which are zeros, would meet pixels of the
    output that belong to no gradient: zero times infinity is not a number."""
    g = problem.geometry
    size, stride = (g.height, g.width)[axis], g.stride[axis]
    beyond = range(size, round_up(size, cut))
    if not beyond:
        return False
    real = reached(problem, axis)
    last = max(real, default=-1)
    met = {q * stride + k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis]) for q in beyond}
    return any(0 <= at <= last and at not in real for at in met)


def has_gaps(problem: Problem) -> bool:
    """Whether the kernel leaves out rows and columns of the output, and no two taps meet the same ones."""
    g = problem.geometry
    return all(
        len({k * d % s for k in range(kernel)}) == kernel < s
        for kernel, d, s in zip(g.kernel, g.dilation, g.stride, strict=True)
    )


def candidates(problem: Problem, device: Device) -> Iterator[Boxes]:
    """All tiles that fit."""
    for taps, tap_step in _tap_choices(problem):
        shapes = list(_warpgroup_choices(problem, math.prod(taps)))
        for pixels, flat in _pixel_choices(problem, taps, tap_step) if shapes else ():
            for warps, warp_n, warp_taps in shapes:
                tile = Tile(warps, 16, warp_n, warp_taps, taps, tap_step, *pixels, LEAST_STAGES, 1, True)
                fitted = _with_most_stages(problem, Boxes(tile, flat), device)
                if fitted is not None:
                    yield fitted


def _with_most_stages(problem: Problem, boxes: Boxes, device: Device) -> Boxes | None:
    if box_count(problem, boxes) > MOST_BOXES or not boxes.fits_registers:
        return None
    room = device.shared_memory_per_block - BOX_ALIGNMENT
    each = stage_bytes(problem, boxes)
    stages = min(MOST_STAGES, room // (each + 16))
    tile = boxes.tile
    # Where nothing is left to add up, the sums leave by way of the stages.
    if stages < LEAST_STAGES or stages * each < tile.block_m * _staged_row_bytes(tile):
        return None
    t = tile
    return Boxes(
        Tile(
            t.warps, 16, t.warp_n, t.warp_taps, t.taps, t.tap_step, t.images, t.rows, t.cols, stages, 1, True
        ),
        boxes.flat,
    )


def _staged_row_bytes(tile: Tile) -> int:
    """Of one input channel's sums: grad_weight_store.cuh."""
    return (round_up(tile.block_n * math.prod(tile.taps), 32) + 8) * 4


def _counts(taps: int) -> list[int]:
    """How many of so many taps a block may take: all, half of them, a third ..."""
    return sorted({ceil_div(taps, parts) for parts in range(1, taps + 1)})


def _tap_choices(problem: Problem) -> list[tuple[Pair, Pair]]:
    """Taps of a block and steps between them: neighbours, or those of one phase."""
    g = problem.geometry

    def along(axis: int) -> list[tuple[int, int]]:
        kernel = g.kernel[axis]
        period = g.stride[axis] // math.gcd(g.stride[axis], g.dilation[axis])
        found = {(count, 1) for count in _counts(kernel)}
        if period < kernel:
            found |= {(count, period) for count in _counts(ceil_div(kernel, period)) if count > 1}
        return sorted(found)

    return [
        ((rows, cols), (row_step, col_step))
        for (rows, row_step), (cols, col_step) in itertools.product(along(0), along(1))
        if rows * cols <= 16
    ]


def _warpgroup_choices(problem: Problem, taps: int) -> Iterator[tuple[tuple[int, int, int, int], int, int]]:
    """Warps along m, n, taps, pixels; channels out and taps of one warpgroup."""
    g = problem.geometry
    widths = (64, 128, 256) if g.out_channels_per_group > 32 else (32,)
    for warp_n, groups_t in itertools.product(widths, (1, 2, 3)):
        warp_taps = ceil_div(taps, groups_t)
        sums = warp_n * warp_taps // 2
        if ceil_div(taps, warp_taps) != groups_t or warp_n >= max(128, 2 * g.out_channels_per_group):
            continue
        for groups_m, groups_n in itertools.product((1, 2, 3), (1, 2)):
            groups = groups_m * groups_n * groups_t
            if not 2 <= groups <= 3 or sums < 32 or sums > 128 or groups_n * warp_n > 256:
                continue
            if (groups_m - 1) * 64 >= g.in_channels_per_group:
                continue
            if (groups_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (4 * groups_m, groups_n, groups_t, 1), warp_n, warp_taps


def _pixel_choices(
    problem: Problem, taps: Pair, tap_step: Pair
) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """Images, rows, columns of a tile of pixels, and whether its boxes are flat."""
    g = problem.geometry
    widths = {cols for cols in (8, 16, 32, 64) if cols < 2 * g.width} | (
        {g.width} if g.width <= 64 else set()
    )
    heights = {rows for rows in (1, 2, 4, 8, 16) if rows < 2 * g.height} | (
        {g.height} if g.height <= 32 else set()
    )
    for cols, rows, images in itertools.product(
        sorted(widths), sorted(heights), (1, 2, 4, 8, 16, 32, 64, 128)
    ):
        if (
            images >= 2 * g.batch
            or _meets_unreached(problem, 0, rows)
            or _meets_unreached(problem, 1, cols)
            or not 32 <= images * rows * cols <= 256
            or images * rows * cols % STEP_PIXELS
        ):
            continue
        for flat in (False, True):
            tile = Tile((4, 1, 1, 1), 16, 64, 1, taps, tap_step, images, rows, cols, LEAST_STAGES, 1, True)
            if flat and axis_of(problem, tile, 1).reach == 0:
                continue
            boxes = Boxes(tile, flat)
            shape = box_shape(problem, boxes)
            spans = shape[0], (shape[1] - 1) * g.stride[0] + 1, (shape[2] - 1) * g.stride[1] + 1
            if max(spans) <= BOX_SPAN and _runs_lie_right(problem, boxes):
                yield (images, rows, cols), flat


def slice_bytes(problem: Problem, boxes: Boxes) -> int:
    """Of one copy of the gradient, in float32 and whole tiles."""
    tile = boxes.tile
    return weight_tiles(problem, tile) * tile.threads * tile.sums * 4


def slice_choices(problem: Problem, boxes: Boxes, device: Device) -> list[int]:
    """Parts that the pixels may be cut into, within the workspace's limit."""
    blocks, room = weight_tiles(problem, boxes.tile), device.multiprocessors
    most = min(max(1, WORKSPACE_LIMIT_BYTES // slice_bytes(problem, boxes)), pixel_tiles(problem, boxes.tile))
    return sorted({min(most, max(1, waves * room // blocks)) for waves in (1, 2, 3)} | {1})


def expected_clocks(problem: Problem, boxes: Boxes, device: Device) -> Iterator[tuple[float, int]]:
    """Roughly, of the whole, with each choice of slices: the slowest of what works side by side, and what is outside
    of that."""
    tile, g = boxes.tile, problem.geometry
    groups = tile.threads // 128
    steps = groups * tile.warp_taps * tile.pixels / STEP_PIXELS
    copied = stage_bytes(problem, boxes)
    multiplies = steps * tile.warp_n / 2
    shared = steps * (16 + tile.warp_n / 4) + copied / 128
    clocks = max(multiplies, shared, copied / L2_RATE) + TILE_CLOCKS
    moved = 2 * g.batch * (g.in_channels * g.height * g.width + g.out_channels * g.out_height * g.out_width)
    if has_gaps(problem):
        # Every tap has pixels of its own: those are brought, and as many for a tap that a block has to spare.
        taps = math.prod(
            blocks * taken for blocks, taken in zip(tap_blocks(problem, tile), tile.taps, strict=True)
        )
        moved = 2 * g.batch * g.height * g.width * (g.in_channels + taps * g.out_channels)
    memory = moved / (device.multiprocessors * MEMORY_RATE)
    gradient = slice_bytes(problem, boxes) / (device.multiprocessors * PARTIAL_RATE)
    blocks, tiles = weight_tiles(problem, tile), pixel_tiles(problem, tile)
    for slices in slice_choices(problem, boxes, device):
        waves = ceil_div(blocks * slices, device.multiprocessors)
        # Until the first stage is there nobody multiplies, and all begin at once.
        block = ceil_div(tiles, slices) * clocks + copied / MEMORY_RATE + BLOCK_CLOCKS
        partial = gradient if slices == 1 else (2 * slices + 2) * gradient + REDUCTION_CLOCKS
        yield max(waves * block, memory) + partial, slices


#: How many are kept of a search, which takes a while: as many as anybody asks for.
KEPT = 16


def best_boxes(problem: Problem, device: Device, count: int) -> tuple[tuple[Boxes, int], ...]:
    """The ``count`` tiles that are expected to be the fastest, each with the slices of the pixels it does best with."""
    return _ranked(problem, device)[:count]


@lru_cache(maxsize=256)
def _ranked(problem: Problem, device: Device) -> tuple[tuple[Boxes, int], ...]:
    found = [
        (min(expected_clocks(problem, boxes, device), key=itemgetter(0)), boxes)
        for boxes in candidates(problem, device)
    ]
    found.sort(key=lambda one: (one[0][0], one[1].tile.images))
    return tuple((boxes, slices) for (_, slices), boxes in found[:KEPT])
