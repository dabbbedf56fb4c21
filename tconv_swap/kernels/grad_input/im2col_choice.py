"""Chooses the tiles of csrc/kernels/grad_input/im2col.cu: at most four for all sizes of a layer, and one of them for
each size. The functions are pure."""

from __future__ import annotations

import math
from functools import lru_cache

from tconv_swap.kernels.common.schedules import PATCHES, select_covering
from tconv_swap.kernels.grad_input.im2col_tile import (
    ALIGNMENT,
    MULTIPLY_MACS,
    Im2colTile,
    clocks,
    column_block,
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
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_im2col
from tconv_swap.kernels.grad_input.tma_gemm import for_size, may_load
from tconv_swap.kernels.problem import Device

#: The fewest channels of a group, on either side: with fewer it was not measured.
MIN_CHANNELS = 32
#: How many times as long as its multiplies a problem may be expected to take: with more,
#: grad_input/implicit_gemm_wgmma.cu was as fast (measured).
MAX_CLOCKS_PER_MULTIPLY = 4.4
#: The same for grad_input/implicit_gemm_wgmma.cu, which computes the sizes for which a layer has no tile (measured on
#: 4 x 4 maps).
FALLBACK_CLOCKS_PER_MULTIPLY = 5.8
#: Words loaded in halves pay where an element is the sum of so many products, or where grad_input has so many elements
#: for each multiprocessor (the problems that were slower had fewer of both).
HALVES_SUMMED = 2048
HALVES_ELEMENTS = 3 * 128 * 128
#: For how many of the tiles expected to be the fastest for a size the bank conflicts are computed.
EXAMINED = 8
#: Clocks that are added to each size, so that tiles for small sizes do not count too much.
MIN_CLOCKS = 10000

#: A tile, and how many passes over the banks of shared memory a load of its im2col operand takes on average.
Schedule = tuple[Im2colTile, float]


def claims_layer(layer: StridedProblem, device: Device) -> bool:
    """Returns whether the kernel computes some size of the layer."""
    geometry = layer.geometry
    if layer.input_channels_last or layer.output_channels_last or layer.weight_channels_last:
        return False
    weights = geometry.in_channels_per_group * geometry.taps
    return weights * layer.item % ALIGNMENT == 0 and may_load(layer, device)


@lru_cache(maxsize=1024)
def kernel_count(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels a layer (``of_any_size``) has over all its sizes: none if others are expected to be
    faster at all that represent them."""
    geometry = layer.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    if channels < MIN_CHANNELS or not claims_layer(layer, device):
        return 0
    found = schedules(layer, device)
    return len(found) if any(_ranked(found, size, device) for size in _sizes_of(layer)[0]) else 0


def choose(problem: StridedProblem, device: Device, count: int = 1) -> list[Im2colTile]:
    """Returns at most ``count`` tiles for this size, the one expected to be the fastest first: of the layer's tiles,
    and, if there are too few, of all tiles. Tiles are left out that are expected to load or store most of the time."""
    found = _ranked(schedules(of_any_size(problem), device), problem, device)
    if len(found) < count and count > 1:
        found += _ranked(tuple((tile, 1.0) for tile in tiles(problem, device)), problem, device)
    return list(dict.fromkeys(found))[:count]


def _ranked(among: tuple[Schedule, ...], problem: StridedProblem, device: Device) -> list[Im2colTile]:
    limit = _max_clocks(problem, device)
    timed = (
        (clocks(problem, one, device.multiprocessors, passes), i, one)
        for i, (tile, passes) in enumerate(among)
        for one in for_size(tile, problem, legal)
        if not halves(problem, tile) or _halves_pay(problem, device.multiprocessors)
    )
    return [tile for time, _, tile in sorted(timed, key=lambda entry: entry[:2]) if time <= limit]


def _halves_pay(problem: StridedProblem, multiprocessors: int) -> bool:
    geometry, (rows, cols) = problem.geometry, problem.positions
    elements = geometry.batch * rows * cols * geometry.out_channels
    summed = geometry.in_channels_per_group * geometry.taps
    return summed >= HALVES_SUMMED or elements >= HALVES_ELEMENTS * multiprocessors


@lru_cache(maxsize=1024)
def schedules(layer: StridedProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns the tiles of a layer (``of_any_size``): those that bring the expected times of ``representatives``
    closest to the best of all tiles."""
    sizes, weights = _sizes_of(layer)

    def times(tile: Im2colTile, passes: float) -> list[float]:
        return [_expected_clocks(tile, passes, size, device) for size in sizes]

    plain = {tile: times(tile, 1.0) for tile in tiles(layer, device)}
    examined = dict.fromkeys(
        tile for i in range(len(sizes)) for tile in sorted(plain, key=lambda tile: plain[tile][i])[:EXAMINED]
    )
    max_tiles = share_of_im2col(layer, device)
    # Of several tiles the first is right for rows of any width.
    any_width = [tile for tile in plain if max_tiles > 1 and column_block(layer, tile) == 1]
    if any(column_block(layer, tile) > 1 for tile in examined):
        for i in range(len(sizes)):
            examined.update(dict.fromkeys(sorted(any_width, key=lambda tile: plain[tile][i])[:1]))
    found: dict[Schedule, list[float]] = {}
    for tile in examined:
        timed = [(conflicts(layer, one), one) for one in variants(layer, tile, device)]
        passes, best = min(timed, key=lambda entry: clocks(layer, entry[1], device.multiprocessors, entry[0]))
        found[best, passes] = times(best, passes)
    first = [one for one in found if max_tiles > 1 and column_block(layer, one[0]) == 1]
    return select_covering(found, weights, first, max_tiles)


def _sizes_of(layer: StridedProblem) -> tuple[list[StridedProblem], list[float]]:
    """Returns the sizes that represent all sizes of a layer, and the weight of each."""
    sizes, weights = representatives(layer)
    if layer.geometry.kernel == layer.step and not layer.one_pixel:
        return [*sizes, sized(layer, *PATCHES)], [*weights, 1.0]
    return sizes, weights


def _expected_clocks(tile: Im2colTile, passes: float, problem: StridedProblem, device: Device) -> float:
    """Returns the expected clocks with the best number of splits, or those of grad_input/implicit_gemm_wgmma.cu for a
    size that it computes."""
    best = min(
        (clocks(problem, one, device.multiprocessors, passes) for one in for_size(tile, problem, legal)),
        default=math.inf,
    )
    limit = _max_clocks(problem, device)
    return MIN_CLOCKS + (
        best if best <= limit else limit * FALLBACK_CLOCKS_PER_MULTIPLY / MAX_CLOCKS_PER_MULTIPLY
    )


def _max_clocks(problem: StridedProblem, device: Device) -> float:
    return MAX_CLOCKS_PER_MULTIPLY * macs(problem) / (device.multiprocessors * MULTIPLY_MACS * word(problem))
