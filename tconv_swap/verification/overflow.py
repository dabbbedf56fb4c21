"""Runs the original with smaller gradients where its own overflow, as a gradient scaler does in training."""

from __future__ import annotations

from tconv_swap.verification.runs import Outcome, Pass, Runner, Subject
from tconv_swap.verification.tree import dense

#: The scales that are tried, largest first. A power of two changes no rounding except where numbers underflow.
SCALES = (2.0**-4, 2.0**-8, 2.0**-12)
#: The distance to the overflow that rounding, and another order of sums, may use up.
MARGIN = 2.0**-4


def run_in_range(runner: Runner, original: Subject, mode: str, how: Pass) -> Outcome:
    """Runs the original and leaves in ``runner.scale`` the scale of the outputs' gradients with which its own are
    finite; 1 if they are finite anyway, or with none.

    Next to an overflow, rounding decides which gradients are infinite, and infinities show no error.

    Raises:
        Exception: whatever the network raises.
    """
    runner.scale = 1.0
    first = runner.run(original, mode, how)
    if _has_finite_gradients(first):
        return first
    for scale in SCALES:
        runner.scale = scale
        if _has_finite_gradients(runner.run(original, mode, how)):
            runner.scale = scale * MARGIN
            return runner.run(original, mode, how)
    runner.scale = 1.0
    return first


def _has_finite_gradients(outcome: Outcome) -> bool:
    gradients = [*outcome.grad_inputs.values(), *outcome.grad_parameters.values()]
    return all(gradient is None or bool(dense(gradient).isfinite().all()) for gradient in gradients)
