"""The expected time of the kernels of csrc/kernels/grad_weight/implicit_gemm_tma.cu, and the tile of pixels and the
splits with which they take it. The functions are pure.

The constants are fitted to 678 times of an H200, in clocks of 1.7 GHz; the standard deviation of the logarithm is 0.10
(docs/selection.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import tap_blocks, weight_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_shape import STEP_PIXELS
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import MIN_STAGES, Stage, TmaKernel, has_gaps
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Clocks of the launch; of the launch that reduces splits; of a byte that is loaded of both tensors, of partial sums,
#: and of the gradient.
LAUNCH_CLOCKS, REDUCTION_CLOCKS = 9430, 2750
BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS, GRADIENT_BYTE_CLOCKS = 0.000449, 0.000587, 0.000311
#: Clocks of a tile beside its work; of its multiplies over those of the tensor cores; of a byte of a stage, and how
#: many times as long it takes where pixels are no whole sectors of memory.
TILE_CLOCKS, MULTIPLY_CLOCKS, LOADED_BYTE_CLOCKS = 100, 0.86, 0.0119
RAGGED_PIXELS = 1.46
#: How many times as long a tile takes that has only the fewest stages.
FEW_STAGES = 1.15
#: The share of the shorter of two times that does not overlap with the longer: of the multiplies and loads of a tile;
#: of all tiles and what memory takes.
TILE_OVERLAP, MEMORY_OVERLAP = 0.362, 0.133


class Cut(NamedTuple):
    """A number of splits, how many blocks a multiprocessor then computes one after the other, and the clocks of adding
    up the splits."""

    splits: int
    rounds: int
    added_clocks: float


class Work(NamedTuple):
    """The work of a kernel, whatever the sizes.
    Attributes:
        multiply_clocks: of a tile.
        byte_clocks: of a byte of a stage.
        blocks: of one split.
        split_bytes: of one float32 copy of the gradient in whole tiles.
        channels_read: output channels that are loaded for each pixel of the input where the kernel leaves gaps;
            0 where all of grad_output is loaded.
        cuts: of large sizes.
    """

    multiply_clocks: float
    byte_clocks: float
    blocks: int
    split_bytes: int
    channels_read: int
    cuts: tuple[Cut, ...]

    def tile_clocks(self, stage: Stage) -> float:
        """Returns the clocks of a tile of pixels."""
        loads = self.byte_clocks * stage.bytes
        longer, shorter = max(self.multiply_clocks, loads), min(self.multiply_clocks, loads)
        clocks = TILE_CLOCKS + longer + TILE_OVERLAP * shorter
        return clocks * FEW_STAGES if stage.stages == MIN_STAGES else clocks


def work_of(problem: Problem, kernel: TmaKernel, device: Device) -> Work:
    """Returns the work of a kernel of a layer."""
    g = problem.geometry
    blocks = weight_tiles(problem, kernel)
    split_bytes = blocks * kernel.threads * kernel.sums * 4
    # Clocks of the tensor cores for 64 x warp_n x 16 sums.
    multiplies = kernel.threads // 128 * kernel.warp_taps * kernel.pixels / STEP_PIXELS * kernel.warp_n / 2
    ragged = any(channels * 2 % SECTOR_BYTES for channels in (g.in_channels, g.out_channels))
    # Where every tap has pixels of its own, the unused taps of a block are loaded too.
    taps = math.prod(tap_blocks(problem, kernel)) * math.prod(kernel.taps)
    return Work(
        MULTIPLY_CLOCKS * multiplies,
        LOADED_BYTE_CLOCKS * (RAGGED_PIXELS if ragged else 1.0),
        blocks,
        split_bytes,
        taps * g.out_channels if has_gaps(problem) else 0,
        cuts_of(blocks, split_bytes, INT32_LIMIT, device),
    )


def cuts_of(blocks: int, split_bytes: int, tiles: int, device: Device) -> tuple[Cut, ...]:
    """Returns how the tiles of pixels may be cut into splits within the workspace's limit, the fewest first.
    Args:
        blocks, split_bytes: as in ``Work``.
    """
    max_splits = min(max(1, WORKSPACE_LIMIT_BYTES // split_bytes), tiles)
    choices = (min(max_splits, waves * device.multiprocessors // blocks) for waves in (1, 2, 3))
    return tuple(
        Cut(
            splits,
            ceil_div(blocks * splits, device.multiprocessors),
            REDUCTION_CLOCKS + PARTIAL_BYTE_CLOCKS * splits * split_bytes if splits > 1 else 0.0,
        )
        for splits in sorted({1, *choices} - {0})
    )


def loaded_elements(geometry: Geometry, channels_read: int) -> int:
    """Returns how many elements of the input and of grad_output are loaded (``Work.channels_read``)."""
    g = geometry
    pixels = g.height * g.width
    if channels_read:
        return g.batch * pixels * (g.in_channels + channels_read)
    return g.batch * (g.in_channels * pixels + g.out_channels * g.out_height * g.out_width)


class Fastest(NamedTuple):
    """The stage and the number of splits with which a kernel is expected to be the fastest, and its clocks."""

    clocks: float
    stage: Stage
    splits: int


def fastest(
    work: Work, stages: Iterable[tuple[int, Stage]], geometry: Geometry, device: Device
) -> Fastest | None:
    """Returns the fastest of the stages for a size; None if there are none.
    Args:
        stages: with the number of tiles that cover the map.
    """
    memory = BYTE_CLOCKS * 2 * loaded_elements(geometry, work.channels_read)
    fixed = LAUNCH_CLOCKS + GRADIENT_BYTE_CLOCKS * work.split_bytes
    best = None
    for tiles, stage in stages:
        of_tile, cuts = work.tile_clocks(stage), work.cuts
        if tiles < cuts[-1].splits:
            cuts = cuts_of(work.blocks, work.split_bytes, tiles, device)
        for splits, rounds, added_clocks in cuts:
            product = rounds * -(-tiles // splits) * of_tile
            longer, shorter = (product, memory) if product > memory else (memory, product)
            clocks = fixed + longer + MEMORY_OVERLAP * shorter + added_clocks
            if best is None or clocks < best.clocks:
                best = Fastest(clocks, stage, splits)
    return best
