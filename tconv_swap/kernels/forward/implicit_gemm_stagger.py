"""Tiles of forward/implicit_gemm_tma.cu whose two warpgroups are out of step: while one stores, the other
multiplies."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, group_taps
from tconv_swap.kernels.forward.implicit_gemm_memory import STEP_WORDS
from tconv_swap.runtime.integers import ceil_div

#: Half chunks by which the second warpgroup is late, by the bytes of an element.
LATE_HALF_CHUNKS = {2: 3, 4: 2}


def staggered(problem: TileProblem, tile: Tile, multiprocessors: int) -> Tile:
    """``tile`` with its warpgroups out of step where that was measured to pay: at stride 1, where a tap has several
    multiplies and a block several tiles; else as it is."""
    several = tile.warp_images * tile.warp_rows * tile.warp_cols > 16
    many = block_count(problem, tile) >= 2 * multiprocessors * tile.blocks_per_multiprocessor
    # Not measured: no tap shifted, stacked rows in TF32.
    stride_1 = problem.phases == (1, 1) and not problem.flat and (problem.item == 2 or problem.stack == 1)
    if not (can_stagger(problem, tile) and stride_1 and problem.output_channels_last and several and many):
        return tile
    return replace(tile, stagger=LATE_HALF_CHUNKS[problem.item] * products(problem, tile) // 2)


def can_stagger(problem: TileProblem, tile: Tile) -> bool:
    """Whether the second warpgroup may begin a tile later than the first: no more stages than a tile has chunks."""
    return (
        tile.tma
        and tile.warps_m * tile.warps_n == 8
        and tile.splits == 1
        and len(group_taps(problem)) == 1
        and 2 <= tile.stages <= ceil_div(problem.words, tile.chunk_words)
        and products(problem, tile) >= 2
    )


def products(problem: TileProblem, tile: Tile) -> int:
    """Taps of all steps of a chunk: what ``stagger`` counts."""
    return group_taps(problem)[0] * tile.chunk_words // STEP_WORDS
