"""A few schedules for all sizes of a layer, out of many: those that bring the expected time of sizes that stand for all
closest to the best of all schedules. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import TypeVar

from tconv_swap.kernels.grad_weight.implicit_gemm_classes import select, sizes_of, weight_of
from tconv_swap.kernels.problem import Problem

#: Kernels of one stage of a layer that compute it, in one dtype and layout, over all sizes.
MAX_SCHEDULES = 4
#: Of a schedule for a size that it cannot compute.
MAX_REGRET = 1e3
#: Batch, rows and columns of the maps that stand for all, those first that many networks have; and of those of patches,
#: which kernels enlarge that are their strides.
SIZES: tuple[tuple[int, int, int], ...] = (
    *((16, 32, 32), (8, 64, 64), (128, 16, 16), (8, 128, 128), (4, 256, 256)),
    *((128, 8, 8), (256, 14, 14), (32, 28, 28), (1, 16, 16), (1, 32, 32), (1, 64, 64), (128, 4, 4)),
)
PATCHES = (8, 37, 37)
SIZES_OF_ONE_ROW: tuple[tuple[int, int, int], ...] = (
    (8, 1, 512),
    (4, 1, 512),
    (8, 1, 4096),
    (1, 1, 64),
    (1, 1, 1024),
)
ONE_PIXEL: tuple[tuple[int, int, int], ...] = ((128, 1, 1),)
#: Channels times columns of the maps that networks have, and how much others count for: layers of many channels see
#: smaller maps.
CHANNEL_COLUMNS = (2048, 32768)
UNUSUAL = 0.25
#: The same of single images: networks are trained on several.
SINGLE = 0.5

#: Of every so many of the sizes the best so many schedules are candidates, and as many of those for any size.
EVERY, BEST = 3, 12

_Schedule = TypeVar("_Schedule")


def select_schedules(
    layer: Problem,
    most: int,
    candidates: Callable[[Problem], Iterable[_Schedule]],
    computes: Callable[[Problem, _Schedule], bool],
    expected: Callable[[Problem, _Schedule], float],
    any_size: Callable[[_Schedule], bool],
    every: int = EVERY,
    otherwise: float | None = None,
) -> tuple[_Schedule, ...]:
    """At most ``most`` schedules for all sizes of a layer, out of the candidates for the sizes that stand for all
    (grad_weight/implicit_gemm_classes.py); the first of those that compute ``any_size``, if there are such.
    ``expected``: the time of a size that the schedule ``computes``."""
    geometries = [size.of(layer.geometry) for size in sizes_of(layer)]
    problems = [replace(layer, geometry=geometry) for geometry in geometries]
    found: dict[_Schedule, None] = {}
    for problem in problems[::every]:
        own = [one for one in candidates(problem) if computes(problem, one)]
        for some in (own, [one for one in own if any_size(one)]):
            best = nsmallest(BEST, some, key=lambda one, problem=problem: expected(problem, one))  # type: ignore[misc]
            found.update(dict.fromkeys(best))
    times = {
        one: [expected(problem, one) if computes(problem, one) else math.inf for problem in problems]
        for one in found
    }
    weights = [weight_of(layer, geometry) for geometry in geometries]
    if otherwise is not None:
        every_schedule = list(times)
        chosen = select(list(times.values()), weights, most, math.log(otherwise))
        return tuple(every_schedule[index] for index in chosen)
    return select_covering(times, weights, [one for one in times if any_size(one)], most)


def select_covering(
    times: Mapping[_Schedule, Sequence[float]],
    weights: Sequence[float],
    first: Iterable[_Schedule],
    most: int,
) -> tuple[_Schedule, ...]:
    """At most ``most`` schedules, the first one of ``first``, if there are any there.

    ``times``: of each schedule for each of the sizes, infinite where it cannot compute it. ``weights``: of the sizes.
    """
    if not times:
        return ()
    best = [min(of_size) for of_size in zip(*times.values(), strict=True)]

    def regret(chosen: Sequence[_Schedule]) -> float:
        reached = (min(of_size) for of_size in zip(*(times[one] for one in chosen), strict=True))
        return sum(
            weight * math.log(min(MAX_REGRET, time / least))
            for time, least, weight in zip(reached, best, weights, strict=True)
            if least < math.inf
        )

    always = list(first) or list(times)
    found = [min(always, key=lambda one: regret([one]))]
    while len(found) < most:
        better = min(times, key=lambda one: regret([*found, one]))
        if regret([*found, better]) >= regret(found):
            break
        found.append(better)
    # One of them at a time is exchanged for a better one.
    for i in (*range(len(found)), *range(len(found))):
        rest = found[:i] + found[i + 1 :]
        better = min(times if i else always, key=lambda one, rest=rest: regret([*rest, one]))
        if regret([*rest, better]) < regret(found):
            found[i] = better
    return tuple(found)
