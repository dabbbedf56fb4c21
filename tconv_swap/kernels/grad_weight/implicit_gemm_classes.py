"""Which sizes stand for all sizes of a layer, and which few schedules do for those. Pure functions of data.

A schedule is all of a kernel that sums up the weight's gradient but its sizes. Every candidate is judged at every size
that stands for others; the few that together come nearest to the best one at each are the layer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Images, rows and columns: from the innermost maps of encoders to photographs.
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
#: Of layers of one dimension, whose maps have one row.
ROWS = ((8, 1, 32), (1, 1, 101), (4, 1, 512), (8, 1, 4096), (8, 64, 64))
#: Of layers that make an image of each pixel.
PIXELS = (128, 1, 1)
#: Input channels times columns of the maps that networks have: layers of many channels see smaller maps; and what other
#: sizes count for.
CHANNEL_COLUMNS = (1 << 11, 1 << 16)
UNUSUAL = 0.25
#: How much slower, on all sizes together, what comes first may be than the best; how much another one has to gain.
SLACK, LEAST_GAIN = 0.003, 0.006
#: Channels of either side of a group that strips were measured with.
MOST_STRIPS_CHANNELS = 256
#: What a size that no schedule computes counts for.
UNCOVERED = 1000.0


@dataclass(frozen=True, slots=True)
class Size:
    """What of a geometry a call may change."""

    batch: int
    height: int
    width: int

    def of(self, geometry: Geometry) -> Geometry:
        return replace(geometry, batch=self.batch, height=self.height, width=self.width)


def sizes_of(problem: Problem) -> list[Size]:
    """Those that stand for all sizes of a layer."""
    g = problem.geometry
    if g.height == g.width == 1:
        return [Size(*PIXELS)]
    one_row = g.kernel[0] == g.stride[0] == 1
    found = [Size(*size) for size in (ROWS if one_row else MAPS)]
    return [size for size in found if min(size.of(g).out_height, size.of(g).out_width) > 0]


def weight_of(problem: Problem, geometry: Geometry) -> float:
    """What a size counts for among those of a layer."""
    least, most = CHANNEL_COLUMNS
    columns = problem.geometry.in_channels_per_group * geometry.width
    return 1.0 if least <= columns <= most else UNUSUAL


def has_pixels(geometry: Geometry) -> bool:
    """Whether maps of one pixel have a kernel of their own."""
    return max(geometry.stride) == 1 < max(geometry.kernel) and max(geometry.padding) == 0


def is_a_product(geometry: Geometry) -> bool:
    """Whether maps of one pixel may be plan_pixel_gradients'."""
    return (geometry.padding, geometry.dilation, geometry.groups) == ((0, 0), (1, 1), 1)


def goes_down_strips(geometry: Geometry) -> bool:
    """Whether large maps may be plan_grad_weight_strips'."""
    channels = max(geometry.in_channels_per_group, geometry.out_channels_per_group)
    return geometry.stride == geometry.dilation == (1, 1) and channels <= MOST_STRIPS_CHANNELS


def share_of(layer: Problem, most: int) -> int:
    """Of so many kernels, those that maps of one pixel have, or all others (``of_any_size``)."""
    if most == 1:
        return most
    if not has_pixels(layer.geometry):
        return most - is_a_product(layer.geometry)
    return 1 if layer.geometry.height == 1 else most - 1


@lru_cache(maxsize=256)
def of_any_size(problem: Problem, pixels_apart: bool = True) -> Problem:
    """The same for all sizes of a layer, with the output padding by which outputs of rows of 64 pixels are multiples of
    the largest power of two; maps of one pixel apart, if they have a kernel of their own
    and ``pixels_apart`` lets them."""
    g = problem.geometry
    if pixels_apart and g.height == g.width == 1 and has_pixels(g):
        return replace(problem, geometry=replace(g, batch=1, output_padding=(0, 0)))
    at = replace(g, batch=1, height=64, width=64, output_padding=(0, 0))
    most = max(g.stride[1], g.dilation[1])
    if most > 1:
        width = at.out_width
        padding = max(range(most), key=lambda extra: (width + extra) & -(width + extra))
        at = replace(at, output_padding=(0, padding))
    return replace(problem, geometry=at)


def pixel_tiles(size: Geometry | Size, tile: tuple[int, int, int]) -> int:
    """Tiles of so many images, rows and columns."""
    return ceil_div(size.batch, tile[0]) * ceil_div(size.height, tile[1]) * ceil_div(size.width, tile[2])


def counts_in_32_bits(geometry: Geometry, tile: tuple[int, int, int]) -> bool:
    """Whether a tile's images, and the tiles, are few enough for a kernel's offsets."""
    g = geometry
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    return tile[0] * image < INT32_LIMIT and pixel_tiles(g, tile) < INT32_LIMIT


def select(
    clocks: Sequence[Sequence[float]], weights: Sequence[float], most: int, uncovered: float = UNCOVERED
) -> list[int]:
    """Indices of at most ``most`` candidates; of those as good the first. ``clocks``:
    of each candidate at each size, infinite where it is not for that; ``weights``: of the sizes; ``uncovered``: what
    one counts for that none is for, the logarithm of how many times as long it takes."""
    best = [min(of_size) for of_size in zip(*clocks, strict=True)]
    coverable = [j for j, least in enumerate(best) if math.isfinite(least)]
    none = [uncovered * weights[j] for j in coverable]
    losses = [
        [
            weights[j] * math.log(row[j] / best[j]) if math.isfinite(row[j]) else lost
            for j, lost in zip(coverable, none, strict=True)
        ]
        for row in clocks
    ]
    all_weights = sum(weights[j] for j in coverable)

    def first_of_best(now: list[float]) -> tuple[int, float]:
        totals = [sum(map(min, now, row)) for row in losses]
        limit = min(totals) + SLACK * all_weights
        index = next(i for i, total in enumerate(totals) if total <= limit)
        return index, min(totals)

    def now_with(those: Sequence[int]) -> list[float]:
        return [min(of_size) for of_size in zip(none, *(losses[i] for i in those), strict=True)]

    chosen: list[int] = []
    while len(chosen) < most and losses:
        now = now_with(chosen)
        index, least = first_of_best(now)
        if sum(now) - least < LEAST_GAIN * all_weights:
            break
        chosen.append(index)
    # One of them at a time is exchanged for a better one.
    for i in (*range(len(chosen)), *range(len(chosen))):
        rest = chosen[:i] + chosen[i + 1 :]
        index, least = first_of_best(now_with(rest))
        if sum(now_with(chosen)) - least >= LEAST_GAIN * all_weights:
            chosen[i] = index
    return chosen
