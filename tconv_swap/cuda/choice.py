"""Chooses whether our kernels or PyTorch's operator compute a stage, by which plan, and says why. Pure functions
of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tconv_swap.cuda.tuned import NONE, Winner, Winners, problem_key
from tconv_swap.kernels import measured, plan
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import Plan

#: ``"rules"``: as ``"auto"``, but nothing is timed at first use (``first_use``).
Backend = Literal["auto", "rules", "kernel", "native"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Which gradients a step computes: of the input, the weight and the bias. ``FORWARD`` means the output instead.
Mask = tuple[bool, ...]
FORWARD: Mask = ()

#: The number of our plans that ``tune`` measures for a problem.
CANDIDATES = 8

NATIVE = "native"
KERNEL = "kernel"
RULES = "rules"
GENERAL = "general"
WHY_NOTHING = "without an output channel there is nothing to compute"
WHY_NOT_GENERAL = "of ours only the general kernels claim it: 0.06 to 0.95 of PyTorch's speed on an H200"


class CallKind(NamedTuple):
    """One stage of a problem on a GPU, which a call computes. An empty ``mask`` means the forward pass."""

    problem: Problem
    mask: Mask
    has_bias: bool
    device: int


@dataclass(frozen=True, slots=True)
class Step:
    """One call that a stage makes: our kernels by ``plan``, or PyTorch's operator if ``plan`` is None."""

    mask: Mask
    plan: Plan | None
    why: str

    @property
    def family(self) -> str:
        """The family of the kernels, or ``"native"``."""
        return NATIVE if self.plan is None else self.plan.family


def check_backend(backend: str) -> Backend:
    """Returns ``backend``, if there is such a backend.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend  # type: ignore[return-value]


def choose_forward(
    problem: Problem, has_bias: bool, device: Device, backend: str, winners: Winners = NONE
) -> Step:
    """Returns the one step of a forward pass."""
    backend = _decided_as(backend)
    if backend == NATIVE:
        return Step(FORWARD, None, "the backend is native")
    if problem.geometry.out_channels == 0:
        return Step(FORWARD, None, WHY_NOTHING)
    winner = _winner_of(problem, FORWARD, has_bias, winners)
    if winner is None:
        made = plan.plan_forward(problem, has_bias, device)
        if backend == "auto" and _only_general(problem, made):
            return Step(FORWARD, None, WHY_NOT_GENERAL)
        if backend == "auto" and (why := measured.why_forward_is_native(problem, made.family, device)):
            return Step(FORWARD, None, why)
        return Step(FORWARD, made, made.why)
    if backend == "auto" and winner.native:
        return Step(FORWARD, None, winner.why)
    return _step(FORWARD, plan.forward_candidates(problem, has_bias, device, CANDIDATES), winner)


def choose_backward(
    problem: Problem, mask: Mask, device: Device, backend: str, winners: Winners = NONE
) -> tuple[Step, ...]:
    """Returns the steps of a backward pass: first those of our kernels, then at most one of PyTorch's operator."""
    backend = _decided_as(backend)
    if backend == NATIVE:
        return (Step(mask, None, "the backend is native"),)
    if problem.geometry.out_channels == 0:
        return (Step(mask, None, WHY_NOTHING),)
    ours: list[tuple[Mask, Winner | None]] = []
    native: list[Step] = []
    for unit in backward_units(mask):
        winner = _winner_of(problem, unit, False, winners)
        if backend == "auto" and (why := _why_native(problem, unit, device, winner, mask)):
            native.append(Step(unit, None, why))
        else:
            ours.append((unit, winner))
    steps = _our_steps(problem, mask, device, ours)
    if len(native) > 1:
        reasons = dict.fromkeys(step.why for step in native)
        native = [Step(mask, None, "; ".join(reasons))]
    return (*steps, *native)


def _winner_of(problem: Problem, mask: Mask, has_bias: bool, winners: Winners) -> Winner | None:
    return winners.get(problem_key(problem, mask, has_bias)) if winners else None


def _our_steps(
    problem: Problem, mask: Mask, device: Device, units: Sequence[tuple[Mask, Winner | None]]
) -> list[Step]:
    """Returns the steps of those gradients of the mask that our kernels compute, each with its winner: one step if all
    are as without winners, so that its parts share the workspace, and may share a pass over the tensors."""
    tuned = [
        (winner, plan.plan_backward(problem, unit, device).digest, _our_step(problem, unit, device, winner))
        for unit, winner in units
        if winner is not None
    ]
    if len(units) > 1 and all(step.plan and step.plan.digest == default for _, default, step in tuned):
        together = plan.plan_backward(problem, mask, device)
        whys = dict.fromkeys(winner.why for winner, default, _ in tuned if winner.kernel == default)
        return [Step(mask, together, "; ".join((together.why, *whys)))]
    return [_our_step(problem, unit, device, winner) for unit, winner in units]


def _our_step(problem: Problem, unit: Mask, device: Device, winner: Winner | None) -> Step:
    default = plan.plan_backward(problem, unit, device)
    if winner is None:
        return Step(unit, default, default.why)
    if winner.kernel == default.digest:
        return Step(unit, default, f"{default.why}; {winner.why}")
    return _step(unit, plan.backward_candidates(problem, unit, device, CANDIDATES), winner)


def _decided_as(backend: str) -> str:
    """What is timed at first use comes as winners: without them, ``"auto"`` goes by rules."""
    return "auto" if backend == RULES else backend


def _step(mask: Mask, candidates: Sequence[Plan], winner: Winner) -> Step:
    """Returns the step of the winner, or of the first candidate if the winner is no longer among them."""
    for made in candidates:
        if made.digest == winner.kernel:
            return Step(mask, made, f"{made.why}; {winner.why}")
    return Step(mask, candidates[0], candidates[0].why)


def backward_units(mask: Mask) -> list[Mask]:
    """Returns the groups of gradients that are decided together: one pass computes those of weight and bias."""
    wants_input, wants_weight, wants_bias = mask
    units: list[Mask] = []
    if wants_input:
        units.append((True, False, False))
    if wants_weight or wants_bias:
        units.append((False, wants_weight, wants_bias))
    return units


def _why_native(
    problem: Problem, unit: Mask, device: Device, winner: Winner | None, mask: Mask
) -> str | None:
    """Returns why PyTorch's operator should compute these gradients of those that are wanted (``mask``), or None. A
    result of ``tune`` takes precedence."""
    if winner is not None:
        return winner.why if winner.native else None
    if unit == (False, False, True):
        return None  # a sum: the general kernel is as fast
    decisive = (False, True, False) if unit[1] else unit
    # A plan takes longer than the clocks of the kernels that may compute it.
    counted = plan.expected_clocks(problem, decisive, device) < math.inf
    if not counted and _only_general(problem, plan.plan_backward(problem, decisive, device)):
        return WHY_NOT_GENERAL
    if unit[1]:
        return measured.why_grad_weight_is_native(problem, device)
    why = measured.why_grad_input_is_native(problem, device)
    # One pass for both gradients is faster than the faster of two for one of them.
    return None if why and mask[1] and plan.in_one_pass(problem, device) else why


def _only_general(problem: Problem, made: Plan) -> bool:
    """Returns whether only the general kernels could compute this, and the sizes fit PyTorch's operator."""
    geometry = problem.geometry
    batch, *image = geometry.output_shape
    largest = max(_elements(geometry.input_shape), batch * _elements(image))
    return made.family == GENERAL and batch > 0 and largest < INT32_LIMIT


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
