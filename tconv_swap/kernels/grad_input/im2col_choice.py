"""Which tiles of csrc/kernels/grad_input/im2col.cu a layer has, whatever its sizes: at most four; and which of them
computes one size. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.schedules import PATCHES, select_covering
from tconv_swap.kernels.grad_input.im2col_tile import (
    MULTIPLY_MACS,
    UnfoldedTile,
    clocks,
    conflicts,
    halves,
    legal,
    macs,
    tiles,
    variants,
    word,
)
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    of_any_size,
    representatives,
    sized,
)
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_unfolded
from tconv_swap.kernels.problem import Device

#: How much longer than its multiplies a problem may be expected to take: beyond it grad_input/implicit_gemm_wgmma.cu
#: was as fast.
MOST_CLOCKS = 3.3
#: The same of grad_input/implicit_gemm_wgmma.cu where no tile of a layer is for a size (4 x 4 maps, measured).
OTHERS_CLOCKS = 5.8
#: Words in halves pay where so many products are summed up for an element, or where there are so many elements of
#: grad_input for each multiprocessor (what was slower had fewer of both).
HALVES_SUMMED = 2048
HALVES_ELEMENTS = 3 * 128 * 128
#: More splits than this never paid.
SPLITS = (2, 4)
#: Of those expected to be the fastest for a size, how many the banks of shared memory are looked at for.
LOOKED_AT = 8
#: Clocks that a size takes however small it is: what tiles for small sizes are worth is less than they say.
LEAST_CLOCKS = 10000

#: A tile, and how many passes over the banks of shared memory its loads take.
Schedule = tuple[UnfoldedTile, float]


def choose(problem: StridedProblem, device: Device, count: int = 1) -> list[UnfoldedTile]:
    """At most ``count`` tiles for this size, the one expected to be the fastest first, but those that are expected to
    be filled or stored for most of the time: out of the layer's, and if more are asked for, out of all."""
    found = _ranked(schedules(of_any_size(problem), device), problem, device)
    if len(found) < count and count > 1:
        found += _ranked(tuple((tile, 1.0) for tile in tiles(problem, device)), problem, device)
    return list(dict.fromkeys(found))[:count]


def _ranked(among: tuple[Schedule, ...], problem: StridedProblem, device: Device) -> list[UnfoldedTile]:
    most = _most_clocks(problem, device)
    timed = (
        (clocks(problem, one, device.multiprocessors, passes), i, one)
        for i, (tile, passes) in enumerate(among)
        for one in for_size(tile, problem)
        if not halves(problem, tile) or _halves_pay(problem, device.multiprocessors)
    )
    return [tile for time, _, tile in sorted(timed, key=lambda entry: entry[:2]) if time <= most]


def _halves_pay(problem: StridedProblem, multiprocessors: int) -> bool:
    geometry, (rows, cols) = problem.geometry, problem.cells
    elements = geometry.batch * rows * cols * geometry.out_channels
    summed = geometry.in_channels_per_group * geometry.taps
    return summed >= HALVES_SUMMED or elements >= HALVES_ELEMENTS * multiprocessors


def for_size(tile: UnfoldedTile, problem: StridedProblem) -> Iterator[UnfoldedTile]:
    """The tile with as many splits as this size allows, if any."""
    geometry = problem.geometry
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    for splits in SPLITS if tile.splits > 1 else (1,):
        one = replace(tile, splits=splits) if splits != tile.splits else tile
        if (splits == 1 or 4 * count * splits <= WORKSPACE_LIMIT_BYTES) and legal(problem, one):
            yield one


@lru_cache(maxsize=1024)
def schedules(layer: StridedProblem, device: Device) -> tuple[Schedule, ...]:
    """The tiles of a layer (``of_any_size``), each the one that brings the expected time of ``representatives`` closest
    to the best of all tiles."""
    sizes, weights = representatives(layer)
    if layer.geometry.kernel == layer.step and not layer.one_pixel:
        sizes, weights = [*sizes, sized(layer, *PATCHES)], [*weights, 1.0]

    def times(tile: UnfoldedTile, passes: float) -> list[float]:
        return [_least(tile, passes, size, device) for size in sizes]

    plain = {tile: times(tile, 1.0) for tile in tiles(layer, device)}
    looked_at = dict.fromkeys(
        tile for i in range(len(sizes)) for tile in sorted(plain, key=lambda tile: plain[tile][i])[:LOOKED_AT]
    )
    found: dict[Schedule, list[float]] = {}
    for tile in looked_at:
        timed = [(conflicts(layer, one), one) for one in variants(layer, tile, device)]
        passes, best = min(timed, key=lambda entry: clocks(layer, entry[1], device.multiprocessors, entry[0]))
        found[best, passes] = times(best, passes)
    return select_covering(found, weights, (), share_of_unfolded(layer, device))


def _least(tile: UnfoldedTile, passes: float, problem: StridedProblem, device: Device) -> float:
    """The expected time with the best number of splits, or that of grad_input/implicit_gemm_wgmma.cu where that
    computes it."""
    best = min(
        (clocks(problem, one, device.multiprocessors, passes) for one in for_size(tile, problem)),
        default=math.inf,
    )
    most = _most_clocks(problem, device)
    return LEAST_CLOCKS + (best if best <= most else most * OTHERS_CLOCKS / MOST_CLOCKS)


def _most_clocks(problem: StridedProblem, device: Device) -> float:
    return MOST_CLOCKS * macs(problem) / (device.multiprocessors * MULTIPLY_MACS * word(problem))
