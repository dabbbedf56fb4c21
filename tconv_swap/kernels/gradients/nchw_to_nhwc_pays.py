"""Where NCHW tensors are brought to channels_last first, because the kernels for channels_last make up for that. Pure
functions of data."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, sizes_of
from tconv_swap.kernels.problem import Device, Problem

#: As measured on an H200 in float16: channels of either side of a group, and multiply-adds for each element that is
#: arranged.
LEAST_CHANNELS = 128
LEAST_MACS_PER_ELEMENT = 192


def enough_work(problem: Problem, device: Device) -> bool:
    """Whether arranging input and grad_output was measured to be the faster way (docs/kernels/arrange.md)."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.channels_last or max(g.stride) == 1 or g.batch == 0:
        return False
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return False
    if min(g.in_channels_per_group, g.out_channels_per_group) < LEAST_CHANNELS:
        return False
    elements = g.in_channels * g.height * g.width + g.out_channels * g.out_height * g.out_width
    return g.macs >= LEAST_MACS_PER_ELEMENT * g.batch * elements


def at_some_size(problem: Problem, device: Device) -> bool:
    """The same of a layer."""
    g = problem.geometry
    if min(g.in_channels_per_group, g.out_channels_per_group) < LEAST_CHANNELS:
        return False
    return _at_some_size(of_any_size(problem), device)


@lru_cache(maxsize=1024)
def _at_some_size(layer: Problem, device: Device) -> bool:
    return any(
        enough_work(replace(layer, geometry=size.of(layer.geometry)), device) for size in sizes_of(layer)
    )
