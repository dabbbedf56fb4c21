"""Selects a few schedules for all sizes of a layer: those whose expected times for representative sizes are closest
to the best of all schedules. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.problem import Problem

#: The most kernels that compute one stage of a layer in one dtype and layout, over all sizes.
MAX_SCHEDULES = 4
#: The regret of a schedule for a size that it cannot compute.
MAX_REGRET = 1e3
#: Batch, rows and columns of the representative maps, the most usual ones first. PATCHES: of layers whose kernel is
#: their stride.
SIZES: tuple[tuple[int, int, int], ...] = (
    *((16, 32, 32), (8, 64, 64), (128, 16, 16), (8, 128, 128), (4, 256, 256)),
    *((128, 8, 8), (256, 14, 14), (32, 28, 28), (1, 16, 16), (1, 32, 32), (1, 64, 64), (128, 4, 4)),
)
#: Further ones: batches and sides that are no powers of two make other numbers of tiles.
MORE_SIZES = (
    *((5, 32, 32), (3, 64, 64), (50, 16, 16), (20, 28, 28), (12, 40, 40), (6, 56, 56), (300, 7, 7)),
    *((40, 20, 20), (100, 12, 12), (24, 24, 24), (8, 25, 25), (2, 100, 100)),
)
PATCHES = (8, 37, 37)
#: Of pose networks, whose sides are no powers of two, and of photographs.
FURTHER_SIZES = ((32, 8, 6), (12, 24, 18), (4, 512, 512))
#: Of detection and segmentation networks in NCHW, whose images have any size: rows that are no whole pieces of memory.
#: Most networks pad their images, so they are unusual.
RAGGED_SIZES: tuple[tuple[int, int, int], ...] = (
    *((8, 33, 33), (8, 25, 34), (4, 65, 65), (4, 50, 67), (2, 129, 129), (1, 257, 257)),
)
#: Of networks that are served with few images; they are unusual.
FEW_IMAGES = ((1, 7, 7), (4, 8, 8), (2, 13, 13))
SIZES_OF_ONE_ROW: tuple[tuple[int, int, int], ...] = (
    (8, 1, 512),
    (4, 1, 512),
    (8, 1, 4096),
    (1, 1, 64),
    (1, 1, 1024),
)
MORE_SIZES_OF_ONE_ROW = ((16, 1, 32), (16, 1, 175), (4, 1, 861), (12, 1, 150), (2, 1, 10000))
ONE_PIXEL: tuple[tuple[int, int, int], ...] = ((128, 1, 1),)
#: Channels times columns of usual maps (layers of many channels have smaller maps), and the weight of unusual ones.
CHANNEL_COLUMNS = (2048, 32768)
UNUSUAL = 0.25
#: The same of the maps of ``select_schedules``.
MAP_CHANNEL_COLUMNS = (1 << 11, 1 << 16)
#: The weight of single images: networks are trained on several.
SINGLE = 0.5

#: Images, rows and columns of the maps for which ``select_schedules`` selects, from the innermost maps of encoders to
#: photographs.
MAPS: tuple[tuple[int, int, int], ...] = (
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
ROWS: tuple[tuple[int, int, int], ...] = ((8, 1, 32), (1, 1, 101), (4, 1, 512), (8, 1, 4096), (8, 64, 64))
#: The candidates are, for every third of the sizes, the 12 best schedules and the 12 best of those that compute any
#: size.
EVERY, BEST = 3, 12

_Schedule = TypeVar("_Schedule")


def select_schedules(
    layer: Problem,
    limit: int,
    candidates: Callable[[Problem], Iterable[_Schedule]],
    supports: Callable[[Problem, _Schedule], bool],
    expected: Callable[[Problem, _Schedule], float],
    any_size: Callable[[_Schedule], bool],
) -> tuple[_Schedule, ...]:
    """Returns at most ``limit`` schedules for all sizes of a layer, out of the candidates for representative sizes.
    The first one computes ``any_size``, if such a candidate exists. ``expected`` returns the time of a size that the
    schedule ``supports``."""
    geometries = _maps_of(layer)
    problems = [layer._replace(geometry=geometry) for geometry in geometries]
    found = pool(problems, candidates, supports, expected, any_size)
    times = {
        one: [expected(problem, one) if supports(problem, one) else math.inf for problem in problems]
        for one in found
    }
    weights = [_weight_of(layer, geometry) for geometry in geometries]
    return select_covering(times, weights, [one for one in times if any_size(one)], limit)


def pool(
    problems: Sequence[Problem],
    candidates: Callable[[Problem], Iterable[_Schedule]],
    supports: Callable[[Problem, _Schedule], bool],
    expected: Callable[[Problem, _Schedule], float],
    any_size: Callable[[_Schedule], bool],
) -> tuple[_Schedule, ...]:
    """Returns the schedules that are the best of a third of the sizes of a layer, and the best of those that compute
    ``any_size``. ``expected`` returns the time of a size that the schedule ``supports``."""
    return best_of_sizes(
        (
            [(expected(problem, one), one) for one in candidates(problem) if supports(problem, one)]
            for problem in problems[::EVERY]
        ),
        any_size,
    )


def best_of_sizes(
    timed_of_sizes: Iterable[Sequence[tuple[float, _Schedule]]], any_size: Callable[[_Schedule], bool]
) -> tuple[_Schedule, ...]:
    """Returns the schedules that are the best of a size, and the best of those that compute ``any_size``, by the
    expected times for each size."""
    found: dict[_Schedule, None] = {}
    for timed in timed_of_sizes:
        ranked = [one for _, one in sorted(timed, key=itemgetter(0))]
        found.update(dict.fromkeys(ranked[:BEST]))
        found.update(dict.fromkeys(islice(filter(any_size, ranked), BEST)))
    return tuple(found)


def _maps_of(layer: Problem) -> list[Geometry]:
    """Returns the sizes for which ``select_schedules`` selects."""
    g = layer.geometry
    if g.height == g.width == 1:
        sizes = ONE_PIXEL
    else:
        sizes = ROWS if g.one_row else MAPS
    found = [g._replace(batch=batch, height=height, width=width) for batch, height, width in sizes]
    return [one for one in found if min(one.out_height, one.out_width) > 0]


def _weight_of(layer: Problem, geometry: Geometry) -> float:
    """Returns the weight of one of these sizes."""
    low, high = MAP_CHANNEL_COLUMNS
    columns = layer.geometry.in_channels_per_group * geometry.width
    return 1.0 if low <= columns <= high else UNUSUAL


def representative_sizes(
    one_row: bool,
    patches: bool,
    channels: int,
    further: Sequence[tuple[int, int, int]] = (),
    unusual: Sequence[tuple[int, int, int]] = (),
) -> list[tuple[tuple[int, int, int], float]]:
    """Returns batch, rows and columns of the maps that represent all sizes of a layer, and the weight of each.

    ``one_row``: the layer is of one dimension. ``patches``: its kernel is its stride. ``channels``: those of a group
    that usual numbers of columns go with; ``further``: other maps; ``unusual``: others that are so whatever their
    columns.
    """
    if one_row:
        rows = (*SIZES_OF_ONE_ROW, *MORE_SIZES_OF_ONE_ROW)
        return [(size, SINGLE if size[0] == 1 else 1.0) for size in rows]
    least, most = CHANNEL_COLUMNS
    found = []
    for size in (*SIZES, *MORE_SIZES, *further):
        usual = least <= channels * size[2] <= most
        found.append((size, (SINGLE if size[0] == 1 else 1.0) * (1.0 if usual else UNUSUAL)))
    found += [(size, UNUSUAL) for size in unusual]
    return [*found, (PATCHES, 1.0)] if patches else found


def ragged_sizes(channels_last: bool, stride: int, element_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the maps at which rows of grad_output are no whole pieces of memory; ``stride``: of columns."""
    whole = channels_last or stride * element_bytes % TMA_ALIGNMENT == 0
    return () if whole else RAGGED_SIZES


class Timed(NamedTuple):
    """A kernel of a family, its expected clocks for each representative size, and whether it computes any size."""

    family: str
    kernel: Hashable
    clocks: list[float]
    any_size: bool


def select_of_families(
    timed: Sequence[Timed], weights: Sequence[float], limit: int
) -> dict[str, tuple[Hashable, ...]]:
    """Returns at most ``limit`` kernels with the least regret, by family, in the order in which they are selected; the
    first one computes any size, if there is such a one. ``weights``: of the sizes."""
    times = {(one.family, one.kernel): one.clocks for one in timed}
    always = [(one.family, one.kernel) for one in timed if one.any_size]
    found: dict[str, tuple[Hashable, ...]] = {}
    for family, kernel in select_covering(times, weights, always, limit):
        found[family] = (*found.get(family, ()), kernel)
    return found


def select_covering(
    times: Mapping[_Schedule, Sequence[float]],
    weights: Sequence[float],
    first: Iterable[_Schedule],
    limit: int,
) -> tuple[_Schedule, ...]:
    """Returns at most ``limit`` schedules with the least regret; the first one is of ``first``, unless that is empty.

    ``times``: the times of each schedule for each size, infinite where it cannot compute the size. ``weights``: of
    the sizes.
    """
    if not times:
        return ()
    schedules = list(times)
    best = [min(of_size) for of_size in zip(*times.values(), strict=True)]
    weighted = [(j, shortest, weights[j]) for j, shortest in enumerate(best) if shortest < math.inf]
    largest = math.log(MAX_REGRET)
    # Conditions, because calls of min take several times as long.
    regrets = [
        [
            weight * (math.log(longer) if (longer := row[j] / shortest) < MAX_REGRET else largest)
            for j, shortest, weight in weighted
        ]
        for row in times.values()
    ]
    most = [weight * largest for _, _, weight in weighted]

    def joined(among: Iterable[int], chosen: Sequence[int]) -> tuple[float, int]:
        """Returns the least regret of the chosen schedules and another one, and that one."""
        now = [min(of_size) for of_size in zip(most, *(regrets[i] for i in chosen), strict=True)]
        return min((sum([a if a < b else b for a, b in zip(now, regrets[i], strict=True)]), i) for i in among)

    indices = {one: i for i, one in enumerate(schedules)}
    every = range(len(schedules))
    always = [indices[one] for one in first] or every
    regret, better = joined(always, ())
    found = [better]
    while len(found) < limit:
        less, better = joined(every, found)
        if less >= regret:
            break
        regret = less
        found.append(better)
    # Each of them in turn is replaced if another one reduces the regret, until no one is, at most twice. The last one
    # that was found is the best beside the others.
    kept = 1
    for i in (*range(len(found)), *range(len(found))):
        if kept == len(found):
            break
        less, better = joined(every if i else always, found[:i] + found[i + 1 :])
        kept += 1
        if less < regret:
            regret, found[i], kept = less, better, 1
    return tuple(schedules[i] for i in found)
