"""Chooses the tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu: at most four kernels for all sizes of a layer, and
one of them, in the shape of its tile that fits best, for each size. The functions are pure."""

from __future__ import annotations

import math

from tconv_swap.kernels.common.schedules import select_covering
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, of_any_size, representatives
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_tma
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import (
    chunks,
    clocks,
    legal,
    shapes,
    tile_clocks,
    tiles,
    work_count,
)
from tconv_swap.kernels.grad_input.tma_gemm import for_size
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import ceil_div, round_up

#: With at most so many steps (a step is a tap of a chunk) a tile should have at most ``SMALL`` outputs: storing the
#: last tile, when nothing is left to multiply, costs more than the loads that small tiles add.
FEW_STEPS = 24
SMALL = 128 * 128
#: The most steps of a tile for each byte of an output with which two consumers in ping-pong are faster (one multiplies
#: while the other stores), and the smallest share of the multiprocessors that must have work in the last wave for that.
PING_PONG_STEPS = 9
PING_PONG_OCCUPANCY = 0.9
#: Factors on the expected time of a tile that is too large for few steps, of one consumer where two were measured to be
#: faster, and of two consumers where they were not (1.3 and 1.5 times as slow where timed: with more than that, a layer
#: keeps another kernel for sizes that a dense one of two consumers computes nearly as fast).
LARGE, ONE_CONSUMER, IDLE_CONSUMER = 1.5, 1.5, 1.3
#: Factors on the expected time that put, of equals, tiles with longer rows and with more stages first.
NARROW, WIDE, WIDE_CHANNELS = 1.02, 1.02, 192
#: Clocks that are added to each size, so that tiles for small sizes do not count too much.
MIN_CLOCKS = 10000

#: A kernel: its tile in each of its shapes, with the expected clocks of one tile.
Kernel = tuple[tuple[float, TmaTile], ...]


def choose(problem: StridedProblem, device: Device, count: int = 1) -> list[TmaTile]:
    """Returns at most ``count`` tiles for this size, the one expected to be the fastest first: of the layer's kernels,
    and, if there are too few, of all kernels in all shapes."""
    layer = of_any_size(problem)
    found = _ranked(schedules(layer, device), problem, device)
    if len(found) < count and count > 1:
        every: tuple[Kernel, ...] = tuple((shape,) for kernel in _kernels(layer, device) for shape in kernel)
        found += _ranked(every, problem, device)
    return list(dict.fromkeys(found))[:count]


def _ranked(kernels: tuple[Kernel, ...], problem: StridedProblem, device: Device) -> list[TmaTile]:
    shaped = [in_best_shape(kernel, problem, device) for kernel in kernels]
    sized_tiles = [tile for one in shaped for tile in for_size(one, problem, legal)]
    return sorted(sized_tiles, key=lambda tile: expected(problem, tile, device))


def in_best_shape(kernel: Kernel, problem: StridedProblem, device: Device) -> TmaTile:
    """Returns the tile in the shape with which all tiles take the fewest clocks; of equals that of the fewest tiles."""
    first = kernel[0][1]
    if len(kernel) == 1:
        return first
    geometry, (rows, cols) = problem.geometry, problem.positions
    batch, blocks = (
        geometry.batch,
        ceil_div(geometry.out_channels_per_group, first.channels) * geometry.groups,
    )
    best, found = (math.inf, math.inf), first
    for one_tile, tile in kernel:
        count = ceil_div(batch, tile.images) * ceil_div(rows, tile.rows) * ceil_div(cols, tile.cols)
        waves = ceil_div(count * blocks * tile.splits, device.multiprocessors)
        if (waves * one_tile, count * one_tile) < best:
            best, found = (waves * one_tile, count * one_tile), tile
    return found


def _kernels(layer: StridedProblem, device: Device) -> tuple[Kernel, ...]:
    """Returns every kernel that computes sizes of a layer."""
    return tuple(
        tuple((tile_clocks(layer, shape), shape) for shape in shapes(layer, tile))
        for tile in tiles(layer, device)
    )


def expected(problem: StridedProblem, tile: TmaTile, device: Device) -> float:
    """Returns the expected clocks, raised where another kind of tile was measured to be faster."""
    steps = problem.geometry.taps * chunks(problem)
    found = clocks(problem, tile, device.multiprocessors)
    found *= (NARROW if tile.narrow else 1.0) * (WIDE if tile.channels > WIDE_CHANNELS else 1.0)
    if steps // tile.splits <= FEW_STEPS and tile.positions * tile.channels > SMALL * (
        1.5 if tile.channels == 192 else 1
    ):
        found *= LARGE
    if tile.consumers > 1:
        return found if _ping_pong_pays(problem, tile, device) else found * IDLE_CONSUMER
    return found * ONE_CONSUMER if steps <= PING_PONG_STEPS * problem.item else found


def _ping_pong_pays(problem: StridedProblem, tile: TmaTile, device: Device) -> bool:
    """Returns whether a tile of two consumers is one of those that were measured to be faster than one consumer."""
    work_tiles = work_count(problem, tile)
    waves = ceil_div(work_tiles, device.multiprocessors)
    batch, (rows, cols) = problem.geometry.batch, problem.positions
    if not tile.dense and (tile.images > batch or tile.rows > rows or tile.cols - 7 > cols):
        return False
    channels = problem.geometry.out_channels_per_group
    if round_up(channels, tile.channels) > 1.25 * channels:
        return False
    return (
        tile.m_tiles == 2
        and problem.geometry.taps * chunks(problem) <= PING_PONG_STEPS * problem.item
        and waves > 1
        and work_tiles >= PING_PONG_OCCUPANCY * waves * device.multiprocessors
    )


@disk_cache
def schedules(layer: StridedProblem, device: Device) -> tuple[Kernel, ...]:
    """Returns the kernels of a layer (``of_any_size``): those that bring the expected times of ``representatives``
    closest to the best of all kernels. The first computes any size."""
    sizes, weights = representatives(layer)
    times = {
        kernel: [_expected_clocks(kernel, size, device) for size in sizes]
        for kernel in _kernels(layer, device)
    }
    always = [
        kernel
        for kernel in times
        if not (kernel[0][1].dense or kernel[0][1].phase_dimension)
        and (kernel[0][1].splits == 1 or layer.one_pixel)
    ]
    return select_covering(times, weights, always, share_of_tma(layer, device))


def _expected_clocks(kernel: Kernel, problem: StridedProblem, device: Device) -> float:
    """Returns the expected clocks with the best number of splits, or infinity if the kernel does not compute the
    size."""
    tile = in_best_shape(kernel, problem, device)
    times = (MIN_CLOCKS + expected(problem, one, device) for one in for_size(tile, problem, legal))
    return min(times, default=math.inf)
