"""Defines measured rows, their comparison with the targets, their summaries, and the JSON that keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.truth import Error
from tconv_swap.measurement.roof import Ceilings, Work
from tconv_swap.measurement.suite import Targets
from tconv_swap.measurement.timing import Timing
from tconv_swap.runtime.cache import write_atomically

BENCHMARK = "layers"

#: Rounding the exact result to its dtype costs 0.39 of the unit roundoff (norm over norm, random data). An error below
#: half of it never counts as less accurate, however exact PyTorch happens to be.
EXACT = 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One stage (forward, backward or one gradient) of one layer in one mode and layout, PyTorch's and ours."""

    layer: str
    geometry: str
    mode: str
    layout: str
    stage: str
    family: str
    why: str
    work: Work
    roof_ms: float
    roundoff: float
    pytorch: Timing
    ours: Timing
    speedup_95: tuple[float, float]
    errors_pytorch: Mapping[str, Error]
    errors_ours: Mapping[str, Error]
    """The errors against float64, by tensor: the output, or the gradients."""
    repeatable_pytorch: bool
    repeatable_ours: bool
    """Whether a second call gave the same bits."""

    @property
    def speedup(self) -> float:
        return self.pytorch.median_ms / self.ours.median_ms

    @property
    def tflops(self) -> float:
        return self.work.flops / self.ours.median_ms * 1e-9

    @property
    def gbps(self) -> float:
        return self.work.bytes / self.ours.median_ms * 1e-6

    @property
    def roof_fraction(self) -> float:
        return self.roof_ms / self.ours.median_ms

    @property
    def worst_tensor(self) -> str:
        """Returns the checked tensor whose error is largest relative to PyTorch's; a NaN is larger than any number."""
        return max(self.errors_ours, key=lambda name: _or_infinity(self._error_ratio(name)))

    @property
    def error(self) -> float:
        """Returns the relative L2 error of our worst tensor."""
        return self.errors_ours[self.worst_tensor].l2

    @property
    def error_ratio(self) -> float:
        """Returns this error over PyTorch's; 1 if both are exact."""
        return self._error_ratio(self.worst_tensor)

    def _error_ratio(self, name: str) -> float:
        ours, pytorch = self.errors_ours[name].l2, self.errors_pytorch[name].l2
        if pytorch == 0:
            return 1.0 if ours == 0 else math.inf
        return ours / pytorch

    def accurate(self, targets: Targets) -> bool:
        """Returns whether the error of every tensor is below PyTorch's times a factor, or below what rounding
        explains."""
        return all(
            ours.l2 <= max(targets.error_factor * self.errors_pytorch[name].l2, EXACT * self.roundoff)
            for name, ours in self.errors_ours.items()
        )

    def fast(self, targets: Targets) -> bool:
        return self.speedup >= targets.least_speedup

    def own(self, targets: Targets) -> bool:
        """Returns whether our fast kernels computed all of it: the family names every kernel that had a part."""
        return not set(self.family.split(", ")) & set(targets.fallbacks)

    def to_dict(self, targets: Targets) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "geometry": self.geometry,
            "mode": self.mode,
            "layout": self.layout,
            "stage": self.stage,
            "family": self.family,
            "why": self.why,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "roof_ms": self.roof_ms,
            "roundoff": self.roundoff,
            "pytorch": self.pytorch.to_dict(),
            "ours": self.ours.to_dict(),
            "speedup": self.speedup,
            "speedup_95": list(self.speedup_95),
            "tflops": self.tflops,
            "gbps": self.gbps,
            "roof_fraction": self.roof_fraction,
            "errors_pytorch": {name: error.to_dict() for name, error in self.errors_pytorch.items()},
            "errors_ours": {name: error.to_dict() for name, error in self.errors_ours.items()},
            "repeatable_pytorch": self.repeatable_pytorch,
            "repeatable_ours": self.repeatable_ours,
            "fast": self.fast(targets),
            "accurate": self.accurate(targets),
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Row:
        return cls(
            **{
                name: entry[name]
                for name in ("layer", "geometry", "mode", "layout", "stage", "family", "why")
            },
            **{
                name: entry[name] for name in ("roof_ms", "roundoff", "repeatable_pytorch", "repeatable_ours")
            },
            work=Work(entry["flops"], entry["bytes"]),
            pytorch=Timing(**entry["pytorch"]),
            ours=Timing(**entry["ours"]),
            speedup_95=(entry["speedup_95"][0], entry["speedup_95"][1]),
            errors_pytorch={name: Error.from_dict(error) for name, error in entry["errors_pytorch"].items()},
            errors_ours={name: Error.from_dict(error) for name, error in entry["errors_ours"].items()},
        )


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


@dataclass
class Results:
    """The results of one run. ``failures``: a readable line for each configuration that could not be measured."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def save(self, path: Path, targets: Targets) -> None:
        """Writes the JSON, one row on a line, all at once or not at all."""
        head = {
            "benchmark": BENCHMARK,
            "environment": self.environment,
            "settings": self.settings,
            "ceilings": {"copy_gbps": self.ceilings.copy_gbps, "tflops": dict(self.ceilings.tflops)},
            "failures": self.failures,
        }
        rows = ",\n".join("  " + json.dumps(row.to_dict(targets)) for row in self.rows)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        write_atomically(path, f'{text},\n "rows": [\n{rows}\n ]\n}}\n'.encode())

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads what ``save`` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("benchmark") != BENCHMARK:
            raise ValueError(f"{path} does not hold results of benchmarks.layers")
        return cls(
            document["environment"],
            document["settings"],
            Ceilings(document["ceilings"]["copy_gbps"], document["ceilings"]["tflops"]),
            [Row.from_dict(entry) for entry in document["rows"]],
            document["failures"],
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows of one stage, mode and layout together. A target is None if none is set."""

    stage: str
    mode: str
    layout: str
    rows: int
    speedup: float
    slowest: Row
    roof_fraction: float
    own_rows: int
    slower_rows: int
    inaccurate_rows: int
    target: float | None
    roof_target: float | None

    @property
    def met(self) -> bool:
        return self.target is None or (
            self.speedup >= self.target and self.slower_rows == 0 and self.inaccurate_rows == 0
        )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def group_rows(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Returns the rows by stage, mode and layout, in the order of the first row of each group."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.stage, row.mode, row.layout), []).append(row)
    return groups


def summarise(rows: Iterable[Row], targets: Targets) -> list[Summary]:
    return [
        Summary(
            stage=stage,
            mode=mode,
            layout=layout,
            rows=len(group),
            speedup=geometric_mean([row.speedup for row in group]),
            slowest=min(group, key=lambda row: row.speedup),
            roof_fraction=geometric_mean([row.roof_fraction for row in group]),
            own_rows=sum(row.own(targets) for row in group),
            slower_rows=sum(not row.fast(targets) for row in group),
            inaccurate_rows=sum(not row.accurate(targets) for row in group),
            target=targets.speedup.get(stage, {}).get(mode, {}).get(layout),
            roof_target=targets.roof.get(stage),
        )
        for (stage, mode, layout), group in group_rows(rows).items()
    ]
