"""The tiles of csrc/kernels/forward/implicit_gemm_tma.cu for inputs in channels_last that are worth measuring for one
size (docs/kernels/forward/implicit_gemm_tma.md). Pure functions of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tconv_swap.kernels.forward.implicit_gemm_fit import fit_rows, multiplied_fragments, tile_fragments
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    supports_tma_weights,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import can_be_shaped, of_any_shape, shaped
from tconv_swap.runtime.integers import ceil_div, round_up

#: For tiles of whole rows: fragments of one multiply along a row of positions, the stages that must fit, and the
#: bytes of a warp's subtile of the outputs.
ROW_FRAGMENTS = (9, 8, 7)
ROW_STAGES = 3
ROW_SUBTILE_BYTES = 16384
#: Bytes of such a subtile for tiles of narrow maps, whose stages take nearly all of the memory.
NARROW_SUBTILE_BYTES = 2048
#: The most stages.
MAX_STAGES = 6
#: Registers of a producer thread where one of them issues all copies of the copy engine.
TMA_PRODUCER_REGISTERS = 56


class Depths(NamedTuple):
    """Makes a tile with each number of stages, the most first, when it is called. ``arguments`` are those of ``make``;
    equal ones make equal tiles."""

    make: Callable[..., Iterator[Tile]]
    arguments: tuple[Any, ...]

    def __call__(self) -> Iterator[Tile]:
        return self.make(*self.arguments)


def tma_tiles(problem: TileProblem) -> Iterator[tuple[TileProblem, Depths]]:
    """Yields tiles of forward/implicit_gemm_tma.cu for channels_last inputs, and the problem with the phases that a
    block of theirs computes."""
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32 or geometry.in_channels_per_group * problem.item % 16:
        return
    narrow_map = not problem.flat and problem.positions[1] <= 4
    if narrow_map and (
        problem.positions[1] < 2
        or problem.positions[0] * problem.positions[1] < 8
        or problem.position_input_rows != 1
    ):
        return
    # A block with half of the phases has more positions, of which maps may have too few.
    variants = [problem]
    if problem.phases == (2, 2):
        variants.append(problem._replace(block_phases=(1, 2)))
    if fragments := row_fragments(problem):
        tile = _row_tile(problem, fragments)
        yield from ((problem, depths) for depths in _depths(problem, tile, ROW_STAGES))
    # Warpgroups over channels and over positions, and blocks of a multiprocessor.
    for groups_m, groups_n, blocks in ((1, 2, 1), (2, 1, 1), (1, 1, 2)):
        if groups_m == 2 and channels <= 64:
            continue
        for variant in variants:
            phases = variant.phases[0] * variant.phases[1]
            max_rows = 1 if narrow_map else 16 if phases <= 2 else 8
            for registers in (128, 64) if variant is variants[-1] else (128,):
                fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
                shape = tile_fragments(variant, max(4, fragments), groups_n, max_rows)
                multiplied = shape[3] if narrow_map else multiplied_fragments(shape)
                if fragments < 4 or multiplied < 4:
                    continue
                tile = Tile(4 * groups_m, 1, *shape, 8, 2, blocks, wgmma=True, tma=True)
                for fitted in _in_shape(variant, tile):
                    yield from ((variant, depths) for depths in _depths(variant, fitted))


def _in_shape(problem: TileProblem, tile: Tile) -> Iterator[Tile]:
    """Yields the tile with room for each shape that its kernel takes at its launch; otherwise with the rows that fit
    the map."""
    if can_be_shaped(problem, tile):
        yield of_any_shape(shaped(problem, tile))
    else:
        yield from fit_rows(problem, tile)


def row_fragments(problem: TileProblem) -> int:
    """Returns the fragments of a warp that stores whole rows of positions, or 0. In NCHW, where it stores its outputs
    in long segments, it is worth it where it covers the map as well as other tiles do; in channels_last only where it
    covers the map better."""
    height, width = problem.positions
    if problem.phases != (2, 2):
        return 0
    if problem.flat:
        # Several rows of a narrow map for each warp.
        fragments = next((n for n in (8, 7) if 8 * n % width == 0), 0)
        pays = not problem.output_channels_last and width % 2 == 0 and (width < 16 or fragments == 7)
    else:
        fragments = min(ROW_FRAGMENTS, key=lambda n: ceil_div(width, 8 * n) * n)
        covered = round_up(height, 2) * round_up(width, 8 * fragments)
        others = round_up(height, 8) * round_up(width, 16)
        pays = 20 * covered <= 19 * others if problem.output_channels_last else covered <= others
    return fragments if pays else 0


def _row_tile(problem: TileProblem, fragments: int) -> Tile:
    """Returns the tile of whole rows of positions."""
    rows, cols = (1, 16 * fragments) if problem.flat else (2, 8 * fragments)
    tile = Tile(4, 1, 1, rows, cols, 1, 1, fragments, 8, 2, 1, wgmma=True, tma=True)
    if problem.output_channels_last:
        return tile
    return tile._replace(subtile_bytes=ROW_SUBTILE_BYTES, by_rows=True)


def _depths(problem: TileProblem, tile: Tile, least: int = 2) -> Iterator[Depths]:
    """Yields the tile with each number of words of a chunk, and with weights in their own layout, if the copy engine
    can load these, and packed: the former are stored slower, but nothing is packed."""
    # Narrow maps are loaded once for each shift: longer chunks with fewer stages were faster.
    narrow = not problem.flat and tile.cols < 8
    if narrow:
        tile = tile._replace(subtile_bytes=NARROW_SUBTILE_BYTES)
    m_blocks = ceil_div(problem.geometry.out_channels_per_group, problem.block_channels(tile))
    one_weight = m_blocks * problem.geometry.groups * len(problem.group_taps) == 1
    for words, fewest in ((16, max(least, 3 if narrow else 4)), (8, least)):
        if words > max(8, problem.words):
            continue
        for own in (True, False) if supports_tma_weights(problem) else (False,):
            yield Depths(_staged, (tile, words, own, fewest, one_weight))


def _staged(tile: Tile, words: int, own: bool, fewest: int, one_weight: bool) -> Iterator[Tile]:
    """Yields the tile with each number of stages. Weights that stay in shared memory gain less than one more stage."""
    tile = tile._replace(chunk_words=words, tma_weights=own, whole_lines=own)
    for stages in range(MAX_STAGES, fewest - 1, -1):
        if one_weight:
            yield tile._replace(stages=stages, resident_weights=True)
        yield tile._replace(stages=stages)
