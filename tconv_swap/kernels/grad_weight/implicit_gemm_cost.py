"""How the implicit GEMM of csrc/kernels/grad_weight/implicit_gemm_*.cu is split over blocks, and its expected
time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    Operands,
    Tile,
    Window,
    item_bytes,
    step_pixels,
    weight_tiles,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

#: Limit of the partial sums; one copy of the gradient in whole tiles may exceed it.
WORKSPACE_LIMIT_BYTES = 64 << 20
#: Warps of a multiprocessor that hide each other's waits: of wgmma, and with IEEE, where a warp has three multiplies
#: for each pair of fragments; of all other tiles.
FEW_WARPS, WARPS = 8, 12
#: The clocks of a tile where another block runs meanwhile, relative to those where none does. With IEEE the tensor
#: cores are busy all the time.
TWO_BLOCKS, TWO_BLOCKS_IEEE = 0.8, 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a tile, whatever the sizes.
    Attributes:
        clocks: for one tile of pixels.
        blocks: of one split.
        split_bytes: of the sums of one split.
        copies: of those sums that a split writes: one for each warp along k.
    """

    clocks: float
    blocks: int
    split_bytes: int
    copies: int


def split_bytes(problem: Problem, tile: Tile) -> int:
    """Returns the bytes of the sums of one split, in whole tiles."""
    return weight_tiles(problem, tile) * tile.block_m * tile.block_n * tile.warps[2] * tile.warp_taps * 4


def splits_of(work: Work, tile: Tile, tiles: int, device: Device) -> int:
    """Returns into how many splits the tiles of pixels are cut, so that all multiprocessors have work and the
    workspace keeps its limit."""
    blocks = work.blocks
    slots = device.multiprocessors * tile.blocks_per_multiprocessor
    splits = max(1, slots // blocks)
    # A second wave, where one would leave more than a quarter of the multiprocessors idle.
    if blocks < slots and splits * blocks * 4 < 3 * slots:
        splits = max(1, 2 * slots // blocks)
    max_splits = max(1, WORKSPACE_LIMIT_BYTES // (work.split_bytes * work.copies))
    return min(splits, max_splits, tiles)


def work_of(problem: Problem, tile: Tile, operands: Operands) -> Work:
    """Returns the work of a tile with these ``windows``; of the sizes only the elements of one copy count
    (docs/kernels/grad_weight/sizes.md)."""
    multiplies = (_wgmma_clocks if tile.wgmma else _mma_clocks)(problem, tile, operands)
    parts = (*multiplies, _copy_clocks(problem, operands))
    clocks = 0.7 * max(parts) + 0.3 * sum(parts)
    # The warps are spread over four tensor cores; a barrier and the latency of memory cost every tile, less where
    # another block runs meanwhile.
    resident = tile.threads // 32 * tile.blocks_per_multiprocessor
    wanted = FEW_WARPS if tile.wgmma or problem.is_ieee else WARPS
    clocks = clocks * round_up(resident, 4) / resident * math.sqrt(max(1.0, wanted / resident)) + 300
    if tile.blocks_per_multiprocessor > 1:
        clocks *= TWO_BLOCKS_IEEE if problem.is_ieee else TWO_BLOCKS
    return Work(clocks, weight_tiles(problem, tile), split_bytes(problem, tile), tile.warps[3])


def expected_clocks(work: Work, tile: Tile, tiles: int, device: Device) -> float:
    """Returns the expected clocks of the whole launch over ``tiles`` tiles of pixels."""
    multiprocessors, resident = device.multiprocessors, tile.blocks_per_multiprocessor
    splits = splits_of(work, tile, tiles, device)
    tiles_per_split = ceil_div(tiles, splits)
    blocks = work.blocks * splits
    waves = ceil_div(blocks, multiprocessors * resident)
    shared_by = 1 if resident == 1 else min(resident, ceil_div(blocks, multiprocessors))
    gradient = work.split_bytes / (multiprocessors * 20)
    copies = splits * work.copies
    # Partial sums are written, then read by another launch that writes the gradient.
    partial = gradient if copies == 1 else (2 * copies + 2) * gradient + 5000
    return waves * shared_by * (tiles_per_split * work.clocks + 1500) + partial


def _mma_clocks(problem: Problem, tile: Tile, operands: Operands) -> tuple[float, ...]:
    """Returns the clocks of one tile of pixels with mma.sync: of the tensor cores, of shared memory, of issuing
    instructions."""
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


def _wgmma_clocks(problem: Problem, tile: Tile, brought: Operands) -> tuple[float, ...]:
    """Returns the clocks of one tile of pixels with wgmma: of the tensor cores or of shared memory, whichever
    is slower, and of issuing instructions."""
    warp_steps = math.prod(tile.warps[:3]) * tile.warp_taps * tile.pixels / step_pixels(problem)
    operands = 16 + tile.warp_n / 4
    return warp_steps / 4 * max(tile.warp_n / 2, operands) * 1.1, _copies(problem, brought) / 4


def _copies(problem: Problem, operands: Operands) -> float:
    """Returns how many instructions load one tile of pixels."""
    each = 10 if problem.channels_last else 4
    return sum(window.channels * window.positions / (window.copy * 32) * each for window in operands)


def _copy_clocks(problem: Problem, operands: Operands) -> float:
    """Returns the clocks in which the L2 delivers one tile of pixels: short copies in NCHW and those joined in
    registers are slower."""
    item = item_bytes(problem)

    def clocks(window: Window) -> float:
        if window.through_registers and not problem.channels_last:
            return max(window.positions * item, window.sector_bytes) / 13
        rate = 20 if problem.channels_last else {4: 20, 2: 14}.get(window.copy, 8)
        return window.positions * item / rate

    return sum(window.channels * clocks(window) for window in operands)
