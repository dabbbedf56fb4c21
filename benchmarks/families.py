"""Finds every family of kernels that can compute a stage of a layer, with the best plan of each by its own ranking.

The library makes one plan only; a benchmark of the families' worth needs the plans of all. The name of a family is the
entry of its kernel, with ``nchw_to_nhwc`` in front if its plan first copies NCHW tensors to channels_last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tconv_swap.cuda.choice import Step, choose_backward, choose_forward
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import tiny as tiny_family
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.gradients import depthwise as gradients_depthwise
from tconv_swap.kernels.gradients import gemm as gradients_gemm
from tconv_swap.kernels.gradients import large_kernel as gradients_large_kernel
from tconv_swap.kernels.gradients import narrow_joint as gradients_narrow_joint
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Output, Part, Plan

#: The gradients that a stage computes: of the input, the weight, the bias. ``gradients``: the first two together, by
#: families that share a pass or a copy.
MASKS = {
    "grad_input": (True, False, False),
    "grad_weight": (False, True, False),
    "gradients": (True, True, False),
}
STAGES = ("forward", *MASKS)

PYTORCH = "pytorch"
#: The gradients of input and weight one after the other, each by the fastest family.
APART = "apart"
FROM_COPIES = "nchw_to_nhwc"

#: Kernels that prepare the operands of another kernel, or add up its partial results.
_HELPERS = frozenset(
    (
        "nchw_to_nhwc",
        "forward_implicit_gemm_split_k",
        "grad_weight_split_k_reduce",
        "grad_weight_split_k_reduce_untiled",
        "forward_narrow_mma_pack",
        "forward_stride1_pack",
        "forward_implicit_gemm_pack",
        "pad_rows",
        "pad_images",
        "split_k_reduce",
    )
)
#: So many plans that the best of every family, which come in turn, are among them.
_OF_ALL_FAMILIES = 16


def family_of(made: Plan) -> str:
    """Returns the name of what a plan launches, such as ``"nchw_to_nhwc grad_input_implicit_gemm_tma"``."""
    entries = dict.fromkeys(launch.kernel.entry for launch in made.launches)
    mains = " + ".join(entry for entry in entries if entry not in _HELPERS)
    return f"{FROM_COPIES} {mains}" if "nchw_to_nhwc" in entries else mains


def plans_of(problem: Problem, stage: str, has_bias: bool, device: Device) -> dict[str, Plan]:
    """Returns the best plan of each family that computes ``stage``, by the family's name.

    For the family that the library takes, it is the library's plan. The general kernels are included only if no other
    kernel of ours computes the stage.
    """
    if stage == "forward":
        found = list(_forward(problem, has_bias, device))
        default = plan.plan_forward(problem, has_bias, device)
    else:
        found = list(_BACKWARD[stage](problem, device))
        default = plan.plan_backward(problem, MASKS[stage], device)
    first: dict[str, Plan] = {}
    for made in found:
        first.setdefault(family_of(made), made)
    name = family_of(default)
    if name in first or (stage != "gradients" and not first):
        first[name] = default
    return first


def plans_of_layer(problem: Problem, stage: str, has_bias: bool, device: Device) -> list[Plan]:
    """Returns the plans by the kernels that the layer has for all its sizes, at most four; ``stage``: the forward pass
    or a single gradient."""
    count = _OF_ALL_FAMILIES
    if stage == "forward":
        return forward_plan.plan_candidates(problem, has_bias, device, count, further=False)
    if stage == "grad_input":
        parts = grad_input_implicit_gemm.part_candidates(problem, device, count, further=False)
        return [_plan(part, _grad_input_output(problem)) for part in parts]
    parts = grad_weight_implicit_gemm.part_candidates(problem, device, False, count, further=False)
    copied = gradients_nchw_to_nhwc.plan_candidates(problem, MASKS[stage], device)
    return [*(_plan(part, _grad_weight_output(problem)) for part in parts), *copied]


def chosen(problem: Problem, stage: str, has_bias: bool, device: Device, found: Iterable[str]) -> str:
    """Returns what the library's rule takes for a stage today: a family among ``found``, ``"pytorch"`` or
    ``"apart"``."""
    steps: tuple[Step, ...]
    if stage == "forward":
        steps = (choose_forward(problem, has_bias, device, "auto"),)
    else:
        steps = choose_backward(problem, MASKS[stage], device, "auto")
    if all(step.plan is None for step in steps):
        return PYTORCH
    names = [PYTORCH if step.plan is None else family_of(step.plan) for step in steps]
    return names[0] if len(names) == 1 and (names[0] in found or stage != "gradients") else APART


def _forward(problem: Problem, has_bias: bool, device: Device) -> Iterator[Plan]:
    yield from forward_plan.plan_candidates(problem, has_bias, device, _OF_ALL_FAMILIES)
    tiny = tiny_family.plan_forward(problem)
    if tiny is not None:
        yield tiny


def _grad_input(problem: Problem, device: Device) -> Iterator[Plan]:
    parts = grad_input_implicit_gemm.part_candidates(problem, device, _OF_ALL_FAMILIES)
    yield from (_plan(part, _grad_input_output(problem)) for part in parts)
    yield from _in_one_pass(problem, "grad_input", device)


def _grad_weight(problem: Problem, device: Device) -> Iterator[Plan]:
    parts = grad_weight_implicit_gemm.part_candidates(problem, device, False, _OF_ALL_FAMILIES)
    yield from (_plan(part, _grad_weight_output(problem)) for part in parts)
    yield from _in_one_pass(problem, "grad_weight", device)


def _gradients(problem: Problem, device: Device) -> Iterator[Plan]:
    outputs = (_grad_input_output(problem), _grad_weight_output(problem))
    if gradients_narrow_joint.supports(problem, device) and (
        tiles := gradients_narrow_joint.rank(problem, device)
    ):
        yield _plan(gradients_narrow_joint.lower(problem, tiles[0], device, False), *outputs)
    if gradients_large_kernel.supports(problem, device) and (
        shape := gradients_large_kernel.shape_of(problem, device)
    ):
        yield _plan(gradients_large_kernel.lower(problem, shape, device), *outputs)
    yield from _in_one_pass(problem, "gradients", device)


_BACKWARD = {"grad_input": _grad_input, "grad_weight": _grad_weight, "gradients": _gradients}


def _in_one_pass(problem: Problem, stage: str, device: Device) -> Iterator[Plan]:
    """Yields families that compute either gradient, and both in one pass or from the same copies."""
    mask = MASKS[stage]
    for whole in (
        tiny_family.plan_backward(problem, mask),
        gradients_gemm.plan_backward(problem, mask, device),
    ):
        if whole is not None:
            yield whole
    depthwise = gradients_depthwise.plan_gradients(problem, mask, device)
    if depthwise is not None:
        outputs = (_grad_input_output(problem), _grad_weight_output(problem))
        yield _plan(depthwise, *(one for one, wanted in zip(outputs, mask, strict=False) if wanted))
    yield from gradients_nchw_to_nhwc.plan_candidates(problem, mask, device)


def _plan(part: Part, *outputs: Output) -> Plan:
    return Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)


def _grad_input_output(problem: Problem) -> Output:
    return Output(problem.geometry.input_shape, problem.channels_last)


def _grad_weight_output(problem: Problem) -> Output:
    return Output(problem.geometry.weight_shape, problem.weight_channels_last)
