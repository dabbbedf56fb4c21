"""Whether a swapped network computes what the original computes, forward and backward: a proof that can fail.

Both networks run on the same inputs, random numbers and buffers. Where it can be had, a float64 run of the
original is the truth, and the swapped network's error against it is set beside the original's. What a network
makes of rounding in its transposed convolutions is measured too, by adding some: an original that happens to
be exact, or a gradient that is zero but for rounding, must not fail a right swap. `verify_layers` then
compares every swapped layer by itself.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tconv_swap import compare
from tconv_swap.compare import Norms, Tolerance
from tconv_swap.inputs import Inputs, model_dtype
from tconv_swap.verify_layers import LayerChecks, layer_roundoff, mismatch, swapped_layers
from tconv_swap.verify_memory import float64_does_not_fit, leaf_outputs
from tconv_swap.verify_report import Check, Kind, VerifyReport
from tconv_swap.verify_runs import (
    PASSES,
    Outcome,
    Pass,
    Runner,
    Subject,
    devices_of,
    in_float64,
    shaken,
    untouched,
)

__all__ = ["Check", "VerifyReport", "verify"]

_log = logging.getLogger("tconv_swap")

# Runs of the original with rounding added; more of them, up to the limit, only while something is in doubt.
SHAKEN_RUNS = 2
MAX_SHAKEN_RUNS = 16
# How much is added, in units of what rounding may do; a right kernel is off by less than one on average.
SHAKEN_BY = 2.0
# How often what that does the swapped network may be off.
NOISE_FACTOR = 2.0
# However inexact the original is, the swapped network is excused no further: no gradient at all is 1 off.
EXCUSABLE_ERROR = 0.5
# A float64 run further from the original than this computes something else (other boxes kept, other noise).
FLOAT64_TOO_FAR = 0.25


def verify(
    original: nn.Module,
    swapped: nn.Module,
    inputs: Any,
    *,
    modes: Sequence[Literal["eval", "train"]] = ("eval", "train"),
    backward: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    reference: Literal["float64", "original"] | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Compare outputs, gradients, buffers and every swapped layer of `swapped` with those of `original`.

    Leaves both networks (buffers, gradients, training flags) and all random states as they were. Runs under
    the caller's autocast state. The same arguments give the same report.

    Args:
        original: the network before the swap; may share its parameters with `swapped`.
        swapped: the network after `swap_layers`.
        inputs: whatever `Inputs.of` takes, on the networks' device.
        modes: in which the networks are compared; one that the original cannot run is noted.
        backward: whether gradients are compared too: of every floating-point input and of every parameter
            that requires grad, for random gradients of the outputs.
        atol, rtol: replace the automatic limits (all of them): `|value - reference| <= atol + rtol *
            |reference|` for every element; one that is not given is 0.
        reference: `"float64"`: anything that prevents a float64 run is a failure. `"original"`: the original
            is the truth. None: float64 where memory and operators allow it.
        seed: of the random numbers that the networks and the output gradients draw.

    Raises:
        TypeError: `inputs` is nothing that `Inputs.of` takes.
        ValueError: an unknown mode or reference, no mode at all, or a negative tolerance.
    """
    if not modes or (unknown := [mode for mode in modes if mode not in ("eval", "train")]):
        raise ValueError(f"modes must be some of 'eval' and 'train', not {unknown if modes else modes!r}")
    if reference not in (None, "float64", "original"):
        raise ValueError(f"reference must be 'float64', 'original' or None, not {reference!r}")
    if (atol or 0) < 0 or (rtol or 0) < 0:
        raise ValueError(f"atol and rtol must not be negative, but are {atol} and {rtol}")
    tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
    inputs = Inputs.of(inputs)
    report = VerifyReport()
    layers = swapped_layers(swapped)
    if not layers:
        report.failures.append("nothing is swapped: the network holds no tconv_swap.ConvTranspose2d")
    if both := sorted(swapped_layers(original)):
        report.failures.append(
            f"the original holds swapped layers itself ({', '.join(name or '(root)' for name in both)}): "
            "nothing to compare with; swap with inplace=False"
        )
    if report.failures:
        return report
    devices = devices_of(original, swapped, inputs)
    before, after, runner = Subject(original), Subject(swapped), Runner(inputs, devices, seed)
    with untouched([before, after], devices):
        _Verification(report, before, after, runner, tolerance, reference, backward).run(modes)
    return report


@dataclass
class _Mode:
    """What one mode is judged by."""

    name: str
    how: Pass
    original: Outcome
    truth: Outcome
    noise: dict[tuple[Kind, str], Norms]
    shaken_runs: int = 0


class _Verification:
    def __init__(
        self,
        report: VerifyReport,
        original: Subject,
        swapped: Subject,
        runner: Runner,
        tolerance: Tolerance | None,
        reference: str | None,
        backward: bool,
    ) -> None:
        self.report = report
        self.original = original
        self.swapped = swapped
        self.runner = runner
        self.tolerance = tolerance
        self.reference = reference
        self.backward = backward
        self.dtype = model_dtype(original.module)
        self.layers = LayerChecks(swapped.module, backward, runner.seed, tolerance)
        self.float64: Subject | None = None
        self.no_float64 = "as asked" if reference == "original" else ""
        self.why_original: dict[str, str] = {}
        self.diverged_in: _Mode | None = None

    def run(self, modes: Sequence[str]) -> None:
        unverified = []
        for name in modes:
            if (mode := self._prepare(name)) is None:
                unverified.append(name)
                continue
            _log.info("verify: %s mode", name)
            self._compare(mode)
            del mode
        if len(unverified) == len(modes):
            self.report.failures.append(f"nothing compared: the original runs in none of {list(modes)}")
        else:
            self.layers.probe_unreached()
        self._conclude(unverified, modes)

    def _prepare(self, name: str) -> _Mode | None:
        """Everything that the swapped network will be judged by; None if the original does not run."""
        how, first = self._first_run(name)
        if how is None or first is None:
            return None
        activations: list[int] = []
        with leaf_outputs(self.original.module, activations):
            again = self.runner.run(self.original, name, how)
        noise = self._distances(again, first, first)
        if off := {key: norms for key, norms in noise.items() if norms.maximum > 0}:
            (kind, where), worst = max(off.items(), key=lambda item: item[1].maximum)
            self.report.notes.append(
                f"{name}: the original is not deterministic: two runs differ by up to {worst.maximum:.1e} "
                f"({kind} {where}); the limits are widened by that"
            )
        del again
        truth = self._truth(name, how, first, sum(activations))
        mode = _Mode(name, how, first, truth or first, noise)
        for _ in range(SHAKEN_RUNS):
            self._shake(mode)
        return mode

    def _first_run(self, name: str) -> tuple[Pass | None, Outcome | None]:
        passes = PASSES if self.backward else PASSES[-1:]
        reason = ""
        for how in passes:
            try:
                outcome = self.runner.run(self.original, name, how)
            except Exception as error:  # a foreign forward may raise anything
                reason = reason or _reason(error)
                last = _reason(error)
                continue
            if self.backward and not how.gradients:
                self.report.notes.append(f"{name}: the original gives no gradients, none compared: {reason}")
            elif self.backward and not how.of_inputs:
                self.report.notes.append(f"{name}: no gradients of the inputs: {reason}")
            elif self.backward and not outcome.differentiable:
                self.report.notes.append(f"{name}: no output depends on anything that requires grad")
            return how, outcome
        self.report.notes.append(f"{name}: not verifiable, the original raises {last}")
        return None, None

    def _truth(self, name: str, how: Pass, first: Outcome, activations: int) -> Outcome | None:
        """The float64 run of the original, or None; why not is kept."""
        reason = self.no_float64 or float64_does_not_fit(
            self.original.module, self.runner.inputs, activations, how.gradients
        )
        if reason:
            self.why_original[name] = reason
            return None
        devices = self.runner.devices
        try:
            if self.float64 is None:
                self.original.rewind()
                self.float64 = Subject(copy.deepcopy(self.original.module).double())
            with in_float64(self.dtype, devices):
                truth = self.runner.run(self.float64, name, how, double=True)
        except Exception as error:
            # The frames of the traceback hold what was computed so far.
            self.why_original[name] = f"in float64 it raises {_reason(error)}"
            truth = None
        if truth is None:
            self.float64 = None
            gc.collect()
            return None
        if reason := self._not_comparable(truth, first):
            self.why_original[name] = reason
            return None
        return truth

    def _not_comparable(self, truth: Outcome, first: Outcome) -> str:
        if truth.random_state != first.random_state:
            return "in float64 it draws other random numbers"
        for path, value in first.output.tensors.items():
            exact = truth.output.leaves.get(path)
            if not isinstance(exact, Tensor) or exact.shape != value.shape:
                return f"output {path} has another shape in float64"
            if value.is_floating_point():
                off = compare.difference(value, exact, value).norms.l2
                if not off <= FLOAT64_TOO_FAR:
                    return f"output {path} is {off:.1e} off in float64: not the same computation"
        return ""

    def _shake(self, mode: _Mode) -> None:
        """Adds rounding to the original's transposed convolutions and keeps how far that moves everything."""

        def amplitude(layer: nn.Module, output: Tensor) -> float:
            return SHAKEN_BY * layer_roundoff(layer, output)

        mode.shaken_runs += 1
        names = list(swapped_layers(self.swapped.module))
        with shaken(self.original.module, names, amplitude, self.runner.seed + mode.shaken_runs):
            outcome = self.runner.run(self.original, mode.name, mode.how)
        for key, norms in self._distances(outcome, mode.original, mode.truth).items():
            mode.noise[key] = norms.larger(mode.noise.get(key, Norms()))

    def _distances(
        self, outcome: Outcome, original: Outcome, truth: Outcome
    ) -> dict[tuple[Kind, str], Norms]:
        """How far an outcome is from the original's, tensor by tensor, on the scale of the truth."""
        found: dict[tuple[Kind, str], Norms] = {}
        for kind, values, references, exacts in _pairs(outcome, original, truth):
            for name, mine in references.items():
                value, exact = values.get(name), exacts.get(name)
                if isinstance(mine, Tensor) and isinstance(value, Tensor) and value.shape == mine.shape:
                    scale = exact if isinstance(exact, Tensor) and exact.shape == mine.shape else mine
                    found[kind, name] = compare.distance(value, mine, scale, self.tolerance)
        return found

    def _compare(self, mode: _Mode) -> None:
        try:
            with self.layers.watch(mode.name):
                watched = self.runner.run(self.swapped, mode.name, mode.how)
            outcome = self.runner.run(self.swapped, mode.name, mode.how)
        except Exception as error:
            self.report.failures.append(
                f"{mode.name}: the swapped network raises {_reason(error)}; the original does not"
            )
            self.diverged_in = self.diverged_in or mode
            return
        repeated = self._distances(watched, outcome, mode.truth)
        worst = max((norms.maximum for norms in repeated.values()), default=0.0)
        if worst > 0:
            self.report.notes.append(
                f"{mode.name}: two runs of the swapped network differ by up to {worst:.1e}"
            )
        structural = self._structure(mode, outcome)
        checks = self._checks(mode, outcome)
        in_layers = any(not check.passed for check in self.layers.checks)
        while (
            not in_layers
            and self.tolerance is None
            and mode.shaken_runs < MAX_SHAKEN_RUNS
            and any(not check.passed and math.isfinite(check.error_swapped) for check in checks)
        ):
            # Rounding next to a kink (ReLU, max pooling) moves a gradient by a jump, and is as likely to in
            # a shaken run as in the swapped network.
            self._shake(mode)
            checks = self._checks(mode, outcome)
        self.report.checks += checks
        self.report.failures += structural
        if structural or any(not check.passed for check in checks):
            self.diverged_in = self.diverged_in or mode

    def _structure(self, mode: _Mode, outcome: Outcome) -> list[str]:
        """What is wrong with the outputs before any number is looked at."""
        before, after = mode.original.output, outcome.output
        failures = []
        for path in [p for p in before.containers if before.containers[p] != after.containers.get(p)][:1]:
            now = after.containers.get(path) or type(after.leaves.get(path)).__name__
            failures.append(f"output {path or '(whole)'} is {now}, expected {before.containers[path]}")
        missing = [path for path in before.leaves if path not in after.leaves]
        failures += [f"output {path or '(whole)'} is missing" for path in missing]
        extra = [path for path in after.leaves if path not in before.leaves]
        failures += [f"output {path or '(whole)'} is one that the original does not have" for path in extra]
        for path, value in before.leaves.items():
            if isinstance(value, Tensor) or path not in after.leaves:
                continue
            if not _equal(value, after.leaves[path]):
                failures.append(
                    f"output {path or '(whole)'} is {after.leaves[path]!r:.80}, expected {value!r:.80}"
                )
        lost = mode.original.differentiable - outcome.differentiable - set(missing)
        failures += [f"output {path or '(whole)'} no longer requires grad" for path in sorted(lost)]
        if not any(bool(value.isfinite().any()) for value in before.tensors.values()):
            failures.append("nothing compared: the original's output holds no tensor with a finite element")
        return [f"{mode.name}: {failure}" for failure in failures]

    def _checks(self, mode: _Mode, outcome: Outcome) -> list[Check]:
        checks = []
        for kind, values, references, exacts in _pairs(outcome, mode.original, mode.truth):
            for name in [*references, *(n for n in values if n not in references and kind != "output")]:
                mine, value = references.get(name), values.get(name)
                if kind == "output" and (not isinstance(mine, Tensor) or name not in values):
                    continue
                if mine is None and value is None:
                    continue
                checks.append(self._check(mode, kind, name, value, mine, exacts.get(name)))
        return checks

    def _check(self, mode: _Mode, kind: Kind, name: str, value: Any, mine: Any, exact: Any) -> Check:
        if mine is None:
            # The original leaves out a gradient or a buffer that does not change; zeros say the same.
            return self._beyond_measure(mode, kind, name, "is there, the original has none", value)
        if value is None:
            return self._beyond_measure(mode, kind, name, "is missing", mine)
        if wrong := mismatch(value, mine):
            return Check(mode.name, kind, name, 0.0, math.inf, 0.0, False, wrong)
        exact = exact if isinstance(exact, Tensor) and exact.shape == mine.shape else mine
        first = compare.difference(mine, exact, mine, self.tolerance)
        second = compare.difference(value, exact, mine, self.tolerance)
        unit = self._roundoff(mine)
        noise = mode.noise.get((kind, name), Norms())
        dtype = mine.dtype if mine.is_floating_point() else self.dtype
        excused = compare.excused(first.norms, dtype, mine.device, EXCUSABLE_ERROR)
        if mine.is_floating_point() or mine.is_complex():
            floor = compare.allowed_without_error(unit, mine.numel())
        else:
            # Whole numbers that rounding decides (an argmax): as many near-ties as roundings are wide.
            share = math.floor(8 * unit * mine.numel()) / max(mine.numel(), 1)
            floor = Norms(share, share)
        limit = excused.larger(noise.times(NOISE_FACTOR)).larger(floor)
        verdict = compare.judge(first.norms, second.norms, limit, self.tolerance)
        detail = "" if verdict.passed else second.describe(mine.shape)
        return Check(
            mode.name,
            kind,
            name,
            verdict.error_original,
            verdict.error_swapped,
            verdict.limit,
            verdict.passed,
            detail,
            verdict.norm,
        )

    def _beyond_measure(self, mode: _Mode, kind: Kind, name: str, wrong: str, there: Tensor) -> Check:
        if not there.is_floating_point() or bool((there != 0).any()):
            return Check(mode.name, kind, name, 0.0, math.inf, 0.0, False, wrong)
        return Check(mode.name, kind, name, 0.0, 0.0, 0.0, True, f"{wrong}; all zeros")

    def _roundoff(self, tensor: Tensor) -> float:
        """Of the coarser of the tensor's dtype and the network's: a float32 sum of bfloat16 is no finer."""
        own = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else self.dtype
        devices = {tensor.device, *self.runner.devices}
        units = [compare.roundoff(dtype, device) for dtype in (own, self.dtype) for device in devices]
        kind = tensor.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            units.append(compare.roundoff(torch.get_autocast_dtype(kind), tensor.device))
        return max(units)

    def _conclude(self, unverified: list[str], modes: Sequence[str]) -> None:
        report = self.report
        report.checks += self.layers.checks
        report.notes += self.layers.notes
        failed = [check for check in report.checks if not check.passed]
        report.failures += [check.failure() for check in failed]
        verified = [mode for mode in modes if mode not in unverified]
        report.reference = self._describe_reference(verified)
        if self.reference == "float64" and self.why_original:
            report.failures.append(f"no float64 reference: {report.reference}")
        if not report.checks and not report.failures:
            report.failures.append("nothing compared")
        first = next((check for check in self.layers.checks if not check.passed), None)
        if first is not None:
            report.first_divergence = f"layer {first.name or '(root)'}: {first.failure()}"

    def _describe_reference(self, modes: list[str]) -> str:
        reasons = {mode: self.why_original[mode] for mode in modes if mode in self.why_original}
        if not reasons:
            return "float64"
        text = "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items())
        if len(set(reasons.values())) == 1:
            text = next(iter(reasons.values()))
        if len(reasons) < len(modes):
            return f"float64 in {next(m for m in modes if m not in reasons)} mode, original in {text}"
        return f"original ({text})"


_Values = dict[str, Any]


def _pairs(
    outcome: Outcome, original: Outcome, truth: Outcome
) -> list[tuple[Kind, _Values, _Values, _Values]]:
    """The values of an outcome, of the original and of the truth, by kind."""
    three = (outcome, original, truth)
    kinds: list[tuple[Kind, list[_Values]]] = [
        ("output", [dict(o.output.tensors) for o in three]),
        ("grad_input", [dict(o.grad_inputs) for o in three]),
        ("grad_parameter", [dict(o.grad_parameters) for o in three]),
        ("buffer", [dict(o.buffers) for o in three]),
    ]
    return [(kind, values[0], values[1], values[2]) for kind, values in kinds]


def _equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    return not isinstance(value, str | bytes | int | complex) or value == other


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
