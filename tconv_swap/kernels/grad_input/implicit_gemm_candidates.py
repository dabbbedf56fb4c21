"""The tiles of csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu that suit a size of a
layer, and their expected clocks. The functions are pure.

The size decides which shapes a tile has and how many blocks there are. Registers, shared memory and the clocks of a
block are the same for all sizes of a layer, so :class:`LayerTiles` computes them once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from tconv_swap.kernels.forward import implicit_gemm_fit as forward_fit
from tconv_swap.kernels.forward.implicit_gemm_fit import Shape
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, block_count
from tconv_swap.kernels.grad_input.implicit_gemm_choice import Schedule, pays_to_split, splits_of
from tconv_swap.kernels.grad_input.implicit_gemm_clocks import block_clocks, clocks_of_blocks
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, output_bytes, stage_bytes
from tconv_swap.kernels.grad_input.implicit_gemm_registers import (
    copy_registers,
    max_copy_registers,
    phases_ahead,
    tile_registers,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div

#: The most registers of a thread of grad_input/implicit_gemm_mma.cu, as tile_registers counts them: with more the
#: compiler spills.
MAX_TILE_REGISTERS = 150
#: The most phases that are stages of their own in grad_input/implicit_gemm_wgmma.cu: a copy of the input has a bit for
#: each.
MAX_PHASE_STAGES = 16
#: The same with three products. With more, ptxas does not have enough registers: a plan with 20 phases spilled 6 KB,
#: and its result was wrong on an H200, though right in emulation. All plans with up to 4 phases were right.
MAX_IEEE_PHASE_STAGES = 4
#: Numbers of stages, the most first, and of blocks of a multiprocessor, by whether wgmma multiplies.
STAGES = {True: (8, 6, 4, 3, 2), False: (3, 2)}
RESIDENT = {True: (1,), False: (2, 1)}


class Warps(NamedTuple):
    """How the warps of a block share its channels and its positions, as :class:`Tile` has it."""

    wgmma: bool
    warps_m: int
    warp_m_tiles: int
    m_parts: int
    shape: Shape

    def tile(self, chunk_words: int, stages: int, resident: int) -> Tile:
        """Returns the tile with these chunks and stages, and so many blocks of a multiprocessor."""
        tile = Tile(self.warps_m, self.warp_m_tiles, *self.shape, chunk_words, stages, resident)
        return tile._replace(wgmma=True, m_parts=self.m_parts, subtile_channels=16) if self.wgmma else tile


class FittingTile(NamedTuple):
    """A tile with the most stages that fit: without splits and with some, or None where no number of stages fits.
    ``of_block``: the clocks of a block, by stages and splits, which tiles that share them add to."""

    whole: Tile | None
    split: Tile | None
    of_block: dict[tuple[int, int], float]


class Candidate(NamedTuple):
    """A schedule, a problem that its kernel is compiled for, and the clocks of a block that are known."""

    schedule: Schedule
    posed: StridedProblem
    of_block: dict[tuple[int, int], float]

    def block_clocks(self, splits: int) -> float:
        """Returns the clocks of a block with so many splits."""
        tile = self.schedule.tile
        key = tile.stages, splits
        if key not in self.of_block:
            self.of_block[key] = block_clocks(self.posed, tile._replace(splits=splits))
        return self.of_block[key]


@dataclass(frozen=True, slots=True)
class LayerTiles:
    """The tiles of a layer that fit, with ``aligned`` rows or without (``posed``)."""

    posed: dict[bool, StridedProblem]
    device: Device
    known: dict[tuple[Warps, bool], tuple[FittingTile, ...]]

    def fitting(self, warps: Warps, aligned: bool) -> tuple[FittingTile, ...]:
        """Returns the tiles with each chunk and number of blocks of a multiprocessor."""
        key = warps, aligned
        if key not in self.known:
            self.known[key] = tuple(_fitting(warps, self.posed[aligned], self.device))
        return self.known[key]


def tiles_of_layer(problem: StridedProblem, device: Device) -> LayerTiles:
    """Returns the tiles of the layer that has this size, none of which is known yet."""
    posed = {aligned: problem._replace(aligned=aligned, even=False) for aligned in (False, True)}
    return LayerTiles(posed, device, {})


def candidates(problem: StridedProblem, of_layer: LayerTiles) -> Iterator[Candidate]:
    """Yields the schedules whose tiles suit this size; those that leave multiprocessors idle with splits, too."""
    multiprocessors = of_layer.device.multiprocessors
    by_wgmma = _by_wgmma(problem) if of_layer.device.architecture == "sm_90a" else ()
    every_warps = [
        (warps, block_count(problem, warps.tile(8, 2, 1)))
        for warps in dict.fromkeys((*by_wgmma, *_by_mma(problem)))
    ]
    for aligned in (False, True) if problem.can_be_aligned else (False,):
        posed = of_layer.posed[aligned]
        for warps, blocks in every_warps:
            # With mma.sync, warps store pairs of columns if this constant allows it; with wgmma they test it at run
            # time.
            even = aligned and not warps.wgmma and problem.positions[1] % 2 == 0
            for whole, split, of_block in of_layer.fitting(warps, aligned):
                if whole is not None:
                    yield Candidate(Schedule(whole, aligned, even), posed, of_block)
                if split is not None and pays_to_split(problem, split, blocks, multiprocessors):
                    yield Candidate(Schedule(split, aligned, even), posed, of_block)


def expected_clocks(among: Iterable[Candidate], problem: StridedProblem, device: Device) -> list[float]:
    """Returns the expected clocks of a size with each of the candidates; infinitely many where the kernel is not right
    for it."""
    known: dict[tuple[int, ...], int] = {}
    found = []
    for one in among:
        if not one.schedule.legal(problem):
            found.append(math.inf)
            continue
        tile = one.schedule.tile
        # The channels and positions of a tile decide how many blocks there are.
        key = tile[:8]
        if key not in known:
            known[key] = block_count(problem, tile._replace(splits=1))
        blocks = known[key]
        splits = splits_of(problem, tile, blocks, device.multiprocessors)
        of_block = one.block_clocks(splits)
        found.append(clocks_of_blocks(problem, tile, device, splits, blocks * splits, of_block))
    return found


def _fitting(warps: Warps, problem: StridedProblem, device: Device) -> Iterator[FittingTile]:
    """Yields the tiles whose registers and shared memory the device has."""
    for chunk_words in (16, 8):
        tile = warps.tile(chunk_words, STAGES[warps.wgmma][0], 1)
        if not _has_registers(problem, tile) or not _is_worth(problem, tile):
            continue
        of_block: dict[tuple[int, int], float] = {}
        of_stage = stage_bytes(problem, tile)
        ways = [(one, output_bytes(problem, one)) for one in (tile, tile._replace(splits=2))]
        for resident in RESIDENT[warps.wgmma]:
            room = (device.shared_memory_per_block + 1024) // resident - 1024
            whole, split = (
                next(
                    (
                        one._replace(stages=stages, blocks_per_multiprocessor=resident)
                        for stages in STAGES[warps.wgmma]
                        if stages * of_stage + beside <= room
                    ),
                    None,
                )
                for one, beside in ways
            )
            yield FittingTile(whole, split, of_block)


def _has_registers(problem: StridedProblem, tile: Tile) -> bool:
    """Returns whether registers hold what the threads of a tile have on its way and what they add up."""
    if tile.wgmma:
        return copy_registers(problem, tile, 1) <= max_copy_registers(problem, tile)
    return tile_registers(problem, tile) <= MAX_TILE_REGISTERS


def _is_worth(problem: StridedProblem, tile: Tile) -> bool:
    """Returns whether longer chunks of channels may be faster: by wgmma only where two phases can be loaded ahead, and
    hardly with three products."""
    if tile.chunk_words == 8:
        return True
    if tile.chunk_words > problem.words:
        return False
    if not tile.wgmma:
        return True
    long = problem.input_channels_last and problem.flat if problem.precision == "IEEE" else True
    return long and phases_ahead(problem, tile) > 1


def _by_wgmma(problem: StridedProblem) -> Iterator[Warps]:
    """Yields the warps of tiles that wgmma multiplies."""
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
        order = [one for one in order if one[2] * one[3] == 64]
    rows: tuple[int, ...] = (16, 8)
    if narrow_map:
        if problem.positions[1] < 2 or problem.positions[0] * problem.positions[1] < 8:
            return
        rows = (1,)
    for (groups_m, groups_n, registers, m_parts), max_rows in product(order, rows):
        shape = forward_fit.tile_fragments(problem, registers // 4, groups_n, max_rows)
        along_row = problem.flat or shape[4] == 1
        run = shape[3] if narrow_map else shape[5] if along_row else shape[4]
        if run < 4:
            continue
        yield Warps(True, 4 * groups_m, 1, m_parts, shape)


def _by_mma(problem: StridedProblem) -> Iterator[Warps]:
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
                shape = forward_fit.tile_fragments(problem, positions, 4 // warps_m, 4)
                yield Warps(False, warps_m, warp_m_tiles, 1, shape)
