"""The tiles of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu that are worth measuring for one size,
the best first, by a rule that follows measurements (docs/kernels/forward/implicit_gemm.md). Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.forward.implicit_gemm_fit import (
    fit_rows,
    fits_device,
    multiplied_fragments,
    power_above,
    split_k,
    tile_fragments,
)
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count
from tconv_swap.kernels.forward.implicit_gemm_memory import supports_tma_nchw
from tconv_swap.kernels.forward.implicit_gemm_stagger import staggered
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import tma_tiles
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Registers of a producer thread of forward/implicit_gemm_tma_nchw.cu, which transposes; and pairs of the stages of
#: planes and the stages of NCHW chunks, of which the first that fits is taken.
TRANSPOSER_REGISTERS = 72
TRANSPOSER_STAGES = ((4, 4), (3, 4), (3, 3), (2, 4), (2, 3), (2, 2))


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Yields the tiles that are worth measuring, the one that is expected to be the fastest first."""

    def fits(variant: TileProblem, tile: Tile) -> bool:
        return fits_device(variant, tile, device)

    ranked: list[tuple[TileProblem, Tile]] = []
    if device.architecture == "sm_90a" and problem.precision != "IEEE":
        stacked = _stacked(problem)
        if problem.input_channels_last:
            ranked += tma_tiles(stacked, device)
        else:
            deepest: dict[Tile, Tile] = {}
            for tile in (*_tma_nchw_tiles(stacked), *_wgmma_tiles(stacked)):
                if fits(stacked, tile):
                    kind = replace(tile, stages=0, nchw_stages=int(tile.nchw_stages > 0), subtile_bytes=0)
                    deepest.setdefault(kind, tile)
            ranked += [(stacked, tile) for tile in deepest.values()]
    ranked += [(problem, tile) for tile in _mma_tiles(problem)]
    ranked = [
        (variant, split_k(variant, tile, device.multiprocessors))
        for variant, tile in ranked
        if fits(variant, tile)
    ]

    # Where each multiprocessor has at most one block, that block may take all the memory: more stages hide more
    # latency.
    def deepened(variant: TileProblem, tile: Tile) -> tuple[TileProblem, Tile]:
        if block_count(variant, tile) <= device.multiprocessors and not tile.nchw_stages:
            deeper = [replace(tile, blocks_per_multiprocessor=1, stages=stages) for stages in (6, 5, 4, 3)]
            tile = next((deep for deep in deeper if fits(variant, deep)), tile)
        return variant, _staggered(variant, tile, device)

    # A tile that leaves multiprocessors idle comes last, even if it is the fastest where all multiprocessors have work.
    ranked.sort(key=lambda entry: 4 * block_count(*entry) < 3 * device.multiprocessors)
    yield from (deepened(*entry) for entry in ranked)


def _stacked(problem: TileProblem) -> TileProblem:
    """Returns the problem with its output rows stacked, where at most 32 output channels do not fill the 64 rows of a
    multiply; elsewhere the same problem."""
    channels, stride = problem.geometry.out_channels_per_group, problem.geometry.stride[0]
    rows = 64 // max(16, power_above(channels))
    if rows <= 1 or rows % stride or problem.geometry.dilation[0] != 1:
        return problem
    return replace(problem, stack=rows)


def _staggered(problem: TileProblem, tile: Tile, device: Device) -> Tile:
    found = staggered(problem, tile, device.multiprocessors)
    return found if fits_device(problem, found, device) else tile


def _tma_nchw_tiles(problem: TileProblem) -> Iterator[Tile]:
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
    for stages, nchw_stages in TRANSPOSER_STAGES:
        staged = replace(tile, stages=stages, nchw_stages=nchw_stages)
        if supports_tma_nchw(problem, staged):
            yield staged


def _wgmma_tiles(problem: TileProblem) -> Iterator[Tile]:
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
            for stages in range(5, 1, -1):
                yield Tile(4, 1, *shape, 8, stages, 1, wgmma=True, producer_warps=12)
    # Rows of 32 positions are stored in longer segments in NCHW; with a wide kernel their halo costs more than that
    # gains.
    short_rows = problem.item == 4 or geometry.kernel[1] > 3
    max_rows = 16 if phases == 1 and short_rows else 8
    for (groups_m, groups_n, blocks), chunk_words in _wgmma_shapes(problem):
        if groups_m == 2 and channels <= 64:
            continue
        for registers in (128, 64) if groups_m == groups_n == 1 else (128,):
            fragments = 1 << (registers // 4 // phases).bit_length() - 1 if registers >= 4 * phases else 0
            if fragments < 4:
                continue
            shape = tile_fragments(problem, fragments, groups_n, max_rows)
            if multiplied_fragments(shape) < 4 or chunk_words > max(8, problem.words):
                continue
            tile = Tile(
                4 * groups_m, 1, *shape, chunk_words, 2, blocks, wgmma=True, producer_warps=8 // blocks
            )
            # A large chunk pays only with enough stages.
            min_stages = 3 if chunk_words > 8 else 2
            for fitted in fit_rows(problem, tile):
                for stages in range(5, min_stages - 1, -1):
                    yield replace(fitted, stages=stages)
                if min_stages == 2:
                    yield replace(fitted, subtile_bytes=2048)


def _wgmma_shapes(problem: TileProblem) -> list[tuple[tuple[int, int, int], int]]:
    """Returns pairs of ((warpgroups along the output channels, warpgroups along the positions, blocks of a
    multiprocessor), words of a chunk), the fastest first, as measured. With sums of 128 registers a thread, a
    multiprocessor has room for one block of two consumer warpgroups, or for two blocks of one."""
    wide, narrow, single = (2, 1, 1), (1, 2, 1), (1, 1, 2)
    if problem.flat:
        # Where pixels are loaded one at a time, a block of many channels and few pixels is faster.
        shapes = (narrow, wide, single) if problem.aligned else (wide, narrow, single)
        return [(shape, words) for shape in shapes for words in (16, 8)]
    if problem.phases[0] * problem.phases[1] == 1:
        return [(shape, 8) for shape in (narrow, wide, single)]
    return [(narrow, 8), (single, 8)] if problem.item == 2 else [(narrow, 16), (narrow, 8), (single, 8)]


def _mma_tiles(problem: TileProblem) -> Iterator[Tile]:
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
            for stages in (3, 2):
                for chunk_words in (16, 8) if phases > 1 or problem.flat else (8,):
                    yield Tile(warps_m, warp_m_tiles, *shape, chunk_words, stages, 2)
    # The weights of every tap of many phases take so much shared memory that few blocks fit.
    yield Tile(1, 1, *tile_fragments(problem, min(fragments, 4), 4, 8), 8, 2, 1)
