"""Defines the result of `verify`: one `Check` for every tensor that was compared, and the verdict over all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tconv_swap.verification.compare import Verdict

Kind = Literal[
    "output",
    "grad_input",
    "grad_parameter",
    "buffer",
    "layer_output",
    "layer_grad_input",
    "layer_grad_weight",
    "layer_grad_bias",
]


@dataclass(frozen=True)
class Check:
    """One tensor of the swapped network against the reference, beside the original's.

    Attributes:
        mode: `eval` or `train`; `probe` for a layer of which no call was seen, run on random numbers. Followed by, for
            example, `under float16 autocast` if that was requested.
        kind: what was compared; kinds that begin with `layer_` belong to one layer alone.
        name: the path of an output or input; the dotted name of a parameter, buffer or layer (`""`: root).
        error_original, error_swapped: relative errors; infinite if nothing can be measured.
        limit: the largest `error_swapped` that passes.
        passed: `error_swapped <= limit`.
        detail: where the error is largest, and other details; may be empty.
        norm: how the errors are measured: `max` (the largest error, relative to the tensor's scale), `L2`, `scale` (how
            far the tensor as a whole is from a factor of 1), or `allclose` (in units of the user's tolerance).
        way: the other way in which the network was run for this, such as `without gradients`; empty for the usual one.
    """

    mode: str
    kind: Kind
    name: str
    error_original: float
    error_swapped: float
    limit: float
    passed: bool
    detail: str = ""
    norm: str = "max"
    way: str = ""

    @classmethod
    def of(cls, mode: str, kind: Kind, name: str, verdict: Verdict, detail: str) -> Check:
        """Returns the check for a verdict."""
        return cls(
            mode,
            kind,
            name,
            verdict.error_original,
            verdict.error_swapped,
            verdict.limit,
            verdict.passed,
            detail,
            verdict.norm,
        )

    def in_way(self, way: str) -> Check:
        """Returns the same check for a run that `detail` then names."""
        return replace(self, way=way, detail="; ".join(part for part in (way, self.detail) if part))

    @property
    def margin(self) -> float:
        """Returns how many times larger the error could be: `limit / error_swapped`; below 1 it fails."""
        if self.error_swapped == 0:
            return math.inf
        return self.limit / self.error_swapped if math.isfinite(self.error_swapped) else 0.0

    @property
    def label(self) -> str:
        """Returns for example `layer grad_weight of up.0`, `output 0.boxes`."""
        what = self.kind.replace("layer_", "layer ")
        if self.kind.startswith("layer_"):
            return f"{what} of {self.name or '(root)'}"
        return f"{what} {self.name}".rstrip()

    def failure(self) -> str:
        """Returns the failed check as one line."""
        if not math.isfinite(self.error_swapped):
            return f"{self.mode}: {self.label}: {self.detail}"
        return (
            f"{self.mode}: {self.label}: error {self.error_swapped:.2e} ({self.norm}), the original's "
            f"{self.error_original:.2e}, limit {self.limit:.2e}" + (f"; {self.detail}" if self.detail else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: numbers that JSON does not have become strings."""
        return {key: _jsonable(value) for key, value in vars(self).items()}


@dataclass
class VerifyReport:
    """Says whether a swapped network computes what the original computes, with all comparisons.

    Attributes:
        checks: one for every tensor that was compared, in the order of the modes.
        failures: one readable line for everything that is wrong; empty if it is verified.
        notes: lines that the user should know though nothing is wrong (a mode that the original cannot run).
        reference: `float64` or `original`, with the reason if it is not float64.
        first_divergence: the first layer in the order of execution that diverges, and by how much.
        tried: the ways in which the networks were run and compared, in plain words.
        not_tried: the ways in which they were not, though a network may be run so.
    """

    checks: list[Check] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: str = "float64"
    first_divergence: str | None = None
    tried: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)

    def add(self, other: VerifyReport) -> None:
        """Adds the result of another verification of the same networks, under autocast."""
        if not self.checks:
            self.reference = other.reference
        elif other.checks and other.reference != self.reference:
            self.reference += f", under autocast {other.reference}"
        self.checks += other.checks
        self.failures += other.failures
        self.notes += [note for note in other.notes if note not in self.notes]
        self.first_divergence = self.first_divergence or other.first_divergence
        self.tried += other.tried
        self.not_tried += other.not_tried

    @property
    def passed(self) -> bool:
        """Returns True if there is no failure and something was compared."""
        return not self.failures and bool(self.checks)

    @property
    def margin(self) -> float:
        """Returns the smallest `limit / error_swapped` of all checks; infinite if all are exact."""
        return min((check.margin for check in self.checks), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON: numbers that JSON does not have become strings (`"inf"`, `"nan"`)."""
        return {
            "passed": self.passed,
            "reference": self.reference,
            "margin": _jsonable(self.margin),
            "first_divergence": self.first_divergence,
            "failures": list(self.failures),
            "notes": list(self.notes),
            "tried": list(self.tried),
            "not_tried": list(self.not_tried),
            "checks": [check.to_dict() for check in self.checks],
        }


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
