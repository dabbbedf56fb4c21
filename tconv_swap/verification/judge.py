"""Compares one layer by itself with PyTorch's and with float64: its output and its gradients. Keeps the results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tconv_swap.bits import same_bits
from tconv_swap.layer import plain_class
from tconv_swap.verification import compare
from tconv_swap.verification.compare import Norms, Tolerance, Verdict, layout_mismatch, mismatch
from tconv_swap.verification.layer_call import (
    GRADIENTS,
    Errors,
    Gradients,
    LayerCall,
    Truth,
    accumulated,
    layer_roundoff,
    own_class,
)
from tconv_swap.verification.report import Check, Kind
from tconv_swap.verification.slope import is_judged

# The error of PyTorch's own layer excuses a layer up to this (see compare.excused).
EXCUSABLE_ERROR = 0.02


@dataclass
class LayerJudge:
    """Compares calls of layers and keeps the results.

    Attributes:
        reached: names of the layers that were compared on a nonempty input.
        notes: what could not be compared, and why.
        found: each check with the position of its call.
        order: counts the calls.
    """

    tolerance: Tolerance | None = None
    reached: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    found: list[tuple[int, Check]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)

    def compare_output(self, call: LayerCall, output: Any) -> None:
        original = call.output(plain_class(call.layer))
        wrong = mismatch(output, original)
        if not wrong and call.same_strides:
            wrong = layout_mismatch(output, original)
        if wrong:
            self.add_broken(call.name, call.mode, "layer_output", call.order, f"{wrong} ({call.described})")
            return
        if output.numel() == 0:
            return
        self.reached.add(call.name)
        unit = layer_roundoff(call.layer, original)
        try:
            errors = Truth(call, None, original.dtype, unit).outputs(original, output.detach())
        except RuntimeError as error:
            self._without_truth(call, "layer_output", original, output.detach(), unit, error)
            return
        self._judge(call, "layer_output", original, errors, unit)

    def compare_gradients(
        self, call: LayerCall, grad_output: Tensor, gradients: Gradients | None = None
    ) -> None:
        """Args:
        gradients: our gradients, if they are computed already.
        """
        grad_output = grad_output.detach()
        reference = call.gradients(plain_class(call.layer), grad_output)
        try:
            if gradients is None:
                gradients = call.gradients(own_class(call.layer), grad_output)
        except Exception as error:  # a broken layer may raise anything
            self.add_broken(call.name, call.mode, "layer_grad_input", call.order, first_line(error))
            return
        values: dict[Kind, tuple[Tensor, Tensor]] = {}
        for kind, original, swapped in zip(GRADIENTS, reference, gradients, strict=True):
            if original is None:
                continue
            if swapped is None:
                self.add_broken(call.name, call.mode, kind, call.order, f"is missing ({call.described})")
            elif wrong := mismatch(swapped, original):
                self.add_broken(call.name, call.mode, kind, call.order, f"{wrong} ({call.described})")
            elif original.numel() and grad_output.numel():
                values[kind] = (original, swapped)
        if not values:
            return
        base, units = _units(call, grad_output, [original for original, _ in values.values()])
        try:
            errors = Truth(call, grad_output, grad_output.dtype, base).gradients(values)
        except RuntimeError as error:
            for kind, (original, swapped) in values.items():
                self._without_truth(call, kind, original, swapped, units[kind], error)
            return
        for kind, found in errors.items():
            self._judge(call, kind, values[kind][0], found, units[kind])

    def _judge(self, call: LayerCall, kind: Kind, original: Tensor, errors: Errors, unit: float) -> None:
        first, second = errors.original.norms, errors.swapped.norms
        floor = compare.allowed_without_error(unit, original.numel())
        excused = compare.excused(first, original.dtype, original.device, EXCUSABLE_ERROR)
        verdict = compare.judge(
            first, second, excused.larger(floor), call.tolerance, _scale(call, kind, original, errors)
        )
        where = errors.swapped.describe(original.shape)
        if verdict.norm == "scale":
            where = f"on average {1 + errors.swapped_slope.off:.5f} times the right value"
        detail = f"{call.described}; {where}" if where else call.described
        self._add(call, kind, verdict, detail)

    def _without_truth(
        self, call: LayerCall, kind: Kind, original: Tensor, swapped: Tensor, unit: float, error: Exception
    ) -> None:
        self.notes.append(
            f"{call.mode}: {kind} of {call.name or '(root)'} is compared with PyTorch's own: {first_line(error)}"
        )
        second = compare.difference(swapped, original, original, call.tolerance)
        floor = compare.allowed_without_error(2 * unit, original.numel())
        verdict = compare.judge(Norms(), second.norms, floor, call.tolerance)
        self._add(call, kind, verdict, second.describe(original.shape))

    def _add(self, call: LayerCall, kind: Kind, verdict: Verdict, detail: str) -> None:
        if not (call.extra and verdict.passed):
            check = Check.of(call.mode, kind, call.name, verdict, detail)
            self.found.append((call.order, check))

    def add_broken(self, name: str, mode: str, kind: Kind, order: int, detail: str) -> None:
        self.found.append((order, Check(mode, kind, name, 0.0, math.inf, 0.0, False, detail)))

    def is_known(self, call: LayerCall, kind: Kind) -> bool:
        """Returns whether this kind of tensor of this layer was found to be wrong before."""
        return any(
            (check.mode, check.name, check.kind) == (call.mode, call.name, kind) and not check.passed
            for _, check in self.found
        )

    def output(self, call: LayerCall, value: Tensor, other: Tensor) -> bool:
        """Returns whether the value is right: near the result of another call, or near the truth."""
        if self.is_known(call, "layer_output"):
            return False
        wrong = mismatch(value, other) or (layout_mismatch(value, other) if call.same_strides else "")
        if wrong or not _near(value, other, layer_roundoff(call.layer, other)):
            self.compare_output(call, value)
        return not self.is_known(call, "layer_output")

    def gradients(self, call: LayerCall, grad_output: Tensor, values: Gradients, others: Gradients) -> bool:
        """Returns whether all gradients are right in the same sense."""
        if any(self.is_known(call, kind) for kind in GRADIENTS):
            return False
        expected = [other for other in others if other is not None]
        _, units = _units(call, grad_output, expected)
        for kind, value, other in zip(GRADIENTS, values, others, strict=True):
            if other is None:
                continue
            if value is None or mismatch(value, other) or not _near(value, other, units[kind]):
                self.compare_gradients(call, grad_output, values)
                break
        return not any(self.is_known(call, kind) for kind in GRADIENTS)

    def broken(self, call: LayerCall, kind: Kind, detail: str) -> None:
        """Keeps a fault that is not about numbers."""
        self.add_broken(call.name, call.mode, kind, call.order, detail)


def _near(value: Tensor, other: Tensor, unit: float) -> bool:
    """Returns whether two results are equal, or as near as two right results may be."""
    if same_bits(value, other):
        return True
    error = compare.difference(value, other, other).norms
    limit = compare.allowed_without_error(2 * unit, other.numel())
    return error.maximum <= limit.maximum and error.l2 <= limit.l2


def _scale(call: LayerCall, kind: Kind, original: Tensor, errors: Errors) -> Verdict | None:
    """Returns the verdict on the scale of the whole tensor, if the dtype allows one (see `slope`)."""
    if not is_judged(original.dtype):
        return None
    first, second = errors.original_slope.off, errors.swapped_slope.off
    unit = compare.roundoff(original.dtype, original.device)
    limit = errors.swapped_slope.allowed(unit, terms_of(call, kind)) + min(abs(first), EXCUSABLE_ERROR)
    return Verdict("scale", abs(first), abs(second), limit)


def terms_of(call: LayerCall, kind: Kind) -> int:
    """Returns the largest number of products, or of gradients of the output, that are added for one element."""
    layer = call.layer
    taps = math.prod(layer.kernel_size)
    return {
        "layer_output": layer.in_channels // layer.groups * taps,
        "layer_grad_input": layer.out_channels // layer.groups * taps,
        "layer_grad_weight": call.input.numel() // layer.in_channels,
    }.get(kind, call.input.numel() // layer.in_channels * math.prod(layer.stride))


def _units(call: LayerCall, grad_output: Tensor, gradients: list[Tensor]) -> tuple[float, dict[Kind, float]]:
    """Returns the largest relative error of one rounding, and that of each gradient including the loss in its sum."""
    base = max(compare.roundoff(t.dtype, t.device) for t in (grad_output, *gradients))
    counts = {kind: terms_of(call, kind) for kind in GRADIENTS[:2]}
    counts["layer_grad_bias"] = grad_output.numel() // call.layer.out_channels
    return base, {kind: accumulated(base, count, grad_output.dtype) for kind, count in counts.items()}


def first_line(error: Exception) -> str:
    """Returns class and message of an error, in one line."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
