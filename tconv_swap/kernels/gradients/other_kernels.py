"""How many kernels a layer has beside those that are selected for each gradient."""

from __future__ import annotations

from functools import lru_cache

from tconv_swap.kernels.gradients import large_kernel as gradients_large_kernel
from tconv_swap.kernels.gradients import narrow_joint as gradients_narrow_joint
from tconv_swap.kernels.gradients.narrow_mma import MANY_TAPS
from tconv_swap.kernels.problem import Device, Problem


@lru_cache(maxsize=1024)
def other_kernels(layer: Problem, device: Device) -> int:
    """Returns how many kernels of each gradient a layer has beside those that are selected for it: those that compute
    both gradients of some sizes in one pass, and, for many taps, the general kernel, which computes what would leave
    too many partial sums."""
    joint = max(
        gradients_narrow_joint.kernels_of(layer, device), gradients_large_kernel.kernels_of(layer, device)
    )
    return joint + (layer.geometry.taps >= MANY_TAPS)
