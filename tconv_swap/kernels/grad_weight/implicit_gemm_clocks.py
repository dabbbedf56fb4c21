"""How the implicit GEMM of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu is split over blocks, and its expected
time. The functions are pure.

The constants are fitted to 9,638 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.08 to 0.11 (docs/selection.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    COPY_BYTES,
    Operands,
    Tile,
    item_bytes,
    step_pixels,
    weight_tiles,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up

#: Limit of the partial sums; one copy of the gradient in whole tiles may exceed it.
WORKSPACE_LIMIT_BYTES = 64 << 20
#: Clocks of the launch; of the launch that reduces splits; of a byte of both tensors, of partial sums, and of the
#: gradient.
LAUNCH_CLOCKS, REDUCTION_CLOCKS = 12900, 4200
BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS, GRADIENT_BYTE_CLOCKS = 0.000207, 0.00053, 0.00138
#: Clocks of a tile of pixels beside its work, which is that of all units: they hardly overlap.
TILE_CLOCKS = 459
#: By mma.sync: clocks of a multiply of 16 x 8 sums, how many times as long the three products of float32 take, and
#: clocks of an operand that a warp reads, and further ones where it rounds float32.
MMA_CLOCKS, IEEE_MMA, MMA_READ_CLOCKS, ROUNDING_CLOCKS = 0.97, 6.47, 0.72, 0.431
#: By wgmma: the clocks that a multiply takes over those of the tensor cores; clocks of a read of shared memory.
WGMMA_CLOCKS, WGMMA_READ_CLOCKS = 0.437, 0.75
#: Clocks of a copy of a thread: in NCHW, and of less than 16 bytes in channels_last; through registers, in NCHW and in
#: channels_last. Clocks of a byte that a tile loads.
COPY_CLOCKS, SHORT_COPY_CLOCKS_NHWC = 0.0591, 0.0754
REGISTER_COPY_CLOCKS, REGISTER_COPY_CLOCKS_NHWC = 0.0766, 0.108
LOADED_BYTE_CLOCKS = 0.0194
#: In NCHW, with strides that are multiples of the number of banks: the columns that a warp stores are of different
#: phases, which lie in the same banks, and copies take so many times as long (kernels of 64 x 64 taps, whose tiles took
#: 1.4 to 4.5 times as long on an H100).
BANKS, BANK_CONFLICTS = 32, 2.7
#: A tile takes this power of ``WARPS`` over the warps of a multiprocessor longer where these are fewer; and so many
#: times as long where two blocks of a multiprocessor take turns, counted one after the other (in float32 the tensor
#: cores are nearly always busy).
WARPS, FEW_WARPS, TWO_BLOCKS, TWO_BLOCKS_IEEE = 8, 0.257, 0.844, 0.951


class Work(NamedTuple):
    """The work of a tile, whatever the sizes.
    Attributes:
        clocks: for one tile of pixels.
        blocks: of one split.
        split_bytes: of the sums of one split, in whole tiles.
        copies: of those sums that a split writes: one for each warp along k.
    """

    clocks: float
    blocks: int
    split_bytes: int
    copies: int

    @property
    def beside_clocks(self) -> tuple[int, int, int]:
        """Returns everything but the clocks."""
        return self.blocks, self.split_bytes, self.copies


def splits_of(work: Work, tile: Tile, tiles: int, device: Device) -> int:
    """Returns into how many splits the tiles of pixels are cut, so that all multiprocessors have work and the
    workspace keeps its limit."""
    return min(_most_splits(work, tile, device), tiles)


def _most_splits(work: Work, tile: Tile, device: Device) -> int:
    """Returns the splits of as many tiles of pixels, or more."""
    blocks = work.blocks
    slots = device.multiprocessors * tile.blocks_per_multiprocessor
    splits = max(1, slots // blocks)
    # A second wave, where one would leave more than a quarter of the multiprocessors idle.
    if blocks < slots and splits * blocks * 4 < 3 * slots:
        splits = max(1, 2 * slots // blocks)
    max_splits = max(1, WORKSPACE_LIMIT_BYTES // (work.split_bytes * work.copies))
    return min(splits, max_splits)


def work_of(problem: Problem, tile: Tile, operands: Operands) -> Work:
    """Returns the work of a tile with these ``windows``; of the sizes only the elements of one copy count
    (docs/kernels/grad_weight/sizes.md)."""
    resident = tile.threads // 32 * tile.blocks_per_multiprocessor
    multiplies = _wgmma_clocks(problem, tile) if tile.wgmma else _mma_clocks(problem, tile, resident)
    clocks = TILE_CLOCKS + multiplies + _copy_clocks(problem, operands)
    if resident < WARPS:
        clocks *= (WARPS / resident) ** FEW_WARPS
    if tile.blocks_per_multiprocessor > 1:
        clocks *= TWO_BLOCKS_IEEE if problem.is_ieee else TWO_BLOCKS
    blocks = weight_tiles(problem, tile)
    split_bytes = blocks * tile.block_m * tile.block_n * tile.warps[2] * tile.warp_taps * 4
    return Work(clocks, blocks, split_bytes, tile.warps[3])


def tensor_bytes(geometry: Geometry, item: int) -> int:
    """Returns the bytes of the input and of grad_output, whose elements have ``item`` bytes."""
    g = geometry
    return item * g.batch * (g.in_channels * g.height * g.width + g.out_channels * g.out_height * g.out_width)


def expected_clocks(work: Work, tile: Tile, tiles: int, moved_bytes: int, device: Device) -> float:
    """Returns the expected clocks of both launches over ``tiles`` tiles of pixels.
    ``moved_bytes``: ``tensor_bytes``."""
    return clocks_of_sizes(work, tile, ((tiles, moved_bytes),), device)[0]


def clocks_of_sizes(work: Work, tile: Tile, sizes: Iterable[tuple[int, int]], device: Device) -> list[float]:
    """Returns the same for each size, which is its tiles of pixels and its ``tensor_bytes``. Of large sizes all but the
    last product is the same, and a layer has many tiles and sizes."""
    most = _most_splits(work, tile, device)
    of_most = _rounds_and_reduction(work, tile, most, device)
    of_gradient = GRADIENT_BYTE_CLOCKS * work.split_bytes
    found = []
    for tiles, moved_bytes in sizes:
        if tiles >= most:
            splits, (rounds, reduction) = most, of_most
        else:
            splits, (rounds, reduction) = tiles, _rounds_and_reduction(work, tile, tiles, device)
        of_tiles = rounds * -(-tiles // splits) * work.clocks
        found.append(LAUNCH_CLOCKS + of_tiles + BYTE_CLOCKS * moved_bytes + of_gradient + reduction)
    return found


def _rounds_and_reduction(work: Work, tile: Tile, splits: int, device: Device) -> tuple[int, float]:
    """Returns how many blocks a multiprocessor computes one after the other, and the clocks of adding up the splits."""
    blocks, copies = work.blocks * splits, splits * work.copies
    resident = device.multiprocessors * tile.blocks_per_multiprocessor
    # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
    rounds = blocks // resident * tile.blocks_per_multiprocessor + ceil_div(
        blocks % resident, device.multiprocessors
    )
    # Partial sums are written, then read by another launch that writes the gradient.
    reduction = REDUCTION_CLOCKS + PARTIAL_BYTE_CLOCKS * work.split_bytes * copies if copies > 1 else 0
    return rounds, reduction


def _mma_clocks(problem: Problem, tile: Tile, resident: int) -> float:
    """Returns the clocks of one tile of pixels with mma.sync: of its multiplies, and of reading their operands. The
    ``resident`` warps of a multiprocessor are spread over four tensor cores."""
    m, n = tile.warp_m // 16, tile.warp_n // 8
    warps_m, warps_n, warps_t, _ = tile.warps
    warp_steps = warps_m * warps_n * warps_t * tile.pixels / step_pixels(problem)
    multiply = MMA_CLOCKS * (IEEE_MMA if problem.is_ieee else 1.0)
    read = MMA_READ_CLOCKS + (ROUNDING_CLOCKS if item_bytes(problem) == 4 else 0)
    of_warp = multiply * m * n * tile.warp_taps + read * (4 * m + 2 * n * tile.warp_taps)
    return warp_steps * of_warp * round_up(resident, 4) / resident


def _wgmma_clocks(problem: Problem, tile: Tile) -> float:
    """Returns the same with wgmma, whose operands are read from shared memory."""
    warp_steps = math.prod(tile.warps[:3]) * tile.warp_taps * tile.pixels / step_pixels(problem)
    return warp_steps / 4 * (WGMMA_CLOCKS * tile.warp_n / 2 + WGMMA_READ_CLOCKS * (16 + tile.warp_n / 4))


def _copy_clocks(problem: Problem, operands: Operands) -> float:
    """Returns the clocks in which one tile of pixels is loaded: of its copies, and of its bytes. In NCHW a copy of a
    few bytes takes a sector of memory."""
    clocks, item = 0.0, item_bytes(problem)
    for window in operands:
        loaded: float = window.positions * item
        if problem.channels_last:
            copy = 0.0 if window.copy * item == COPY_BYTES else SHORT_COPY_CLOCKS_NHWC
        else:
            copy, loaded = COPY_CLOCKS, max(loaded, window.sector_bytes)
        if window.through_registers:
            copy = REGISTER_COPY_CLOCKS_NHWC if problem.channels_last else REGISTER_COPY_CLOCKS
        of_window = window.channels * (copy * window.pieces + LOADED_BYTE_CLOCKS * loaded)
        crowded = not problem.channels_last and problem.geometry.stride[1] % BANKS == 0
        clocks += of_window * (BANK_CONFLICTS if crowded else 1.0)
    return clocks
