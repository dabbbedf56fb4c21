"""Tiles of forward/implicit_gemm_tma.cu whose second warpgroup begins later than the first, so that one multiplies
while the other stores."""

from __future__ import annotations

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count
from tconv_swap.kernels.forward.implicit_gemm_memory import STEP_WORDS
from tconv_swap.runtime.integers import ceil_div

#: By how many half chunks the second warpgroup is behind the first, for elements of 2 and of 4 bytes (measured on an
#: H200).
STAGGER_HALF_CHUNKS = {2: 3, 4: 2}


def staggered(problem: TileProblem, tile: Tile, multiprocessors: int) -> Tile:
    """Returns ``tile`` with a stagger where that was measured to be faster, at stride 1, where a tap has several
    multiplies and a block several tiles; elsewhere returns ``tile`` itself."""
    several = tile.warp_images * tile.warp_rows * tile.warp_cols > 16
    # Flat problems and stacked rows in TF32 were not measured.
    stride_1 = problem.phases == (1, 1) and not problem.flat and (problem.item == 2 or problem.stack == 1)
    if not (stride_1 and several and problem.output_channels_last and can_stagger(problem, tile)):
        return tile
    if block_count(problem, tile) < 2 * multiprocessors * tile.blocks_per_multiprocessor:
        return tile
    return tile._replace(stagger=STAGGER_HALF_CHUNKS[problem.item] * products(problem, tile) // 2)


def can_stagger(problem: TileProblem, tile: Tile) -> bool:
    """Whether the second warpgroup may begin a tile later than the first; there may be no more stages than chunks of a
    tile."""
    return (
        tile.tma
        and tile.warps_m * tile.warps_n == 8
        and tile.splits == 1
        and len(problem.group_taps) == 1
        and 2 <= tile.stages <= ceil_div(problem.words, tile.chunk_words)
        and products(problem, tile) >= 2
    )


def products(problem: TileProblem, tile: Tile) -> int:
    """Returns the taps of all steps of a chunk, in which ``stagger`` counts."""
    return problem.group_taps[0] * tile.chunk_words // STEP_WORDS
