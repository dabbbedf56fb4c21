"""Defines the rows of the ablation, and what follows from them: the worth of each family, and the regret of the rule.

A row is one stage of one layer in one mode and layout, with the time of every way to compute it. The worth of a family
there is how much slower the fastest of the other ways is, including PyTorch's operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.families import APART, PYTORCH
from benchmarks.stage_row import StageRow

#: A family is kept if its worth is above this in the geometric mean of its stage in one mode and layout, or above this
#: on a class of layers there.
MIN_WORTH_OF_STAGE, MIN_WORTH_OF_CLASS = 1.01, 1.3
#: A class needs at least this many rows.
MIN_ROWS_OF_CLASS = 3
#: A way that is slower than the best by no more than this is as good: the rest is noise.
TIE = 1.01
#: The largest regret that a row should have.
MAX_REGRET = 1.25
WORST_SHOWN = 20

#: What other GPUs than Hopper run instead of kernels that only Hopper has. They are kept for those GPUs.
FALLBACKS = frozenset(
    (
        "forward_narrow_ffma",
        "forward_implicit_gemm_mma",
        "forward_general",
        "grad_input_general",
        "grad_weight_general",
        "grad_input_implicit_gemm_mma",
        "grad_weight_implicit_gemm_mma",
    )
)


@dataclass(frozen=True, slots=True)
class Row(StageRow):
    """Times in microseconds, medians from a cold L2, by family; ``"pytorch"``: its operator; ``"apart"``: both
    gradients one after the other. ``chosen``: what the rule takes. ``failures``: why others have no time."""

    chosen: str
    microseconds: Mapping[str, float]
    failures: Mapping[str, str]

    def worth(self, family: str) -> float:
        """Returns the time of the fastest other way over that of the fastest of all; 1 if nothing else computes the
        row."""
        others = [time for name, time in self.microseconds.items() if name != family]
        return min(others) / min(self.microseconds.values()) if others else 1.0

    @property
    def regret(self) -> float | None:
        """Returns the time of what the rule takes over that of the fastest; None if it did not run."""
        taken = self.microseconds.get(self.chosen)
        return None if taken is None else taken / min(self.microseconds.values())


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of one family in one stage, with all other families present.

    Attributes:
        rows: the number of rows on which it was measured; ``wins``: how many of them it computes fastest.
        margin: the time of the next best over its own, as a geometric mean over those it wins; 1 if it wins none.
        of_stage: the geometric mean of the stage's rows without it over that with it, in all modes and layouts.
        of_combination: the largest of these in one mode and layout, ``combination``.
        of_class: the largest in one class of layers in one mode and layout, ``layer_class``.
        of_suite: as ``of_stage``, over the rows of the suite only; ``of_random``: over those of the random layers only.
    """

    stage: str
    family: str
    rows: int
    wins: int
    margin: float
    of_stage: float
    of_combination: float
    combination: str
    of_class: float
    layer_class: str
    of_suite: float
    of_random: float

    @property
    def earns(self) -> bool:
        return self.of_combination > MIN_WORTH_OF_STAGE or self.of_class >= MIN_WORTH_OF_CLASS


@dataclass(frozen=True, slots=True)
class Verdict:
    """``fallback``: it is kept for other GPUs. ``worths``: by stage, without the families that were dropped before."""

    family: str
    keeps: bool
    fallback: bool
    worths: tuple[Worth, ...]


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of what the rule takes, relative to the fastest: the geometric mean of the rows, the largest, and the
    number of rows above ``MAX_REGRET``."""

    stage: str
    rows: int
    mean: float
    largest: float
    above: int


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean; 1 for no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else 1.0


def families_of(rows: Iterable[Row]) -> list[str]:
    """Returns all our families, in alphabetic order."""
    names = {name for row in rows for name in row.microseconds}
    return sorted(names - {PYTORCH, APART})


def worth_of(rows: Sequence[Row], stage: str, family: str) -> Worth | None:
    """Returns the worth of a family; None if no row of the stage has it. A row that only it computes counts as 1."""
    of_stage = [row for row in rows if row.stage == stage]
    logarithms = {row.key: math.log(row.worth(family)) for row in of_stage if family in row.microseconds}
    if not logarithms:
        return None

    def mean(group: Sequence[Row]) -> float:
        # Without the family, a row that does not have it is as fast as before.
        found = math.fsum(logarithms.get(row.key, 0.0) for row in group)
        return math.exp(found / len(group)) if group else 1.0

    won = [row for row in of_stage if logarithms.get(row.key, 0.0) > 0]
    combinations = {name: mean(group) for name, group in _grouped(of_stage, _combination).items()}
    classes = {
        name: mean(group)
        for name, group in _grouped(of_stage, _class).items()
        if len(group) >= MIN_ROWS_OF_CLASS
    }
    combination = max(combinations, key=lambda name: combinations[name])
    layer_class = max(classes, key=lambda name: classes[name], default="")
    return Worth(
        stage=stage,
        family=family,
        rows=len(logarithms),
        wins=len(won),
        margin=mean(won),
        of_stage=mean(of_stage),
        of_combination=combinations[combination],
        combination=combination,
        of_class=classes.get(layer_class, 1.0),
        layer_class=layer_class,
        of_suite=mean([row for row in of_stage if row.of_suite]),
        of_random=mean([row for row in of_stage if not row.of_suite]),
    )


def worths(rows: Sequence[Row]) -> list[Worth]:
    """Returns the worth of every family in every stage, with all others present; by stage, the most valuable first."""
    stages = list(dict.fromkeys(row.stage for row in rows))
    found = [worth_of(rows, stage, family) for stage in stages for family in families_of(rows)]
    known = [worth for worth in found if worth is not None]
    return sorted(known, key=lambda worth: (stages.index(worth.stage), -worth.of_stage))


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Returns the dropped families in the order of their dropping, then those that are kept.

    Two families that do the same are worth nothing each, but much together. So one is dropped at a time: the one with
    the smallest worth in the stage and class where its worth is largest; then the others are judged without it.
    """
    dropped: list[Verdict] = []
    while True:
        judged = {family: _judged(rows, family) for family in families_of(rows)}
        failing = [
            family
            for family, found in judged.items()
            if family not in FALLBACKS and not any(worth.earns for worth in found)
        ]
        if not failing:
            break
        least = min(failing, key=lambda family: max(map(_value, judged[family]), default=0.0))
        dropped.append(Verdict(least, False, False, judged[least]))
        rows = [_without(row, least) for row in rows]
    stay = [Verdict(family, True, family in FALLBACKS, found) for family, found in judged.items()]
    return dropped + stay


def _judged(rows: Sequence[Row], family: str) -> tuple[Worth, ...]:
    found = (worth_of(rows, stage, family) for stage in dict.fromkeys(row.stage for row in rows))
    return tuple(worth for worth in found if worth is not None)


def _without(row: Row, family: str) -> Row:
    if family not in row.microseconds:
        return row
    left = {name: time for name, time in row.microseconds.items() if name != family}
    return replace(row, microseconds=left)


def _value(worth: Worth) -> float:
    """Returns how near a family is to being kept: 1 at the limit of either criterion."""
    of_stage = math.log(worth.of_combination) / math.log(MIN_WORTH_OF_STAGE)
    return max(of_stage, math.log(worth.of_class) / math.log(MIN_WORTH_OF_CLASS))


def regrets(rows: Sequence[Row]) -> list[Regret]:
    """Returns the regret of every stage."""
    found = []
    for stage, group in _grouped(rows, lambda row: row.stage).items():
        known = [regret for row in group if (regret := row.regret) is not None]
        if known:
            above = sum(regret > MAX_REGRET for regret in known)
            found.append(Regret(stage, len(known), geometric_mean(known), max(known), above))
    return found


def worst(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the largest regret, above ``TIE``."""
    known = [(regret, row) for row in rows if (regret := row.regret) is not None and regret > TIE]
    known.sort(key=lambda entry: -entry[0])
    return [row for _, row in known[:WORST_SHOWN]]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns all of the above as values that ``json`` can write."""
    return {
        "worths": [asdict(worth) for worth in worths(rows)],
        "verdicts": [asdict(verdict) for verdict in verdicts(rows)],
        "regrets": [asdict(regret) for regret in regrets(rows)],
    }


def _grouped(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def _combination(row: Row) -> str:
    return f"{row.mode} {row.layout}"


def _class(row: Row) -> str:
    return f"{row.layer_class}, {row.mode} {row.layout}"
