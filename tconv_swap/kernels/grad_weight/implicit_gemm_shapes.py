"""The tiles of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu that are compared, whether or not they fit: their
shapes, and their pixels. The functions are pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import item_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile without its pixels."""

    taps: Pair
    tap_step: Pair
    warps: tuple[int, int, int, int]
    warp_m: int
    warp_n: int
    warp_taps: int
    wgmma: bool


def shapes_of(problem: Problem, device: Device) -> Iterator[Shape]:
    """Yields the shapes of each kind of tensor-core instruction."""
    kinds = [(False, _warp_choices)]
    if device.architecture == "sm_90a" and item_bytes(problem) == 2:
        kinds.append((True, _warpgroup_choices))
    for taps, tap_step in _tap_choices(problem):
        for wgmma, choices in kinds:
            for warps in choices(problem, math.prod(taps)):
                yield Shape(taps, tap_step, *warps, wgmma)


_Warps = tuple[tuple[int, int, int, int], int, int, int]


def _warpgroup_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """Yields warps along (m, n, taps, k) and the channels in, channels out and taps of a warp for wgmma,
    where a warpgroup's four warps lie along m."""
    g = problem.geometry
    if g.in_channels_per_group <= 32:
        return
    for warp_n, warp_taps in itertools.product((128, 64, 32), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_n * warp_taps // 2
        if warp_taps > taps or not 48 <= sums <= 160 or warp_n >= max(64, 2 * g.out_channels_per_group):
            continue
        for groups_m, groups_n, groups_k in itertools.product((1, 2), (1, 2), (1, 2)):
            groups_t = ceil_div(taps, warp_taps)
            if not 2 <= groups_m * groups_n * groups_t * groups_k <= 4:
                continue
            if (groups_m - 1) * 64 >= g.in_channels_per_group:
                continue
            if (groups_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (4 * groups_m, groups_n, groups_t, groups_k), 16, warp_n, warp_taps


def _warp_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """Yields warps along (m, n, taps, k) and the channels in, channels out and taps of a warp for mma.sync."""
    g = problem.geometry
    # A warp with too few sums waits for its operands. A small product has no more sums.
    widest = [
        min(64, 1 << (channels - 1).bit_length())
        for channels in (g.in_channels_per_group, g.out_channels_per_group)
    ]
    min_sums = min(48, max(16, widest[0]) * widest[1] * min(taps, 5) // 64)
    for warp_m, warp_n, warp_taps in itertools.product((64, 32, 16), (64, 32, 16, 8), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_m * warp_n * warp_taps // 32
        if warp_taps > taps or not min_sums <= sums <= 128 or (problem.is_ieee and warp_m == 64):
            continue
        if warp_m >= max(32, 2 * g.in_channels_per_group) or warp_n >= max(16, 2 * g.out_channels_per_group):
            continue
        warps_t = ceil_div(taps, warp_taps)
        for warps_m, warps_n, warps_k in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
            warps = warps_m * warps_n * warps_t * warps_k
            if not 4 <= warps <= 16 or (warps_k > 1 and warps > 8) or warps_m * warps_n > 4:
                continue
            if (warps_m - 1) * warp_m >= g.in_channels_per_group:
                continue
            if (warps_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (warps_m, warps_n, warps_t, warps_k), warp_m, warp_n, warp_taps


def _tap_choices(problem: Problem) -> Iterator[tuple[Pair, Pair]]:
    """Yields the taps of a block and the steps between them: all taps, those of one vertical phase, fewer rows
    or columns."""
    g = problem.geometry
    period = g.stride[0] // math.gcd(g.stride[0], g.dilation[0])
    row_choices = {(g.kernel[0], 1), (1, 1)}
    if 1 < period < g.kernel[0]:
        row_choices.add((ceil_div(g.kernel[0], period), period))
    if g.kernel[0] > 3:
        row_choices.add((ceil_div(g.kernel[0], ceil_div(g.kernel[0], 3)), 1))
    col_choices = {(g.kernel[1], 1), (ceil_div(g.kernel[1], 2), 1), (min(8, g.kernel[1]), 1)}
    for rows, row_step in sorted(row_choices):
        for cols, col_step in sorted(col_choices):
            if rows * cols <= 32:
                yield (rows, cols), (row_step, col_step)


def pixel_choices(sizes: Iterable[Geometry], step: int, wgmma: bool) -> list[tuple[int, int, int]]:
    """Returns images, rows and columns of the tiles of a multiple of ``step`` pixels that suit maps of these sizes."""
    sides = ((size.batch, size.height, size.width) for size in sizes)
    return whole_steps(
        dict.fromkeys(one for size in sides for one in _pixel_choices(size, step)), step, wgmma
    )


@lru_cache(maxsize=256)
def _pixel_choices(size: tuple[int, int, int], step: int) -> list[tuple[int, int, int]]:
    """Returns images, rows and columns of tiles of a multiple of ``step`` pixels, powers of two, those nearest
    to 128 pixels and to a square first."""
    found = []
    widest, tallest, deepest = (1 << max(0, count - 1).bit_length() for count in reversed(size))
    for cols, rows in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64)):
        if cols > widest or rows > tallest or (cols < 8 and cols != widest):
            continue
        if rows * cols >= max(64, step):
            images = [1]
        elif cols == widest and rows == tallest:
            # Small maps: many whole images.
            images = [count // (rows * cols) for count in (32, 64, 128) if count <= deepest * rows * cols]
            images = images or [max(step, 32) // (rows * cols)]
        else:
            images = [1]
        for n in images:
            if n * rows * cols % step == 0 and 32 <= n * rows * cols <= 256:
                found.append((n, rows, cols))
    return sorted(
        found, key=lambda one: (abs(math.log2(math.prod(one) / 128)), abs(math.log2(one[1] / one[2])))
    )


def whole_steps(
    choices: Iterable[tuple[int, int, int]], step: int, wgmma: bool
) -> list[tuple[int, int, int]]:
    """Returns the choices of pixels that are whole steps; wgmma reads 8 contiguous pixels."""
    return [one for one in choices if math.prod(one) % step == 0 and not (wgmma and one[2] < 8)]
