"""Says for which NCHW layers the gradient of the weight gains from copies in channels_last. Pure functions of data."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, sizes_of
from tconv_swap.kernels.gradients.narrow_mma import MANY_TAPS
from tconv_swap.kernels.problem import Device, Problem

#: As measured on an H200 in float16: channels of either side of a group, of kernels of many taps and of others, and
#: multiply-adds for each element that is copied (with 144 to 819 of them the gradient of the weight was 1.02 to 1.9
#: times as fast on 13 layers, with 43 to 128 of them 0.58 to 1.03 times on four).
MIN_CHANNELS_OF_MANY_TAPS = 128
MIN_CHANNELS = 48
MIN_MACS_PER_ELEMENT = 136


def enough_channels(geometry: Geometry, least: int) -> bool:
    """Returns whether both sides of a group have at least ``least`` channels."""
    return min(geometry.in_channels_per_group, geometry.out_channels_per_group) >= least


def enough_work(problem: Problem, device: Device) -> bool:
    """Returns whether copies of input and grad_output were measured to be faster
    (docs/kernels/gradients/nchw_to_nhwc.md)."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.channels_last or max(g.stride) == 1 or g.batch == 0:
        return False
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return False
    # The narrow kernels take the gradient of the input of kernels of many taps.
    if not enough_channels(g, MIN_CHANNELS_OF_MANY_TAPS if g.taps >= MANY_TAPS else MIN_CHANNELS):
        return False
    elements = g.in_channels * g.height * g.width + g.out_channels * g.out_height * g.out_width
    return g.macs >= MIN_MACS_PER_ELEMENT * g.batch * elements


def at_some_size(problem: Problem, device: Device) -> bool:
    """Returns whether some size of this layer has enough work, and the copy engine can load its channels."""
    g = problem.geometry
    if not enough_channels(g, MIN_CHANNELS) or g.in_channels % 8 or g.out_channels % 8:
        return False
    return _at_some_size(of_any_size(problem), device)


@lru_cache(maxsize=1024)
def _at_some_size(layer: Problem, device: Device) -> bool:
    return any(
        enough_work(replace(layer, geometry=size.of(layer.geometry)), device) for size in sizes_of(layer)
    )
