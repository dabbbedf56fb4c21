"""The tiles of csrc/kernels/forward/implicit_gemm_tma.cu for inputs in channels_last that are worth measuring for one
size (docs/kernels/forward/implicit_gemm_tma.md). Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.forward.implicit_gemm_fit import (
    fit_rows,
    fits_device,
    multiplied_fragments,
    split_k,
    tile_fragments,
)
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    group_taps,
    supports_tma_weights,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import best_shape, can_be_shaped, shaped
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: The fewest outputs for each weight with which packed weights are faster in 16 bits, although packing takes time
#: (measured).
MIN_OUTPUTS_PER_PACKED_WEIGHT = 8
#: For tiles of whole rows: fragments of one multiply along a row of positions, the stages that must fit, and the
#: bytes of a warp's subtile of the outputs.
ROW_FRAGMENTS = (9, 8, 7)
ROW_STAGES = 3
ROW_SUBTILE_BYTES = 16384
#: Bytes of such a subtile for tiles of narrow maps, whose stages take nearly all of the memory.
NARROW_SUBTILE_BYTES = 2048
#: Registers of a producer thread where one of them issues all copies of the copy engine.
TMA_PRODUCER_REGISTERS = 56


def tma_tiles(problem: TileProblem, device: Device) -> list[tuple[TileProblem, Tile]]:
    """Returns tiles of forward/implicit_gemm_tma.cu for channels_last inputs; those whose sum over channels is not
    split come first."""
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32 or geometry.in_channels_per_group * problem.item % 16:
        return []
    narrow_map = not problem.flat and problem.positions[1] <= 4
    if narrow_map and (
        problem.positions[1] < 2
        or problem.positions[0] * problem.positions[1] < 8
        or problem.position_input_rows != 1
    ):
        return []
    # A block with half of the phases has more positions, of which maps may have too few.
    variants = [problem]
    if problem.phases == (2, 2):
        variants.append(replace(problem, block_phases=(1, 2)))
    wide, narrow, single = (2, 1, 1), (1, 2, 1), (1, 1, 2)
    stride_1 = problem.phases == (1, 1)
    found = [(problem, tile) for tile in _row_tiles(problem, device)]
    for groups_m, groups_n, blocks in (wide, narrow, single) if stride_1 else (narrow, wide, single):
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
                for fitted in _in_shape(variant, tile, device):
                    deep = deepest_stages(variant, fitted, device)
                    if deep is not None:
                        found.append((variant, deep))
    return sorted(found, key=lambda entry: entry[1].splits)


def _in_shape(problem: TileProblem, tile: Tile, device: Device) -> Iterator[Tile]:
    """Yields the tile in the shape that fits the map best, if its kernel takes the shape at its launch; otherwise with
    the rows that fit the map."""
    if can_be_shaped(problem, tile):
        yield best_shape(problem, shaped(problem, tile), device.multiprocessors)
    else:
        yield from fit_rows(problem, tile)


def _row_tiles(problem: TileProblem, device: Device) -> Iterator[Tile]:
    """Yields a tile of whole rows of positions. In NCHW, where it stores its outputs in long segments, it is worth it
    where it covers the map as well as other tiles do; in channels_last only where it covers the map better."""
    height, width = problem.positions
    if problem.phases != (2, 2):
        return
    if problem.flat:
        # Several rows of a narrow map for each warp.
        fragments = next((n for n in (8, 7) if 8 * n % width == 0), 0)
        rows, cols = 1, 16 * fragments
        pays = not problem.output_channels_last and width % 2 == 0 and (width < 16 or fragments == 7)
    else:
        fragments = min(ROW_FRAGMENTS, key=lambda n: ceil_div(width, 8 * n) * n)
        rows, cols = 2, 8 * fragments
        covered = round_up(height, rows) * round_up(width, cols)
        others = round_up(height, 8) * round_up(width, 16)
        pays = 20 * covered <= 19 * others if problem.output_channels_last else covered <= others
    if fragments and pays:
        tile = Tile(4, 1, 1, rows, cols, 1, 1, fragments, 8, 2, 1, wgmma=True, tma=True)
        if not problem.output_channels_last:
            tile = replace(tile, subtile_bytes=ROW_SUBTILE_BYTES, by_rows=True)
        deep = deepest_stages(problem, tile, device)
        if deep is not None and deep.stages >= ROW_STAGES:
            yield deep


def deepest_stages(problem: TileProblem, tile: Tile, device: Device) -> Tile | None:
    """Returns a tile of forward/implicit_gemm_tma.cu with its splits and the best stages that fit the device, or None
    where none fit. Partial sums take more shared memory than outputs of 16 bits."""
    staged = _tma_stages(problem, tile, device.multiprocessors)
    split = (split_k(problem, deep, device.multiprocessors) for deep in staged)
    return next((deep for deep in split if fits_device(problem, deep, device)), None)


def _loads_own_weights(problem: TileProblem) -> bool:
    """Returns whether the copy engine should load the weights in their own layout: the rows of a multiply are channels
    in their order then, whose sums are stored slower, but nothing is packed."""
    geometry = problem.geometry
    weights = geometry.in_channels_per_group * geometry.out_channels * geometry.taps
    outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    return supports_tma_weights(problem) and MIN_OUTPUTS_PER_PACKED_WEIGHT * weights >= outputs


def _tma_stages(problem: TileProblem, tile: Tile, multiprocessors: int) -> Iterator[Tile]:
    """Yields the tile with the stages of weights and input that are worth measuring, those that take most memory
    first."""
    geometry = problem.geometry
    tma_weights = _loads_own_weights(problem)
    tiles = block_count(problem, tile)
    m_blocks = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile))
    one_weight = m_blocks * geometry.groups * len(group_taps(problem)) == 1
    many_tiles = tiles >= 2 * multiprocessors * tile.blocks_per_multiprocessor
    # Narrow maps are loaded once for each shift: longer chunks with fewer stages were faster.
    narrow = not problem.flat and tile.cols < 8
    if narrow:
        tile = replace(tile, subtile_bytes=NARROW_SUBTILE_BYTES)
    for words, min_stages in ((16, 3 if narrow else 4), (8, 2)):
        for stages in range(6, min_stages - 1, -1) if words <= max(8, problem.words) else ():
            # Weights that stay in shared memory gain less than one more stage.
            for resident in (True, False) if one_weight and many_tiles else (False,):
                yield replace(
                    tile,
                    chunk_words=words,
                    stages=stages,
                    resident_weights=resident,
                    tma_weights=tma_weights,
                    whole_lines=tma_weights,
                )
