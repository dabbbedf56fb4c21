"""Plans the gradient of the weight of NCHW tensors, alone or with that of the input, from copies in channels_last:
launches of common/nchw_to_nhwc.py copy the tensors to channels_last in the workspace, and the kernels for channels_last
compute from the copies. Both gradients share the copy of grad_output. (grad_input/nchw_to_nhwc.py plans the gradient of
the input alone.) The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.nchw_to_nhwc import (
    Matrices,
    activation,
    reduce_row_sums,
    row_sums_bytes,
    transpose,
)
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import (
    Argument,
    ArgumentKind,
    Launch,
    Output,
    Part,
    Plan,
    input_,
    output,
    with_operands,
    workspace,
)

GRAD_OUTPUT, INPUT, WEIGHT = range(3)


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A part that computes one gradient, its output, and the inputs of the plan that it reads from copies in
    channels_last. ``transposed_back``: the part stores a transposed output, which another launch transposes to the
    output's layout."""

    part: Part
    output: Output
    copied: tuple[int, ...]
    transposed_back: Matrices | None = None


def plan_backward(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan | None:
    """Returns the plan of the gradients of the mask from copies in channels_last, or None where kernels that read the
    tensors as they lie are expected to be as fast.

    Inputs: grad_output, input, weight (16-byte aligned). Workspace: the copies, at most ``MAX_COPY_BYTES``, and the
    workspace of the parts.
    """
    wants_input, wants_weight, wants_bias = output_mask
    if not wants_weight:
        return None
    copies = grad_weight_implicit_gemm.ranked_from_copies(problem, device)
    if not copies:
        return None
    from_copies, apart = (
        copies[0].clocks,
        grad_weight_implicit_gemm.clocks_as_it_lies(problem, device, wants_bias),
    )
    if wants_input:
        # Both read the same copy of grad_output.
        from_copies += _grad_input_clocks(problem, device)
        apart += grad_input_implicit_gemm.expected_clocks(problem, device)
    if apart <= from_copies:
        return None
    return next(plan_candidates(problem, output_mask, device), None)


def plan_candidates(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Iterator[Plan]:
    """Yields the plans of the layer's kernels that read copies of grad_output and the input in channels_last, the one
    that is expected to be the fastest first, whether or not others are faster."""
    copies = grad_weight_implicit_gemm.ranked_from_copies(problem, device) if output_mask[1] else []
    before = []
    if copies and output_mask[0]:
        grad_input = _grad_input(problem, device)
        if grad_input is None:
            return
        before.append(grad_input)
    for one in copies:
        yield assembled(problem, [*before, _grad_weight(problem, one.make())], output_mask[2], device)


def _grad_input_clocks(problem: Problem, device: Device) -> float:
    """Returns the expected clocks of the gradient of the input, which may read the copy of grad_output that exists
    already."""
    direct = grad_input_implicit_gemm.expected_clocks(problem, device)
    if _reads_as_it_lies(problem, device):
        return direct
    copies = grad_input_implicit_gemm.ranked_from_copies(problem, device)
    return min(direct, copies[0].clocks) if copies else direct


def _reads_as_it_lies(problem: Problem, device: Device) -> bool:
    """Returns whether kernels of the forward pass, which only read tensors as they lie, or those that read copies with
    more channels compute the gradient of the input."""
    return (
        grad_input_implicit_gemm.by_forward_kernels(problem, device)
        or grad_input_implicit_gemm.channels_of_copies(problem, device) is not None
    )


def _grad_input(problem: Problem, device: Device) -> GradientPart | None:
    """Returns grad_input, from the copies where that is expected to be faster than every part that reads the tensors as
    they lie. grad_output is copied for grad_weight in any case."""
    made = Output(problem.geometry.input_shape)
    if not _reads_as_it_lies(problem, device):
        direct = grad_input_implicit_gemm.ranked(problem, device)
        copies = grad_input_implicit_gemm.ranked_from_copies(problem, device)
        if copies and (not direct or copies[0].clocks <= direct[0].clocks):
            return GradientPart(copies[0].make(), made, (GRAD_OUTPUT, WEIGHT))
    part = grad_input_implicit_gemm.plan_grad_input(problem, device)
    return GradientPart(part, made, ()) if part is not None else None


def _grad_weight(problem: Problem, part: Part) -> GradientPart:
    """Returns grad_weight. A launch that adds up partial sums can store any layout; if there is none, the part stores
    channels_last, whose lines are whole, and another launch transposes it."""
    copied = (GRAD_OUTPUT, INPUT)
    made = Output(problem.geometry.weight_shape, problem.weight_channels_last)
    if len(part.launches) == 1 and not problem.weight_channels_last:
        return GradientPart(part, made, copied, tensors_of(problem)[WEIGHT].transposed)
    return GradientPart(part, made, copied)


def assembled(problem: Problem, gradients: Sequence[GradientPart], wants_bias: bool, device: Device) -> Plan:
    """Returns the plan: each tensor is copied once, and the copy of grad_output also computes the gradient of the
    bias."""
    tensors = tensors_of(problem)
    memory = WorkspaceLayout()
    sums = memory.reserve(row_sums_bytes(tensors[GRAD_OUTPUT], device)) if wants_bias else None
    launches: list[Launch] = []
    copies: dict[Argument, Argument] = {}
    for index in sorted({index for gradient in gradients for index in gradient.copied}):
        copies[input_(index)] = copy_at = workspace(memory.reserve(tensors[index].bytes))
        with_sums = sums if index == GRAD_OUTPUT else None
        launches.append(transpose(tensors[index], input_(index), copy_at, device, with_sums))
    launches[0] = launches[0]._replace(overlaps_previous=False)
    outputs = [gradient.output for gradient in gradients]
    if sums is not None:
        launches.append(reduce_row_sums(tensors[GRAD_OUTPUT], sums, len(outputs), device))
        outputs.append(Output((problem.geometry.out_channels,)))
    results = [
        workspace(memory.reserve(gradient.transposed_back.bytes)) if gradient.transposed_back else output(i)
        for i, gradient in enumerate(gradients)
    ]
    for index, (gradient, result) in enumerate(zip(gradients, results, strict=True)):
        copied = {input_(i): copies[input_(i)] for i in gradient.copied}
        launches += _placed(gradient.part, copied, result, memory.bytes)
        if gradient.transposed_back is not None:
            back = transpose(gradient.transposed_back, result, output(index), device)
            launches.append(back._replace(overlaps_previous=False))
    return Plan(
        ", ".join(("nchw_to_nhwc", *dict.fromkeys(gradient.part.family for gradient in gradients))),
        "; ".join(("by way of channels_last", *(gradient.part.why for gradient in gradients))),
        tuple(outputs),
        tuple(launches),
        memory.bytes + max(gradient.part.workspace_bytes for gradient in gradients),
    )


def _placed(part: Part, copies: dict[Argument, Argument], result: Argument, first_byte: int) -> list[Launch]:
    """Returns the part's launches with its output at ``result`` and its workspace from byte ``first_byte`` on."""

    def placed(argument: Argument) -> Argument:
        if argument.kind is ArgumentKind.WORKSPACE:
            return workspace(first_byte + argument.value)
        return result if argument.kind is ArgumentKind.OUTPUT else copies.get(argument, argument)

    return [with_operands(launch, placed) for launch in part.launches]


def tensors_of(problem: Problem) -> tuple[Matrices, Matrices, Matrices]:
    """Returns grad_output, the input and the weight as matrices to transpose."""
    grad_output, weight = grad_input_nchw_to_nhwc.copied(problem)
    return grad_output, activation(problem.geometry.input_shape, problem.dtype), weight
