"""Makes the table of ways from the JSON document: plain rows, computed once for all forms of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tconv_swap.report.words import times_as_fast, verdict_of

Json = Mapping[str, Any]

TODAY = "pytorch"
STAGES = {"forward": "forward pass", "step": "training step"}


@dataclass(frozen=True)
class WayLine:
    """The line of one way.

    Attributes:
        name: of the way.
        today_ms, ms: the medians of today's way and of this one, from the same run; None if it was not timed.
        speedup: the speedup over today in words; `""` if it was not timed.
        verdict: as for a stage of the network; `""` if it was not timed.
        remark: what it is (chosen, PyTorch's best), or why it was not timed or not chosen.
        chosen: whether it is the chosen way.
    """

    name: str
    today_ms: float | None
    ms: float | None
    speedup: str
    verdict: str
    remark: str
    chosen: bool


@dataclass(frozen=True)
class WayTable:
    """The ways of one stage.

    Attributes:
        title: the stage.
        lines: in the order in which they were tried.
        headline: the gain in one sentence.
        bound: what bounds the network in the chosen way.
        needs: what the chosen way requires; one line each.
    """

    title: str
    lines: tuple[WayLine, ...]
    headline: str
    bound: str
    needs: tuple[str, ...]


def way_tables(document: Json) -> tuple[WayTable, ...]:
    """Returns a table for each stage that was searched; none if no ways were tried."""
    ways = document.get("ways")
    return tuple(map(_table, ways["stages"])) if ways else ()


def way_notes(document: Json) -> Iterator[str]:
    for stage in (document.get("ways") or {"stages": ()})["stages"]:
        for note in stage["notes"]:
            yield f"ways, {STAGES[stage['stage']]}: {note}"


def _table(stage: Json) -> WayTable:
    chosen = next(row for row in stage["rows"] if row["way"] == stage["best"])
    return WayTable(
        STAGES[stage["stage"]],
        tuple(_line(row, stage) for row in stage["rows"]),
        _headline(stage),
        stage["bound"],
        tuple(chosen["requirements"]),
    )


def _line(row: Json, stage: Json) -> WayLine:
    remarks = [
        *(["today"] if row["way"] == TODAY else []),
        *(["chosen, verified" if row["verified"] else "chosen"] if row["way"] == stage["best"] else []),
        *(["PyTorch's best"] if row["way"] == stage["pytorch_best"] else []),
        *(["ours in the same way"] if row["way"] == stage["ours_in_the_same_way"] else []),
        *([row["why_not"]] if row["why_not"] else []),
        *(["does not compute the same (see the notes)"] if row["failure"] else []),
    ]
    speedup, verdict = "", ""
    if row["timing"] is not None and row["way"] != TODAY:
        verdict = verdict_of(float(row["speedup"]), _numbers(row["speedup_interval"]))
        speedup = times_as_fast(float(row["speedup"]), verdict)
    return WayLine(
        row["way"],
        row["today"]["median_ms"] if row["today"] else None,
        row["timing"]["median_ms"] if row["timing"] else None,
        speedup,
        verdict,
        ", ".join(remarks),
        row["way"] == stage["best"],
    )


def _headline(stage: Json) -> str:
    title, best, theirs = STAGES[stage["stage"]], stage["best"], stage["pytorch_best"]
    if best == TODAY:
        return f"No way was found in which the {title} is faster than it is today."
    times = {name: timing["median_ms"] for name, timing in stage["finals"].items()}
    if best not in times:
        return f"The {title} is fastest as {best}."
    parts = [f"{times[TODAY] / times[best]:.2f} times as fast as today"]
    if theirs in times and theirs not in (TODAY, best):
        parts.append(f"{times[theirs] / times[best]:.2f} times as fast as PyTorch's best way ({theirs})")
    return f"The {title} as {best} is {' and '.join(parts)}, measured side by side."


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]
