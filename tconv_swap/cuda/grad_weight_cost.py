"""How the work of csrc/kernels/grad_weight_*.cu is cut into blocks, and how long that may be expected to take."""

from __future__ import annotations

import math

from tconv_swap.cuda.grad_weight_tile import (
    Tile,
    ceil_div,
    is_ieee,
    item_bytes,
    pixel_tiles,
    step_pixels,
    weight_tiles,
    windows,
)
from tconv_swap.cuda.problem import Device, Problem

#: Partial sums may take this much memory, or one copy of the gradient in whole tiles where that is more.
WORKSPACE_LIMIT_BYTES = 64 << 20


def slices_of(problem: Problem, tile: Tile, device: Device) -> int:
    """Parts that the pixels are cut into, so that all multiprocessors have work, within the workspace's limit."""
    blocks = weight_tiles(problem, tile)
    room = device.multiprocessors * tile.blocks_per_multiprocessor
    slices = max(1, room // blocks)
    # One wave more, if this one leaves more than a quarter of the multiprocessors without work.
    if blocks < room and slices * blocks * 4 < 3 * room:
        slices = max(1, 2 * room // blocks)
    most = max(1, WORKSPACE_LIMIT_BYTES // (slice_bytes(problem, tile) * tile.warps[3]))
    return min(slices, most, pixel_tiles(problem, tile))


def slice_bytes(problem: Problem, tile: Tile) -> int:
    return weight_tiles(problem, tile) * tile.block_m * tile.block_n * tile.warps[2] * tile.warp_taps * 4


def expected_clocks(problem: Problem, tile: Tile, device: Device) -> float:
    """Roughly, of the whole launch: the multiplier, shared memory, instructions and the L2 work side by side."""
    ieee = is_ieee(problem)
    item = item_bytes(problem)
    step = step_pixels(problem)
    m, n = tile.warp_m // 16, tile.warp_n // 8
    warps = tile.warps[0] * tile.warps[1] * tile.warps[2]
    steps = tile.pixels / step
    multiplies = m * n * tile.warp_taps * warps * steps * (3 if ieee else 1)
    reads = (4 * m + 2 * n * tile.warp_taps) * warps * steps
    into, out = windows(problem, tile)
    fill = (into.channels * into.positions + out.channels * out.positions) * item
    copies = sum(
        window.channels * window.positions / (window.copy * 32) * (10 if problem.channels_last else 4)
        for window in (into, out)
    )
    instructions = (
        multiplies * (2 if ieee else 1) + reads * (2 if item == 4 else 0.3) * (2 if ieee else 1) + copies
    )
    if tile.wgmma:
        # 64 x columns x step of four warps: the multiplier's time, or that of reading both operands.
        columns = tile.warp_m if item == 4 else tile.warp_n
        multiply = warps / 4 * tile.warp_taps * steps * max(columns / 2, 16 + columns / 4)
        rows = warps * tile.warp_taps * steps * 16 if item == 4 else 0
        parts = sorted((multiply * 1.1, fill / 128, (copies + rows) / 4, fill / 20))
    else:
        parts = sorted((multiplies * 1.5, reads + fill / 128, instructions / 4, fill / 20))
    clocks = parts[-1] + 0.3 * sum(parts[:-1])
    # The four multipliers share the warps; a barrier and the trip to memory cost every tile.
    resident = warps * tile.warps[3] * tile.blocks_per_multiprocessor
    clocks = clocks * ceil_div(resident, 4) * 4 / resident * math.sqrt(max(1.0, 8 / resident)) + 300
    slices = slices_of(problem, tile, device)
    tiles_of_slice = ceil_div(pixel_tiles(problem, tile), slices)
    room = device.multiprocessors * tile.blocks_per_multiprocessor
    blocks = weight_tiles(problem, tile) * slices
    waves = ceil_div(blocks, room)
    shared_by = min(tile.blocks_per_multiprocessor, ceil_div(blocks, device.multiprocessors))
    gradient = slice_bytes(problem, tile) / (device.multiprocessors * 20)
    copies_of_it = slices * tile.warps[3]
    # Partial sums are written, read and, by another launch, made into the gradient.
    partial = gradient if copies_of_it == 1 else (2 * copies_of_it + 2) * gradient + 5000
    return waves * shared_by * (tiles_of_slice * clocks + 1500) + partial
