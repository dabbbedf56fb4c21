"""How many of a layer's kernels each family of the forward pass may have, over all sizes: at most ``MOST_SCHEDULES``
in all, beside those that pack, arrange and add up. Pure functions of data."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.cuda.plans import plan_fold, plan_pixel, plan_strips
from tconv_swap.cuda.plans.layer_sizes import of_any_size
from tconv_swap.cuda.plans.schedules import MOST_SCHEDULES
from tconv_swap.cuda.plans.tile_layout import TileProblem, has_stride_of_one_pixel
from tconv_swap.cuda.problem import Device, Problem


def share_of_narrow(problem: Problem, device: Device) -> int:
    """Those of the family that computes what plan_fold.py leaves over of a narrow layer."""
    if not plan_fold.computes_some_size(problem, device):
        return MOST_SCHEDULES
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    return MOST_SCHEDULES - len(plan_fold.schedules(layer, device))


def share_of_tile(layer: TileProblem, device: Device) -> int:
    """Those of the halo tile, maps of one pixel apart, which have another one where the layer has another stride for
    them; plan_pixel.py and plan_strips.py have one each."""
    if layer.of_grad_input:
        return MOST_SCHEDULES - has_stride_of_one_pixel(layer.geometry)
    pixels = Problem(
        layer.geometry,
        layer.dtype,
        layer.precision,
        layer.output_channels_last,
        layer.weight_channels_last,
    )
    return (
        MOST_SCHEDULES
        - has_stride_of_one_pixel(layer.geometry)
        - plan_pixel.computes_some_size(pixels, device)
        - plan_strips.computes_some_size(layer, device)
    )
