"""Reports the results of benchmarks.layers in the README of the benchmarks: a table of means, and a chart of every
layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.results import Results, Row, summarise
from benchmarks.table import Table
from tconv_swap.measurement.environment import machine_name
from tconv_swap.measurement.suite import Targets
from tconv_swap.report.figures import COLOURS, Figure, settings, standalone_svg
from tconv_swap.runtime.cache import write_atomically

#: The columns of the table.
STAGES = ("forward", "backward", "grad_input", "grad_weight", "grad_bias")
PANELS = {"forward": "forward", "backward": "backward, all gradients"}
#: The marker and colour of each mode; hollow markers are channels_last.
MARKS = {"tf32": ("o", "other"), "fp16": ("s", "after"), "bf16": ("^", "before"), "fp32": ("D", "ink")}
LAYOUTS = {"nchw": "NCHW", "channels_last": "channels_last"}
_PLACE = re.compile(r"(<!-- layers -->\n).*?(<!-- end of layers -->)", re.DOTALL)


def table(documents: Sequence[Results], targets: Targets) -> str:
    """Returns Markdown: for each mode and layout, the mean speedup of every stage, the smallest one, and the mean
    fraction of the roof."""
    summaries = {
        (one.mode, one.layout, one.stage): one
        for document in documents
        for one in summarise(document.rows, targets)
    }
    stages = [stage for stage in STAGES if any(key[2] == stage for key in summaries)]
    lines = []
    for mode, layout in dict.fromkeys(key[:2] for key in summaries):
        cells = [mode, LAYOUTS[layout]]
        for stage in stages:
            found = summaries.get((mode, layout, stage))
            cells.append(
                f"{found.speedup:.2f}x, {found.slowest.speedup:.2f}x, {found.roof_fraction:.0%}"
                if found
                else ""
            )
        lines.append(cells)
    return Table(["dtype", "layout", *stages], lines, left=2).markdown()


def chart(documents: Sequence[Results]) -> str:
    """Returns an SVG, light and dark: a line for each layer, a mark for its speedup in each mode and layout."""
    rows = [row for document in documents for row in document.rows]
    names = list(dict.fromkeys(row.layer for row in rows if row.stage in PANELS))
    stages = [stage for stage in PANELS if any(row.stage == stage for row in rows)]
    with settings():
        figure = Figure(figsize=(9.2, 1.5 + 0.3 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
        for axes, stage in zip(panels, stages, strict=True):
            _panel(axes, [row for row in rows if row.stage == stage], names)
            axes.set_title(PANELS[stage])
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(MARKS))
    machine = documents[0].environment.get("gpu", "CPU")
    return standalone_svg(figure, f"Speedup of every layer over PyTorch on one {machine}")


def render(directory: Path, readme: Path, targets: Targets) -> None:
    """Draws the chart of ``h200-*.json`` in ``directory`` beside these files, and puts it and the table into
    ``readme``.

    Raises:
        FileNotFoundError, ValueError: a file does not exist, or holds something else.
    """
    files = [directory / f"h200-{direction}.json" for direction in ("forward", "backward")]
    documents = [Results.load(path) for path in files]
    write_atomically(directory / "h200-layers.svg", chart(documents).encode())
    origins = [
        f"[{path.name}](results/{path.name}): {machine_name(document.environment)}, "
        f"commit {document.settings['commit'] or 'unknown'}, {_findings(document.rows, targets)}."
        for path, document in zip(files, documents, strict=True)
    ]
    text = "\n".join(
        [*origins, "", table(documents, targets), "![Speedup of every layer](results/h200-layers.svg)"]
    )
    before = readme.read_text(encoding="utf-8")
    filled = _PLACE.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before)
    write_atomically(readme, filled.encode())


def _findings(rows: Sequence[Row], targets: Targets) -> str:
    slower = [_where(row) for row in rows if not row.fast(targets)]
    inexact = [_where(row) for row in rows if not row.accurate(targets)]
    whole = [row for row in rows if row.stage in PANELS]
    return (
        f"{len(rows)} rows; of the {len(whole)} {whole[0].stage if whole else ''} rows our fast kernels alone compute "
        f"{sum(row.own(targets) for row in whole)}; "
        f"slower than PyTorch: {', '.join(slower) or 'none'}; less accurate: {', '.join(inexact) or 'none'}"
    )


def _where(row: Row) -> str:
    return f"{row.layer} {row.mode} {LAYOUTS[row.layout]} {row.stage} ({row.speedup:.2f}x)"


def _panel(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    place: Mapping[str, int] = {name: index for index, name in enumerate(names)}
    for mode, (marker, colour) in MARKS.items():
        for layout, name in LAYOUTS.items():
            found = [row for row in rows if (row.mode, row.layout) == (mode, layout)]
            axes.scatter(
                [row.speedup for row in found],
                [place[row.layer] for row in found],
                26,
                marker=marker,
                facecolors=COLOURS["page" if layout == "channels_last" else colour],
                edgecolors=COLOURS[colour],
                linewidths=1.2,
                zorder=3,
                label=f"{mode} {name}",
            )
    axes.axvline(1, color=COLOURS["ink"], linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as PyTorch")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="both")
    axes.margins(y=0.02)
    axes.tick_params(axis="y", length=0)
