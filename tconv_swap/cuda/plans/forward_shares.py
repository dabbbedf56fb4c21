"""How many of a layer's kernels each family of the forward pass may have, over all sizes: at most ``MOST_KERNELS`` in
all. Pure functions of data."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.cuda.plans import plan_fold
from tconv_swap.cuda.plans.layer_sizes import of_any_size
from tconv_swap.cuda.problem import Device, Problem

#: Kernels of the forward pass of a layer in one dtype and layout, beside those that pack, arrange and add up.
MOST_KERNELS = 4


def share(problem: Problem, device: Device) -> int:
    """Those of the family that computes what plan_fold.py leaves over of a narrow layer."""
    if not plan_fold.computes_some_size(problem, device):
        return MOST_KERNELS
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    return MOST_KERNELS - len(plan_fold.schedules(layer, device))
