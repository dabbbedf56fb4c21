"""Draws the charts of the report: time before and after, and the roofline with every layer before and after."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from tconv_swap.files.fileformat import printable
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.report.figures import COLOURS, Figure, inline_svg, settings
from tconv_swap.report.rows import LayerRow, StageRow, Summary, speedup_text

STAGES = ("forward", "backward")
WIDTH = 9.2
LABEL = 34


def bars(summary: Summary) -> str | None:
    """Draws milliseconds of every layer, PyTorch's above ours, a panel for each stage; None if nothing was timed."""
    layers = [layer for layer in summary.layers if layer.stages]
    stages = [name for name in STAGES if any(layer.stage(name) for layer in layers)]
    if not stages:
        return None
    with settings():
        figure = Figure(figsize=(WIDTH, 1.0 + 0.52 * len(layers)), layout="constrained")
        panels = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
        for axes, stage in zip(panels, stages, strict=True):
            _stage_bars(axes, stage, layers)
        panels[0].set_yticks(
            range(len(layers)), [_label(number, layer) for number, layer in _numbered(layers)]
        )
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
    return inline_svg(figure, "Time of every layer, PyTorch and ours")


def _numbered(layers: Sequence[LayerRow]) -> list[tuple[int, LayerRow]]:
    return list(enumerate(layers, start=1))


def _label(number: int, layer: LayerRow) -> str:
    name = printable(layer.name)
    short = name if len(name) <= LABEL else f"…{name[-LABEL:]}"
    return _literal(f"{number}  {short}")


def _literal(text: str) -> str:
    """Returns the text with escaped dollar signs, between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")


def _stage_bars(axes: Axes, stage: str, layers: Sequence[LayerRow]) -> None:
    found = [(place, row) for place, layer in enumerate(layers) if (row := layer.stage(stage))]
    axes.barh(
        [p - 0.2 for p, _ in found],
        [r.times.original_ms for _, r in found],
        0.36,
        color=COLOURS["before"],
        label="PyTorch",
    )
    axes.barh(
        [p + 0.2 for p, _ in found],
        [r.times.swapped_ms for _, r in found],
        0.36,
        color=COLOURS["after"],
        label="ours",
    )
    for place, row in found:
        end = max(row.times.original_ms, row.times.swapped_ms)
        axes.annotate(
            speedup_text(row).removesuffix(" faster"),
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if row.verdict == "slower" else "normal",
        )
    axes.set_title(stage)
    axes.set_xlabel("milliseconds")
    axes.margins(x=0.24)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)


def way_bars(summary: Summary) -> str | None:
    """Draws how many times as fast as today each way is, a panel for each stage; None if no way was timed."""
    tables = [table for table in summary.ways if any(line.ms for line in table.lines)]
    if not tables:
        return None
    names = list(dict.fromkeys(line.name for table in tables for line in table.lines if line.ms))
    with settings():
        figure = Figure(figsize=(WIDTH, 1.0 + 0.3 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
        for axes, table in zip(panels, tables, strict=True):
            for line in table.lines:
                if line.ms is None or line.today_ms is None:
                    continue
                place, ratio = names.index(line.name), line.today_ms / line.ms
                axes.barh(place, ratio, 0.7, color=COLOURS["after" if line.chosen else "before"])
                axes.annotate(
                    f"{ratio:.2f}x",
                    (ratio, place),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
            axes.axvline(1, color=COLOURS["ink"], linewidth=1)
            axes.set_title(table.title)
            axes.set_xlabel("times as fast as today")
            axes.margins(x=0.18)
            axes.set_xlim(left=0)
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        panels[0].set_yticks(range(len(names)), [_literal(printable(name)) for name in names])
        panels[0].invert_yaxis()
    return inline_svg(figure, "Ways to run the network, times as fast as today")


def roofline(summary: Summary) -> str | None:
    """Draws TFLOP/s over FLOP/byte under the measured ceilings, with an arrow from PyTorch's point to ours; None
    without ceilings."""
    ceilings = summary.ceilings
    layers = [layer for layer in summary.layers if layer.stages]
    known = [
        (n, layer) for n, layer in _numbered(layers) if any(row.roof_ms is not None for row in layer.stages)
    ]
    stages = [name for name in STAGES if any(layer.stage(name) for _, layer in known)]
    if ceilings is None or not stages:
        return None
    modes = [mode for mode in ceilings.tflops if any(layer.mode == mode for _, layer in known)]
    with settings():
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        panels = figure.subplots(1, len(stages), sharex=True, sharey=True, squeeze=False)[0]
        for axes, stage in zip(panels, stages, strict=True):
            _stage_roofline(axes, stage, known)
        for axes in panels:
            _roofs(axes, ceilings, modes)
        panels[0].set_ylabel("TFLOP/s")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
    return inline_svg(figure, "Roofline: every layer before and after")


def _stage_roofline(axes: Axes, stage: str, layers: Sequence[tuple[int, LayerRow]]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    found = [(n, row) for n, layer in layers if (row := layer.stage(stage)) and row.work is not None]
    for number, row in found:
        x, before, after = _point(row)
        axes.annotate(
            "",
            (x, after),
            (x, before),
            arrowprops={
                "arrowstyle": "-|>",
                "color": COLOURS["muted"],
                "linewidth": 0.9,
                "shrinkA": 3,
                "shrinkB": 3,
            },
        )
        axes.annotate(
            str(number), (x, after), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9
        )
    points = [_point(row) for _, row in found]
    size = 34
    axes.scatter(
        [x for x, *_ in points],
        [before for _, before, _ in points],
        size,
        facecolors=COLOURS["page"],
        edgecolors=COLOURS["before"],
        linewidths=1.5,
        label="PyTorch",
        zorder=3,
    )
    axes.scatter(
        [x for x, *_ in points],
        [after for *_, after in points],
        size,
        color=COLOURS["after"],
        label="ours",
        zorder=4,
    )
    axes.set_title(stage)
    axes.set_xlabel("FLOP per byte of unavoidable memory traffic")
    axes.grid(which="major")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _point(row: StageRow) -> tuple[float, float, float]:
    """Returns FLOP/byte, and TFLOP/s before and after."""
    assert row.work is not None
    rate = row.work.flops * 1e-9
    return row.work.flops / row.work.bytes, rate / row.times.original_ms, rate / row.times.swapped_ms


def _roofs(axes: Axes, ceilings: Ceilings, modes: Sequence[str]) -> None:
    """Draws the slope of the memory's rate up to the plateau of each mode."""
    left, right = axes.get_xlim()
    bottom, _ = axes.get_ylim()
    slope = ceilings.copy_gbps * 1e-3
    right = max(right, 3 * max(ceilings.tflops[mode] for mode in modes) / slope)
    for mode in modes:
        top = ceilings.tflops[mode]
        axes.plot([left, top / slope, right], [left * slope, top, top], color=COLOURS["other"], linewidth=1.4)
        axes.annotate(
            f"{mode}: {top:.0f} TFLOP/s",
            (right, top),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
    middle = (left * min(ceilings.tflops[mode] for mode in modes) / slope) ** 0.5
    axes.annotate(
        f"{ceilings.copy_gbps:.0f} GB/s",
        (middle, middle * slope),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, 2 * max(ceilings.tflops[mode] for mode in modes))
