"""Compares the results of a whole network with those of the original: first the structure, then every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tconv_swap.verification import compare
from tconv_swap.verification.compare import Norms, Tolerance, layout_mismatch, mismatch
from tconv_swap.verification.report import Check, Kind
from tconv_swap.verification.runs import Outcome, Pass
from tconv_swap.verification.tree import dense, equal, lack_of_numbers

# The swapped network may be off by this many times the change that rounding in the swapped layers causes.
NOISE_FACTOR = 2.0
# The original's own error excuses the swapped network up to this: a missing gradient has the error 1.
EXCUSABLE_ERROR = 0.5

_Values = dict[str, Any]


@dataclass
class Standard:
    """The values that a network is judged by in one mode.

    Attributes:
        mode: `eval` or `train`.
        how: how every network is run.
        original: the results of the original.
        truth: what errors are measured against: the float64 run of the original, or `original` again.
        dtype, devices: those of the network.
        tolerance: the user's, if any.
        noise: how far rounding in its transposed convolutions moves the original, on the scale of the truth.
        noisy_runs: the number of runs with added rounding from which `noise` comes.
        in_place: paths of the outputs that two runs of the original return in the same memory; the swapped network may
            too.
        require_layouts: whether an output with another memory layout than the original's is wrong.
    """

    mode: str
    how: Pass
    original: Outcome
    truth: Outcome
    dtype: torch.dtype
    devices: list[torch.device]
    tolerance: Tolerance | None
    noise: dict[tuple[Kind, str], Norms] = field(default_factory=dict)
    noisy_runs: int = 0
    in_place: set[str] = field(default_factory=set)
    require_layouts: bool = True

    def widen(self, outcome: Outcome) -> None:
        """Adds the differences of another run of the original to the noise."""
        for key, norms in self.distances(outcome, self.original).items():
            self.noise[key] = norms.larger(self.noise.get(key, Norms()))

    def distances(self, outcome: Outcome, other: Outcome) -> dict[tuple[Kind, str], Norms]:
        """Returns how far two outcomes are apart, tensor by tensor, on the scale of the truth."""
        found: dict[tuple[Kind, str], Norms] = {}
        for kind, values, others, exacts in _by_kind(outcome, other, self.truth):
            for name, theirs in others.items():
                value, exact = values.get(name), exacts.get(name)
                if isinstance(theirs, Tensor) and isinstance(value, Tensor) and value.shape == theirs.shape:
                    scale = exact if isinstance(exact, Tensor) and exact.shape == theirs.shape else theirs
                    found[kind, name] = compare.distance(value, theirs, scale, self.tolerance)
        return found

    def structure(self, outcome: Outcome) -> list[str]:
        """Returns what is wrong with the outputs apart from their numbers."""
        before, after = self.original.output, outcome.output
        failures = []
        paths = [*before.containers, *(path for path in after.containers if path in before.leaves)]
        for path in [p for p in paths if before.containers.get(p) != after.containers.get(p)][:1]:
            now, expected = (
                tree.containers.get(path) or type(tree.leaves.get(path)).__name__ for tree in (after, before)
            )
            failures.append(f"{_output_name(path)} is {now}, expected {expected}")
        for path, value in before.leaves.items():
            if path not in after.leaves:
                failures.append(f"{_output_name(path)} is missing")
                continue
            now = after.leaves[path]
            if isinstance(value, Tensor):
                if not isinstance(now, Tensor):
                    failures.append(f"{_output_name(path)} is {type(now).__name__}, expected a tensor")
                elif path in self.original.differentiable - outcome.differentiable:
                    failures.append(f"{_output_name(path)} no longer requires grad")
                elif (
                    self.require_layouts
                    and not mismatch(now, value)
                    and (wrong := layout_mismatch(now, value))
                ):
                    failures.append(f"{_output_name(path)} {wrong}")
            elif equal(value, now) is False:
                failures.append(f"{_output_name(path)} is {now!r:.80}, expected {value!r:.80}")
        extra = [path for path in after.leaves if path not in before.leaves]
        failures += [f"{_output_name(path)} is one that the original does not have" for path in extra]
        if lack := lack_of_numbers(before):
            failures.append(f"nothing compared: the original {lack}")
        return [f"{self.mode}: {failure}" for failure in failures]

    def not_compared(self, outcome: Outcome) -> list[str]:
        """Returns the parts of the outputs that cannot be compared, and their classes."""
        before, after = self.original.output.leaves, outcome.output.leaves
        return [
            f"{_output_name(path)} ({type(value).__qualname__})"
            for path, value in before.items()
            if not isinstance(value, Tensor) and path in after and equal(value, after[path]) is None
        ]

    def checks(self, outcome: Outcome) -> list[Check]:
        """Compares every tensor of the outcome with the truth, beside the original's."""
        checks = []
        for kind, values, originals, exacts in _by_kind(outcome, self.original, self.truth):
            for name in dict.fromkeys([*originals, *values]):
                original, value = originals.get(name), values.get(name)
                if kind == "output" and (original is None or value is None):
                    continue  # `structure` reports it
                if original is not None or value is not None:
                    checks.append(self._check(kind, name, value, original, exacts.get(name)))
        return checks

    def _check(
        self, kind: Kind, name: str, value: Tensor | None, original: Tensor | None, exact: Tensor | None
    ) -> Check:
        if original is None or value is None:
            return self._one_sided(kind, name, value, original)
        if wrong := mismatch(value, original):
            return Check(self.mode, kind, name, 0.0, math.inf, 0.0, False, wrong)
        if exact is None or exact.shape != original.shape:
            exact = original
        first = compare.difference(original, exact, original, self.tolerance)
        cuda = any(device.type == "cuda" for device in self.devices)
        second = compare.difference(value, exact, original, self.tolerance, cuda=cuda)
        limit = self._limit(kind, name, original, first.norms)
        verdict = compare.judge(first.norms, second.norms, limit, self.tolerance)
        detail = "" if verdict.passed else second.describe(original.shape)
        if second.allowed_nan:
            nan = f"{second.allowed_nan} of {second.elements} NaN where the original is infinite"
            detail = f"{detail}; {nan}".removeprefix("; ")
        return Check.of(self.mode, kind, name, verdict, detail)

    def _limit(self, kind: Kind, name: str, original: Tensor, error: Norms) -> Norms:
        real = original.is_floating_point() or original.is_complex()
        unit, elements = self.roundoff(original), max(original.numel(), 1)
        if real:
            floor = compare.allowed_without_error(unit, elements)
        else:
            # Integers that rounding decides (an argmax): as many near-ties as roundings are wide.
            share = math.floor(8 * unit * elements) / elements
            floor = Norms(share, share)
        dtype = original.dtype if real else self.dtype
        excused = compare.excused(error, dtype, original.device, EXCUSABLE_ERROR)
        noise = self.noise.get((kind, name), Norms())
        return excused.larger(noise.times(NOISE_FACTOR)).larger(floor)

    def _one_sided(self, kind: Kind, name: str, value: Tensor | None, original: Tensor | None) -> Check:
        """Returns the check of a gradient that only one has (zeros count as none), or of a buffer that only one
        changed."""
        there = value if original is None else original
        assert there is not None
        if kind == "buffer":
            detail = "changes, the original's does not" if original is None else "does not change"
        else:
            detail = "is there, the original has none" if original is None else "is missing"
        if kind == "buffer" or bool((there != 0).any()):
            return Check(self.mode, kind, name, 0.0, math.inf, 0.0, False, detail)
        return Check(self.mode, kind, name, 0.0, 0.0, 0.0, True, f"{detail}; all zeros")

    def roundoff(self, tensor: Tensor) -> float:
        """Returns the roundoff of the coarser of the tensor's dtype and the network's: a float32 sum of bfloat16 is no
        finer."""
        dtypes = {self.dtype, tensor.dtype if tensor.is_floating_point() else self.dtype}
        devices = {tensor.device, *self.devices}
        for device in devices:
            if device.type != "meta" and torch.is_autocast_enabled(device.type):
                dtypes.add(torch.get_autocast_dtype(device.type))
        return max(compare.roundoff(dtype, device) for dtype in dtypes for device in devices)


def _by_kind(*outcomes: Outcome) -> list[tuple[Kind, _Values, _Values, _Values]]:
    """Returns the tensors of three outcomes by kind and name."""
    kinds: list[tuple[Kind, list[_Values]]] = [
        ("output", [dict(o.output.tensors) for o in outcomes]),
        ("grad_input", [_dense(o.grad_inputs) for o in outcomes]),
        ("grad_parameter", [_dense(o.grad_parameters) for o in outcomes]),
        ("buffer", [_dense(o.buffers) for o in outcomes]),
    ]
    return [(kind, values[0], values[1], values[2]) for kind, values in kinds]


def _dense(values: Mapping[str, Tensor | None]) -> _Values:
    return {name: None if value is None else dense(value) for name, value in values.items()}


def _output_name(path: str) -> str:
    return f"output {path or '(whole)'}"
