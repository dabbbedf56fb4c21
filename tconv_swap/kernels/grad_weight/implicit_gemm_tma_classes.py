"""Which tiles of csrc/kernels/grad_weight/implicit_gemm_tma.cu a layer has over all sizes, and which of them
computes one size, by expected time. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import (
    counts_in_32_bits,
    of_any_size,
    pixel_tiles,
    select,
    share_of,
    sizes_of,
    weight_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_cost import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import tap_blocks, weight_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    MIN_STAGES,
    STEP_PIXELS,
    TmaTile,
    candidates,
    fits_map,
    has_gaps,
    stage_bytes,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import ceil_div

#: Bytes for each multiprocessor and clock: from the L2, from memory, of partial sums to the workspace and back.
L2_RATE, MEMORY_RATE, PARTIAL_RATE = 40, 15, 16
#: Clocks of a tile, of starting and ending a block, and of the launch that reduces splits (fitted,
#: docs/kernels/grad_weight/implicit_gemm_tma.md).
TILE_CLOCKS, BLOCK_CLOCKS, REDUCTION_CLOCKS = 220, 3000, 4000
#: How many times as long a tile takes that has only the fewest stages, compared with smaller tiles of more stages.
FEW_STAGES = 1.1


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a tile, whatever the sizes.
    Attributes:
        clocks: for one tile of pixels.
        copied: bytes that are loaded for one tile of pixels.
        blocks: of one split.
        split_bytes: of one float32 copy of the gradient in whole tiles.
        channels_read: output channels that are loaded for each pixel of the input where the kernel leaves gaps;
            0 where all of grad_output is loaded.
    """

    clocks: float
    copied: int
    blocks: int
    split_bytes: int
    channels_read: int


def work_of(problem: Problem, tma_tile: TmaTile) -> Work:
    """Returns the work of a tile: the time of the slowest of the units that work in parallel."""
    tile = tma_tile.tile
    steps = tile.threads // 128 * tile.warp_taps * tile.pixels / STEP_PIXELS
    copied = stage_bytes(problem, tma_tile)
    multiplies = steps * tile.warp_n / 2
    shared = steps * (16 + tile.warp_n / 4) + copied / 128
    met = 0
    if has_gaps(problem):
        # Every tap has pixels of its own; those of the unused taps of a block are loaded too.
        taps = math.prod(
            blocks * taken for blocks, taken in zip(tap_blocks(problem, tile), tile.taps, strict=True)
        )
        met = taps * problem.geometry.out_channels
    blocks = weight_tiles(problem, tile)
    clocks = max(multiplies, shared, copied / L2_RATE) + TILE_CLOCKS
    return Work(
        clocks * (FEW_STAGES if tile.stages == MIN_STAGES else 1.0),
        copied,
        blocks,
        blocks * tile.threads * tile.sums * 4,
        met,
    )


def split_choices(work: Work, tiles: int, device: Device) -> list[int]:
    """Returns into how many splits the tiles of pixels may be cut within the workspace's limit, the fewest first."""
    max_splits = min(max(1, WORKSPACE_LIMIT_BYTES // work.split_bytes), tiles)
    found = [1]
    for waves in (1, 2, 3):
        splits = min(max_splits, waves * device.multiprocessors // work.blocks)
        if splits > found[-1]:
            found.append(splits)
    return found


def tiles_of(geometry: Geometry, shape: tuple[int, int, int]) -> int:
    """Returns how many tiles of ``shape`` cover the pixels of a size; 0 if they do not compute it correctly."""
    fits = fits_map(shape, geometry) and counts_in_32_bits(geometry, shape)
    return pixel_tiles(geometry, shape) if fits else 0


def loaded_elements(geometry: Geometry, channels_read: int) -> int:
    """Returns how many elements of the input and of grad_output are loaded (``Work.channels_read``)."""
    g = geometry
    pixels = g.height * g.width
    if channels_read:
        return g.batch * pixels * (g.in_channels + channels_read)
    return g.batch * (g.in_channels * pixels + g.out_channels * g.out_height * g.out_width)


def expected_clocks(work: Work, tiles: int, elements: int, device: Device) -> tuple[float, int]:
    """Returns the expected clocks of the whole part and the number of splits with which it takes them.
    Args:
        tiles: of pixels.
        elements: that are loaded (``loaded_elements``).
    """
    multiprocessors = device.multiprocessors
    memory = 2 * elements / (multiprocessors * MEMORY_RATE)
    gradient = work.split_bytes / (multiprocessors * PARTIAL_RATE)
    # Nothing is multiplied until the first stage has arrived, and all blocks start at once.
    start = work.copied / MEMORY_RATE + BLOCK_CLOCKS
    best, best_splits = math.inf, 1
    for splits in split_choices(work, tiles, device):
        waves = ceil_div(work.blocks * splits, multiprocessors)
        product = waves * (ceil_div(tiles, splits) * work.clocks + start)
        partial = gradient if splits == 1 else (2 * splits + 2) * gradient + REDUCTION_CLOCKS
        clocks = (product if product > memory else memory) + partial
        if clocks < best:
            best, best_splits = clocks, splits
    return best, best_splits


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes."""

    problem: Problem
    tma_tile: TmaTile
    work: Work


def schedule_of(problem: Problem, tma_tile: TmaTile) -> Schedule:
    """Returns the schedule of a layer's kernel with this tile."""
    return Schedule(problem, tma_tile, work_of(problem, tma_tile))


def choose(problem: Problem, device: Device, count: int, limit: int) -> list[tuple[Schedule, int, float]]:
    """Returns at most ``count`` schedules for this size with their best number of splits and its clocks, the fastest
    expected first.
    The first is one of the layer's kernels, of which there are at most ``limit`` over all sizes; the others
    come from all candidates.
    """
    geometry, layer = problem.geometry, of_any_size(problem)

    def ranked(found: Iterable[Schedule]) -> list[tuple[tuple[float, int], Schedule]]:
        timed = []
        for one in found:
            if tiles := tiles_of(geometry, one.tma_tile.tile.shape):
                elements = loaded_elements(geometry, one.work.channels_read)
                timed.append((expected_clocks(one.work, tiles, elements, device), one))
        return sorted(timed, key=itemgetter(0))

    best = ranked(schedules(layer, device, limit))[:1]
    if best and count > 1:
        best += [one for one in ranked(pool(layer, device)) if one[1] is not best[0][1]][: count - 1]
    return [(one, splits, clocks) for (clocks, splits), one in best]


@disk_cache
def schedules(layer: Problem, device: Device, limit: int) -> tuple[Schedule, ...]:
    """Returns the kernels of a layer (``of_any_size``)."""
    distinct: dict[tuple[tuple[int, int, int], Work], Schedule] = {}
    # Tiles of the same pixels and work are equally fast: the first is taken.
    for one in pool(layer, device):
        distinct.setdefault((one.tma_tile.tile.shape, one.work), one)
    clocks: list[list[float]] = [[] for _ in distinct]
    weights = []
    for size in sizes_of(layer):
        geometry = size.of(layer.geometry)
        tiles = {shape: tiles_of(geometry, shape) for shape in {shape for shape, _ in distinct}}
        elements = {
            read: loaded_elements(geometry, read) for read in {work.channels_read for _, work in distinct}
        }
        for row, (shape, work) in zip(clocks, distinct, strict=True):
            row.append(
                expected_clocks(work, tiles[shape], elements[work.channels_read], device)[0]
                if tiles[shape]
                else math.inf
            )
        weights.append(weight_of(layer, geometry))
    found = list(distinct.values())
    return tuple(found[index] for index in select(clocks, weights, share_of(layer, limit)))


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns all candidate schedules."""
    maps = [size.of(layer.geometry) for size in sizes_of(layer)]
    found = sorted(candidates(layer, device, maps), key=_oddness)
    return tuple(schedule_of(layer, tma_tile) for tma_tile in found)


def _oddness(tma_tile: TmaTile) -> tuple[int, bool]:
    """Orders tiles that are equally fast: few images first, then rows and columns that divide most maps."""
    _, *sides = tma_tile.tile.shape
    return tma_tile.tile.images, any(side & (side - 1) for side in sides)
