"""Plans of the backward pass by way of channels_last: NCHW tensors are brought to channels_last in the workspace
(common/nchw_to_nhwc.py), and the kernels for channels_last compute from there. Pure functions of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES, WorkspaceLayout
from tconv_swap.kernels.common.nchw_to_nhwc import (
    Matrices,
    activation,
    reduce_row_sums,
    row_sums_bytes,
    transpose,
)
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input.implicit_gemm_layout import as_convolution
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.gradients import nchw_to_nhwc_pays as gradients_nchw_to_nhwc_pays
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

#: Products that are summed up for an element of grad_input, from which the kernel by boxes makes up for storing NCHW.
LEAST_SUMMED = 2304
#: Of grad_input alone: multiply-adds for each element of grad_output and the weight.
LEAST_MACS_ALONE = 768
GRAD_OUTPUT, INPUT, WEIGHT = range(3)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part, its only output, and the inputs of the plan that it reads in channels_last. ``turned``: what it writes
    has to be brought back to the output's layout."""

    part: Part
    output: Output
    arranged: tuple[int, ...]
    turned: Matrices | None = None


def plan_backward(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Plan | None:
    """The gradients the mask asks for, out of arranged tensors, or None where that is not known to be the faster way.

    Inputs: grad_output, input, weight (16-byte aligned). Workspace: the arranged tensors, at most
    ``MAX_COPY_BYTES``, and beside them what the parts share.
    """
    if not pays(problem, output_mask, device):
        return None
    pieces = []
    if output_mask[0]:
        by_boxes = nhwc_grad_input(problem, device) if _summed(problem) >= LEAST_SUMMED else None
        pieces.append(by_boxes or direct_grad_input(problem, device))
    if output_mask[1]:
        pieces.append(nhwc_grad_weight(problem, device))
    made = [piece for piece in pieces if piece is not None]
    if len(made) < len(pieces) or not any(piece.arranged for piece in made):
        return None
    return assembled(problem, made, output_mask[2], device)


def pays(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> bool:
    """Whether arranging was measured to be the faster way (docs/kernels/arrange.md)."""
    if not gradients_nchw_to_nhwc_pays.enough_work(problem, device):
        return False
    if not output_mask[1] and not (output_mask[0] and _pays_alone(problem, device)):
        return False
    tensors = tensors_of(problem)
    return (
        all(tensor.rows % tensor.piece == 0 for tensor in tensors)
        and sum(tensor.bytes for tensor in tensors) <= MAX_COPY_BYTES
    )


def _summed(problem: Problem) -> int:
    """Products that are summed up for an element of grad_input."""
    return problem.geometry.out_channels_per_group * problem.geometry.taps


def _pays_alone(problem: Problem, device: Device) -> bool:
    """Whether arranging pays for grad_input alone: many products for it, and nothing better from what lies there."""
    arranged = sum(tensors_of(problem)[index].bytes for index in (GRAD_OUTPUT, WEIGHT))
    if (
        _summed(problem) < LEAST_SUMMED
        or problem.geometry.macs * problem.dtype.itemsize < LEAST_MACS_ALONE * arranged
    ):
        return False
    direct = grad_input_implicit_gemm.plan_grad_input(problem, device)
    return direct is None or direct.family == grad_input_implicit_gemm.FAMILY


def nhwc_grad_input(problem: Problem, device: Device) -> Piece | None:
    """From grad_output and the weight in channels_last to NCHW."""
    posed = as_convolution(replace(problem, channels_last=True, weight_channels_last=True))
    parts = grad_input_tma.part_candidates(replace(posed, output_channels_last=False), device, 1)
    return Piece(parts[0], Output(problem.geometry.input_shape), (GRAD_OUTPUT, WEIGHT)) if parts else None


def direct_grad_input(problem: Problem, device: Device) -> Piece | None:
    """From the tensors as they lie."""
    part = grad_input_implicit_gemm.plan_grad_input(problem, device)
    return Piece(part, Output(problem.geometry.input_shape), ()) if part is not None else None


def nhwc_grad_weight(problem: Problem, device: Device) -> Piece | None:
    """From grad_output and the input in channels_last. Where no launch adds up slices, which would write any layout as
    fast, the gradient is written in channels_last too, in whole lines."""
    arranged = (GRAD_OUTPUT, INPUT)
    made = Output(problem.geometry.weight_shape, problem.weight_channels_last)
    posed = replace(problem, channels_last=True, weight_channels_last=True)
    part = grad_weight_tma.plan_from_nhwc_copies(posed, device, problem.weight_channels_last)
    if part is None:
        return None
    if len(part.launches) == 1 and not problem.weight_channels_last:
        return Piece(part, made, arranged, tensors_of(problem)[WEIGHT].transposed)
    return Piece(part, made, arranged)


def assembled(problem: Problem, pieces: Sequence[Piece], wants_bias: bool, device: Device) -> Plan:
    """What the pieces read is arranged once, the bias's gradient comes with grad_output's arranging."""
    tensors = tensors_of(problem)
    memory = WorkspaceLayout()
    sums = memory.reserve(row_sums_bytes(tensors[GRAD_OUTPUT], device)) if wants_bias else None
    launches: list[Launch] = []
    places: dict[Argument, Argument] = {}
    for index in sorted({index for piece in pieces for index in piece.arranged}):
        places[input_(index)] = place = workspace(memory.reserve(tensors[index].bytes))
        with_sums = sums if index == GRAD_OUTPUT else None
        launches.append(transpose(tensors[index], input_(index), place, device, with_sums))
    launches[0] = replace(launches[0], overlaps_previous=False)
    outputs = [piece.output for piece in pieces]
    if sums is not None:
        launches.append(reduce_row_sums(tensors[GRAD_OUTPUT], sums, len(outputs), device))
        outputs.append(Output((problem.geometry.out_channels,)))
    results = [
        workspace(memory.reserve(piece.turned.bytes)) if piece.turned else output(i)
        for i, piece in enumerate(pieces)
    ]
    for index, (piece, result) in enumerate(zip(pieces, results, strict=True)):
        arranged = {input_(i): places[input_(i)] for i in piece.arranged}
        launches += _placed(piece.part, arranged, result, memory.bytes)
        if piece.turned is not None:
            back = transpose(piece.turned, result, output(index), device)
            launches.append(replace(back, overlaps_previous=False))
    return Plan(
        ", ".join(("nchw_to_nhwc", *dict.fromkeys(piece.part.family for piece in pieces))),
        "; ".join(("by way of channels_last", *(piece.part.why for piece in pieces))),
        tuple(outputs),
        tuple(launches),
        memory.bytes + max(piece.part.workspace_bytes for piece in pieces),
    )


def _placed(part: Part, places: dict[Argument, Argument], result: Argument, shared: int) -> list[Launch]:
    """The part's launches, with its only output at ``result`` and its workspace from ``shared`` on."""

    def placed(argument: Argument) -> Argument:
        if argument.kind is ArgumentKind.WORKSPACE:
            return workspace(shared + argument.value)
        return result if argument.kind is ArgumentKind.OUTPUT else places.get(argument, argument)

    return [with_operands(launch, placed) for launch in part.launches]


def tensors_of(problem: Problem) -> tuple[Matrices, Matrices, Matrices]:
    """grad_output, the input and the weight."""
    g = problem.geometry
    return (
        activation(g.output_shape, problem.dtype),
        activation(g.input_shape, problem.dtype),
        Matrices(g.in_channels, g.out_channels_per_group, g.taps, problem.dtype),
    )
