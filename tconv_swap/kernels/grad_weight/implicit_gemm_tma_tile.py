"""The tiles of csrc/kernels/grad_weight/implicit_gemm_tma.cu: which there are, and what memory they take
(grad_weight/implicit_gemm_tma.cuh in Python)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import Tile
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: The warp that asks for boxes; those that add up the bias.
ASKING_THREADS, BIAS_THREADS = 32, 96
REGISTERS = 65536
#: What a thread needs besides its sums: while it multiplies, and to store them without spilling a few.
OTHER_REGISTERS, STORE_REGISTERS = 28, 48

ROW_BYTES, BOX_CHANNELS, BOX_ALIGNMENT = 128, 64, 1024
#: Elements of the tensor that a box may span along each dimension, and the largest step between those it takes.
BOX_SPAN, BOX_STEP = 256, 8
#: Pixels of one multiply.
STEP_PIXELS = 16
MOST_STAGES, LEAST_STAGES = 8, 3
MOST_BOXES = 32
#: Rows and columns of maps up to which a tile may have as many.
MOST_WHOLE = 16


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
        return self.tile.sums + OTHER_REGISTERS <= self.registers

    @property
    def may_spill(self) -> bool:
        """Where the sums leave, behind the last multiply."""
        return self.tile.sums + STORE_REGISTERS > self.registers

    @property
    def registers(self) -> int:
        """That a thread may have: each quarter of a multiprocessor has its own, and one warp at least besides those
        that multiply."""
        warps = self.tile.threads // 128 + 1
        return min(255, REGISTERS // (128 * warps) // 8 * 8)

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
    return _runs_of_8(boxes.tile.shape, box_shape(problem, boxes))


@lru_cache(maxsize=8192)
def _runs_of_8(tile: tuple[int, int, int], box: tuple[int, int, int]) -> bool:
    _, rows, cols = box

    def position(k: int) -> int:
        area = tile[1] * tile[2]
        return (k // area * rows + k // tile[2] % tile[1]) * cols + k % tile[2]

    distance = position(8) - position(0)
    return all(
        position(k) == position(k // 16 * 16) + k // 8 % 2 * distance + k % 8 for k in range(math.prod(tile))
    )


def last_reached(geometry: Geometry, axis: int) -> int:
    """The last row (column) of the output that some pixel of the input reaches; 0 where there is none."""
    size, out = (geometry.height, geometry.out_height) if axis == 0 else (geometry.width, geometry.out_width)
    stride, dilation, padding = geometry.stride[axis], geometry.dilation[axis], geometry.padding[axis]
    last = 0
    for k in range(geometry.kernel[axis]):
        offset = k * dilation - padding
        meeting = min(size - 1, (out - 1 - offset) // stride)
        if meeting >= 0:
            last = max(last, meeting * stride + offset)
    return last


def most_beyond(geometry: Geometry, axis: int) -> int:
    """Rows (columns) of zeros beyond the input that a tile may have: further ones would meet pixels of the output that
    belong to no gradient, and zero times infinity is not a number."""
    g = geometry
    size = (g.height, g.width)[axis]
    # Larger maps end in the same way.
    enough = g.kernel[axis] * g.dilation[axis] + g.padding[axis] + 1
    return _most_beyond(
        min(size, enough),
        g.kernel[axis],
        g.stride[axis],
        g.padding[axis],
        g.dilation[axis],
        g.output_padding[axis],
    )


@lru_cache(maxsize=4096)
def _most_beyond(
    size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int
) -> int:
    geometry = Geometry(
        1, 1, 1, size, 1, (1, kernel), (1, stride), (0, padding), (0, output_padding), (1, dilation)
    )
    last = last_reached(geometry, 1)
    offsets = [k * dilation - padding for k in range(kernel)]
    real = {q * stride + offset for q in range(size) for offset in offsets}
    beyond = 0
    while (size + beyond) * stride + offsets[0] <= last:
        met = {(size + beyond) * stride + offset for offset in offsets}
        if any(0 <= at <= last and at not in real for at in met):
            return beyond
        beyond += 1
    return INT32_LIMIT


def has_gaps(problem: Problem) -> bool:
    """Whether the kernel leaves out rows and columns of the output, and no two taps meet the same ones."""
    g = problem.geometry
    return all(
        len({k * d % s for k in range(kernel)}) == kernel < s
        for kernel, d, s in zip(g.kernel, g.dilation, g.stride, strict=True)
    )


def candidates(problem: Problem, device: Device, sizes: Sequence[Geometry] | None = None) -> Iterator[Boxes]:
    """All tiles that fit the maps of these sizes (None: of the problem's own)."""
    maps = [problem.geometry] if sizes is None else sizes
    for taps, tap_step in _tap_choices(problem):
        shapes = list(_warpgroup_choices(problem, math.prod(taps)))
        for pixels, flat in _pixel_choices(problem, taps, tap_step, maps) if shapes else ():
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
    """Of one input channel's sums: grad_weight/implicit_gemm_store.cuh."""
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


def fits_map(boxes: Boxes, geometry: Geometry) -> bool:
    """Whether tiles of these may be laid over a map: those beyond it meet nothing that they should not."""
    tile = boxes.tile
    return _fits_axis(geometry, 0, tile.rows) and _fits_axis(geometry, 1, tile.cols)


def _fits_axis(geometry: Geometry, axis: int, cut: int) -> bool:
    return -(geometry.height, geometry.width)[axis] % cut <= most_beyond(geometry, axis)


def _pixel_choices(
    problem: Problem, taps: Pair, tap_step: Pair, maps: Sequence[Geometry]
) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """Images, rows, columns of a tile of pixels, and whether its boxes are flat."""
    stride = problem.geometry.stride
    for pixels in dict.fromkeys(pixels for g in maps for pixels in _pixels_of(g)):
        for flat in (False, True):
            tile = Tile((4, 1, 1, 1), 16, 64, 1, taps, tap_step, *pixels, LEAST_STAGES, 1, True)
            if flat and axis_of(problem, tile, 1).reach == 0:
                continue
            boxes = Boxes(tile, flat)
            shape = box_shape(problem, boxes)
            spans = shape[0], (shape[1] - 1) * stride[0] + 1, (shape[2] - 1) * stride[1] + 1
            if max(spans) <= BOX_SPAN and _runs_lie_right(problem, boxes):
                yield pixels, flat


@lru_cache(maxsize=1024)
def _pixels_of(geometry: Geometry) -> tuple[tuple[int, int, int], ...]:
    g = geometry
    widths = {cols for cols in (8, 16, 32, 64) if cols < 2 * g.width} | (
        {g.width} if g.width <= MOST_WHOLE else set()
    )
    heights = {rows for rows in (1, 2, 4, 8, 16) if rows < 2 * g.height} | (
        {g.height} if g.height <= MOST_WHOLE else set()
    )
    return tuple(
        (images, rows, cols)
        for cols, rows, images in itertools.product(
            sorted(widths), sorted(heights), (1, 2, 4, 8, 16, 32, 64, 128)
        )
        if images < 2 * g.batch
        and 32 <= images * rows * cols <= 256
        and images * rows * cols % STEP_PIXELS == 0
        and _fits_axis(g, 0, rows)
        and _fits_axis(g, 1, cols)
    )


def leaves_sizes(layer: Problem) -> bool:
    """Whether there are sizes that no tile can be laid over."""
    large = replace(layer.geometry, height=1 << 12, width=1 << 12)
    return min(most_beyond(large, 0), most_beyond(large, 1)) < INT32_LIMIT
