"""The choice: a problem and a GPU in, a plan out. Pure functions of data; nothing here touches a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tconv_swap.cuda import plan_general, plan_narrow, plan_tile
from tconv_swap.cuda.program import Plan
from tconv_swap.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Device:
    """What planning knows of a GPU. ``architecture`` is NVRTC's name for it, such as ``"sm_90a"``."""

    architecture: str
    multiprocessors: int
    shared_memory_per_block: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One transposed convolution to compute. ``precision``: ``"tf32"`` allows float32 products to be rounded
    to TF32, ``"ieee"`` does not. ``channels_last`` is the layout of every activation."""

    geometry: Geometry
    dtype: torch.dtype
    precision: str
    channels_last: bool
    weight_channels_last: bool


def with_weight_layout(problem: Problem, weight_channels_last: bool) -> Problem:
    """The same problem with the weight, or its gradient, in the layout given."""
    return replace(problem, weight_channels_last=weight_channels_last)


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan:
    """Inputs: input, weight, bias (or none), 16-byte aligned. Output: the output.

    The narrow kernels take what memory bounds or what has few channels in a group; the halo-tile kernels what has
    channels enough to fill a tile of the tensor cores; the general kernels the rest, and all of float64.
    """
    for family in (plan_narrow.plan_narrow_forward, plan_tile.plan_tile_forward):
        made = family(
            problem.geometry,
            problem.dtype,
            problem.precision,
            problem.channels_last,
            problem.weight_channels_last,
            has_bias,
            device.architecture,
            device.multiprocessors,
            device.shared_memory_per_block,
        )
        if made is not None:
            return made
    return plan_general.plan_forward(
        problem.geometry, problem.dtype, problem.channels_last, problem.weight_channels_last, has_bias
    )


def plan_backward(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan:
    """Inputs: grad_output, input, weight. Outputs: the gradients the mask asks for (input, weight, bias)."""
    return plan_general.plan_backward(
        problem.geometry,
        problem.dtype,
        problem.channels_last,
        problem.weight_channels_last,
        output_mask,
        device.multiprocessors,
    )
