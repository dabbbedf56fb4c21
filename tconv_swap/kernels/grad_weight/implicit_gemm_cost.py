"""How the work of csrc/kernels/grad_weight_*.cu is cut into blocks, and how long that may be expected to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    Tile,
    Window,
    item_bytes,
    step_pixels,
    weight_tiles,
    windows,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

#: Partial sums may take this much memory, or one copy of the gradient in whole tiles where that is more.
WORKSPACE_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """Of a tile, whatever the sizes: clocks for one tile of pixels; blocks of one slice; bytes of one slice's sums;
    copies of those that a slice has."""

    clocks: float
    blocks: int
    slice_bytes: int
    copies: int


def slice_bytes(problem: Problem, tile: Tile) -> int:
    return weight_tiles(problem, tile) * tile.block_m * tile.block_n * tile.warps[2] * tile.warp_taps * 4


def slices_of(work: Work, tile: Tile, tiles: int, device: Device) -> int:
    """Parts that so many tiles of pixels are cut into, so that all multiprocessors have work, within the workspace's
    limit."""
    blocks = work.blocks
    room = device.multiprocessors * tile.blocks_per_multiprocessor
    slices = max(1, room // blocks)
    # One wave more, if this one leaves more than a quarter of the multiprocessors without work.
    if blocks < room and slices * blocks * 4 < 3 * room:
        slices = max(1, 2 * room // blocks)
    most = max(1, WORKSPACE_LIMIT_BYTES // (work.slice_bytes * work.copies))
    return min(slices, most, tiles)


def work_of(problem: Problem, tile: Tile) -> Work:
    """Of the sizes only what they allow to be copied in one piece counts (docs/kernels/grad_weight.md)."""
    into_and_out = windows(problem, tile)
    multiplies = (
        _wgmma_clocks(problem, tile, into_and_out) if tile.wgmma else _mma_clocks(problem, tile, into_and_out)
    )
    parts = (*multiplies, _fill_clocks(problem, into_and_out))
    clocks = 0.7 * max(parts) + 0.3 * sum(parts)
    # The four multipliers share the warps; a barrier and the trip to memory cost every tile, less where another block
    # goes on meanwhile.
    resident = tile.threads // 32 * tile.blocks_per_multiprocessor
    wanted = 8 if tile.wgmma else 12
    clocks = clocks * round_up(resident, 4) / resident * math.sqrt(max(1.0, wanted / resident)) + 300
    clocks *= 1 if tile.blocks_per_multiprocessor == 1 else 0.8
    return Work(clocks, weight_tiles(problem, tile), slice_bytes(problem, tile), tile.warps[3])


def expected_clocks(work: Work, tile: Tile, tiles: int, device: Device) -> float:
    """Returns an estimate for the whole launch, of so many tiles of pixels."""
    slices = slices_of(work, tile, tiles, device)
    tiles_of_slice = ceil_div(tiles, slices)
    blocks = work.blocks * slices
    waves = ceil_div(blocks, device.multiprocessors * tile.blocks_per_multiprocessor)
    shared_by = min(tile.blocks_per_multiprocessor, ceil_div(blocks, device.multiprocessors))
    gradient = work.slice_bytes / (device.multiprocessors * 20)
    copies = slices * work.copies
    # Partial sums are written, read and, by another launch, made into the gradient.
    partial = gradient if copies == 1 else (2 * copies + 2) * gradient + 5000
    return waves * shared_by * (tiles_of_slice * work.clocks + 1500) + partial


def _mma_clocks(problem: Problem, tile: Tile, operands: tuple[Window, Window]) -> tuple[float, ...]:
    """Of one tile of pixels: the multiplier's, shared memory's, the instructions'."""
    rounds = 3 if problem.is_ieee else 1
    m, n = tile.warp_m // 16, tile.warp_n // 8
    warp_steps = math.prod(tile.warps[:3]) * tile.pixels / step_pixels(problem)
    multiplies = m * n * tile.warp_taps * warp_steps * rounds
    reads = (4 * m + 2 * n * tile.warp_taps) * warp_steps
    conversions = (4 if problem.is_ieee else 2) if item_bytes(problem) == 4 else 0.3
    instructions = (
        multiplies * (2 if problem.is_ieee else 1) + reads * conversions + _copies(problem, operands)
    )
    return multiplies * 1.5, reads, instructions / 4


def _wgmma_clocks(problem: Problem, tile: Tile, brought: tuple[Window, Window]) -> tuple[float, ...]:
    """Of one tile of pixels: that of the multiplier, or of shared memory where both operands take it longer; that of
    the instructions. In TF32 the rows come by way of registers, which costs both."""
    tf32 = item_bytes(problem) == 4
    columns = tile.warp_m if tf32 else tile.warp_n
    warp_steps = math.prod(tile.warps[:3]) * tile.warp_taps * tile.pixels / step_pixels(problem)
    operands = (16 + columns / 4) * (1.4 if tf32 else 1)
    instructions = _copies(problem, brought) + (warp_steps * 16 if tf32 else 0)
    return warp_steps / 4 * max(columns / 2, operands) * 1.1, instructions / 4


def _copies(problem: Problem, operands: tuple[Window, Window]) -> float:
    """Instructions that bring in one tile of pixels."""
    each = 10 if problem.channels_last else 4
    return sum(window.channels * window.positions / (window.copy * 32) * each for window in operands)


def _fill_clocks(problem: Problem, operands: tuple[Window, Window]) -> float:
    """Of the L2 for one tile of pixels: short copies of NCHW, and those that are joined in registers, are slower."""
    item = item_bytes(problem)

    def clocks(window: Window) -> float:
        if window.through_registers and not problem.channels_last:
            return max(window.positions * item, window.sector_bytes) / 13
        rate = 20 if problem.channels_last else {4: 20, 2: 14}.get(window.copy, 8)
        return window.positions * item / rate

    return sum(window.channels * clocks(window) for window in operands)
