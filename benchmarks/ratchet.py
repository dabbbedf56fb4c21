"""Compares new results with the committed ones, row by row: ``python -m benchmarks.ratchet NEW.json [COMMITTED.json]``.

Reads results of benchmarks.layers, regret, ablation, neighbours, models, blocks, varying and overhead. The speed of a
row is PyTorch's time over ours in one run, so that runs of different machines can be compared; that of a neighbour is
the layer's own time for a multiply-add over the worst neighbour's. It names the rows and geometric means that fell, the
rows slower than PyTorch's, and missing rows. Exit codes: 0 none, 1 some, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks import neighbours_rows
from benchmarks.ablation_rows import geometric_mean
from benchmarks.families import PYTORCH
from tconv_swap.measurement.suite import load_suite

RESULTS = Path(__file__).parent / "results"
#: A row, or a geometric mean, has fallen if it is below this fraction of its committed speed.
MIN_ROW, MIN_MEAN = 0.92, 0.98

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Speed:
    """One row. ``theirs`` and ``ours``: times in one unit. ``least``: the speed below which it counts as slower."""

    name: str
    group: str
    theirs: float
    ours: float
    least: float

    @property
    def speed(self) -> float:
        return self.theirs / self.ours


@dataclass(frozen=True, slots=True)
class Verdict:
    """Lines for the reader. ``means``: those of every group, before and now; the others name what is wrong."""

    means: tuple[str, ...]
    fallen_means: tuple[str, ...]
    fallen: tuple[str, ...]
    slower: tuple[str, ...]
    missing: tuple[str, ...]
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not (self.fallen_means or self.fallen or self.slower or self.missing or self.failures)

    def __str__(self) -> str:
        titles = {
            "geometric means, committed and new": self.means,
            f"geometric means below {MIN_MEAN} of the committed": self.fallen_means,
            f"rows below {MIN_ROW} of the committed": self.fallen,
            "rows too slow": self.slower,
            "rows missing": self.missing,
            "not measured": self.failures,
        }
        return "\n\n".join(
            f"{title}:" + "".join(f"\n  {line}" for line in lines or ("none",))
            for title, lines in titles.items()
        )


def compare(new: Document, committed: Document) -> Verdict:
    """Compares the new results with the committed ones.

    Raises:
        ValueError: they come from two benchmarks, or from one without PyTorch's times.
    """
    kinds = _kind(new), _kind(committed)
    if kinds[0] != kinds[1]:
        raise ValueError(f"the files are of benchmarks.{kinds[0]} and of benchmarks.{kinds[1]}")
    before = {one.name: one for one in speeds_of(committed)}
    now = {one.name: one for one in speeds_of(new)}
    both = [(before[name], one) for name, one in now.items() if name in before]
    groups = {group: [pair for pair in both if pair[1].group == group] for group in _groups(now.values())}
    means, fallen_means = [], []
    for group, pairs in groups.items():
        if not pairs:
            continue
        old_mean, new_mean = (geometric_mean(pair[side].speed for pair in pairs) for side in (0, 1))
        line = f"{group}: {old_mean:.3f}x, {new_mean:.3f}x ({new_mean / old_mean:.3f}) over {len(pairs)} rows"
        means.append(line)
        if new_mean < MIN_MEAN * old_mean:
            fallen_means.append(line)
    fallen = sorted(
        (pair for pair in both if pair[1].speed < MIN_ROW * pair[0].speed),
        key=lambda pair: pair[1].speed / pair[0].speed,
    )
    return Verdict(
        means=tuple(means),
        fallen_means=tuple(fallen_means),
        fallen=tuple(_line(old, one) for old, one in fallen),
        slower=tuple(
            f"{one.name}: {one.speed:.2f}x ({one.theirs:.4g} / {one.ours:.4g})"
            for one in sorted(now.values(), key=lambda one: one.speed)
            if one.speed < one.least
        ),
        missing=tuple(name for name in before if name not in now),
        failures=tuple(map(str, [*new.get("failures", ()), *new.get("not_measured", ())])),
    )


def _groups(rows: Iterable[Speed]) -> list[str]:
    return list(dict.fromkeys(one.group for one in rows))


def _line(before: Speed, now: Speed) -> str:
    return (
        f"{now.name}: {now.speed:.2f}x ({now.theirs:.4g} / {now.ours:.4g}), was {before.speed:.2f}x "
        f"({before.theirs:.4g} / {before.ours:.4g}): {now.speed / before.speed:.3f}"
    )


def speeds_of(document: Document) -> list[Speed]:
    """Returns every row that has both times.

    Raises:
        ValueError: the benchmark has no such rows.
    """
    return list(_READERS[_kind(document)](document))


def _kind(document: Document) -> str:
    kind = document.get("benchmark") if isinstance(document, dict) else None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"a file holds no results of benchmarks.{', '.join(_READERS)}")
    return kind


def _layers(document: Document) -> Iterator[Speed]:
    for row in document["rows"]:
        times = row["pytorch"]["median_ms"], row["ours"]["median_ms"]
        yield _of_layer(row, *times)


def _chosen(document: Document) -> Iterator[Speed]:
    for row in document["rows"]:
        times = row["microseconds"]
        if PYTORCH in times and row["chosen"] in times:
            yield _of_layer(row, times[PYTORCH], times[row["chosen"]])


def _neighbours(document: Document) -> Iterator[Speed]:
    for fields in document["rows"]:
        row = neighbours_rows.Row(**fields)
        yield _of_layer(fields, 1.0, row.ratio(row.worst), 1 / neighbours_rows.MAX_RATIO)


def _of_layer(row: Document, theirs: float, ours: float, least: float | None = None) -> Speed:
    where = f"{row['mode']} {row['layout']} {row['stage']}"
    return Speed(f"{row['layer']} {where}", where, theirs, ours, _least() if least is None else least)


def _models(document: Document) -> Iterator[Speed]:
    for row in document["rows"]:
        case = " ".join(row[name] for name in ("network", "precision", "layout", "runtime"))
        stages = {stage["stage"]: stage for stage in row["stages"]}
        if row.get("cuda_graph"):
            stages["forward in a CUDA graph"] = row["cuda_graph"]
        for stage, found in stages.items():
            times = found["original"]["median_ms"], found["swapped"]["median_ms"]
            yield Speed(f"{case} {stage}", f"{row['runtime']} {stage}", *times, _least())


def _blocks(document: Document) -> Iterator[Speed]:
    for row in document["kernels"]:
        norm = "instance norm" if row["per_image"] else "batch norm"
        shape = "x".join(map(str, row["shape"]))
        where = f"{norm} {row['precision']} {row['layout']}"
        for stage in ("forward", "backward"):
            times = row[f"{stage}_pytorch_us"], row[f"{stage}_us"]
            yield Speed(f"{shape} {where} {stage}", f"{norm} {stage}", *times, _least())
    for row in document["networks"]:
        where = f"{row['network']} {row['precision']} {row['layout']}"
        for stage in ("step", "eval"):
            times = row[stage]
            for variant in [name for name in times if name != PYTORCH]:
                name = f"{stage}, fuse {variant}"
                yield Speed(f"{where} {name}", name, times[PYTORCH], times[variant], _least())


def _varying(document: Document) -> Iterator[Speed]:
    """Yields the totals with kernels on disk, over the calls that both sides finished."""
    for stream in document["streams"]:
        theirs, ours = stream["sides"][PYTORCH], stream["sides"]["warm"]
        if "error" in theirs or "error" in ours:
            continue
        for turn in ("first", "again"):
            calls = min(len(theirs[turn]), len(ours[turn]))
            if calls:
                totals = sum(theirs[turn][:calls]), sum(ours[turn][:calls])
                yield Speed(f"{stream['name']} {turn}", turn, *totals, _least())


def _overhead(document: Document) -> Iterator[Speed]:
    for row in document["rows"]:
        backend = row["row"].partition(":")[0]
        yield Speed(row["row"], backend, row["pytorch_us"], row["ours_us"], _least())


_READERS: Mapping[str, Callable[[Document], Iterator[Speed]]] = {
    "layers": _layers,
    "regret": _chosen,
    "ablation": _chosen,
    "neighbours": _neighbours,
    "models": _models,
    "blocks": _blocks,
    "varying": _varying,
    "overhead": _overhead,
}


@lru_cache(maxsize=1)
def _least() -> float:
    """Returns the smallest speedup that does not count as slower than PyTorch."""
    return load_suite().targets.least_speedup


def committed_file(document: Document) -> Path:
    """Returns the file of the committed results of the same kind, an H200's if there is one; those of benchmarks.layers
    have one for each direction."""
    name = _kind(document)
    if name == "layers":
        name = document["settings"]["direction"]
    return results_of(name)


def results_of(name: str) -> Path:
    """Returns the file of the committed results of this name."""
    of_h200 = RESULTS / f"h200-{name}.json"
    return of_h200 if of_h200.exists() else RESULTS / f"h100-{name}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        new = json.loads(options.new.read_text(encoding="utf-8"))
        path = options.committed or committed_file(new)
        verdict = compare(new, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks.ratchet: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{options.new} beside {path}\n\n{verdict}")
    return 0 if verdict.holds else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ratchet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "committed", type=Path, nargs="?", help="default: the file of that benchmark in benchmarks/results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
