"""Writes the report as Markdown, for a pull request or an issue: tables of GitHub, and nothing that executes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tconv_swap.files.fileformat import printable
from tconv_swap.report.rows import LayerRow, StageRow, Summary, speedup_text
from tconv_swap.report.summary import summarise
from tconv_swap.report.words import error_text, milliseconds

#: All characters by which a name from an untrusted file could become a link, HTML, or another column.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~&])")


def markdown(document: Mapping[str, Any]) -> str:
    """Returns the report of a document that `to_json_dict` made, or that was read back from JSON."""
    summary = summarise(document)
    parts = [part for section in (_head, _ways, _layers, _details) for part in section(summary)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _head(summary: Summary) -> Iterator[str]:
    yield f"# tconv-swap: {_escaped(summary.verdict) if summary.layers else 'nothing to swap'}\n"
    yield _table(("", ""), [(label, _escaped(text)) for label, text in summary.facts])
    if summary.network:
        yield "## The whole network\n"
        yield _table(_STAGES, [("", *_stage(row)[:4]) for row in summary.network])
    for remark in summary.remarks:
        yield f"- {_escaped(remark)}"
    yield ""


def _ways(summary: Summary) -> Iterator[str]:
    for table in summary.ways:
        yield f"## Ways to run it: {table.title}\n"
        rows = []
        for line in table.lines:
            times = ["" if ms is None else milliseconds(ms) for ms in (line.today_ms, line.ms)]
            name = f"**{_escaped(line.name)}**" if line.chosen else _escaped(line.name)
            rows.append((name, *times, line.speedup, _escaped(line.remark)))
        yield _table(("way", "today, ms", "ms", "speedup", ""), rows)
        yield _escaped(table.headline)
        if table.bound:
            yield f"\nIt is {_escaped(table.bound)}."
        if table.needs:
            yield f"\nThis way needs: {_escaped('; '.join(table.needs))}."
        yield ""


def _layers(summary: Summary) -> Iterator[str]:
    if summary.layers:
        yield "## Layers\n"
        headings = (*_STAGES, "run by", "of the roof: PyTorch", "ours")
        rows = [row for layer in summary.layers for row in _layer(layer)]
        yield _table(headings, rows)
        if summary.ceilings is not None:
            rates = ", ".join(
                f"{rate:.0f} TFLOP/s in {mode}" for mode, rate in summary.ceilings.tflops.items()
            )
            yield (
                f"Roof: the shortest time that bytes and FLOPs of the layer can take on this chip, at "
                f"{summary.ceilings.copy_gbps:.0f} GB/s and {rates}, measured in the same run.\n"
            )
        elif summary.no_roof:
            yield f"{summary.no_roof}\n"
    if summary.left:
        yield "## Layers that stay as they are\n"
        rows = [tuple(map(_escaped, row)) for row in summary.left]
        yield _table(("layer", "geometry", "why"), rows)


def _details(summary: Summary) -> Iterator[str]:
    if summary.errors:
        yield "## Errors\n"
        yield f"Relative, the largest of each kind; reference: {_escaped(summary.reference)}\n"
        rows = [
            (
                row.what.replace("_", " "),
                row.mode,
                _escaped(row.name),
                error_text(row.original),
                error_text(row.swapped) if row.passed else f"**{error_text(row.swapped)}**",
                error_text(row.limit),
            )
            for row in summary.errors
        ]
        yield _table(("compared", "mode", "largest at", "PyTorch", "ours", "limit"), rows)
    failures = [*summary.failures]
    if summary.first_divergence:
        failures.append(f"first layer that diverges: {summary.first_divergence}")
    if summary.outcome == "mismatch":
        yield from _bullets("Failures", failures)
    yield from _bullets("Notes", summary.notes)
    if summary.load_snippet:
        yield "## Load it\n"
        # The fence is longer than any run of backticks inside, so nothing in the text can close it.
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", summary.load_snippet)), default=0))
        lines = map(printable, summary.load_snippet.strip().splitlines())
        yield "\n".join([f"{fence}python", *lines, fence])


_STAGES = ("", "stage", "PyTorch, ms", "ours, ms", "speedup")


def _layer(layer: LayerRow) -> Iterator[tuple[str, ...]]:
    label = "<br>".join(f"{_escaped(text)}" for text in (layer.name, layer.geometry, layer.form) if text)
    for row in layer.stages:
        roofs = ["" if share is None else f"{share:.0%}" for share in (row.of_roof_before, row.of_roof)]
        yield label, *_stage(row), *roofs
        label = ""
    if layer.error is not None:
        errors = error_text(layer.error.original), error_text(layer.error.swapped)
        yield label, "error", *errors, f"{layer.error.of_limit:.0%} of its limit", "", "", ""
    elif not layer.stages:
        yield label, *[""] * 7


def _stage(row: StageRow) -> tuple[str, ...]:
    speedup = speedup_text(row)
    times = milliseconds(row.times.original_ms), milliseconds(row.times.swapped_ms)
    return row.stage, *times, f"**{speedup}**" if row.verdict == "slower" else speedup, _escaped(row.family)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"## {title}\n"
        yield "\n".join(f"- {_escaped(line)}" for line in lines) + "\n"


def _escaped(name: str) -> str:
    """Returns a name without markup or control characters, since its file is not trusted."""
    return _SPECIAL.sub(r"\\\1", printable(name))
