"""Which kernels of csrc/kernels/grad_weight/im2col_nchw.cu a layer has over all sizes, and which of them computes
one size. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator

from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    Im2colKernel,
    Tile,
    best_tile,
    expected_clocks,
    kernels,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache

#: How many times as long other families took where this one is the fastest
#: (benchmarks/results/h200-ablation.json).
OTHERWISE = 1.4
#: The least work of the sizes for which a layer's kernels are chosen: with less work they gain least.
MIN_MACS = 1 << 32


def choose(problem: Problem, device: Device, limit: int) -> list[Tile]:
    """Returns the tiles of the layer's kernels that compute the size, the fastest expected first."""
    g = problem.geometry
    tiles = (best_tile(g, kernel, device) for kernel in schedules(of_any_size(problem, False), device, limit))
    found = [tile for tile in tiles if tile is not None]
    return sorted(found, key=lambda tile: expected_clocks(g, tile, device)) if len(found) > 1 else found


@disk_cache
def schedules(layer: Problem, device: Device, limit: int) -> tuple[Im2colKernel, ...]:
    """Returns at most ``limit`` kernels that a layer has over all its sizes."""
    tiles: dict[tuple[Problem, Im2colKernel], Tile | None] = {}

    def tile_of(problem: Problem, kernel: Im2colKernel) -> Tile | None:
        if (problem, kernel) not in tiles:
            tiles[problem, kernel] = best_tile(problem.geometry, kernel, device)
        return tiles[problem, kernel]

    def candidates(problem: Problem) -> Iterator[Im2colKernel]:
        return kernels(problem.geometry)

    def expected(problem: Problem, kernel: Im2colKernel) -> float:
        tile = tile_of(problem, kernel)
        assert tile is not None
        return expected_clocks(problem.geometry, tile, device)

    return select_schedules(
        layer,
        limit,
        candidates,
        lambda problem, one: problem.geometry.macs >= MIN_MACS and tile_of(problem, one) is not None,
        expected,
        lambda one: True,
        every=1,
        otherwise=OTHERWISE,
    )
