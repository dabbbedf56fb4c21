"""Chooses the tiles of csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu: at most four
for all sizes of a layer, and one of them for each size. The functions are pure.

A schedule is the tile that is expected to be the fastest for the size that represents a class of sizes. A size takes
the schedule whose tiles cover its map with the fewest surplus positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS
from tconv_swap.kernels.forward import implicit_gemm_fit as forward_fit
from tconv_swap.kernels.forward.implicit_gemm_layout import PRODUCER_THREADS, Tile, block_count
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    consumer_threads,
    copy_registers,
    of_any_size,
    phase_taps,
    shared_bytes,
    sized,
    tile_registers,
)
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_implicit_gemm
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: The most registers of a thread of grad_input/implicit_gemm_mma.cu, as tile_registers counts them: with more the
#: compiler spills.
MAX_TILE_REGISTERS = 150
#: The same with three products: with more it was seen to spill.
MAX_IEEE_REGISTERS = 64
#: The most phases that are stages of their own in grad_input/implicit_gemm_wgmma.cu: a copy of the input has a bit for
#: each.
MAX_PHASE_STAGES = 16
#: The same with three products. With more, ptxas does not have enough registers: a plan with 20 phases spilled 6 KB,
#: and its result was wrong on an H200, though right in emulation. All plans with up to 4 phases were right.
MAX_IEEE_PHASE_STAGES = 4
#: Registers of a producer thread of grad_input/implicit_gemm_wgmma.cu that hold no input.
PRODUCER_OVERHEAD = 64
#: The most registers that hold input where addresses take registers as well: with more the compiler spills.
MAX_COPY_REGISTERS = 64
#: Registers of a consumer thread that are no accumulators.
CONSUMER_OVERHEAD = 48
#: Images, rows and columns of the maps of grad_input that represent large maps, maps of which large tiles leave
#: multiprocessors idle, maps of which all tiles do, and small maps; the same for maps of one row, and for one pixel.
LARGE, MIDDLE, FEW, SMALL = (8, 64, 64), (8, 32, 32), (1, 16, 16), ((128, 8, 8), (128, 4, 4))
LARGE_ROW, FEW_ROW = (8, 1, 512), (1, 1, 64)
ONE_PIXEL = (128, 1, 1)
#: The cost of a position in the schedules of small maps, whose halo is relatively larger, relative to the first
#: schedule.
HANDICAP_SMALL = 1.15
#: The cost of a position that mma.sync multiplies, relative to wgmma. With three products it took 1.6 times as long.
HANDICAP_MMA = 1.6
#: The same where partial sums are written although there are enough tiles, which took 1.6 to 2.6 times as long.
HANDICAP_SPLIT = 1.6
#: How many times as many positions smaller tiles may have that leave no multiprocessors idle.
MAX_SURPLUS = 2
#: Input channels of a group above which maps of 4 x 4 come before maps of 8 x 8.
MANY_CHANNELS = 256


@dataclass(frozen=True, slots=True)
class Schedule:
    """A tile for a class of sizes. ``problem``: of the size that represents the class. ``few``: for sizes that leave
    multiprocessors idle otherwise. ``handicap``: the cost of a position, relative to the first schedule."""

    problem: StridedProblem
    tile: Tile
    few: bool = False
    handicap: float = 1.0

    def legal(self, problem: StridedProblem) -> bool:
        """Returns whether the kernel computes this size correctly."""
        if self.problem.aligned and not problem.can_be_aligned:
            return False
        if self.problem.even and problem.positions[1] % 2:
            return False
        tile, (positions_h, positions_w) = self.tile, problem.positions
        if tile.wgmma and tile.cols < 8 and positions_w > tile.cols:
            return False
        # Offsets from a tile's first image are counted in 32 bits.
        geometry = problem.geometry
        image_bytes = geometry.in_channels * geometry.height * geometry.width * problem.item
        images = 1 + ceil_div(tile.cols, positions_h * positions_w) if problem.flat else tile.images
        return images * image_bytes < INT32_LIMIT

    def multiplied(self, problem: StridedProblem) -> float:
        """Returns how many positions the tiles of this size have, with those outside of the map, times the handicap."""
        tile, batch, (rows, cols) = self.tile, problem.geometry.batch, problem.positions
        if problem.flat:
            return self.handicap * round_up(batch * rows * cols, tile.cols)
        positions = round_up(batch, tile.images) * round_up(rows, tile.rows) * round_up(cols, tile.cols)
        return self.handicap * positions


def choose(problem: StridedProblem, device: Device, count: int = 1) -> list[tuple[StridedProblem, Tile]]:
    """Returns at most ``count`` tiles for this size, the one expected to be the fastest first. They are tiles of the
    layer's schedules, followed, if ``count`` is larger, by those expected to be the fastest for this very size."""
    legal = [one for one in schedules(of_any_size(problem), device) if one.legal(problem)]
    if not legal:
        return []
    # Of equals, those of aligned rows are faster.
    legal.sort(key=lambda one: not one.problem.aligned)

    def idle(one: Schedule) -> bool:
        blocks = block_count(problem, one.tile) // one.tile.splits
        return 4 * blocks < 3 * device.multiprocessors

    def cost(one: Schedule) -> float:
        is_split_in_vain = one.tile.splits > 1 and not idle(one)
        return one.multiplied(problem) * (HANDICAP_SPLIT if is_split_in_vain else 1.0)

    usual = [one for one in legal if not one.few] or legal
    best = min(usual, key=cost)
    few = [one for one in legal if one.few]
    if few and best.tile.splits == 1 and idle(best):
        smaller = [one for one in usual if not idle(one) and cost(one) <= MAX_SURPLUS * cost(best)]
        best = min(smaller, key=cost) if smaller else next((one for one in few if not idle(one)), few[-1])
    adapted = replace(problem, aligned=best.problem.aligned, even=best.problem.even)
    found = [(adapted, _for_size(best.tile, problem, device))]
    if count > 1:
        adapted = replace(problem, aligned=problem.can_be_aligned, even=problem.positions[1] % 2 == 0)
        others = (Schedule(adapted, tile) for tile in candidates(adapted, device))
        found += [(adapted, one.tile) for one in islice(others, 2 * count) if one.legal(problem)]
    return list(dict.fromkeys(found))[:count]


def _for_size(tile: Tile, problem: StridedProblem, device: Device) -> Tile:
    if tile.splits == 1:
        return tile
    splits = max(2, _splits(problem, replace(tile, splits=1), device.multiprocessors))
    return tile if splits == tile.splits else replace(tile, splits=splits)


@disk_cache
def schedules(layer: StridedProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns the schedules of a layer (``of_any_size``), the one that computes any size first."""
    share = share_of_implicit_gemm(layer, device, grad_input_im2col_choice.kernel_count(layer, device))
    found: dict[tuple[bool, Tile], Schedule] = {}
    for one in _classes(layer, device, share):
        if len(found) == share:
            break
        kind = one.tile if one.tile.splits == 1 else replace(one.tile, splits=2)
        found.setdefault((one.problem.aligned, kind), one)
    return tuple(found.values())


def _classes(layer: StridedProblem, device: Device, share: int) -> Iterator[Schedule]:
    """Yields the schedules of all classes, those first that every layer needs. ``share``: how many the layer has. With
    three or more, one of them is for small maps, and the first needs no splits."""
    geometry = layer.geometry
    one_row = geometry.kernel[0] == layer.step[0] == 1
    large, few = (LARGE_ROW, FEW_ROW) if one_row else (LARGE, FEW)

    def made(size: tuple[int, int, int], aligned: bool = False, few: bool = False) -> Iterator[Schedule]:
        nominal = replace(sized(layer, *size), aligned=aligned)
        tile = next(candidates(nominal, device), None)
        for_large = size in (MIDDLE, large) and not few and (share > 2 or (share == 2 and aligned))
        if tile is not None and tile.splits > 1 and for_large:
            # Larger maps take this schedule too, and need no splits.
            nominal = replace(sized(layer, *large), aligned=aligned)
            tile = next((one for one in candidates(nominal, device) if one.splits == 1), tile)
        if tile is not None:
            # With mma.sync, warps store pairs of columns if this constant allows it; with wgmma they test it at run
            # time.
            nominal = replace(nominal, even=aligned and not tile.wgmma)
            handicap = (HANDICAP_SMALL if size in SMALL else 1.0) * (1.0 if tile.wgmma else HANDICAP_MMA)
            yield Schedule(nominal, tile, few, handicap)

    if layer.one_pixel:
        yield from made(ONE_PIXEL)
        return
    if one_row or not layer.flat:
        yield from made(large)
        if not layer.input_channels_last:
            yield from made(large, aligned=True)
        yield from made(few, few=True)
    elif layer.input_channels_last:
        yield from (*made(large), *made(MIDDLE, few=True), *made(few, few=True))
    else:
        yield from (*made(MIDDLE), *made(large, aligned=True))
        yield from (*made(MIDDLE, aligned=True, few=True), *made(few, few=True))
    if not (layer.flat or one_row):
        # Layers of many channels have smaller maps.
        for size in SMALL[:: -1 if geometry.out_channels_per_group > MANY_CHANNELS else 1]:
            yield from made(size)


def candidates(problem: StridedProblem, device: Device) -> Iterator[Tile]:
    """Yields tiles, the one expected to be the fastest first (docs/kernels/grad_input/implicit_gemm.md has the
    measurements)."""

    def fits(tile: Tile) -> bool:
        if tile.wgmma and copy_registers(problem, tile, 1) > _copy_registers(problem, tile):
            return False
        if not tile.wgmma and tile_registers(problem, tile) > MAX_TILE_REGISTERS:
            return False
        blocks = tile.blocks_per_multiprocessor
        return blocks * (shared_bytes(problem, tile) + 1024) <= device.shared_memory_per_block + 1024

    tiles: list[Tile] = []
    if device.architecture == "sm_90a":
        tiles += _wgmma_tiles(problem)
    tiles += _mma_tiles(problem)
    splits = (_splits(problem, tile, device.multiprocessors) for tile in tiles)
    tiles = [tile if n == 1 else replace(tile, splits=n) for tile, n in zip(tiles, splits, strict=True)]
    tiles = [tile for tile in tiles if fits(tile)]
    # Three products of mma.sync in NCHW spill many registers (measured on Hopper only).
    narrow = not any(tile.wgmma for tile in tiles) and not problem.input_channels_last
    crowds = narrow and problem.precision == "IEEE" and device.architecture == "sm_90a"
    # Tiles that leave multiprocessors idle come last. Of the others those of wgmma come first, and in NCHW those
    # without splits.
    tiles.sort(
        key=lambda tile: (
            4 * block_count(problem, tile) < 3 * device.multiprocessors,
            not tile.wgmma,
            crowds and tile_registers(problem, tile) > MAX_IEEE_REGISTERS,
            crowds and tile.splits == 1 and tile.blocks_per_multiprocessor == 1,
            0 if problem.input_channels_last else tile.splits,
        )
    )
    yield from dict.fromkeys(tiles)


def producer_registers(tile: Tile) -> int:
    """Returns how many registers a producer thread of grad_input/implicit_gemm_wgmma.cu has: those that the consumers
    do not need."""
    multiplying = consumer_threads(tile)
    registers = REGISTERS // tile.blocks_per_multiprocessor
    spare = registers - multiplying * (4 * tile.warp_fragments * tile.m_parts + CONSUMER_OVERHEAD)
    return (
        min(MAX_REGISTERS, registers // (PRODUCER_THREADS + multiplying), max(24, spare // PRODUCER_THREADS))
        // 8
        * 8
    )


def _copy_registers(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many registers of a producer thread may hold addresses and elements on their way to a stage."""
    plain = problem.flat and len(phase_taps(problem)) <= 4
    return min(producer_registers(tile) - PRODUCER_OVERHEAD, 104 if plain else MAX_COPY_REGISTERS)


def phases_ahead(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many phases grad_input/implicit_gemm_wgmma.cu loads ahead: as many as registers hold, and as divide
    the number of phases."""
    phases, room = len(phase_taps(problem)), _copy_registers(problem, tile)
    return max(
        ahead
        for ahead in (1, 2, 3, 4)
        if ahead == 1 or (phases % ahead == 0 and copy_registers(problem, tile, ahead) <= room)
    )


def _splits(problem: StridedProblem, tile: Tile, multiprocessors: int) -> int:
    """Returns over how many blocks the sum over channels of a tile is split: several if there are few tiles
    (split_k)."""
    geometry = problem.geometry
    chunks, blocks = ceil_div(problem.words, tile.chunk_words), block_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    most, splits = min(chunks, WORKSPACE_LIMIT_BYTES // (4 * count)), 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while 2 * splits * blocks <= room and 2 * splits <= most:
            splits *= 2
    return splits


def _wgmma_tiles(problem: StridedProblem) -> Iterator[Tile]:
    geometry = problem.geometry
    channels = geometry.out_channels_per_group
    if len(phase_taps(problem)) > (
        MAX_IEEE_PHASE_STAGES if problem.precision == "IEEE" else MAX_PHASE_STAGES
    ):
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
        for chunk_words, stages in product((16, 8), (8, 6, 4, 3, 2)):
            tile = Tile(
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
            # Longer chunks of channels pay only where two phases can be loaded ahead, and hardly with three products.
            worth = problem.input_channels_last and problem.flat if problem.precision == "IEEE" else True
            if chunk_words == 8 or (
                worth and chunk_words <= problem.words and phases_ahead(problem, tile) > 1
            ):
                yield tile


def _mma_tiles(problem: StridedProblem) -> Iterator[Tile]:
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
                    for stages, blocks in ((3, 2), (2, 2), (3, 1), (2, 1)):
                        yield Tile(warps_m, warp_m_tiles, *fragments_of, chunk_words, stages, blocks)
