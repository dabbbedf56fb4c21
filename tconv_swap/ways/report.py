"""Defines the result of `optimize`: the ways of each stage, the fastest one that was verified, and what bounds the
network in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tconv_swap.verification.report import VerifyReport
from tconv_swap.ways.search import WayRow, fastest_of
from tconv_swap.ways.way import FUSED, OURS, PYTORCH, TODAY, Way

WayStage = Literal["forward", "step"]


@dataclass
class StageWays:
    """The ways of one stage.

    Attributes:
        stage: `forward` (eval mode, no gradients) or `step` (a training step).
        rows: one for each way, in the order in which they were tried.
        best: the way that was chosen; `TODAY` if none is faster.
        finals: the chosen way, the best with each kind of layers and today's, timed once more, interleaved in one run.
        verification: that of the chosen way; None if today's way was chosen.
        bound: one line on what bounds the network in the chosen way; `""` if it was not profiled.
        notes: lines.
    """

    stage: WayStage
    rows: list[WayRow] = field(default_factory=list)
    best: Way = TODAY
    finals: dict[str, Any] = field(default_factory=dict)
    verification: VerifyReport | None = None
    bound: str = ""
    notes: list[str] = field(default_factory=list)

    def row(self, way: Way) -> WayRow | None:
        return next((row for row in self.rows if row.way == way), None)

    def best_of(self, *layers: str) -> WayRow | None:
        """Returns the fastest way with one of these layers that was not found wrong."""
        return fastest_of(self.rows, *layers)

    @property
    def our_best(self) -> WayRow | None:
        """Returns the fastest way with our layers, fused or not, that was not found wrong."""
        return self.best_of(OURS.name, FUSED.name)

    @property
    def pytorch_best(self) -> Way | None:
        """Returns the fastest way with PyTorch's layers, which may be today's; the times side by side decide between
        these two. None if none was timed."""
        row = self.best_of(PYTORCH.name)
        if row is None:
            return None
        timed = [way for way in (row.way, TODAY) if way.name in self.finals]
        return min(timed, key=lambda way: float(self.finals[way.name].median_ms), default=row.way)

    @property
    def ours_in_the_same_way(self) -> WayRow | None:
        """Returns our layers in the best way of PyTorch's layers; None if that was not timed."""
        theirs = self.pytorch_best
        if theirs is None:
            return None
        found = self.row(Way(OURS.name, theirs.layout, theirs.runtime))
        return found if found is not None and found.timing is not None else None

    def to_dict(self) -> dict[str, Any]:
        theirs, same = self.pytorch_best, self.ours_in_the_same_way
        return {
            "stage": self.stage,
            "best": self.best.name,
            "pytorch_best": None if theirs is None else theirs.name,
            "ours_in_the_same_way": None if same is None else same.way.name,
            "bound": self.bound,
            "finals": {name: timing.to_dict() for name, timing in self.finals.items()},
            "verification": None if self.verification is None else self.verification.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }


@dataclass
class WaysReport:
    """The result of `optimize`.

    Attributes:
        stages: the stages that were searched: the forward pass, a training step, or both.
        environment: the result of `measurement.environment.environment`.
        method: how it was measured.
    """

    stages: list[StageWays] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: WayStage) -> StageWays | None:
        return next((stage for stage in self.stages if stage.stage == name), None)

    @property
    def chosen(self) -> StageWays:
        """Returns the stage that the network is prepared for: a training step if that was searched."""
        return self.stages[-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "stages": [stage.to_dict() for stage in self.stages],
            "environment": dict(self.environment),
            "method": dict(self.method),
        }

    def __str__(self) -> str:
        lines = []
        for stage in self.stages:
            for row in stage.rows:
                mark = "*" if row.way == stage.best else " "
                if row.timing is None:
                    lines.append(f"{mark} {stage.stage:8} {row.way.name:36} {row.why_not}")
                    continue
                text = f"{row.timing.median_ms:9.4f} ms {row.speedup:6.2f}x  {row.failure}"
                lines.append(f"{mark} {stage.stage:8} {row.way.name:36} {text}".rstrip())
            lines += [stage.bound] if stage.bound else []
            lines += stage.notes
        return "\n".join(lines)
