"""Reports what benchmarks.models measured of best ways: a table, and a chart for the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.models_ways import RUNTIME
from benchmarks.networks import NETWORKS
from benchmarks.results import geometric_mean
from benchmarks.table import Table
from tconv_swap.report.figures import COLOURS, Figure, settings, standalone_svg

STAGES = {"step": "training step", "forward": "forward"}
PRECISIONS = ("fp16", "tf32")

Row = Mapping[str, Any]


def best_rows(document: Row) -> list[Row]:
    return [row for row in document["rows"] if row["runtime"] == RUNTIME]


def best_table(document: Row) -> Table | None:
    """Returns a line for each network, precision and stage; None if no best ways were measured."""
    rows = best_rows(document)
    if not rows:
        return None
    headings = [
        "network",
        "mode",
        "stage",
        "today ms",
        "PyTorch's best way",
        "ms",
        "our best way",
        "ms",
        "over PyTorch's",
        "over today",
    ]
    return Table(headings, [_cells(row, stage) for row in rows for stage in row["stages"]], left=3)


def _cells(row: Row, stage: Row) -> list[str]:
    return [
        row["network"],
        row["precision"],
        stage["stage"],
        f"{stage['today']['median_ms']:.2f}",
        stage["pytorch_way"],
        f"{stage['original']['median_ms']:.2f}",
        stage["our_way"],
        f"{stage['swapped']['median_ms']:.2f}",
        f"{stage['speedup']:.2f}x",
        f"{stage['over_today']:.2f}x",
    ]


def best_bounds(document: Row) -> Iterator[str]:
    """Yields what bounds PyTorch's best way and ours, for each stage that was profiled."""
    for row in best_rows(document):
        for stage in row["stages"]:
            for side in ("pytorch", "our"):
                if bound := stage.get(f"{side}_bound"):
                    title = f"{row['network']}, {row['precision']}, {STAGES[stage['stage']]}"
                    yield f"{title}, {stage[f'{side}_way']}: {bound}"


def best_means(document: Row) -> Iterator[str]:
    """Yields the means over all rows of a stage: our best way over PyTorch's, and over today's."""
    for name, title in STAGES.items():
        found = [stage for row in best_rows(document) for stage in row["stages"] if stage["stage"] == name]
        if found:
            gains = [stage["speedup"] for stage in found]
            over_today = geometric_mean([stage["over_today"] for stage in found])
            yield (
                f"our best way over PyTorch's best way, {title}: {geometric_mean(gains):.2f}x on geometric mean over "
                f"{len(gains)} rows, {min(gains):.2f}x to {max(gains):.2f}x; over how the network is run today "
                f"(PyTorch's layers, NCHW, eager): {over_today:.2f}x"
            )


def best_chart(document: Row) -> str | None:
    """Draws PyTorch's best way and ours, as times as fast as today, as SVG, light and dark; None if there is no row."""
    rows = best_rows(document)
    if not rows:
        return None
    names = list(dict.fromkeys(row["network"] for row in rows))
    precisions = [one for one in PRECISIONS if any(row["precision"] == one for row in rows)]
    with settings():
        figure = Figure(figsize=(9.2, 1.3 + 0.5 * len(names) * len(precisions)), layout="constrained")
        panels = figure.subplots(len(precisions), len(STAGES), sharex="col", sharey=True, squeeze=False)
        for line, precision in zip(panels, precisions, strict=True):
            for axes, (stage, title) in zip(line, STAGES.items(), strict=True):
                _panel(axes, [row for row in rows if row["precision"] == precision], names, stage)
                axes.set_title(f"{title}, {precision}")
        figure.supxlabel("times as fast as today: PyTorch's layers, NCHW, eager", fontsize="medium")
        panels[0][0].set_yticks(range(len(names)), [NETWORKS[name].title for name in names])
        panels[0][0].invert_yaxis()
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
    machine = document["environment"].get("gpu", "CPU")
    return standalone_svg(
        figure, f"Whole networks in their best ways, PyTorch's layers and ours, on one {machine}"
    )


def _panel(axes: Any, rows: Sequence[Row], names: Sequence[str], stage: str) -> None:
    found = [
        (names.index(row["network"]), one) for row in rows for one in row["stages"] if one["stage"] == stage
    ]
    for shift, side, colour, label in (
        (-0.2, "original", "before", "PyTorch's best way"),
        (0.2, "swapped", "after", "our best way"),
    ):
        ratios = [one["today"]["median_ms"] / one[side]["median_ms"] for _, one in found]
        places = [place + shift for place, _ in found]
        axes.barh(places, ratios, 0.36, color=COLOURS[colour], label=label)
        for place, ratio in zip(places, ratios, strict=True):
            axes.annotate(
                f"{ratio:.2f}",
                (ratio, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.axvline(1, color=COLOURS["ink"], linewidth=1)
    axes.grid(axis="x")
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
