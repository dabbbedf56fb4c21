"""Carries out one verification, from the first run of the original to the faults of the swapped network."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tconv_swap.computed import deep_copy
from tconv_swap.inputs import model_dtype
from tconv_swap.memory import is_out_of_memory
from tconv_swap.verification import compare
from tconv_swap.verification.blocks import BlockChecks, fused_modules
from tconv_swap.verification.compare import Tolerance
from tconv_swap.verification.judge import LayerJudge, first_line
from tconv_swap.verification.layer_call import layer_roundoff, sum_roundoff
from tconv_swap.verification.layers import LayerChecks, swapped_layers
from tconv_swap.verification.memory import float64_does_not_fit, leaf_outputs
from tconv_swap.verification.network import Standard
from tconv_swap.verification.noise import WithRoundedOperators, with_rounding
from tconv_swap.verification.overflow import run_in_range
from tconv_swap.verification.report import Check, VerifyReport
from tconv_swap.verification.runs import (
    CHANGED,
    NOTHING,
    PASSES,
    Outcome,
    Pass,
    Runner,
    Subject,
    may_be_compiled,
    other_ways,
)
from tconv_swap.verification.trace import Trace
from tconv_swap.verification.wide import in_float64

_log = logging.getLogger("tconv_swap")

# The largest number of runs of the original with added rounding: they are made only while a result is in doubt.
MAX_NOISY_RUNS = 16
TRACED_NOISY_RUNS = 2
# The number of parts of an output that a note names.
MAX_NAMED = 5
# The size of the added rounding, in units of what rounding may do; a right kernel is off by less than one on average.
ADDED_ROUNDING = 2.0
# A float64 run that is further from the original computes something else (other boxes kept, other noise).
MAX_FLOAT64_DISTANCE = 0.25


class Session:
    """One verification under one autocast state; `run` writes the results into the report.

    Attributes:
        ways: the ways, beside the usual one, in which the networks were run, in the reader's words.
        gradients: whether gradients were compared in any mode.
    """

    def __init__(
        self,
        report: VerifyReport,
        original: Subject,
        swapped: Subject,
        runner: Runner,
        tolerance: Tolerance | None,
        reference: str | None,
        backward: bool,
        under: str = "",
        require_layouts: bool = True,
        is_compiled: bool = False,
    ) -> None:
        """
        Args:
            under: what the report appends to the name of a mode.
            require_layouts: whether an output with another memory layout than the original's is wrong.
            is_compiled: whether the swapped network is compiled, so that any of its operators may round differently.
        """
        self.report = report
        self.original = original
        self.swapped = swapped
        self.runner = runner
        self.tolerance = tolerance
        self.reference = reference
        self.backward = backward
        self.dtype = model_dtype(original.module)
        self.layers = LayerChecks(swapped.module, backward, runner.seed, LayerJudge(tolerance))
        self.blocks = BlockChecks(swapped.module, backward, tolerance)
        self.under = under
        self.require_layouts = require_layouts
        self.is_compiled = is_compiled
        self.float64: Subject | None = None
        self.no_float64 = "as requested" if reference == "original" else ""
        self.why_original: dict[str, str] = {}
        self.divergence: str | None = None
        self.ways: list[str] = []
        self.gradients = False

    def run(self, modes: Sequence[str]) -> list[str]:
        """Compares in each mode; returns the modes in which the original runs."""
        requested, modes = modes, [f"{mode}{self.under}" for mode in modes]
        verified = [mode for mode in modes if self._verify_mode(mode)]
        if verified:
            self.layers.probe_unreached(f"probe{self.under}")
        else:
            self.report.failures.append(f"nothing compared: the original runs in none of {list(modes)}")
        self._conclude(verified)
        return [mode for mode, named in zip(requested, modes, strict=True) if named in verified]

    def _verify_mode(self, mode: str) -> bool:
        """Returns whether the original runs in this mode, so that there is something to compare with."""
        _log.info("verify: %s mode", mode)
        if (standard := self._standard(mode)) is None:
            return False
        if not self._compare(standard) and self.divergence is None:
            self.divergence = self._first_diverging_module(standard)
        return True

    def _standard(self, mode: str) -> Standard | None:
        """Returns everything that the swapped network is judged by; None if the original does not run."""
        how, first = self._first_run(mode)
        if how is None or first is None:
            return None
        self.gradients |= how.gradients
        activations: list[int] = []
        with leaf_outputs(self.original.module, activations):
            again = self.runner.run(self.original, mode, how)
        truth = self._truth(mode, how, first, sum(activations)) or first
        standard = Standard(mode, how, first, truth, self.dtype, self.runner.devices, self.tolerance)
        standard.widen(again)
        standard.in_place = first.in_same_memory(again)
        standard.require_layouts = self.require_layouts
        if off := {key: norms for key, norms in standard.noise.items() if norms.maximum > 0}:
            (kind, where), worst = max(off.items(), key=lambda item: item[1].maximum)
            self.report.notes.append(
                f"{mode}: the original is not deterministic: two runs differ by up to {worst.maximum:.1e} "
                f"({kind} {where}); the limits are widened by that"
            )
        return standard

    def _first_run(self, name: str) -> tuple[Pass | None, Outcome | None]:
        passes = PASSES if self.backward else (NOTHING,)
        reason = ""
        for how in passes:
            try:
                outcome = run_in_range(self.runner, self.original, name, how)
            except Exception as error:  # a user's forward may raise anything
                if is_out_of_memory(error):
                    raise  # this says nothing about the network
                reason = reason or first_line(error)
                last = first_line(error)
                continue
            if self.backward and not how.gradients:
                self.report.notes.append(f"{name}: the original gives no gradients, none compared: {reason}")
            elif self.backward and not how.of_inputs:
                self.report.notes.append(f"{name}: no gradients of the inputs: {reason}")
            elif self.backward and not outcome.differentiable:
                self.report.notes.append(f"{name}: no output depends on anything that requires grad")
            if self.runner.scale != 1.0:
                self.report.notes.append(
                    f"{name}: the original's gradients overflow; compared are those of outputs' gradients that are "
                    f"{self.runner.scale:.1e} times as large, as a gradient scaler makes them"
                )
            return how, outcome
        self.report.notes.append(f"{name}: not verifiable, the original raises {last}")
        return None, None

    def _truth(self, name: str, how: Pass, first: Outcome, activations: int) -> Outcome | None:
        """Returns the float64 run of the original; None if there is none, and then keeps the reason."""
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
                self.float64 = Subject(deep_copy(self.original.module, dtype=torch.float64).double())
            with in_float64(self.dtype, devices):
                truth = self.runner.run(self.float64, name, how, double=True)
        except Exception as error:
            # The frames of the traceback would keep the tensors computed so far.
            self.why_original[name] = f"in float64 it raises {first_line(error)}"
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
                if not off <= MAX_FLOAT64_DISTANCE:
                    return f"output {path} is {off:.1e} off in float64: not the same computation"
        return ""

    def _measure_noise(self, standard: Standard) -> None:
        """Adds rounding to what our kernels replace in the original, and keeps how far that moves every result."""
        standard.noisy_runs += 1
        with self._with_rounding(standard.noisy_runs):
            standard.widen(self.runner.run(self.original, standard.mode, standard.how))

    @contextmanager
    def _with_rounding(self, index: int) -> Iterator[None]:
        def amplitude(layer: nn.Module, output: Tensor) -> float:
            return ADDED_ROUNDING * layer_roundoff(layer, output)

        def remaining(layer: nn.Module, output: Tensor) -> float:
            return max(0.0, amplitude(layer, output) - operators.amplitude(output))

        network, seed = self.original.module, self.runner.seed + index
        operators = WithRoundedOperators(ADDED_ROUNDING, seed)
        if self.is_compiled:
            names = [name for name, module in network.named_modules() if not any(module.children())]
            with with_rounding(network, names, remaining, seed, sum_roundoff), operators:
                yield
            return
        names = [*swapped_layers(self.swapped.module), *fused_modules(self.swapped.module)]
        with with_rounding(network, names, amplitude, seed):
            yield

    def _compare(self, standard: Standard) -> bool:
        """Runs the swapped network and keeps the faults; returns whether there are none."""
        mode, report = standard.mode, self.report
        try:
            with self.blocks.watch(mode):
                watched = self._run_observed(self.layers.watch(mode), mode, standard.how)
            outcome = self.runner.run(self.swapped, mode, standard.how)
            others = self._other_ways(standard)
        except Exception as error:  # a broken layer may raise anything
            if is_out_of_memory(error):
                raise
            report.failures.append(
                f"{mode}: the swapped network raises {first_line(error)}; the original does not"
            )
            return False
        outcomes = [outcome]
        if not watched.identical(outcome):
            repeated = standard.distances(watched, outcome)
            worst = max((norms.maximum for norms in repeated.values()), default=0.0)
            report.notes.append(f"{mode}: two runs of the swapped network differ, by up to {worst:.1e}")
            outcomes.append(watched)
        reused = sorted(watched.in_same_memory(outcome) - standard.in_place)
        del watched
        if parts := standard.not_compared(outcome):
            more = f" and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
            report.notes.append(f"{mode}: not compared: {', '.join(parts[:MAX_NAMED])}{more}")
        structure = [line for each in outcomes for line in standard.structure(each)]
        structure += [
            f"{mode}: output {path or '(whole)'} of one run shares memory with that of the next"
            for path in reused
        ]
        for way, (other, outcome) in others.items():
            structure += [f"{line}, {way}" for line in other.structure(outcome)]
        checks = _judged(standard, outcomes, others)
        layers_agree = all(check.passed for check in self.layers.checks + self.blocks.checks)
        while layers_agree and self.tolerance is None and (doubted := _in_doubt(standard, checks, others)):
            # Rounding next to a kink (ReLU, max pooling) makes a gradient jump, and that is as likely in a run with
            # added rounding as in the swapped network.
            self._measure_noise(doubted)
            checks = _judged(standard, outcomes, others)
        report.checks += checks
        report.failures += structure
        return not structure and layers_agree and all(check.passed for check in checks)

    def _run_observed(self, observed: AbstractContextManager[None], mode: str, how: Pass) -> Outcome:
        """Runs the swapped network while its layers are observed. Compiled code does not run meanwhile, so where there
        may be any, the outcome is that of another run."""
        with observed:
            outcome = self.runner.run(self.swapped, mode, how)
        return self.runner.run(self.swapped, mode, how) if may_be_compiled() else outcome

    def _other_ways(self, standard: Standard) -> dict[str, tuple[Standard, Outcome]]:
        """Runs the swapped network in the other ways; returns the outcomes, each with the standard that it is judged
        by."""
        found = {}
        for way, how in other_ways(standard.how).items():
            try:
                original = self.runner.run(self.original, standard.mode, how)
            except Exception as error:  # for example a forward that computes gradients itself
                if is_out_of_memory(error):
                    raise
                _log.debug("verify: the original does not run %s: %s", way, first_line(error))
                continue
            exact = standard.truth
            if how.changed or exact is standard.original or self._not_comparable(exact, original):
                exact = original
            if how.changed and not original.has_numbers():
                continue
            watch = self.layers.watch_changed if how.changed else self.layers.watch_again
            outcome = self._run_observed(watch(standard.mode, way), standard.mode, how)
            # These ways share their noise, so a widening counts for all of them; other weights have separate noise.
            noise = dict(standard.noise) if how.changed else standard.noise
            found[way] = replace(standard, how=how, original=original, truth=exact, noise=noise), outcome
            self.ways += [way] if way not in self.ways else []
        return found

    def _first_diverging_module(self, standard: Standard) -> str | None:
        """Returns the first module that returns something else; called only for faults that no swapped layer
        explains."""
        if any(not check.passed for check in self.layers.checks):
            return None
        trace, mode, how = Trace(), standard.mode, NOTHING
        try:
            with trace.record(self.original.module):
                self.runner.run(self.original, mode, how)
            for index in range(TRACED_NOISY_RUNS):
                with self._with_rounding(index), trace.widen(self.original.module):
                    self.runner.run(self.original, mode, how)
            with trace.follow(self.swapped.module):
                self.runner.run(self.swapped, mode, how)
        except Exception as error:  # a search that fails must not hide the faults
            _log.debug("verify: no trace: %s", first_line(error))
        return None if trace.divergence is None else f"{mode}: {trace.divergence}"

    def _conclude(self, verified: list[str]) -> None:
        report, layers = self.report, self.layers
        report.checks += layers.checks + self.blocks.checks
        report.notes += layers.judge.notes + self.blocks.notes
        report.failures += [check.failure() for check in report.checks if not check.passed]
        report.reference = self._describe_reference(verified)
        if self.reference == "float64" and self.why_original:
            report.failures.append(f"no float64 reference: {report.reference}")
        if not report.checks and not report.failures:
            report.failures.append("nothing compared")
        first = next((check for check in layers.checks + self.blocks.checks if not check.passed), None)
        report.first_divergence = self.divergence
        if first is not None:
            report.first_divergence = f"layer {first.name or '(root)'}: {first.failure()}"

    def _describe_reference(self, modes: list[str]) -> str:
        reasons = {mode: self.why_original[mode] for mode in modes if mode in self.why_original}
        if not reasons:
            return "float64"
        if len(reasons) == len(modes) and len(set(reasons.values())) == 1:
            return f"original ({next(iter(reasons.values()))})"
        return ", ".join(
            f"original in {mode} mode ({reasons[mode]})" if mode in reasons else f"float64 in {mode} mode"
            for mode in modes
        )


def _in_doubt(
    standard: Standard, checks: list[Check], others: dict[str, tuple[Standard, Outcome]]
) -> Standard | None:
    """Returns the standard that needs more runs with added rounding before one of its checks counts as failed; None if
    none does."""
    changed = [other for other, _ in others.values() if other.how.changed]
    failed = [check for check in checks if not check.passed and math.isfinite(check.error_swapped)]
    of_changed = [check for check in failed if check.way == CHANGED]
    if len(failed) > len(of_changed) and standard.noisy_runs < MAX_NOISY_RUNS:
        return standard
    if of_changed and changed and changed[0].noisy_runs < MAX_NOISY_RUNS:
        return changed[0]
    return None


def _judged(
    standard: Standard, outcomes: list[Outcome], other_ways: dict[str, tuple[Standard, Outcome]]
) -> list[Check]:
    """Returns the checks of the first outcome, those in which another outcome fails, and those that fail in another
    way."""
    first, *others = (standard.checks(outcome) for outcome in outcomes)
    failed = [check for checks in others for check in checks if not check.passed]
    known = {(check.kind, check.name) for check in first + failed if not check.passed}
    for way, (other, outcome) in other_ways.items():
        found = [
            check.in_way(way)
            for check in other.checks(outcome)
            if not check.passed and (check.kind, check.name) not in known
        ]
        known |= {(check.kind, check.name) for check in found}
        failed += found
    return first + failed
