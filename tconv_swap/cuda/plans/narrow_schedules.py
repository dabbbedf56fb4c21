"""How many tiles of the narrow gradients a layer has, whatever its sizes."""

from __future__ import annotations

from functools import lru_cache

from tconv_swap.cuda.plans import plan_gathered, plan_large
from tconv_swap.cuda.problem import Device, Problem

#: Kernels of each gradient that a layer has over all sizes, of all families; and of these narrow ones at most.
MOST_KERNELS, MOST_NARROW = 4, 3


@lru_cache(maxsize=1024)
def most_schedules(layer: Problem, device: Device) -> int:
    """Less by what computes both gradients of some sizes in one pass."""
    others = max(plan_gathered.kernels_of(layer, device), plan_large.kernels_of(layer, device))
    return min(MOST_NARROW, MOST_KERNELS - others)
