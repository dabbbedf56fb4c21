"""The tiles of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu that suit one size of a layer, of
which forward/selection.py selects by their expected clocks. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product

from tconv_swap.kernels.forward.implicit_gemm_fit import (
    fit_rows,
    fits_device,
    multiplied_fragments,
    power_above,
    split_k,
    tile_fragments,
)
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, of_any_size
from tconv_swap.kernels.forward.implicit_gemm_memory import supports_tma_nchw
from tconv_swap.kernels.forward.implicit_gemm_nchw import tma_tiles_of_nchw
from tconv_swap.kernels.forward.implicit_gemm_stagger import staggered
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import Depths, tma_tiles
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Registers of a producer thread of forward/implicit_gemm_tma_nchw.cu, which transposes; and pairs of the stages of
#: planes and the stages of NCHW chunks, of which the first that fits is taken.
TRANSPOSER_REGISTERS = 72
TRANSPOSER_STAGES = ((4, 4), (3, 4), (3, 3), (2, 4), (2, 3), (2, 2))
#: Stages of a block that has a multiprocessor to itself, of which the most that fit are taken.
STAGES_OF_ONE_BLOCK = (6, 5, 4, 3)


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Yields the tiles that suit this size, some several times, with the problem as their kernels see it. Of tiles that
    leave multiprocessors idle there are further ones: with a sum over channels that is split, and with more stages for
    blocks that have a multiprocessor to themselves."""
    for posed, depths in _kinds(problem, device):
        layer, multiprocessors = of_any_size(posed), device.multiprocessors
        whole = _first_that_fits(layer, depths, 1, device)
        # The number of stages changes no number of blocks.
        shape = whole or next(depths())
        is_idle = block_count(posed, shape) <= multiprocessors
        splits = (1, 2) if is_idle and split_k(posed, shape, multiprocessors) > 1 else (1,)
        alone = (Depths(_of_one_block, (depths,)),) if is_idle and not shape.nchw_stages else ()
        others = islice(product((depths, *alone), splits), 1, None)
        for fitting in (whole, *(_first_that_fits(layer, way, count, device) for way, count in others)):
            if fitting is None:
                continue
            later = staggered(posed, fitting, multiprocessors)
            yield posed, later if later is fitting or fits_device(posed, later, device) else fitting


def _of_one_block(depths: Depths) -> Iterator[Tile]:
    """Yields the tile of a block that has a multiprocessor to itself, the most stages first."""
    kinds = dict.fromkeys(tile._replace(blocks_per_multiprocessor=1, stages=0) for tile in depths())
    for stages in STAGES_OF_ONE_BLOCK:
        yield from (kind._replace(stages=stages) for kind in kinds)


@lru_cache(maxsize=1024)
def _first_that_fits(layer: TileProblem, depths: Depths, splits: int, device: Device) -> Tile | None:
    """Returns the first tile for which the device has room, whatever the size of the layer."""
    split = depths()
    if splits > 1:
        # Weights that stay in shared memory are those of the whole sum.
        split = (tile._replace(splits=splits) for tile in split if not tile.resident_weights)
    return next((tile for tile in split if fits_device(layer, tile, device)), None)


def _kinds(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Depths]]:
    """Yields the tiles of all kernels."""
    if device.architecture == "sm_90a" and problem.precision != "IEEE":
        stacked = _stacked(problem)
        if problem.input_channels_last:
            yield from tma_tiles(stacked)
        else:
            yield from tma_tiles_of_nchw(problem)
            for depths in (*_tma_nchw_tiles(stacked), *_wgmma_tiles(stacked)):
                yield stacked, depths
    for depths in _mma_tiles(problem):
        yield problem, depths


def _staged(tile: Tile, stages: Iterable[int]) -> Iterator[Tile]:
    return (tile._replace(stages=count) for count in stages)


def _stacked(problem: TileProblem) -> TileProblem:
    """Returns the problem with its output rows stacked, where at most 32 output channels do not fill the 64 rows of a
    multiply; elsewhere the same problem."""
    channels, stride = problem.geometry.out_channels_per_group, problem.geometry.stride[0]
    rows = 64 // max(16, power_above(channels))
    if rows <= 1 or rows % stride or problem.geometry.dilation[0] != 1:
        return problem
    return problem._replace(stack=rows)


def _tma_nchw_tiles(problem: TileProblem) -> Iterator[Depths]:
    """Yields tiles of forward/implicit_gemm_tma_nchw.cu where it was faster than forward/implicit_gemm_wgmma.cu
    (docs/kernels/forward/implicit_gemm_tma_nchw.md)."""
    geometry = problem.geometry
    channels, phases = geometry.out_channels_per_group * problem.stack, problem.phases[0] * problem.phases[1]
    narrow, wide_kernel = problem.item == 2, geometry.kernel[1] > 3
    if channels <= 32:
        return
    chunk_words = 8
    if problem.flat:
        # In 16 bits the multiplier reads NCHW in its own layout (forward/implicit_gemm_nchw.py).
        if narrow or phases == 1:
            return
        shape, chunk_words = tile_fragments(problem, 1 << (32 // phases).bit_length() - 1, 2, 1), 16
        producer_warps = 8
    elif phases > 1:
        # Tiles of whole rows of positions store their outputs in segments of 128 and more.
        shape = tile_fragments(problem, 1 << (32 // phases).bit_length() - 1, 2, 1)
        covered = round_up(problem.positions[1], shape[2])
        if not (narrow or problem.stack > 1) or shape[5] < 8 or 10 * covered > 11 * problem.positions[1]:
            return
        producer_warps = 4 if narrow else 8
        if shape[1] == 1:
            chunk_words, producer_warps = 16, 8
    elif problem.stack > 1 and wide_kernel:
        shape = tile_fragments(problem, 16, 1, 1) if narrow else tile_fragments(problem, 32, 1, 8)
        producer_warps = 8
    elif problem.stack == 1 and not narrow and channels <= 64 and not wide_kernel:
        shape, producer_warps = tile_fragments(problem, 32, 2, 8), 8
    elif problem.stack == 1 and narrow and channels > 64 and wide_kernel:
        shape, producer_warps = tile_fragments(problem, 32, 1, 8), 12
    else:
        return
    if multiplied_fragments(shape) < 8 or chunk_words > max(8, problem.words):
        return
    tile = Tile(4, 1, *shape, chunk_words, 2, 1, wgmma=True, producer_warps=producer_warps)
    if supports_tma_nchw(problem, tile):
        yield Depths(_transposing, (tile,))


def _transposing(tile: Tile) -> Iterator[Tile]:
    for stages, nchw_stages in TRANSPOSER_STAGES:
        yield tile._replace(stages=stages, nchw_stages=nchw_stages)


def _wgmma_tiles(problem: TileProblem) -> Iterator[Depths]:
    geometry = problem.geometry
    channels = geometry.out_channels_per_group * problem.stack
    if channels <= 32:
        return
    phases = problem.phases[0] * problem.phases[1]
    # Threads do not load a copy of a narrow map for each shift, as the copy engine does.
    if not problem.flat and problem.positions[1] <= 4:
        return
    # With few output channels and few taps the loads take longest: more producer warps load rows of 256 pixels.
    if problem.stack > 1 and phases == 1 and geometry.kernel[1] <= 3 and not problem.flat:
        shape = tile_fragments(problem, 16, 2, 1)
        if shape[5] == 16:
            tile = Tile(4, 1, *shape, 8, 2, 1, wgmma=True, producer_warps=12)
            yield Depths(_staged, (tile, (5, 4, 3, 2)))
    # Rows of 32 positions are stored in longer segments in NCHW; with a wide kernel their halo costs more than that
    # gains.
    short_rows = problem.item == 4 or geometry.kernel[1] > 3
    max_rows = 16 if phases == 1 and short_rows else 8
    # With sums of 128 registers a thread, a multiprocessor has room for one block of two consumer warpgroups, or for
    # two blocks of one.
    for groups_m, groups_n, blocks in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        if groups_m == 2 and (channels <= 64 or (phases > 1 and not problem.flat)):
            continue
        for registers in (128, 64) if groups_m == groups_n == 1 else (128,):
            fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
            if fragments < 4:
                continue
            shape = tile_fragments(problem, fragments, groups_n, max_rows)
            if multiplied_fragments(shape) < 4:
                continue
            for chunk_words in (16, 8) if phases > 1 or problem.flat else (8,):
                if chunk_words > max(8, problem.words):
                    continue
                tile = Tile(
                    4 * groups_m, 1, *shape, chunk_words, 2, blocks, wgmma=True, producer_warps=8 // blocks
                )
                for fitted in fit_rows(problem, tile):
                    yield Depths(_staged_by_threads, (fitted,))


def _staged_by_threads(tile: Tile) -> Iterator[Tile]:
    """Yields a tile of forward/implicit_gemm_wgmma.cu with each number of stages. A large chunk pays only with enough
    stages."""
    yield from _staged(tile, (5, 4, 3))
    if tile.chunk_words == 8:
        yield tile._replace(stages=2)
        yield tile._replace(stages=2, subtile_bytes=2048)


def _mma_tiles(problem: TileProblem) -> Iterator[Depths]:
    """Yields tiles of forward/implicit_gemm_mma.cu."""
    phases = problem.phases[0] * problem.phases[1]
    tiles_of_channels = ceil_div(problem.geometry.out_channels_per_group, 16)
    # The sums of 32 fragments are 128 registers; the three products of IEEE need some registers of their own.
    ieee = problem.precision == "IEEE"
    max_fragments = 16 if ieee else 32
    max_m_tiles = min(4 if phases == 1 else 1 if ieee and not problem.flat else 2, tiles_of_channels)
    for warp_m_tiles in (m for m in (4, 2, 1) if m <= max_m_tiles):
        fragments = min(16, 1 << max(1, max_fragments // (phases * warp_m_tiles)).bit_length() - 1)
        for warps_m in (1,) if ieee or tiles_of_channels < 2 * warp_m_tiles else (2, 1):
            shape = tile_fragments(problem, fragments, 4 // warps_m, 8)
            if shape[2] < 2 and not problem.input_channels_last:
                continue
            for chunk_words in (16, 8) if phases > 1 or problem.flat else (8,):
                tile = Tile(warps_m, warp_m_tiles, *shape, chunk_words, 3, 2)
                yield Depths(_staged, (tile, (3, 2)))
    # The weights of every tap of many phases take so much shared memory that few blocks fit.
    tile = Tile(1, 1, *tile_fragments(problem, min(fragments, 4), 4, 8), 8, 2, 1)
    yield Depths(_staged, (tile, (2,)))
