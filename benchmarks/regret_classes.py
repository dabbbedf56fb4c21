"""How fast what "auto" takes is on each class of layers: as a share of the roof, and beside PyTorch's best layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ablation_rows import geometric_mean
from benchmarks.families import PYTORCH
from benchmarks.regret_row import RegretRow
from benchmarks.table import Table
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.ceilings import known_ceilings
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.roof import work_of

#: The compute capability of the GPU whose ceilings are used: an H200's.
CAPABILITY = 90


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One stage of one class of layers.

    Attributes:
        rows: the number of rows in which what "auto" takes was timed.
        roof: the geometric mean of the share of the roof.
        over_pytorch: the geometric mean of PyTorch's time, in its faster layout, over that of what "auto" takes.
        slower: the number of rows that are slower than PyTorch's faster layout.
    """

    layer_class: str
    stage: str
    rows: int
    roof: float
    over_pytorch: float
    slower: int


def results_of(rows: Sequence[RegretRow]) -> list[ClassResult]:
    """Returns the results of random layers, by class and stage."""
    groups: dict[tuple[str, str], list[RegretRow]] = {}
    pytorch: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.of_suite or row.chosen not in row.microseconds or PYTORCH not in row.microseconds:
            continue
        groups.setdefault((row.layer_class, row.stage), []).append(row)
        key = row.layer, row.mode, row.stage
        pytorch[key] = min(row.microseconds[PYTORCH], pytorch.get(key, row.microseconds[PYTORCH]))
    found = []
    for (layer_class, stage), group in sorted(groups.items()):
        gains = [pytorch[row.layer, row.mode, row.stage] / row.microseconds[row.chosen] for row in group]
        found.append(
            ClassResult(
                layer_class=layer_class,
                stage=stage,
                rows=len(group),
                roof=geometric_mean([_roof_us(row) / row.microseconds[row.chosen] for row in group]),
                over_pytorch=geometric_mean(gains),
                slower=sum(gain < 1 for gain in gains),
            )
        )
    return found


def _roof_us(row: RegretRow) -> float:
    known = known_ceilings(None, CAPABILITY)
    assert known is not None
    numbers: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row.problem.items()
        if name != "bias"
    }
    work = work_of(Geometry(**numbers), row.stage, MODES[row.mode].dtype.itemsize)
    return 1e3 * work.roof_ms(known.ceilings, row.mode)


def report(rows: Sequence[RegretRow]) -> str:
    """Returns a table of the classes as text."""
    lines = [
        [
            one.layer_class,
            one.stage,
            str(one.rows),
            f"{one.roof:.2f}",
            f"{one.over_pytorch:.2f}",
            str(one.slower),
        ]
        for one in results_of(rows)
    ]
    headings = ["random layers", "stage", "rows", "of an H200's roof", "over PyTorch's best layout", "slower"]
    return Table(headings, lines, left=2).text()
