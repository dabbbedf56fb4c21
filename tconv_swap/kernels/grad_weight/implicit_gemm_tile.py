"""What a block of csrc/kernels/grad_weight/implicit_gemm_*.cu computes, and its shared memory: the Python side
of grad_weight/implicit_gemm_layout.cuh."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from tconv_swap.geometry import Pair
from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant

#: Bytes of the largest copy of a thread (cp.async).
COPY_BYTES = 16


class Block(Protocol):
    """What a block computes of the gradient, whatever its pixels: see ``Tile``."""

    @property
    def warps(self) -> tuple[int, int, int, int]: ...
    @property
    def warp_m(self) -> int: ...
    @property
    def warp_n(self) -> int: ...
    @property
    def warp_taps(self) -> int: ...
    @property
    def taps(self) -> Pair: ...
    @property
    def tap_step(self) -> Pair: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...


class Tile(NamedTuple):
    """What a block computes.
    Attributes:
        warps: along input channels (m), output channels (n), taps and pixels (k).
        warp_m: input channels of a warp.
        warp_n: output channels of a warp.
        warp_taps: taps of a warp.
        taps: rows and columns of taps of a block.
        tap_step: from one of them to the next.
        images, rows, cols: pixels of the input in a stage.
    """

    warps: tuple[int, int, int, int]
    warp_m: int
    warp_n: int
    warp_taps: int
    taps: Pair
    tap_step: Pair
    images: int
    rows: int
    cols: int
    stages: int
    blocks_per_multiprocessor: int
    wgmma: bool = False

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    @property
    def block_m(self) -> int:
        return self.warps[0] * self.warp_m

    @property
    def block_n(self) -> int:
        return self.warps[1] * self.warp_n

    @property
    def pixels(self) -> int:
        return self.images * self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns images, rows and columns of the tile of pixels."""
        return self.images, self.rows, self.cols

    @property
    def sums(self) -> int:
        """Returns how many registers of a thread hold sums."""
        return self.warp_m * self.warp_n * self.warp_taps // 32

    def __str__(self) -> str:
        return (
            f"{self.block_m} x {self.block_n} channels x {self.taps[0]} x {self.taps[1]} taps, tiles of "
            f"{self.images} x {self.rows} x {self.cols} pixels, {self.stages} stages"
        )


def step_pixels(problem: Problem) -> int:
    """Returns the pixels (k) of one multiply."""
    return 8 if item_bytes(problem) == 4 else 16


def item_bytes(problem: Problem) -> int:
    """Returns the bytes of an element."""
    return 4 if problem.dtype == torch.float32 else 2


def tap_blocks(problem: Problem, block: Block) -> Pair:
    """Returns into how many blocks the taps are cut, along rows and columns."""

    (kernel_h, kernel_w), (step_h, step_w) = problem.geometry.kernel, block.tap_step
    rows, columns = block.taps
    return (
        min(step_h, kernel_h) * ceil_div(ceil_div(kernel_h, step_h), rows),
        min(step_w, kernel_w) * ceil_div(ceil_div(kernel_w, step_w), columns),
    )


def weight_tiles(problem: Problem, block: Block) -> int:
    """Returns how many blocks compute one split of the pixels."""
    g = problem.geometry
    return (
        ceil_div(g.in_channels_per_group, block.block_m)
        * ceil_div(g.out_channels_per_group, block.block_n)
        * math.prod(tap_blocks(problem, block))
        * g.groups
    )


class Window(NamedTuple):
    """The part of an operand that a stage holds in shared memory.
    Attributes:
        pieces: copies of ``copy`` elements for each channel.
        copy: elements of one copy.
        span: rows and columns of memory from the first to the last.
        sector_bytes: bytes, for each channel, of the memory sectors that its rows touch, wherever they begin
        (NCHW).
    """

    channels: int
    positions: int
    pieces: int
    copy: int
    bytes: int
    table_bytes: int
    through_registers: bool
    span: Pair
    sector_bytes: float

    def staged_registers(self, threads: int) -> int:
        """Returns how many registers of a thread hold elements on their way to shared memory."""
        if not self.through_registers:
            return 0
        return ceil_div(self.pieces * self.channels // 8, threads) * 8 * ceil_div(self.copy, 2)


#: The windows of the input and of grad_output.
Operands = tuple[Window, Window]


def _window(
    problem: Problem,
    pixels: tuple[int, int, int],
    channels: int,
    phases: Pair,
    shifts: Pair,
    strides: Pair,
    misalignment: int,
    copy: int,
) -> Window:
    """Returns the window of an operand.
    Args:
        misalignment: columns from the aligned address at which a row is copied to the first tap's column
        (NCHW).
        copy: elements of one copy.
    """
    item = item_bytes(problem)
    images, rows, cols = pixels[0], pixels[1] + shifts[0], pixels[2] + shifts[1]
    misalignment, stride = 0 if problem.channels_last else misalignment, strides[1]
    if stride == 1 and not problem.channels_last:
        cols = round_up(cols + misalignment, copy)
    positions = images * phases[0] * rows * phases[1] * cols
    per_row = phases[1] * cols
    if not problem.channels_last and copy > 1:
        per_row = ceil_div(cols if stride == 1 else cols * stride + misalignment, copy)
    pieces = images * phases[0] * rows * per_row
    if item == 2:
        size = channels // 8 * (positions | 1) * 16
    elif problem.channels_last:
        size = positions * (channels if channels % 16 == 8 else channels + 8) * 4
    else:
        size = channels * ((positions + 3) // 8 * 8 + 4) * 4
    through_registers = item == 2 and (not problem.channels_last or copy == 1)
    table = 16 * pieces if problem.channels_last or through_registers else 0
    span = rows * strides[0], cols * stride + copy
    row_bytes = (cols if stride == 1 else cols * stride + misalignment) * item
    sector_bytes = images * phases[0] * rows * (row_bytes + SECTOR_BYTES - copy * item)
    return Window(
        channels, positions, pieces, copy, round_up(size, 16), table, through_registers, span, sector_bytes
    )


def shared_bytes(stages: int, operands: Operands) -> int:
    """Returns the dynamic shared memory of a block, from its ``windows``."""
    into, out = operands
    return stages * (into.bytes + out.bytes) + into.table_bytes + out.table_bytes


def most_stages(operands: Operands, available: int) -> int:
    """Returns the most stages whose ``shared_bytes`` are available."""
    into, out = operands
    return (available - into.table_bytes - out.table_bytes) // (into.bytes + out.bytes)


def _input_windows(
    problem: Problem, channels: int, pixels: tuple[int, int, int], multiple: int
) -> list[Window]:
    """Returns the windows of the input, the preferred ones first: through registers, short copies were measured to be
    faster."""
    g = problem.geometry
    copies = _copies(problem, g.in_channels, g.in_channels_per_group, multiple, pixels[2])
    if item_bytes(problem) == 2 and not problem.channels_last:
        copies.reverse()
    return [_window(problem, pixels, channels, (1, 1), (0, 0), (1, 1), 0, copy) for copy in copies]


def _grad_output_windows(
    problem: Problem, channels: int, taps: tuple[Pair, Pair], pixels: tuple[int, int, int], multiple: int
) -> list[Window]:
    """Returns the windows of grad_output, the preferred ones, with the longest copies, first."""
    g, (counts, steps) = problem.geometry, taps
    rows, columns = (
        _taps_of(counts[axis], steps[axis] * g.dilation[axis], g.stride[axis]) for axis in (0, 1)
    )
    phases, shifts = (rows[0], columns[0]), (rows[1], columns[1])
    span = pixels[2] * g.stride[1]
    # Columns of different phases go to different places, so they are copied one by one.
    split = item_bytes(problem) == 4 and g.stride[1] > 1 and not problem.channels_last
    copies = [1] if split else _copies(problem, g.out_channels, g.out_channels_per_group, multiple, span)
    return [
        _window(
            problem,
            pixels,
            channels,
            phases,
            shifts,
            g.stride,
            _misalignment(g.kernel[1], g.dilation[1], g.padding[1], counts[1], steps[1], copy),
            copy,
        )
        for copy in copies
    ]


@lru_cache(maxsize=1024)
def _taps_of(taps: int, pitch: int, stride: int) -> Pair:
    """Returns the phases that ``taps`` taps touch along an axis, and how far they reach within a phase."""
    return min(taps, stride // math.gcd(stride, pitch)), (taps - 1) * pitch // stride


@lru_cache(maxsize=1024)
def _misalignment(kernel: int, dilation: int, padding: int, taps: int, tap_step: int, copy: int) -> int:
    """Returns the most columns from the aligned address at which a row is copied to the column of a block's first
    tap."""
    classes = min(tap_step, kernel)
    blocks = classes * ceil_div(ceil_div(kernel, tap_step), taps)
    bases = (
        (block % classes + block // classes * taps * tap_step) * dilation - padding for block in range(blocks)
    )
    return max(base % copy for base in bases)


def _of_fewest_registers(found: list[Window], threads: int) -> Window:
    """Returns the window whose copies need the fewest registers; of equals the first one."""
    return min(found, key=lambda window: window.staged_registers(threads))


def _copies(problem: Problem, channels: int, group: int, multiple: int, span: int) -> list[int]:
    """Returns the numbers of elements that one copy may move, the largest first: every copy is aligned to its
    size."""
    most = COPY_BYTES // item_bytes(problem)
    aligned = math.gcd(channels, group) if problem.channels_last else math.gcd(multiple, span)
    return [copy for copy in (8, 4, 2, 1) if copy <= most and aligned % copy == 0]


class Windows:
    """The windows of the tiles of a layer. Many tiles have the same ones, so each is computed once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices: dict[tuple[Any, ...], list[Window]] = {}
        self._chosen: dict[tuple[int, tuple[Any, ...]], Window] = {}

    def of(
        self,
        threads: int,
        block: Pair,
        taps: tuple[Pair, Pair],
        pixels: tuple[int, int, int],
        multiples: Pair,
    ) -> Operands:
        """Returns the windows of the input and of grad_output.
        Args:
            block: input and output channels of a block.
            taps: of a block, and the steps between them.
        """
        return (
            self._window(_input_windows, threads, (block[0], pixels, multiples[0])),
            self._window(_grad_output_windows, threads, (block[1], taps, pixels, multiples[1])),
        )

    def _window(self, choices: Callable[..., list[Window]], threads: int, read: tuple[Any, ...]) -> Window:
        """Returns the best of the ``choices`` of windows for what is ``read``."""
        chosen = self._chosen.get((threads, read))
        if chosen is None:
            if read not in self._choices:
                self._choices[read] = choices(self._problem, *read)
            chosen = self._chosen[threads, read] = _of_fewest_registers(self._choices[read], threads)
        return chosen


def block_constants(block: Block) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants that define what a block computes."""
    warps_m, warps_n, warps_t, warps_k = block.warps
    return (
        ("WARPS_M", warps_m),
        ("WARPS_N", warps_n),
        ("WARPS_T", warps_t),
        ("WARPS_K", warps_k),
        ("WARP_M", block.warp_m),
        ("WARP_N", block.warp_n),
        ("WARP_TAPS", block.warp_taps),
        ("TAP_ROWS", block.taps[0]),
        ("TAP_COLS", block.taps[1]),
        ("TAP_ROW_STEP", block.tap_step[0]),
        ("TAP_COL_STEP", block.tap_step[1]),
    )


def shape_constants(tile: Tile) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants that define the pixels of a tile."""
    return (
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
    )
