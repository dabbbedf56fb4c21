"""The tiles of csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu that a layer may have
over all its sizes, and the best of those that it has for each size. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product

from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_fit as forward_fit
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, block_count
from tconv_swap.kernels.grad_input.implicit_gemm_clocks import block_clocks, clocks
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, shared_bytes
from tconv_swap.kernels.grad_input.implicit_gemm_registers import (
    copy_registers,
    max_copy_registers,
    phases_ahead,
    tile_registers,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: The most taps of a kernel. With more, the code would be too long: it has a multiply for each tap and step of k.
MAX_TAPS = 64
#: The most phases of an axis that have taps: a copy of the input has a bit for each.
MAX_PHASES = 16
#: The most registers of a thread of grad_input/implicit_gemm_mma.cu, as tile_registers counts them: with more the
#: compiler spills.
MAX_TILE_REGISTERS = 150
#: The most phases that are stages of their own in grad_input/implicit_gemm_wgmma.cu: a copy of the input has a bit for
#: each.
MAX_PHASE_STAGES = 16
#: The same with three products. With more, ptxas does not have enough registers: a plan with 20 phases spilled 6 KB,
#: and its result was wrong on an H200, though right in emulation. All plans with up to 4 phases were right.
MAX_IEEE_PHASE_STAGES = 4


def supports(problem: StridedProblem, device: Device) -> bool:
    """Returns whether the kernels compute the problem, and faster than the general kernel."""
    return (
        forward_implicit_gemm.supports(problem, device)
        and max(len(used) for used in problem.phases_used) <= MAX_PHASES
        and problem.geometry.taps <= MAX_TAPS
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kernel: its tile, and whether it computes only aligned rows of grad_output (``aligned_columns``), and only even
    rows of grad_input. A tile of 2 splits stands for any number of splits above 1."""

    tile: Tile
    aligned: bool = False
    even: bool = False

    def posed(self, problem: StridedProblem) -> StridedProblem:
        """Returns the problem as the kernel is compiled for it."""
        if (problem.aligned, problem.even) == (self.aligned, self.even):
            return problem
        return _with_rows(problem, self.aligned, self.even)

    def computes_any_size(self, layer: StridedProblem) -> bool:
        """Returns whether it is legal for all sizes of a layer, but images of 2 GiB."""
        narrow = self.tile.wgmma and self.tile.cols < 8
        if self.aligned or self.even or narrow:
            return False
        return layer.one_pixel or self.tile.images == self.tile.splits == 1

    def legal(self, problem: StridedProblem) -> bool:
        """Returns whether the kernel computes this size correctly."""
        if self.aligned and not problem.can_be_aligned:
            return False
        if self.even and problem.positions[1] % 2:
            return False
        tile, (positions_h, positions_w) = self.tile, problem.positions
        # A map of one pixel has no other kernel; its partial sums are few beside grad_output.
        if tile.splits > 1 and not problem.one_pixel and _most_splits(problem, tile) < 2:
            return False
        if tile.wgmma and tile.cols < 8 and positions_w > tile.cols:
            return False
        # Offsets from a tile's first image are counted in 32 bits.
        geometry = problem.geometry
        image_bytes = geometry.in_channels * geometry.height * geometry.width * problem.item
        images = 1 + ceil_div(tile.cols, positions_h * positions_w) if problem.flat else tile.images
        return images * image_bytes < INT32_LIMIT


@lru_cache(maxsize=1024)
def _with_rows(problem: StridedProblem, aligned: bool, even: bool) -> StridedProblem:
    return replace(problem, aligned=aligned, even=even)


def ranked(
    among: Iterable[Schedule], problem: StridedProblem, device: Device
) -> list[tuple[float, StridedProblem, Tile]]:
    """Returns the tiles of those schedules that compute this size, with their expected clocks and the problem that
    their kernels are compiled for, the one expected to be the fastest first."""
    found = []
    for one in among:
        if one.legal(problem):
            posed, tile = one.posed(problem), _for_size(one.tile, problem, device)
            found.append((clocks(posed, tile, device), posed, tile))
    return sorted(found, key=lambda entry: entry[0])


def expected_clocks(
    one: Schedule, problem: StridedProblem, device: Device, known: dict[tuple[Schedule, int], float]
) -> float:
    """Returns the expected clocks of a size; infinitely many if the kernel is not right for it. ``known``: the clocks
    of a block of this layer's kernels, by their splits, to which new ones are added."""
    if not one.legal(problem):
        return math.inf
    posed, tile = one.posed(problem), _for_size(one.tile, problem, device)
    of_block = known.get((one, tile.splits))
    if of_block is None:
        of_block = known[one, tile.splits] = block_clocks(posed, tile)
    return clocks(posed, tile, device, of_block)


def _for_size(tile: Tile, problem: StridedProblem, device: Device) -> Tile:
    if tile.splits == 1:
        return tile
    return tile._replace(splits=max(2, _splits(problem, tile._replace(splits=1), device.multiprocessors)))


def _splits(problem: StridedProblem, tile: Tile, multiprocessors: int) -> int:
    """Returns over how many blocks the sum over channels of a tile is split: several if there are few tiles
    (split_k)."""
    blocks, most, splits = block_count(problem, tile), _most_splits(problem, tile), 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while 2 * splits * blocks <= room and 2 * splits <= most:
            splits *= 2
    return splits


def _most_splits(problem: StridedProblem, tile: Tile) -> int:
    """Returns into how many parts the sum can be split, whose partial sums the workspace holds."""
    chunks = ceil_div(problem.words, tile.chunk_words)
    return min(chunks, WORKSPACE_LIMIT_BYTES // (4 * problem.grad_input_elements))


def candidates(problem: StridedProblem, device: Device) -> Iterator[Schedule]:
    """Yields the schedules whose tiles suit this size."""
    for aligned in (False, True) if problem.can_be_aligned else (False,):
        for tile in _tiles(replace(problem, aligned=aligned, even=False), device):
            # With mma.sync, warps store pairs of columns if this constant allows it; with wgmma they test it at run
            # time.
            even = aligned and not tile.wgmma and problem.positions[1] % 2 == 0
            yield Schedule(tile, aligned, even)


def _tiles(problem: StridedProblem, device: Device) -> Iterator[Tile]:
    """Yields the tiles that suit this size, each with the most stages that fit; those that leave multiprocessors idle
    with splits, too."""

    def fits(tile: Tile) -> bool:
        if tile.wgmma and copy_registers(problem, tile, 1) > max_copy_registers(problem, tile):
            return False
        if not tile.wgmma and tile_registers(problem, tile) > MAX_TILE_REGISTERS:
            return False
        blocks = tile.blocks_per_multiprocessor
        return blocks * (shared_bytes(problem, tile) + 1024) <= device.shared_memory_per_block + 1024

    found: set[Tile] = set()
    by_wgmma = _wgmma_tiles(problem) if device.architecture == "sm_90a" else ()
    for of_all_stages in chain(by_wgmma, _mma_tiles(problem)):
        ways = [of_all_stages]
        if _splits(problem, of_all_stages[0], device.multiprocessors) > 1:
            ways.append(tuple(tile._replace(splits=2) for tile in of_all_stages))
        for way in ways:
            fitting = next(filter(fits, way), None)
            if fitting is not None and fitting not in found:
                found.add(fitting)
                yield fitting


def _wgmma_tiles(problem: StridedProblem) -> Iterator[tuple[Tile, ...]]:
    """Yields tiles that wgmma multiplies, each with all numbers of stages, the most first."""
    geometry = problem.geometry
    channels = geometry.out_channels_per_group
    if len(problem.phase_taps) > (MAX_IEEE_PHASE_STAGES if problem.precision == "IEEE" else MAX_PHASE_STAGES):
        return
    if channels <= 32 or (problem.input_channels_last and geometry.in_channels_per_group * problem.item % 16):
        return
    # Warpgroups over channels and over positions, accumulators of a thread for 64 channels, and how many times 64
    # channels a warpgroup has.
    wide_m4, wide, tall, long, short = (
        (4, 1, 64, 2),
        (2, 1, 128, 1),
        (2, 1, 64, 1),
        (1, 2, 128, 1),
        (1, 2, 64, 1),
    )
    narrow_map = not problem.flat and problem.positions[1] <= 4
    if channels <= 64:
        order = [long, short]
    elif problem.flat:
        order = [wide_m4, wide, tall] if channels > 128 else [wide, tall]
    elif problem.input_channels_last:
        order = [wide_m4, tall, wide] if channels > 128 and not narrow_map else [tall, wide]
    else:
        order = [wide, tall]
    if problem.precision == "IEEE":
        # Each accumulator has another beside it that collects three products.
        order = [shape for shape in order if shape[2] * shape[3] == 64]
    rows: tuple[int, ...] = (16, 8)
    if narrow_map:
        if problem.positions[1] < 2 or problem.positions[0] * problem.positions[1] < 8:
            return
        rows = (1,)
    for (groups_m, groups_n, registers, m_parts), max_rows in product(order, rows):
        fragments_of = forward_fit.tile_fragments(problem, registers // 4, groups_n, max_rows)
        along_row = problem.flat or fragments_of[4] == 1
        run = fragments_of[3] if narrow_map else fragments_of[5] if along_row else fragments_of[4]
        if run < 4:
            continue
        for chunk_words in (16, 8):
            staged = tuple(
                Tile(
                    4 * groups_m,
                    1,
                    *fragments_of,
                    chunk_words,
                    stages,
                    1,
                    wgmma=True,
                    m_parts=m_parts,
                    subtile_channels=16,
                )
                for stages in (8, 6, 4, 3, 2)
            )
            # Longer chunks of channels pay only where two phases can be loaded ahead, and hardly with three products.
            worth = problem.input_channels_last and problem.flat if problem.precision == "IEEE" else True
            if chunk_words == 8 or (
                worth and chunk_words <= problem.words and phases_ahead(problem, staged[0]) > 1
            ):
                yield staged


def _mma_tiles(problem: StridedProblem) -> Iterator[tuple[Tile, ...]]:
    """Yields the same for mma.sync."""
    tiles_of_channels = ceil_div(problem.geometry.out_channels_per_group, 16)
    # 32 fragments of accumulators are 128 registers; three products need some for themselves.
    ieee = problem.precision == "IEEE"
    budget = 16 if ieee else 32
    max_m_tiles = min(4, tiles_of_channels)
    for warp_m_tiles in (m for m in (4, 2, 1) if m <= max_m_tiles):
        fragments = min(16, budget // warp_m_tiles)
        for warps_m in (4, 2, 1):
            if warps_m > 1 and tiles_of_channels < 2 * warps_m * warp_m_tiles:
                continue
            for positions in (fragments, fragments // 2, fragments // 4, fragments // 8):
                if positions < 2:
                    continue
                fragments_of = forward_fit.tile_fragments(problem, positions, 4 // warps_m, 4)
                for chunk_words in (16, 8):
                    if chunk_words > max(8, problem.words):
                        continue
                    for blocks in (2, 1):
                        yield tuple(
                            Tile(warps_m, warp_m_tiles, *fragments_of, chunk_words, stages, blocks)
                            for stages in (3, 2)
                        )
