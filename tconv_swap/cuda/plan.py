"""The choice: a problem and a GPU in, a plan out. Pure functions of data; nothing here touches a GPU."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.cuda import plan_general, plan_narrow, plan_tile
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import Plan

__all__ = ["Device", "Problem", "plan_backward", "plan_forward", "with_weight_layout"]


def with_weight_layout(problem: Problem, weight_channels_last: bool) -> Problem:
    """The same problem with the weight, or its gradient, in the layout given."""
    return replace(problem, weight_channels_last=weight_channels_last)


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan:
    """Inputs: input, weight, bias (or none), 16-byte aligned. Output: the output.

    The narrow kernels take what memory bounds or what has few channels in a group; the halo-tile kernels what has
    channels enough to fill a tile of the tensor cores; the general kernels the rest, and all of float64.
    """
    for family in (plan_narrow.plan_forward, plan_tile.plan_forward):
        made = family(problem, has_bias, device)
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
