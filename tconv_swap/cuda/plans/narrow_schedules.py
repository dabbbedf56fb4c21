"""How many tiles of the narrow gradients a layer has, whatever its sizes."""

from __future__ import annotations

from functools import lru_cache

from tconv_swap.cuda.plans import plan_gathered, plan_large
from tconv_swap.cuda.plans.narrow_gradients import MANY_TAPS
from tconv_swap.cuda.problem import Device, Problem

#: Kernels of each gradient that a layer has over all sizes, of all families; and of these narrow ones at most.
MOST_KERNELS, MOST_NARROW = 4, 3


@lru_cache(maxsize=1024)
def most_schedules(layer: Problem, device: Device) -> int:
    """Less by what computes both gradients of some sizes in one pass, and by the general kernel, which computes what
    would leave too many sums of many taps."""
    others = max(plan_gathered.kernels_of(layer, device), plan_large.kernels_of(layer, device))
    others += layer.geometry.taps >= MANY_TAPS
    return min(MOST_NARROW, MOST_KERNELS - others)


def loads_every_size(layer: Problem, load: int) -> bool:
    """Whether rows of grad_output hold whole loads whatever the size; of many taps, those without output padding."""
    if layer.channels_last or load == 1:
        return True
    g = layer.geometry
    return g.taps >= MANY_TAPS and g.stride[1] % load == 0 and (g.out_width - g.output_padding[1]) % load == 0
