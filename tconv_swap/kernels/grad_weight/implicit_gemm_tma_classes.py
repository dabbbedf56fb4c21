"""Which tiles of csrc/kernels/grad_weight/implicit_gemm_tma.cu a layer has, whatever its sizes, and which of them
computes one size: by how long they may be expected to take. Pure functions of data."""

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
    LEAST_STAGES,
    STEP_PIXELS,
    Boxes,
    candidates,
    fits_map,
    has_gaps,
    stage_bytes,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div

#: Bytes of one multiprocessor and clock: what the L2 brings, what memory brings, what becomes of partial sums.
L2_RATE, MEMORY_RATE, PARTIAL_RATE = 40, 15, 16
#: Of a tile, of a block to begin and to end, of a launch that adds up (fitted, docs/kernels/grad_weight_boxes.md).
TILE_CLOCKS, BLOCK_CLOCKS, REDUCTION_CLOCKS = 220, 3000, 4000
#: By what the fewest stages take longer than more of them that are smaller.
FEW_STAGES = 1.1


@dataclass(frozen=True, slots=True)
class Work:
    """Of a tile, whatever the sizes: clocks for one tile of pixels and bytes that it brings; blocks of one slice; bytes
    of one copy of the gradient, in float32 and whole tiles; and output channels that come for each pixel of the input,
    where the kernel leaves gaps (else 0: all of grad_output comes)."""

    clocks: float
    copied: int
    blocks: int
    slice_bytes: int
    channels_met: int


def work_of(problem: Problem, boxes: Boxes) -> Work:
    """The slowest of what works side by side."""
    tile = boxes.tile
    steps = tile.threads // 128 * tile.warp_taps * tile.pixels / STEP_PIXELS
    copied = stage_bytes(problem, boxes)
    multiplies = steps * tile.warp_n / 2
    shared = steps * (16 + tile.warp_n / 4) + copied / 128
    met = 0
    if has_gaps(problem):
        # Every tap has pixels of its own: those are brought, and as many for a tap that a block has to spare.
        taps = math.prod(
            blocks * taken for blocks, taken in zip(tap_blocks(problem, tile), tile.taps, strict=True)
        )
        met = taps * problem.geometry.out_channels
    blocks = weight_tiles(problem, tile)
    clocks = max(multiplies, shared, copied / L2_RATE) + TILE_CLOCKS
    return Work(
        clocks * (FEW_STAGES if tile.stages == LEAST_STAGES else 1.0),
        copied,
        blocks,
        blocks * tile.threads * tile.sums * 4,
        met,
    )


def slice_choices(work: Work, tiles: int, device: Device) -> set[int]:
    """Parts that so many tiles of pixels may be cut into, within the workspace's limit."""
    blocks, room = work.blocks, device.multiprocessors
    most = min(max(1, WORKSPACE_LIMIT_BYTES // work.slice_bytes), tiles)
    return {min(most, max(1, waves * room // blocks)) for waves in (1, 2, 3)} | {1}


def expected_clocks(work: Work, tiles: int, geometry: Geometry, device: Device) -> tuple[float, int]:
    """Roughly, of the whole, and with how many slices; what is outside of what works side by side too."""
    g, multiprocessors = geometry, device.multiprocessors
    moved = g.in_channels + work.channels_met
    pixels = g.height * g.width
    moved *= pixels
    if not work.channels_met:
        moved += g.out_channels * g.out_height * g.out_width
    memory = 2 * g.batch * moved / (multiprocessors * MEMORY_RATE)
    gradient = work.slice_bytes / (multiprocessors * PARTIAL_RATE)
    # Until the first stage is there nobody multiplies, and all begin at once.
    start = work.copied / MEMORY_RATE + BLOCK_CLOCKS
    best = math.inf, 1
    for slices in sorted(slice_choices(work, tiles, device)):
        waves = ceil_div(work.blocks * slices, multiprocessors)
        block = ceil_div(tiles, slices) * work.clocks + start
        partial = gradient if slices == 1 else (2 * slices + 2) * gradient + REDUCTION_CLOCKS
        best = min(best, (max(waves * block, memory) + partial, slices))
    return best


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel computes, of a layer."""

    problem: Problem
    boxes: Boxes
    work: Work

    def legal(self, geometry: Geometry) -> bool:
        """Whether the kernel is right for this size."""
        shape = self.boxes.tile.shape
        return fits_map(self.boxes, geometry) and counts_in_32_bits(geometry, shape)

    def clocks(self, geometry: Geometry, device: Device) -> tuple[float, int]:
        """And with how many slices of the pixels."""
        return expected_clocks(self.work, pixel_tiles(geometry, self.boxes.tile.shape), geometry, device)


def schedule_of(problem: Problem, boxes: Boxes) -> Schedule:
    return Schedule(problem, boxes, work_of(problem, boxes))


def choose(problem: Problem, device: Device, count: int, most: int) -> list[tuple[Schedule, int]]:
    """At most ``count`` schedules for this size, each with the slices of the pixels it does best with, the one expected
    to be the fastest first: the first among the layer's kernels, at most ``most`` over all sizes, the others among all
    that were thought of."""
    geometry, layer = problem.geometry, of_any_size(problem)

    def ranked(found: Iterable[Schedule]) -> list[tuple[tuple[float, int], Schedule]]:
        timed = [(one.clocks(geometry, device), one) for one in found if one.legal(geometry)]
        return sorted(timed, key=itemgetter(0))

    best = ranked(schedules(layer, device, most))[:1]
    if best and count > 1:
        best += [one for one in ranked(pool(layer, device)) if one[1] is not best[0][1]][: count - 1]
    return [(one, slices) for (_, slices), one in best]


@lru_cache(maxsize=1024)
def schedules(layer: Problem, device: Device, most: int) -> tuple[Schedule, ...]:
    """The kernels of a layer (``of_any_size``) that are chosen from."""
    maps = [size.of(layer.geometry) for size in sizes_of(layer)]
    found = pool(layer, device)
    clocks = [
        [one.clocks(geometry, device)[0] if one.legal(geometry) else math.inf for geometry in maps]
        for one in found
    ]
    weights = [weight_of(layer, geometry) for geometry in maps]
    return tuple(found[index] for index in select(clocks, weights, share_of(layer, most)))


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """All schedules that are compared."""
    maps = [size.of(layer.geometry) for size in sizes_of(layer)]
    found = sorted(candidates(layer, device, maps), key=_oddness)
    return tuple(schedule_of(layer, boxes) for boxes in found)


def _oddness(boxes: Boxes) -> tuple[int, bool]:
    """Of tiles that do as well, one of few images is taken, and of rows and columns that cover most maps."""
    _, *sides = boxes.tile.shape
    return boxes.tile.images, any(side & (side - 1) for side in sides)
