"""Which tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu a layer has, whatever its sizes: at most four; and
which of them computes one size. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.schedules import select_covering
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, of_any_size, representatives
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_boxes
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import (
    BoxTile,
    chunks,
    clocks,
    legal,
    tiles,
    work_count,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: With so few steps (a tap of a chunk) to a tile it should be small: what is left to store when nothing is left to
#: multiply counts for more than the filling.
FEW_STEPS = 24
SMALL = 128 * 128
#: Two teams: up to so many steps to a tile for each byte of an output (they hide its stores), where the last round of
#: tiles leaves few multiprocessors idle.
TEAM_STEPS = 9
TEAM_SHARE = 0.9
#: By what a tile counts for more that is larger than few steps allow, that one team computes where two were measured
#: to be faster, and that two compute where they were not.
LARGE, ONE_TEAM, IDLE_TEAM = 1.5, 1.5, 2.0
#: Of equals the one comes first whose rows are longer, and whose stages are more: not narrow, not of so many channels.
NARROW, WIDE, WIDE_CHANNELS = 1.02, 1.02, 192
#: Clocks that a size takes however small it is: what tiles for small sizes are worth is less than they say.
LEAST_CLOCKS = 10000
#: More splits than this never paid.
SPLITS = (2, 4)


def choose(problem: StridedProblem, device: Device, count: int = 1) -> list[BoxTile]:
    """At most ``count`` tiles for this size, the one expected to be the fastest first: out of the layer's, and if more
    are asked for, out of all."""
    found = _ranked(schedules(of_any_size(problem), device), problem, device)
    if len(found) < count and count > 1:
        found += _ranked(tuple(tiles(problem, device)), problem, device)
    return list(dict.fromkeys(found))[:count]


def _ranked(among: tuple[BoxTile, ...], problem: StridedProblem, device: Device) -> list[BoxTile]:
    sized_tiles = [tile for one in among for tile in for_size(one, problem)]
    return sorted(sized_tiles, key=lambda tile: expected(problem, tile, device))


def for_size(tile: BoxTile, problem: StridedProblem) -> Iterator[BoxTile]:
    """The tile with as many splits as this size allows, if any."""
    geometry = problem.geometry
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    for splits in SPLITS if tile.splits > 1 else (1,):
        one = replace(tile, splits=splits) if splits != tile.splits else tile
        if (splits == 1 or 4 * count * splits <= WORKSPACE_LIMIT_BYTES) and legal(problem, one):
            yield one


def expected(problem: StridedProblem, tile: BoxTile, device: Device) -> float:
    """About how many clocks it takes, more where another kind of tile was measured to be the faster."""
    steps = problem.geometry.taps * chunks(problem)
    found = clocks(problem, tile, device.multiprocessors)
    found *= (NARROW if tile.narrow else 1.0) * (WIDE if tile.channels > WIDE_CHANNELS else 1.0)
    if steps // tile.splits <= FEW_STEPS and tile.cells * tile.channels > SMALL * (
        1.5 if tile.channels == 192 else 1
    ):
        found *= LARGE
    if tile.teams > 1:
        return found if _teams_pay(problem, tile, device) else found * IDLE_TEAM
    return found * ONE_TEAM if steps <= TEAM_STEPS * problem.item else found


def _teams_pay(problem: StridedProblem, tile: BoxTile, device: Device) -> bool:
    """Whether a tile of two teams is one of those that were measured to be the faster."""
    works = work_count(problem, tile)
    turns = ceil_div(works, device.multiprocessors)
    batch, (rows, cols) = problem.geometry.batch, problem.cells
    if not tile.flat and (tile.images > batch or tile.rows > rows or tile.cols - 7 > cols):
        return False
    channels = problem.geometry.out_channels_per_group
    if round_up(channels, tile.channels) > 1.25 * channels:
        return False
    return (
        tile.m_tiles == 2
        and problem.geometry.taps * chunks(problem) <= TEAM_STEPS * problem.item
        and turns > 1
        and works >= TEAM_SHARE * turns * device.multiprocessors
    )


@lru_cache(maxsize=1024)
def schedules(layer: StridedProblem, device: Device) -> tuple[BoxTile, ...]:
    """The tiles of a layer (``of_any_size``). The first takes any size; each of the others is the one that brings the
    expected time of ``representatives`` closest to the best of all tiles."""
    sizes, weights = representatives(layer)
    times = {tile: [_least(tile, size, device) for size in sizes] for tile in tiles(layer, device)}
    always = [
        tile for tile in times if not (tile.flat or tile.phased) and (tile.splits == 1 or layer.one_pixel)
    ]
    return select_covering(times, weights, always, share_of_boxes(layer, device))


def _least(tile: BoxTile, problem: StridedProblem, device: Device) -> float:
    """The expected time with the best number of splits; infinite where the tile is not right for the size."""
    times = (LEAST_CLOCKS + expected(problem, one, device) for one in for_size(tile, problem))
    return min(times, default=math.inf)
