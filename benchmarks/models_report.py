"""Reports what benchmarks.models measured: a table for the terminal, a chart for the READMEs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models_best import best_bounds, best_means, best_rows, best_table
from benchmarks.models_ways import RUNTIME
from benchmarks.networks import NETWORKS
from benchmarks.results import geometric_mean
from benchmarks.table import Table
from tconv_swap.measurement.environment import machine_name
from tconv_swap.report.figures import COLOURS, Figure, settings, standalone_svg

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("forward", "step")
TITLES = {"forward": "forward", "step": "training step"}
#: The marker and colour of each mode; hollow markers are channels_last.
MARKS = {
    ("tf32", "nchw"): ("o", "other", True),
    ("tf32", "channels_last"): ("o", "other", False),
    ("fp16", "nchw"): ("s", "after", True),
    ("fp16", "channels_last"): ("s", "after", False),
}

#: The width for the shares beside the marks, as a part of the width of the marks.
SHARE_ROOM = 0.35

Row = Mapping[str, Any]
_CHART = re.compile(r"(<!-- models chart -->\n).*?(<!-- end of models chart -->)", re.DOTALL)


def table(document: Row) -> str:
    """Returns a line for each row, and the geometric means."""
    headings = [
        "network",
        "mode",
        "",
        "forward ms",
        "speedup",
        "step ms",
        "speedup",
        "share fwd",
        "share step",
    ]
    rows = [row for row in document["rows"] if row["runtime"] != RUNTIME]
    cells = [_cells(row) for row in rows]
    if any(row.get("cuda_graph") for row in rows):
        headings.append("in a graph")
        cells = [[*one, _replayed(row)] for one, row in zip(cells, rows, strict=True)]
    tables = [Table(headings, cells, left=3)] if rows else []
    best = best_table(document)
    tables += [best] if best is not None else []
    lines = [*(drawn.text() for drawn in tables), *best_bounds(document), *best_means(document)]
    lines += _means(document)
    lines += [f"not measured: {line}" for line in document["not_measured"]]
    text = "\n".join(lines)
    return f"{machine_name(document['environment'])}, {_commits(document)}\n\n{text}\n"


def _commits(document: Row) -> str:
    """Returns the commit that was measured, or the number of rows of each commit."""
    commit = document["settings"]["commit"]
    found = Counter(row.get("commit", commit) for row in document["rows"])
    if len(found) < 2:
        return f"commit {next(iter(found), commit)}"
    return "commits " + ", ".join(f"{commit} ({count} rows)" for commit, count in found.most_common())


def _cells(row: Row) -> list[str]:
    layout = "NCHW" if row["layout"] == "nchw" else "cl"
    cells = [row["network"], f"{row['precision']} {layout}", row["runtime"]]
    for stage in STAGES:
        found = _stage(row, stage)
        if found is None:
            cells += ["", ""]
            continue
        times = (found["original"]["median_ms"], found["swapped"]["median_ms"])
        cells += [" > ".join(f"{value:.2f}" for value in times), f"{found['speedup']:.2f}x"]
    return [
        *cells,
        *("" if row["share"][stage] is None else f"{row['share'][stage]:.0%}" for stage in STAGES),
    ]


def _replayed(row: Row) -> str:
    """Returns the speedup of the forward pass replayed from a CUDA graph."""
    found = row.get("cuda_graph")
    return f"{found['speedup']:.2f}x" if found else ""


def _stage(row: Row, stage: str) -> Row | None:
    return next((found for found in row["stages"] if found["stage"] == stage), None)


def _means(document: Row) -> Iterator[str]:
    for runtime in ("eager", "compile"):
        rows = [row for row in document["rows"] if row["runtime"] == runtime]
        measured = {TITLES[stage]: [_stage(row, stage) for row in rows] for stage in STAGES}
        measured["forward in a CUDA graph"] = [row.get("cuda_graph") for row in rows]
        for title, comparisons in measured.items():
            found = [one["speedup"] for one in comparisons if one]
            if found:
                yield (
                    f"{runtime}, {title}: {geometric_mean(found):.2f}x on geometric mean over {len(found)} "
                    f"rows, {min(found):.2f}x to {max(found):.2f}x"
                )


def chart(document: Row) -> str:
    """Draws the speedups of the eager rows as SVG, light and dark, beside the share that bounds them (Amdahl)."""
    rows = [row for row in document["rows"] if row["runtime"] == "eager"]
    names = list(dict.fromkeys(row["network"] for row in rows))
    with settings():
        figure = Figure(figsize=(9.2, 1.3 + 0.46 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(STAGES), sharey=True, squeeze=False)[0]
        for axes, stage in zip(panels, STAGES, strict=True):
            for (precision, layout), (marker, colour, filled) in MARKS.items():
                mode = [row for row in rows if (row["precision"], row["layout"]) == (precision, layout)]
                found = [(names.index(row["network"]), one) for row in mode if (one := _stage(row, stage))]
                axes.scatter(
                    [one["speedup"] for _, one in found],
                    [place for place, _ in found],
                    42,
                    marker=marker,
                    facecolors=COLOURS[colour] if filled else COLOURS["page"],
                    edgecolors=COLOURS[colour],
                    linewidths=1.5,
                    zorder=3,
                    label=f"{precision} {'NCHW' if layout == 'nchw' else 'channels_last'}",
                )
            for place, name in enumerate(names):
                axes.annotate(
                    _share(rows, name, stage),
                    (1, place),
                    xycoords=("axes fraction", "data"),
                    xytext=(-3, 0),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    fontsize=9,
                    color=COLOURS["muted"],
                )
            axes.axvline(1, color=COLOURS["ink"], linewidth=1)
            axes.set_title(TITLES[stage])
            axes.set_title("share of the time", loc="right", fontsize=9, color=COLOURS["muted"])
            axes.set_xlabel("times as fast as PyTorch")
            axes.grid(axis="x")
            axes.margins(x=0.08, y=0.06)
            left, right = axes.get_xlim()
            axes.set_xlim(right=right + SHARE_ROOM * (right - left))
            axes.tick_params(axis="y", length=0)
        panels[0].set_yticks(range(len(names)), [NETWORKS[name].title for name in names])
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(MARKS))
    machine = document["environment"].get("gpu", "CPU")
    return standalone_svg(figure, f"Speedup of whole networks over PyTorch on one {machine}")


def _share(rows: list[Row], name: str, stage: str) -> str:
    found = [
        row["share"][stage] for row in rows if row["network"] == name and row["share"][stage] is not None
    ]
    if not found:
        return ""
    low, high = min(found), max(found)
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low * 100:.0f} to {high:.0%}"


def fill_readmes(document: Row, name: str) -> None:
    """Puts charts and means between their markers: the best ways, if they were measured, in README.md, all charts in
    benchmarks/README.md."""
    machine, stem = machine_name(document["environment"]), Path(name).stem
    best = {**document, "rows": best_rows(document)}
    parts = []
    if best["rows"]:
        best_image = f"![Whole networks in their best ways]({{folder}}/{stem}-best.svg)"
        parts = [f"{best_image}\n\n{machine}, {_commits(best)}. {_sentences(best_means(document))}"]
    others = {**document, "rows": [row for row in document["rows"] if row not in best["rows"]]}
    if others["rows"]:
        image = f"![Speedup of whole networks]({{folder}}/{stem}.svg)"
        parts.append(f"{image}\n\n{machine}, {_commits(others)}. {_sentences(_means(document))}")
    for path, folder, shown in (
        (ROOT / "README.md", "benchmarks/results", parts[:1]),
        (ROOT / "benchmarks" / "README.md", "results", parts),
    ):
        _fill(path, _CHART, "\n\n".join(part.format(folder=folder) for part in shown))


def _sentences(lines: Iterable[str]) -> str:
    return " ".join(f"{line[0].upper()}{line[1:]}." for line in lines)


def _fill(path: Path, place: re.Pattern[str], text: str) -> None:
    before = path.read_text(encoding="utf-8")
    path.write_text(
        place.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", before), encoding="utf-8"
    )
