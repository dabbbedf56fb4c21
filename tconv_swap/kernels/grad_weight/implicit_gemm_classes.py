"""Which sizes represent all sizes of a layer, and which few schedules are best for them. Pure functions of
data.
A schedule is everything that is compiled into a kernel of the weight's gradient: all but the sizes. Every
candidate is rated at every representative size; a layer keeps the few that together come nearest to the best
one at each size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Images, rows and columns, from the innermost maps of encoders to photographs.
MAPS = (
    (128, 4, 4),
    (32, 8, 6),
    (128, 8, 8),
    (64, 14, 14),
    (128, 16, 16),
    (4, 32, 32),
    (8, 37, 37),
    (1, 64, 64),
    (8, 64, 64),
    (8, 128, 128),
    (1, 256, 256),
    (4, 512, 512),
)
#: The same for one-dimensional layers, whose maps have one row.
ROWS = ((8, 1, 32), (1, 1, 101), (4, 1, 512), (8, 1, 4096), (8, 64, 64))
#: The same for layers that make an image of each pixel.
PIXELS = (128, 1, 1)
#: The usual range of input channels times columns of a map (layers with many channels have smaller maps), and the
#: weight of a size outside of it.
CHANNEL_COLUMNS = (1 << 11, 1 << 16)
UNUSUAL = 0.25
#: How much slower than the best, on geometric mean over all sizes, the first of equals may be; how much a further
#: kernel must gain.
SLACK, MIN_GAIN = 0.003, 0.006
#: Channels on either side of a group up to which stride1 was measured.
STRIDE1_MAX_CHANNELS = 256
#: The cost of a size that no schedule computes (see ``select``).
UNCOVERED = 1000.0


@dataclass(frozen=True, slots=True)
class Size:
    """The part of a geometry that may change from call to call."""

    batch: int
    height: int
    width: int

    def of(self, geometry: Geometry) -> Geometry:
        """Returns the geometry with this size."""
        return replace(geometry, batch=self.batch, height=self.height, width=self.width)


def sizes_of(problem: Problem) -> list[Size]:
    """Returns the sizes that represent all sizes of a layer."""
    g = problem.geometry
    if g.height == g.width == 1:
        return [Size(*PIXELS)]
    one_row = g.kernel[0] == g.stride[0] == 1
    found = [Size(*size) for size in (ROWS if one_row else MAPS)]
    return [size for size in found if min(size.of(g).out_height, size.of(g).out_width) > 0]


def weight_of(problem: Problem, geometry: Geometry) -> float:
    """Returns the weight of a size among those of a layer."""
    low, high = CHANNEL_COLUMNS
    columns = problem.geometry.in_channels_per_group * geometry.width
    return 1.0 if low <= columns <= high else UNUSUAL


def has_pixels(geometry: Geometry) -> bool:
    """Returns whether maps of one pixel have a kernel of their own."""
    return max(geometry.stride) == 1 < max(geometry.kernel) and max(geometry.padding) == 0


def is_a_product(geometry: Geometry) -> bool:
    """Returns whether maps of one pixel may be computed by gradients/gemm."""
    return (geometry.padding, geometry.dilation, geometry.groups) == ((0, 0), (1, 1), 1)


def stride1_may_win(geometry: Geometry) -> bool:
    """Returns whether large maps may be computed by stride1."""
    channels = max(geometry.in_channels_per_group, geometry.out_channels_per_group)
    return geometry.stride == geometry.dilation == (1, 1) and channels <= STRIDE1_MAX_CHANNELS


def share_of(layer: Problem, limit: int) -> int:
    """Returns how many of ``limit`` kernels belong to maps of one pixel, or to all other maps, whichever
    ``layer`` (``of_any_size``) stands for."""
    if limit == 1:
        return limit
    if not has_pixels(layer.geometry):
        return limit - is_a_product(layer.geometry)
    return 1 if layer.geometry.height == 1 else limit - 1


def of_any_size(problem: Problem, pixels_apart: bool = True) -> Problem:
    """Returns the problem that stands for all sizes of a layer.
    It has the output padding with which the outputs of rows of 64 pixels are multiples of the largest power of
    two. Maps of one pixel stand for themselves if they have a kernel of their own and ``pixels_apart`` is true.
    """
    g = problem.geometry
    one_pixel = pixels_apart and g.height == g.width == 1 and has_pixels(g)
    axes = (g.kernel, g.stride, g.padding, g.dilation)
    layout = (problem.channels_last, problem.weight_channels_last)
    layer = (g.in_channels, g.out_channels, g.groups)
    return _of_any_size(one_pixel, layer, axes, problem.dtype, problem.precision, layout)


@lru_cache(maxsize=1024)
def _of_any_size(
    one_pixel: bool,
    layer: tuple[int, int, int],
    axes: tuple[Pair, Pair, Pair, Pair],
    dtype: torch.dtype,
    precision: str,
    layout: tuple[bool, bool],
) -> Problem:
    """Returns the same from what all sizes of a layer have in common."""
    (in_channels, out_channels, groups), (kernel, stride, padding, dilation) = layer, axes
    side = 1 if one_pixel else 64
    geometry = Geometry(
        1, in_channels, side, side, out_channels, kernel, stride, padding, (0, 0), dilation, groups
    )
    if not one_pixel:
        width = geometry.out_width
        paddings = range(max(stride[1], dilation[1]))
        last = max(paddings, key=lambda extra: (width + extra) & -(width + extra))
        geometry = replace(geometry, output_padding=(0, last))
    return Problem(geometry, dtype, precision, *layout)


def taps_cover_stride(geometry: Geometry, axis: int) -> bool:
    """Returns whether every offset in [0, stride) belongs to a tap: such taps together read each pixel of
    grad_output over the input exactly once, so the bias can be added up from what they read."""
    g = geometry
    offsets = {k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis])}
    return offsets.issuperset(range(g.stride[axis]))


def pixel_tiles(size: Geometry | Size, tile: tuple[int, int, int]) -> int:
    """Returns how many tiles of ``tile`` images, rows and columns cover the pixels."""
    return ceil_div(size.batch, tile[0]) * ceil_div(size.height, tile[1]) * ceil_div(size.width, tile[2])


def counts_in_32_bits(geometry: Geometry, tile: tuple[int, int, int]) -> bool:
    """Returns whether the tiles, and the offsets within one, fit the 32 bits that a kernel counts with."""
    g = geometry
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    return tile[0] * image < INT32_LIMIT and pixel_tiles(g, tile) < INT32_LIMIT


def select(
    clocks: Sequence[Sequence[float]], weights: Sequence[float], limit: int, uncovered: float = UNCOVERED
) -> list[int]:
    """Returns the indices of at most ``limit`` candidates that together come nearest to the best at every size.
    Of candidates that are equally good the first is taken.

    Args:
        clocks: of each candidate at each size; infinite where it does not compute the size.
        weights: of the sizes.
        uncovered: the cost of a size that no chosen candidate computes, as the logarithm of how many times as
        long it takes.
    """
    best = [min(at_size) for at_size in zip(*clocks, strict=True)]
    coverable = [j for j, clocks_of_best in enumerate(best) if math.isfinite(clocks_of_best)]
    none = [uncovered * weights[j] for j in coverable]
    losses = [
        [
            weights[j] * math.log(row[j] / best[j]) if math.isfinite(row[j]) else lost
            for j, lost in zip(coverable, none, strict=True)
        ]
        for row in clocks
    ]
    all_weights = sum(weights[j] for j in coverable)

    def first_near_best(now: list[float]) -> tuple[int, float]:
        totals = [sum(map(min, now, row)) for row in losses]
        limit = min(totals) + SLACK * all_weights
        index = next(i for i, total in enumerate(totals) if total <= limit)
        return index, min(totals)

    def now_with(those: Sequence[int]) -> list[float]:
        return [min(at_size) for at_size in zip(none, *(losses[i] for i in those), strict=True)]

    chosen: list[int] = []
    while len(chosen) < limit and losses:
        now = now_with(chosen)
        index, loss = first_near_best(now)
        if sum(now) - loss < MIN_GAIN * all_weights:
            break
        chosen.append(index)
    # Then each of them is exchanged for a better one, if there is one; this is done twice.
    for i in (*range(len(chosen)), *range(len(chosen))):
        rest = chosen[:i] + chosen[i + 1 :]
        index, loss = first_near_best(now_with(rest))
        if sum(now_with(chosen)) - loss >= MIN_GAIN * all_weights:
            chosen[i] = index
    return chosen
