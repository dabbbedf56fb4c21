"""The tiles of csrc/kernels/grad_weight/implicit_gemm_tma.cu and their shared memory: the Python side of
grad_weight/implicit_gemm_tma.cuh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_REGISTERS, REGISTERS
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import Tile
from tconv_swap.kernels.grad_weight.layer import largest_image
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: The warp that issues the copies; the warps that add up the bias.
PRODUCER_THREADS, BIAS_THREADS = 32, 96
#: Registers that a thread needs beside its sums: while it multiplies, and to store them without spills.
OTHER_REGISTERS, STORE_REGISTERS = 28, 48

ROW_BYTES, BOX_CHANNELS, BOX_ALIGNMENT = 128, 64, 1024
#: Pixels of one multiply.
STEP_PIXELS = 16
#: Stages of the ring.
MAX_STAGES, MIN_STAGES = 8, 3
#: Boxes of grad_output in a stage.
MAX_BOXES = 32
#: Rows or columns of a map up to which a tile may have exactly as many.
MAX_WHOLE_SIDE = 16


@dataclass(frozen=True, slots=True)
class TmaTile:
    """A tile whose operands are loaded by TMA.
    Attributes:
        tile: what a block computes.
        box_per_tap_col: each tap column has a box of grad_output of its own, so that no tap is shifted within a
            box.
    """

    tile: Tile
    box_per_tap_col: bool

    @property
    def input_blocks(self) -> int:
        """Returns the boxes of the input in a stage."""
        return self.tile.block_m // BOX_CHANNELS

    @property
    def channel_blocks(self) -> int:
        """Returns the boxes of grad_output side by side along output channels."""
        return ceil_div(self.tile.block_n, BOX_CHANNELS)

    @property
    def fits_registers(self) -> bool:
        """Returns whether the consumers' sums fit their registers."""
        return self.tile.sums + OTHER_REGISTERS <= self.registers

    @property
    def may_spill(self) -> bool:
        """Returns whether the compiler may spill where the sums are stored, after the last multiply."""
        return self.tile.sums + STORE_REGISTERS > self.registers

    @property
    def registers(self) -> int:
        """Returns the registers that a thread may have: each quarter of a multiprocessor has its own, for the
        consumers and at least one other warp."""
        warps = self.tile.threads // 128 + 1
        return min(MAX_REGISTERS, REGISTERS // (128 * warps) // 8 * 8)

    def __str__(self) -> str:
        return f"{self.tile}{', a box per tap column' if self.box_per_tap_col else ''}"


class Boxes(NamedTuple):
    """The boxes of grad_output in a stage.
    Attributes:
        shape: images, rows and columns of a box.
        per_channel_block: boxes for each 64 output channels.
    """

    shape: tuple[int, int, int]
    per_channel_block: int


def boxes_of(
    geometry: Geometry, taps: tuple[Pair, Pair], pixels: tuple[int, int, int], box_per_tap_col: bool
) -> Boxes:
    """Returns the boxes of grad_output of a tile.
    Args:
        taps: rows and columns of taps of a block, and the steps between them.
        pixels: images, rows and columns of the tile.
    """
    (phases_h, reach_h), (phases_w, reach_w) = reach_of(geometry, taps, 0), reach_of(geometry, taps, 1)
    images, rows, cols = pixels
    if box_per_tap_col:
        phases_w, reach_w = taps[0][1], 0
    return Boxes((images, rows + reach_h, cols + reach_w), phases_h * phases_w)


def reach_of(geometry: Geometry, taps: tuple[Pair, Pair], axis: int) -> Pair:
    """Returns the phases that the taps of a block touch along an axis, and how far they reach within a phase."""
    (counts, steps), stride = taps, geometry.stride[axis]
    pitch = steps[axis] * geometry.dilation[axis]
    return min(counts[axis], stride // math.gcd(stride, pitch)), (counts[axis] - 1) * pitch // stride


def box_shape(problem: Problem, tma_tile: TmaTile) -> tuple[int, int, int]:
    """Returns images, rows and columns of a box of grad_output."""
    return _boxes(problem, tma_tile).shape


def _boxes(problem: Problem, tma_tile: TmaTile) -> Boxes:
    tile = tma_tile.tile
    return boxes_of(problem.geometry, (tile.taps, tile.tap_step), tile.shape, tma_tile.box_per_tap_col)


def stage_bytes(problem: Problem, tma_tile: TmaTile) -> int:
    """Returns the shared memory of a stage."""
    boxes = _boxes(problem, tma_tile)
    of_input = tma_tile.input_blocks * box_bytes(tma_tile.tile.shape)
    return of_input + boxes.per_channel_block * tma_tile.channel_blocks * box_bytes(boxes.shape)


def box_bytes(shape: tuple[int, int, int]) -> int:
    """Returns the shared memory of a box of so many images, rows and columns."""
    return round_up(shape[0] * shape[1] * shape[2] * ROW_BYTES, BOX_ALIGNMENT)


def shared_bytes(problem: Problem, tma_tile: TmaTile) -> int:
    """Returns the dynamic shared memory of a block."""
    return BOX_ALIGNMENT + tma_tile.tile.stages * (stage_bytes(problem, tma_tile) + 16)


@lru_cache(maxsize=8192)
def _groups_are_contiguous(tile: tuple[int, int, int], box: tuple[int, int, int]) -> bool:
    """Returns whether the two groups of 8 pixels of each multiply are contiguous, and always the same distance
    apart."""
    _, rows, cols = box

    def position(k: int) -> int:
        area = tile[1] * tile[2]
        return (k // area * rows + k // tile[2] % tile[1]) * cols + k % tile[2]

    distance = position(8) - position(0)
    return all(
        position(k) == position(k // 16 * 16) + k // 8 % 2 * distance + k % 8 for k in range(math.prod(tile))
    )


def last_reached(geometry: Geometry, axis: int) -> int:
    """Returns the last row (column) of the output that some pixel of the input reaches; 0 if there is none."""
    size, out = (geometry.height, geometry.out_height) if axis == 0 else (geometry.width, geometry.out_width)
    stride, dilation, padding = geometry.stride[axis], geometry.dilation[axis], geometry.padding[axis]
    last = 0
    for k in range(geometry.kernel[axis]):
        offset = k * dilation - padding
        meeting = min(size - 1, (out - 1 - offset) // stride)
        if meeting >= 0:
            last = max(last, meeting * stride + offset)
    return last


def max_beyond(geometry: Geometry, axis: int) -> int:
    """Returns how many rows (columns) of zeros beyond the input a tile may have.
    More of them would meet pixels of the output that belong to no gradient, and zero times infinity is not a
    number.
    """
    g = geometry
    size = (g.height, g.width)[axis]
    # Larger maps have the same edge.
    enough = g.kernel[axis] * g.dilation[axis] + g.padding[axis] + 1
    return _max_beyond(
        min(size, enough),
        g.kernel[axis],
        g.stride[axis],
        g.padding[axis],
        g.dilation[axis],
        g.output_padding[axis],
    )


@lru_cache(maxsize=4096)
def _max_beyond(size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
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
    """Returns whether the kernel skips rows and columns of the output, and no two taps read the same ones."""
    g = problem.geometry
    return all(
        len({k * d % s for k in range(kernel)}) == kernel < s
        for kernel, d, s in zip(g.kernel, g.dilation, g.stride, strict=True)
    )


def candidates(
    problem: Problem, device: Device, sizes: Sequence[Geometry] | None = None
) -> Iterator[TmaTile]:
    """Yields all tiles that fit the maps of these sizes (None: of the problem's own)."""
    maps = [problem.geometry] if sizes is None else sizes
    choices = list(dict.fromkeys(pixels for g in maps for pixels in _pixels_of(g)))
    for taps, tap_step in _tap_choices(problem):
        # Tiles of one pixel: the others differ from them in nothing else.
        unfilled = [
            TmaTile(Tile(warps, 16, warp_n, warp_taps, taps, tap_step, 1, 1, 1, MIN_STAGES, 1, True), False)
            for warps, warp_n, warp_taps in _warpgroup_choices(problem, math.prod(taps))
        ]
        shapes = [
            (one.tile, one.input_blocks, one.channel_blocks, one.tile.block_m * _staged_row_bytes(one.tile))
            for one in unfilled
            if one.fits_registers
        ]
        loaded = _loaded(problem, (taps, tap_step), choices) if shapes else ()
        for pixels, box_per_tap_col, boxes in loaded:
            input_box, output_boxes = box_bytes(pixels), boxes.per_channel_block * box_bytes(boxes.shape)
            for tile, input_blocks, channel_blocks, staged in shapes:
                each = input_blocks * input_box + channel_blocks * output_boxes
                stages = min(MAX_STAGES, (device.shared_memory_per_block - BOX_ALIGNMENT) // (each + 16))
                if stages < MIN_STAGES or boxes.per_channel_block * channel_blocks > MAX_BOXES:
                    continue
                # A single split stores its sums through the stages' memory.
                if stages * each >= staged:
                    yield TmaTile(Tile(*tile[:6], *pixels, stages, 1, True), box_per_tap_col)


def _staged_row_bytes(tile: Tile) -> int:
    """Returns the bytes of one input channel's sums on their way to memory
    (grad_weight/implicit_gemm_store.cuh)."""
    return (round_up(tile.block_n * math.prod(tile.taps), 32) + 8) * 4


def _counts(taps: int) -> list[int]:
    """Returns how many of ``taps`` taps a block may take: all, half of them, a third and so on."""
    return sorted({ceil_div(taps, parts) for parts in range(1, taps + 1)})


def _tap_choices(problem: Problem) -> list[tuple[Pair, Pair]]:
    """Returns the taps of a block and the steps between them: neighbours, or those of one phase."""
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
    """Yields warps along (m, n, taps, k), and the output channels and taps of a warpgroup."""
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


class Limits(NamedTuple):
    """What the tiles of a map must keep.
    Attributes:
        height, width: of the map.
        beyond: how many rows and columns beyond it a tile may have, so that what lies there meets no pixel that it
            should not.
        images: of a tile at most, so that offsets have 32 bits.
    """

    height: int
    width: int
    beyond: Pair
    images: int

    def fit(self, shape: tuple[int, int, int]) -> bool:
        """Returns whether tiles of so many images, rows and columns may cover the map."""
        _, rows, cols = shape
        return -self.height % rows <= self.beyond[0] and -self.width % cols <= self.beyond[1]


def limits_of(geometry: Geometry) -> Limits:
    """Returns the limits of the tiles of a map."""
    g = geometry
    beyond = max_beyond(g, 0), max_beyond(g, 1)
    return Limits(g.height, g.width, beyond, (INT32_LIMIT - 1) // largest_image(g))


def _loaded(
    problem: Problem, taps: tuple[Pair, Pair], choices: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[tuple[int, int, int], bool, Boxes]]:
    """Yields those choices of images, rows and columns of a tile of pixels that boxes can load, whether each tap column
    has a box of its own, and the boxes."""
    g = problem.geometry
    shifted = reach_of(g, taps, 1)[1] > 0
    for pixels in choices:
        for box_per_tap_col in (False, True) if shifted else (False,):
            boxes = boxes_of(g, taps, pixels, box_per_tap_col)
            images, rows, cols = boxes.shape
            most = max(images, (rows - 1) * g.stride[0] + 1, (cols - 1) * g.stride[1] + 1)
            if most <= MAX_BOX and _groups_are_contiguous(pixels, boxes.shape):
                yield pixels, box_per_tap_col, boxes


@lru_cache(maxsize=1024)
def _pixels_of(geometry: Geometry) -> tuple[tuple[int, int, int], ...]:
    g, limits = geometry, limits_of(geometry)
    widths = {cols for cols in (8, 16, 32, 64) if cols < 2 * g.width} | (
        {g.width} if g.width <= MAX_WHOLE_SIDE else set()
    )
    heights = {rows for rows in (1, 2, 4, 8, 16) if rows < 2 * g.height} | (
        {g.height} if g.height <= MAX_WHOLE_SIDE else set()
    )
    return tuple(
        (images, rows, cols)
        for cols, rows, images in itertools.product(
            sorted(widths), sorted(heights), (1, 2, 4, 8, 16, 32, 64, 128)
        )
        if images < 2 * g.batch
        and 32 <= images * rows * cols <= 256
        and images * rows * cols % STEP_PIXELS == 0
        and limits.fit((images, rows, cols))
    )


def leaves_sizes(layer: Problem) -> bool:
    """Returns whether there are sizes that no tile can cover."""
    large = layer.geometry._replace(height=1 << 12, width=1 << 12)
    return min(max_beyond(large, 0), max_beyond(large, 1)) < INT32_LIMIT
