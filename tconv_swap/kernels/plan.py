"""Chooses a plan for a problem and a GPU. Pure functions of data; nothing here touches a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

from tconv_swap.kernels.common import general
from tconv_swap.kernels.common import tiny as tiny_family
from tconv_swap.kernels.common.one_pixel import NOMINAL_IMAGES, has_gemm, has_two_kernels
from tconv_swap.kernels.common.ranked import in_turn
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.gradients import depthwise as gradients_depthwise
from tconv_swap.kernels.gradients import gemm as gradients_gemm
from tconv_swap.kernels.gradients import large_kernel as gradients_large_kernel
from tconv_swap.kernels.gradients import narrow_joint as gradients_narrow_joint
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Launch, Output, Part, Plan

__all__ = [
    "Device",
    "Problem",
    "backward_candidates",
    "forward_candidates",
    "in_one_pass",
    "plan_backward",
    "plan_forward",
    "with_weight_layout",
]


def with_weight_layout(problem: Problem, weight_channels_last: bool) -> Problem:
    """Returns the same problem with the weight, or its gradient, in the given layout."""
    return problem._replace(weight_channels_last=weight_channels_last)


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan:
    """Returns the plan of a forward pass. Its inputs are input, weight and bias (or none), 16-byte aligned.

    Tiny problems take one launch. Of the kernels that a layer has, of all families, the one with the fewest expected
    clocks computes the others (forward/plan.py), and the general kernels what remains, and all of float64.
    """
    found = forward_plan.plan_candidates(problem, has_bias, device, count=1)
    made = found[0] if found else general.plan_forward(problem, has_bias)
    tiny = tiny_family.plan_forward(problem) if tiny_family.replaces(made) else None
    return tiny or made


def forward_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns at most ``count`` plans to measure: the one of ``plan_forward``, then the best of each fast family
    in turn."""
    others = forward_plan.plan_candidates(problem, has_bias, device, count)
    return list(dict.fromkeys([plan_forward(problem, has_bias, device), *others]))[:count]


def backward_candidates(
    problem: Problem, output_mask: tuple[bool, ...], device: Device, count: int
) -> list[Plan]:
    """Returns the same for the gradient of the input, or of weight and bias; for other masks only the plan of
    ``plan_backward``."""
    geometry = problem.geometry
    plans: list[Plan] = []
    if output_mask == (True, False, False):
        grad_input = Output(geometry.input_shape, problem.channels_last)
        parts = grad_input_implicit_gemm.part_candidates(problem, device, count)
        plans = [_assembled([(part, (grad_input,))]) for part in parts]
    elif not output_mask[0] and output_mask[1]:
        grad_weight = Output(geometry.weight_shape, problem.weight_channels_last)
        grad_bias = Output((geometry.out_channels,))

        def for_weight(with_bias: bool) -> list[Part]:
            return grad_weight_implicit_gemm.part_candidates(problem, device, with_bias, count)

        if output_mask[2]:
            plans = [_assembled([(part, (grad_weight, grad_bias))]) for part in for_weight(True)]
            bias = (_grad_bias(problem, device), (grad_bias,))
        if not plans:
            after = [bias] if output_mask[2] else []
            plans = [_assembled([(part, (grad_weight,)), *after]) for part in for_weight(False)]
        copies = gradients_nchw_to_nhwc.plan_candidates(problem, output_mask, device)
        plans = in_turn(plans, list(copies))
    product = gradients_gemm.plan_backward(problem, output_mask, device) if plans else None
    plans = in_turn(plans, [product] if product else [])
    return list(dict.fromkeys([plan_backward(problem, output_mask, device), *plans]))[:count]


@lru_cache(maxsize=256)
def plan_backward(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan:
    """Returns the plan of a backward pass. Its inputs are grad_output, input and weight; its outputs are the
    gradients in the mask (input, weight, bias)."""
    made = _of_larger_families(problem, output_mask, device)
    tiny = tiny_family.plan_backward(problem, output_mask) if tiny_family.replaces(made) else None
    return tiny or made


def _of_larger_families(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan:
    for family in (_gemm, _depthwise, _from_copies):
        made = family(problem, output_mask, device)
        if made is not None:
            return made
    return _direct_backward(problem, output_mask, device)


def _gemm(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan | None:
    """Returns the plan of a product of matrices, unless other kernels are expected to be faster."""
    geometry = problem.geometry
    if not has_gemm(geometry, device):
        return None
    compared = problem
    if not has_two_kernels(geometry):
        compared = problem._replace(geometry=geometry.with_batch(NOMINAL_IMAGES))
    clocks = gradients_gemm.expected_clocks(compared, output_mask, device)
    if clocks == inf or expected_clocks(compared, output_mask, device) < clocks:
        return None
    return gradients_gemm.plan_backward(problem, output_mask, device)


@lru_cache(maxsize=256)
def expected_clocks(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> float:
    """Returns the expected clocks of the gradients of the mask, each of the input and of the weight by the kernels that
    compute it alone; infinitely many where none does."""
    wants_input, wants_weight, wants_bias = output_mask
    clocks = grad_input_implicit_gemm.expected_clocks(problem, device) if wants_input else 0.0
    if wants_weight:
        clocks += grad_weight_implicit_gemm.expected_clocks(problem, device, wants_bias)
    return clocks


def _depthwise(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan | None:
    """Returns a plan that computes all gradients in one pass. If that pass does not read all of grad_output, the
    bias has a pass of its own."""
    geometry = problem.geometry
    with_bias = output_mask[2] and gradients_depthwise.meets_all(geometry)
    part = gradients_depthwise.plan_gradients(problem, (*output_mask[:2], with_bias), device)
    if part is None:
        return None
    grad_input = Output(geometry.input_shape, problem.channels_last)
    grad_weight = Output(geometry.weight_shape, problem.weight_channels_last)
    grad_bias = Output((geometry.out_channels,))
    outputs = zip((grad_input, grad_weight, grad_bias), (*output_mask[:2], with_bias), strict=True)
    pieces = [(part, tuple(output for output, wanted in outputs if wanted))]
    if output_mask[2] and not with_bias:
        pieces.append((_grad_bias(problem, device), (grad_bias,)))
    return _assembled(pieces)


def _from_copies(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan | None:
    """Returns a plan that reads copies in channels_last, unless one pass computes the gradients of input and weight."""
    if output_mask[0] and output_mask[1] and in_one_pass(problem, device):
        return None
    return gradients_nchw_to_nhwc.plan_backward(problem, output_mask, device)


def _direct_backward(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan:
    """Returns a plan that reads the tensors as they lie."""
    geometry = problem.geometry
    pieces: list[tuple[Part, tuple[Output, ...]]] = []
    grad_input = Output(geometry.input_shape, problem.channels_last)
    grad_weight = Output(geometry.weight_shape, problem.weight_channels_last)
    grad_bias = Output((geometry.out_channels,))
    wants_input, wants_weight, wants_bias = output_mask
    together = _together(problem, wants_bias, device) if wants_input and wants_weight else None
    if together is not None:
        part, with_bias = together
        pieces.append((part, (grad_input, grad_weight, *((grad_bias,) if with_bias else ()))))
        wants_input, wants_weight, wants_bias = False, False, wants_bias and not with_bias
    if wants_input:
        pieces.append((_grad_input(problem, device), (grad_input,)))
    if wants_weight:
        both = _grad_weight_and_bias(problem, device) if wants_bias else None
        if both is not None:
            pieces.append((both, (grad_weight, grad_bias)))
            wants_bias = False
        else:
            pieces.append((_grad_weight(problem, device), (grad_weight,)))
    if wants_bias:
        pieces.append((_grad_bias(problem, device), (grad_bias,)))
    return _assembled(pieces)


def _assembled(pieces: Sequence[tuple[Part, tuple[Output, ...]]]) -> Plan:
    """Returns the plan that runs the parts one after the other, each with its outputs. They share the workspace."""
    outputs: list[Output] = []
    launches: list[Launch] = []
    for part, made in pieces:
        launches.extend(part.with_outputs(*range(len(outputs), len(outputs) + len(made))))
        outputs.extend(made)
    parts = [part for part, _ in pieces]
    return Plan(
        ", ".join(dict.fromkeys(part.family for part in parts)),
        "; ".join(dict.fromkeys(part.why for part in parts)),
        tuple(outputs),
        tuple(launches),
        workspace_bytes=max((part.workspace_bytes for part in parts), default=0),
    )


def in_one_pass(problem: Problem, device: Device) -> bool:
    """Returns whether a kernel computes the gradients of input and weight in one pass over grad_output."""
    return _together(problem, False, device) is not None


def _together(problem: Problem, wants_bias: bool, device: Device) -> tuple[Part, bool] | None:
    """Returns the part that computes the gradients of input and weight in one pass, and whether it includes the
    bias; None if no kernel does that."""
    part = gradients_narrow_joint.plan_gradients(problem, device, wants_bias)
    if part is not None:
        return part, wants_bias and gradients_narrow_joint.counts_the_output(problem.geometry)
    part = gradients_large_kernel.plan_gradients(problem, device)
    return None if part is None else (part, False)


def _grad_input(problem: Problem, device: Device) -> Part:
    return grad_input_implicit_gemm.plan_grad_input(problem, device) or general.plan_grad_input(problem)


def _grad_weight(problem: Problem, device: Device) -> Part:
    found = grad_weight_implicit_gemm.plan_grad_weight(problem, device)
    return found or general.plan_grad_weight(problem, device)


def _grad_weight_and_bias(problem: Problem, device: Device) -> Part | None:
    """Returns the part that computes both in one pass over grad_output (outputs: weight, bias), or None if no
    kernel does that."""
    return grad_weight_implicit_gemm.plan_grad_weight(problem, device, with_bias=True)


def _grad_bias(problem: Problem, device: Device) -> Part:
    return general.plan_grad_bias(problem, device)
