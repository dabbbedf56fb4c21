"""Defines the neighbours of a layer, the rows of their measurements, and what follows from these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.ablation_rows import geometric_mean
from benchmarks.stage_row import StageRow
from benchmarks.table import Table
from tconv_swap.geometry import Geometry

#: The name of the layer itself among its neighbours.
OWN = "layer"
CHANNELS = 8
#: The largest time for a multiply-add over the layer's own that is not a cliff.
MAX_RATIO = 1.3
WORST_SHOWN = 20


def neighbours_of(geometry: Geometry) -> dict[str, Geometry]:
    """Returns the layer and its existing neighbours by name, such as ``"height +1"``. Channels change by the smallest
    multiple of 8 that the groups divide; those of a depthwise layer are its groups too."""
    g = geometry
    channels = math.lcm(CHANNELS, g.groups)
    steps: dict[str, tuple[tuple[str, ...], int]] = {
        "batch": (("batch",), 1),
        "height": (("height",), 1),
        "width": (("width",), 1),
    }
    if 1 < g.groups == g.in_channels == g.out_channels:
        steps["channels"] = ("in_channels", "out_channels", "groups"), CHANNELS
    else:
        steps["in_channels"] = ("in_channels",), channels
        steps["out_channels"] = ("out_channels",), channels
    found = {OWN: g}
    for name, (changed, step) in steps.items():
        for by in (-step, step):
            sizes = {field: getattr(g, field) + by for field in changed}
            if min(sizes.values()) > 0:
                made = g._replace(**sizes)
                if min(made.output_shape) > 0:
                    found[f"{name} {by:+d}"] = made
    return found


@dataclass(frozen=True, slots=True)
class Row(StageRow):
    """One stage of one layer in one mode and layout, and its neighbours by name: times in microseconds (medians from a
    cold L2 cache), multiply-adds, and what "auto" takes. ``failures``: why others have no time."""

    microseconds: Mapping[str, float]
    macs: Mapping[str, int]
    families: Mapping[str, str]
    failures: Mapping[str, str]

    def ratio(self, name: str) -> float:
        """Returns the neighbour's time for a multiply-add over the layer's own."""
        return self.slower(name) * self.macs[OWN] / self.macs[name]

    def slower(self, name: str) -> float:
        """Returns the neighbour's time over the layer's own."""
        return self.microseconds[name] / self.microseconds[OWN]

    @property
    def worst(self) -> str:
        """Returns the neighbour whose multiply-adds take longest."""
        return max(self.microseconds, key=self.ratio)

    @property
    def is_cliff(self) -> bool:
        """Returns whether a multiply-add of some neighbour takes too long, and the neighbour also takes longer in
        total: with fewer multiply-adds, each bears more of the fixed cost of a launch."""
        return any(self.ratio(name) > MAX_RATIO and self.slower(name) > 1 for name in self.microseconds)


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one stage.

    Attributes:
        group: its name, such as ``"forward, suite"``.
        rows: the number of rows.
        mean: the geometric mean of the worst neighbours' ratios; ``largest``: the largest ratio.
        above: the number of rows whose worst neighbour is above ``MAX_RATIO``.
        cliffs: the number of these in which such a neighbour takes longer than the layer in total.
    """

    group: str
    rows: int
    mean: float
    largest: float
    above: int
    cliffs: int


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Returns a group for every stage on the suite and on the random layers, then for all."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        where = "suite" if row.of_suite else "random layers"
        for name in (f"{row.stage}, {where}", f"all, {where}"):
            found.setdefault(name, []).append(row)
    return [_group(name, found[name]) for name in sorted(found, key=lambda name: name.startswith("all"))]


def _group(name: str, rows: Sequence[Row]) -> Group:
    ratios = [row.ratio(row.worst) for row in rows]
    return Group(
        group=name,
        rows=len(rows),
        mean=geometric_mean(ratios),
        largest=max(ratios),
        above=sum(ratio > MAX_RATIO for ratio in ratios),
        cliffs=sum(row.is_cliff for row in rows),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the groups as values that ``json`` can write."""
    return {"groups": [asdict(group) for group in groups_of(rows)]}


def report(rows: Sequence[Row]) -> str:
    """Returns every group, and the rows with the worst neighbours, as text."""
    if not rows:
        return "nothing was measured"
    groups = [
        [one.group, str(one.rows), f"{one.mean:.3f}", f"{one.largest:.2f}", str(one.above), str(one.cliffs)]
        for one in groups_of(rows)
    ]
    worst = sorted(rows, key=lambda row: -row.ratio(row.worst))[:WORST_SHOWN]
    headings = ["group", "rows", "worst neighbour", "largest", f"above {MAX_RATIO}", "and slower"]
    return "\n".join([Table(headings, groups).text(), *map(_line, worst)])


def _line(row: Row) -> str:
    own, its = (f"{row.families[name]} {row.microseconds[name]:.1f} us" for name in (OWN, row.worst))
    where = " ".join((row.layer, row.mode, row.layout, row.stage))
    return f"{row.ratio(row.worst):6.2f} {where}: {own}, {row.worst}: {its}"
