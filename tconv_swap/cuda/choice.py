"""Ours or PyTorch's: which of the two computes a stage, by what plan, and why. Pure functions of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tconv_swap.cuda import plan
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import Plan

Backend = Literal["auto", "kernel", "native"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Which gradients a step computes: of the input, the weight, the bias. ``FORWARD``: the output instead.
Mask = tuple[bool, ...]
FORWARD: Mask = ()

NATIVE = "native"
GENERAL = "general"
WHY_NOT_GENERAL = "of ours only the general kernels claim it, measured far behind cuDNN (benchmarks/NOTES.md)"
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Step:
    """One call that a stage makes: of ours by ``plan``, or of PyTorch's operator where that is None."""

    mask: Mask
    plan: Plan | None
    why: str

    @property
    def family(self) -> str:
        """The kernels' family, or ``"native"``."""
        return NATIVE if self.plan is None else self.plan.family


def check_backend(backend: str) -> Backend:
    """``backend`` itself.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend  # type: ignore[return-value]


def choose_forward(problem: Problem, has_bias: bool, device: Device, backend: str) -> Step:
    """The one step of a forward pass."""
    if backend == NATIVE:
        return Step(FORWARD, None, "backend is native")
    made = plan.plan_forward(problem, has_bias, device)
    if backend == "auto" and _only_general(problem, made):
        return Step(FORWARD, None, WHY_NOT_GENERAL)
    return Step(FORWARD, made, made.why)


def choose_backward(problem: Problem, mask: Mask, device: Device, backend: str) -> tuple[Step, ...]:
    """The steps of a backward pass: one of ours at most, then one of PyTorch's at most."""
    if backend == NATIVE:
        return (Step(mask, None, "backend is native"),)
    if backend == "auto":
        lost = [unit for unit in backward_units(mask) if _loses(problem, unit, device)]
    else:
        lost = []
    native = union(lost)
    ours = tuple(wanted and not other for wanted, other in zip(mask, native, strict=True))
    steps = []
    if any(ours):
        made = plan.plan_backward(problem, ours, device)
        steps.append(Step(ours, made, made.why))
    if any(native):
        steps.append(Step(native, None, WHY_NOT_GENERAL))
    return tuple(steps)


def backward_units(mask: Mask) -> list[Mask]:
    """The gradients that are decided about together: the bias's comes out of the same pass as the weight's."""
    wants_input, wants_weight, wants_bias = mask
    units: list[Mask] = []
    if wants_input:
        units.append((True, False, False))
    if wants_weight or wants_bias:
        units.append((False, wants_weight, wants_bias))
    return units


def union(masks: Sequence[Mask]) -> Mask:
    """Every gradient that one of the masks asks for."""
    return tuple(any(mask[index] for mask in masks) for index in range(3))


def _loses(problem: Problem, unit: Mask, device: Device) -> bool:
    # The sum that is the bias's gradient costs little beside the weight's: what computes that decides.
    decisive = (False, True, False) if unit[1] else unit
    return _only_general(problem, plan.plan_backward(problem, decisive, device))


def _only_general(problem: Problem, made: Plan) -> bool:
    """Whether nothing but the general kernels would compute this, and PyTorch's operator surely can."""
    geometry = problem.geometry
    batch, *image = geometry.output_shape
    largest = max(_elements(geometry.input_shape), batch * _elements(image))
    return made.family == GENERAL and batch > 0 and largest <= _INT32_MAX


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
