"""Which tiles of csrc/kernels/grad_weight/im2col_nhwc.cu a layer has over all sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import (
    Tile,
    candidates,
    clocks_of,
    expected_clocks,
    fits,
    split_choices,
    stage_clocks,
    stages_of,
    tiles_images,
    tiles_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import (
    of_any_size,
    select,
    share_of,
    sizes_of,
    stride1_may_win,
    weight_of,
)
from tconv_swap.kernels.grad_weight.pixel_rows_tile import weight_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache

#: Kernels of a layer; of each representative size, how many tiles are compared.
MAX_SCHEDULES, MAX_PER_SIZE = 3, 6
#: The cost of a size that the kernels of grad_weight/implicit_gemm.py compute instead: the logarithm of 2.8, as
#: measured (docs/kernels/grad_weight/im2col_nhwc.md).
UNCOVERED = 1.03


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes: a tile without its splits."""

    tile: Tile
    stage_clocks: float
    blocks: int
    bytes_of_copy: int

    def best(self, geometry: Geometry, device: Device) -> tuple[float, int] | None:
        """Returns the expected clocks at a size and the splits with which it takes them; None where the kernel
        does not compute it."""
        tile = self.tile
        if not tiles_images(geometry, tile.pixels):
            return None
        stages = stages_of(geometry, tile.pixels)
        choices = split_choices(stages, self.blocks, self.bytes_of_copy, tile.cluster, device)
        return min(
            (
                (
                    clocks_of(
                        self.stage_clocks,
                        stages,
                        self.blocks,
                        self.bytes_of_copy,
                        splits,
                        tile.cluster,
                        device,
                    ),
                    splits,
                )
                for splits in choices
            ),
            default=None,
        )


def choose(problem: Problem, device: Device, count: int) -> list[Tile]:
    """Returns at most ``count`` tiles for this size, the fastest expected first.
    The first is one of the layer's kernels; the others come from all candidates.
    """
    geometry, layer = problem.geometry, of_any_size(problem)

    def ranked(found: tuple[Schedule, ...]) -> list[Tile]:
        timed = [(one.best(geometry, device), one.tile) for one in found]
        fitting = [(best, tile) for best, tile in timed if best is not None]
        fitting.sort(key=lambda one: one[0])
        return [replace(tile, splits=splits) for (_, splits), tile in fitting]

    best = ranked(schedules(layer, device))[:1]
    if best and count > 1:
        best += [tile for tile in ranked(pool(layer, device)) if tile != best[0]][: count - 1]
    return best


@disk_cache
def schedules(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns the kernels of a layer (``of_any_size``)."""
    maps = [size.of(layer.geometry) for size in sizes_of(layer)]
    found = pool(layer, device)
    clocks = [[(one.best(geometry, device) or (math.inf,))[0] for geometry in maps] for one in found]
    weights = [weight_of(layer, geometry) for geometry in maps]
    limit = share_of(layer, MAX_SCHEDULES - stride1_may_win(layer.geometry))
    return tuple(found[index] for index in select(clocks, weights, limit, UNCOVERED))


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns all candidates: the best tiles at each representative size, and the very best of them with the
    pixels of all."""
    found: dict[Tile, None] = {}
    firsts: dict[Tile, None] = {}
    for size in sizes_of(layer):
        geometry = size.of(layer.geometry)
        timed = sorted(
            (expected_clocks(geometry, tile, device), i, tile)
            for i, tile in enumerate(candidates(geometry, device))
        )
        found.update((replace(tile, splits=1), None) for _, _, tile in timed[:MAX_PER_SIZE])
        firsts.update((replace(tile, splits=1, cluster=1), None) for _, _, tile in timed[:1])
    pixels = dict.fromkeys(tile.pixels for tile in found)
    crossed = (replace(tile, pixels=one) for tile in firsts for one in pixels)
    found.update((tile, None) for tile in crossed if fits(layer.geometry, tile, device))
    g = layer.geometry
    return tuple(Schedule(tile, stage_clocks(g, tile), tiles_of(g, tile), weight_bytes(g)) for tile in found)
