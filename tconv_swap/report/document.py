"""Makes the result of a swap plain data: one JSON document, described field by field in ``schema.json``.

Every renderer (``terminal``, ``markdown``, ``page``) reads this document through ``summary``, and nothing else, so a
program finds in it everything that a person is shown.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tconv_swap.explanation import Explanation
    from tconv_swap.measurement.bench import BenchmarkReport
    from tconv_swap.measurement.roof import Ceilings
    from tconv_swap.surgery import SwapPlan
    from tconv_swap.verification.report import VerifyReport
    from tconv_swap.ways.report import WaysReport

SCHEMA_VERSION = 1
"""The version of the JSON. It grows by one when a field is removed or changes its meaning; new fields do not count."""

MODEL_ITSELF = "(the model itself)"


@dataclass(frozen=True)
class Facts:
    """The facts that no other report has: the file that was swapped, the inputs and the device, and the output file."""

    model: str
    """The file, or a name."""
    inputs: str
    """Shapes and dtypes, as `Inputs.describe` returns them."""
    inputs_origin: str
    """How they were found: "--input-shape", "inferred from main.0 (ConvTranspose2d)" ..."""
    device: str
    output: str | None = None
    """The file that was written; None if none was."""
    load_snippet: str = ""
    """The Python lines that load it."""
    warnings: tuple[str, ...] = ()
    native: tuple[str, ...] = ()
    """Swapped layers and stages that PyTorch's operator computes, and why, one line each."""


def outcome(plan: SwapPlan, verification: VerifyReport | None) -> str:
    """Returns "nothing_to_swap", "not_verified", "verified" or "mismatch"."""
    if not plan.swapped:
        return "nothing_to_swap"
    if verification is None:
        return "not_verified"
    return "verified" if verification.passed else "mismatch"


def to_json_dict(
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    facts: Facts,
    explanation: Explanation | None = None,
    ceilings: Ceilings | None = None,
    ways: WaysReport | None = None,
) -> dict[str, Any]:
    """Returns everything that is known, as plain values that `json` can write and any parser can read.

    `json_schema` describes it. Parts that were not done are null. JSON has no infinities: they and NaN are the strings
    "inf", "-inf", "nan".

    Args:
        plan, verification, benchmark, facts: the results; None for a part that was not done.
        explanation: that of the swapped network on the inputs of the benchmark.
        ceilings: those of the GPU, measured in the same run; None on the CPU.
        ways: the ways to run the network, if they were tried.
    """
    hints = [plan.describe_unused(pattern) for pattern in plan.unused_patterns]
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": "tconv-swap",
        "outcome": outcome(plan, verification),
        "facts": plain(asdict(facts)),
        "plan": plain(plan.to_dict() | {"unused_hints": hints}),
        "verification": None if verification is None else plain(verification.to_dict()),
        "benchmark": None if benchmark is None else plain(benchmark.to_dict()),
        "explanation": None if explanation is None else plain(explanation.to_dict()),
        "ceilings": None if ceilings is None else plain(asdict(ceilings)),
        "ways": None if ways is None else plain(ways.to_dict()),
    }


@lru_cache(maxsize=1)
def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of the document, each field with a description."""
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return schema


def plain(value: Any) -> Any:
    """Returns `value` as dicts, lists and JSON's own scalars."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
