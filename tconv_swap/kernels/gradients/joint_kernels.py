"""How many kernels of a layer compute both gradients in one pass. They count among the kernels of each."""

from __future__ import annotations

from functools import lru_cache

from tconv_swap.kernels.gradients import large_kernel as gradients_large_kernel
from tconv_swap.kernels.gradients import narrow_joint as gradients_narrow_joint
from tconv_swap.kernels.problem import Device, Problem


@lru_cache(maxsize=1024)
def joint_kernels(layer: Problem, device: Device) -> int:
    """Returns how many kernels compute both gradients of some sizes of a layer in one pass."""
    return max(
        gradients_narrow_joint.kernels_of(layer, device), gradients_large_kernel.kernels_of(layer, device)
    )
