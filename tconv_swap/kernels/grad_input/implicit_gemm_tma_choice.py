"""The kernels of csrc/kernels/grad_input/implicit_gemm_tma.cu that a layer may have over all its sizes, and the best of
those that it has, in the shape of its tile that fits best, for each size. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.grad_input.implicit_gemm_tma_clocks import clocks, tile_clocks
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import legal, shapes, tiles
from tconv_swap.kernels.grad_input.tma_gemm import for_size
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div

#: A kernel: its tile in each of its shapes, with the expected clocks of one tile.
Schedule = tuple[tuple[float, TmaTile], ...]


def candidates(layer: StridedProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns every kernel that computes sizes of a layer (``of_any_size``)."""
    return tuple(
        tuple((tile_clocks(layer, shape), shape) for shape in shapes(layer, tile))
        for tile in tiles(layer, device)
    )


def computes_any_size(kernel: Schedule) -> bool:
    """Returns whether a kernel is legal for all sizes of a layer that TMA loads."""
    tile = kernel[0][1]
    return not (tile.dense or tile.phase_dimension) and tile.splits == 1


def ranked(among: Iterable[Schedule], problem: StridedProblem, device: Device) -> list[tuple[float, TmaTile]]:
    """Returns the tiles of those kernels that compute this size, with each number of splits, and their expected clocks,
    the one expected to be the fastest first."""
    found = [
        (clocks(problem, tile, device.multiprocessors), tile)
        for kernel in among
        for tile in for_size(in_best_shape(kernel, problem, device), problem, legal)
    ]
    return sorted(found, key=lambda entry: entry[0])


def in_best_shape(kernel: Schedule, problem: StridedProblem, device: Device) -> TmaTile:
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
