"""Which tiles of csrc/kernels/grad_weight/im2col_nhwc.cu a layer has over all sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import (
    STAGE_PIXELS,
    Pixels,
    Tile,
    candidates,
    clocks_of,
    covers,
    every_pixels,
    expected_clocks,
    fits,
    split_choices,
    stage_clocks,
    stages_of,
    tiles_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import (
    of_any_size,
    select,
    share_of,
    sizes_of,
    weight_of,
)
from tconv_swap.kernels.grad_weight.split_k_untiled import weight_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache

#: Kernels of a layer; of each representative size, how many tiles are compared.
MAX_SCHEDULES, MAX_PER_SIZE = 2, 6
#: Stands for the pixels of a kernel, which has any.
_ANY = Pixels(1, 1, STAGE_PIXELS)
#: The cost of a size that the kernels of grad_weight/implicit_gemm.py compute instead: the logarithm of 2.8, as
#: measured (docs/kernels/grad_weight/im2col_nhwc.md).
UNCOVERED = 1.03


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One kernel of a layer: a tile, whatever its pixels and splits, and the pixels that its stages may have, with the
    expected clocks of a stage."""

    tile: Tile
    stages: tuple[tuple[Pixels, float], ...]
    blocks: int
    bytes_of_copy: int

    def best(self, geometry: Geometry, device: Device) -> tuple[float, Tile] | None:
        """Returns the expected clocks at a size, and the tile with the pixels and splits with which it takes them; None
        where the kernel does not compute it."""
        counted = [
            (stages_of(geometry, pixels) * clocks, i)
            for i, (pixels, clocks) in enumerate(self.stages)
            if covers(geometry, pixels)
        ]
        if not counted:
            return None
        pixels, clocks = self.stages[min(counted)[1]]
        stages, cluster = stages_of(geometry, pixels), self.tile.cluster
        timed = [
            (clocks_of(clocks, stages, self.blocks, self.bytes_of_copy, splits, cluster, device), splits)
            for splits in split_choices(stages, self.blocks, self.bytes_of_copy, cluster, device)
        ]
        if not timed:
            return None
        time, splits = min(timed)
        return time, replace(self.tile, pixels=pixels, splits=splits)


def choose(problem: Problem, device: Device, count: int) -> list[Tile]:
    """Returns at most ``count`` tiles for this size, the fastest expected first.
    The first is one of the layer's kernels; the others come from all candidates.
    """
    geometry, layer = problem.geometry, of_any_size(problem)

    def ranked(found: tuple[Schedule, ...]) -> list[Tile]:
        timed = [one.best(geometry, device) for one in found]
        return [tile for _, tile in sorted(filter(None, timed), key=itemgetter(0))]

    best = ranked(schedules(layer, device))[:1]
    if best and count > 1:
        best += [tile for tile in ranked(pool(layer, device)) if tile != best[0]][: count - 1]
    return best


@disk_cache
def schedules(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns the kernels of a layer (``of_any_size``)."""
    maps = [size.of(layer.geometry) for size in sizes_of(layer)]
    found = pool(layer, device)
    clocks = [
        [best[0] if (best := one.best(geometry, device)) else math.inf for geometry in maps] for one in found
    ]
    weights = [weight_of(layer, geometry) for geometry in maps]
    limit = share_of(layer, MAX_SCHEDULES)
    return tuple(found[index] for index in select(clocks, weights, limit, UNCOVERED))


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns all candidates: the best tiles at each representative size."""
    found: dict[Tile, None] = {}
    for size in sizes_of(layer):
        geometry = size.of(layer.geometry)
        timed = sorted(
            (expected_clocks(geometry, tile, device), i, tile)
            for i, tile in enumerate(candidates(geometry, device))
        )
        found.update((replace(tile, pixels=_ANY, splits=1), None) for _, _, tile in timed[:MAX_PER_SIZE])
    g = layer.geometry

    def stages(kernel: Tile) -> tuple[tuple[Pixels, float], ...]:
        tiles = (replace(kernel, pixels=pixels) for pixels in every_pixels())
        return tuple((tile.pixels, stage_clocks(g, tile)) for tile in tiles if fits(g, tile, device))

    return tuple(Schedule(tile, stages(tile), tiles_of(g, tile), weight_bytes(g)) for tile in found)
