"""The neighbours of a layer, what was measured of them, and what that says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.ablation_rows import geometric_mean
from benchmarks.table import Table
from tconv_swap.geometry import Geometry

#: The name of the layer itself among its neighbours.
OWN = "layer"
CHANNELS = 8
#: Of the time for a multiply-add, over the layer's own: more is a cliff.
MOST = 1.3
WORST_SHOWN = 20


def neighbours_of(geometry: Geometry) -> dict[str, Geometry]:
    """The layer and its neighbours, by name, of those that there are: ``"height +1"``. Channels come in the least
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
                made = replace(g, **sizes)
                if min(made.output_shape) > 0:
                    found[f"{name} {by:+d}"] = made
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of one layer in one mode and layout, and its neighbours, by name: times in microseconds (medians from a
    cold L2), multiply-adds, what "auto" takes. ``failures``: why others have no time."""

    layer: str
    geometry: str
    layer_class: str
    of_suite: bool
    mode: str
    layout: str
    stage: str
    microseconds: Mapping[str, float]
    macs: Mapping[str, int]
    families: Mapping[str, str]
    failures: Mapping[str, str]

    def ratio(self, name: str) -> float:
        """The time for a multiply-add there, over the layer's own."""
        return self.slower(name) * self.macs[OWN] / self.macs[name]

    def slower(self, name: str) -> float:
        """The time there, over the layer's own."""
        return self.microseconds[name] / self.microseconds[OWN]

    @property
    def worst(self) -> str:
        """The neighbour whose multiply-adds take longest."""
        return max(self.microseconds, key=self.ratio)

    @property
    def is_cliff(self) -> bool:
        """Whether a multiply-add of some neighbour takes too long, and not only since fewer of them share what a
        launch takes whatever its size: it takes longer in all."""
        return any(self.ratio(name) > MOST and self.slower(name) > 1 for name in self.microseconds)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one stage.

    Attributes:
        group: ``"forward, suite"``.
        rows: how many.
        mean: of the worst neighbour's ratio, the geometric mean; ``largest``: of one row.
        above: the rows whose worst neighbour is above ``MOST``.
        cliffs: those of them where a neighbour above it takes longer than the layer in all.
    """

    group: str
    rows: int
    mean: float
    largest: float
    above: int
    cliffs: int


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Of every stage on the suite and on the random layers, then of all."""
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
        above=sum(ratio > MOST for ratio in ratios),
        cliffs=sum(row.is_cliff for row in rows),
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """As values that ``json`` can write."""
    return {"groups": [asdict(group) for group in groups_of(rows)]}


def report(rows: Sequence[Row]) -> str:
    """Every group, and the rows with the worst neighbours, as text."""
    if not rows:
        return "nothing was measured"
    groups = [
        [one.group, str(one.rows), f"{one.mean:.3f}", f"{one.largest:.2f}", str(one.above), str(one.cliffs)]
        for one in groups_of(rows)
    ]
    worst = sorted(rows, key=lambda row: -row.ratio(row.worst))[:WORST_SHOWN]
    headings = ["group", "rows", "worst neighbour", "largest", f"above {MOST}", "and slower"]
    return "\n".join([Table(headings, groups).text(), *map(_line, worst)])


def _line(row: Row) -> str:
    own, its = (f"{row.families[name]} {row.microseconds[name]:.1f} us" for name in (OWN, row.worst))
    where = " ".join((row.layer, row.mode, row.layout, row.stage))
    return f"{row.ratio(row.worst):6.2f} {where}: {own}, {row.worst}: {its}"
