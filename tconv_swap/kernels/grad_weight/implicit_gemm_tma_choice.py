"""The kernels of csrc/kernels/grad_weight/implicit_gemm_tma.cu that a layer may have, and their expected times for a
size. The functions are pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.schedules import EVERY, best_of_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import Fastest, Work, fastest, work_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    TmaKernel,
    computes_any_size,
    kernels_of_sizes,
    stages_of,
)
from tconv_swap.kernels.problem import Device, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes."""

    problem: Problem
    kernel: TmaKernel
    work: Work


@lru_cache(maxsize=256)
def ranked(among: tuple[Schedule, ...], geometry: Geometry, device: Device) -> list[tuple[Fastest, Schedule]]:
    """Returns the schedules that compute a size, each with the stage and splits with which it is expected to be the
    fastest, the fastest first. (A size is ranked with and without the bias.)"""
    found = [
        (best, one)
        for one in among
        if (best := fastest(one.work, stages_of(geometry, one.kernel, device), geometry, device))
    ]
    return sorted(found, key=itemgetter(0))


def fastest_of_sizes(
    among: Iterable[Schedule], sizes: Sequence[Geometry], device: Device
) -> Iterator[tuple[Schedule, list[Fastest | None]]]:
    """Yields the schedules that are among the fastest for some of the sizes, with what is expected to be the fastest
    for each size, None where one does not compute it. Of those that differ in nothing that counts, it considers the
    first."""
    different: dict[tuple[Hashable, ...], Schedule] = {}
    for one in among:
        different.setdefault((one.work, one.kernel.loads), one)

    def of_size(one: Schedule, size: Geometry) -> Fastest | None:
        return fastest(one.work, stages_of(size, one.kernel, device), size, device)

    timed = (
        [(best.clocks, one) for one in different.values() if (best := of_size(one, size))]
        for size in sizes[::EVERY]
    )
    for one in best_of_sizes(timed, lambda one: computes_any_size(one.problem, one.kernel, device)):
        yield one, [of_size(one, size) for size in sizes]


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device, sizes: tuple[Geometry, ...]) -> tuple[Schedule, ...]:
    """Returns all schedules with tiles that suit maps of these sizes."""
    return tuple(
        Schedule(layer, one, work_of(layer, one, device)) for one in kernels_of_sizes(layer, device, sizes)
    )
