"""Tiles of csrc/kernels/forward/implicit_gemm_tma.cu for NCHW inputs. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import Depths, tma_tiles


def tma_tiles_of_nchw(problem: TileProblem) -> Iterator[tuple[TileProblem, Depths]]:
    """Yields tiles for an NCHW problem: of aligned images those that load the input in its own layout, of others those
    that load a copy in channels_last."""
    if not problem.aligned:
        yield from tma_tiles(problem._replace(input_channels_last=True, nhwc_copy=True))
    elif problem.item == 2 and problem.flat:
        for posed, depths in tma_tiles(problem):
            if supports_pixel_major(posed, next(depths())):
                yield posed, Depths(_pixel_major, (depths,))


def _pixel_major(depths: Depths) -> Iterator[Tile]:
    return (tile._replace(pixel_major=True) for tile in depths())


def supports_pixel_major(problem: TileProblem, tile: Tile) -> bool:
    """Whether the multiplier can read the tile's NCHW input as a pixel-major operand: no box may lie in two images or
    groups."""
    geometry = problem.geometry
    return (
        problem.item == 2
        and problem.flat
        and problem.aligned
        and geometry.height * geometry.width % tile.cols == 0
        and tile.warp_cols in (8, 16)
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
    )
