"""Prints the report on a terminal: a short form by default, every number with ``verbose``; plain text to files and
pipes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tconv_swap.files.fileformat import printable
from tconv_swap.report.document import MODEL_ITSELF, Facts, to_json_dict
from tconv_swap.report.rows import ErrorRow, LayerRow, StageRow, Summary, speedup_text
from tconv_swap.report.summary import summarise
from tconv_swap.report.ways_terminal import ways_shown
from tconv_swap.report.words import error_text, milliseconds

if TYPE_CHECKING:
    from tconv_swap.explanation import Explanation
    from tconv_swap.measurement.bench import BenchmarkReport
    from tconv_swap.measurement.roof import Ceilings
    from tconv_swap.surgery import SwapPlan
    from tconv_swap.verification.report import VerifyReport
    from tconv_swap.ways.report import WaysReport

WIDTH = 80
#: The width at which a name has 14 columns beside its numbers, which are never cut.
MIN_WIDTH = 72
FAILURES_SHOWN = 10
#: The lines of a table for one layer: labels on the left, and rows of cells.
Block: TypeAlias = tuple[list[Text], list[list[Text]]]
STYLES = {"faster": "green", "slower": "red", "noisy": "yellow", "same": ""}
VERDICTS = {"verified": "bold green", "mismatch": "bold red", "not_verified": "yellow"}


def make_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Returns a console for the report: in colour and full width on a terminal, plain 80 columns elsewhere.

    Args:
        file: the file to write to instead of stdout.
        stderr: writes to stderr instead of stdout.
    """
    console = Console(file=file, stderr=stderr, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def print_report(
    console: Console,
    plan: SwapPlan,
    verification: VerifyReport | None,
    benchmark: BenchmarkReport | None,
    facts: Facts,
    explanation: Explanation | None = None,
    ceilings: Ceilings | None = None,
    ways: WaysReport | None = None,
    *,
    verbose: bool = False,
) -> None:
    """Writes the report to `console`; for parts that are None it says that they were not done.

    Args:
        console: the result of `make_console`.
        plan, verification, benchmark, facts, explanation, ceilings, ways: as in `to_json_dict`.
        verbose: adds the spread of every timing, every kind of error, and every kernel.
    """
    document = to_json_dict(plan, verification, benchmark, facts, explanation, ceilings, ways)
    print_summary(console, summarise(document), verbose=verbose)


def print_summary(console: Console, summary: Summary, *, verbose: bool = False) -> None:
    """Writes the report of a summary to `console`."""
    sections: list[Iterable[RenderableType]] = [
        _heading(summary),
        _layers(summary, console.width),
        ways_shown(summary.ways, console.width),
        _left(summary),
    ]
    if verbose:
        sections += [_errors(summary), _times(summary), _kernels(summary)]
    sections += [_failures(summary), _notes(summary)]
    with console.capture() as capture:
        width = console.width
        for renderable in itertools.chain.from_iterable(sections):
            # On a narrow terminal these tables are wrapped here: rich would cut names and numbers.
            console.width = max(width, MIN_WIDTH) if isinstance(renderable, _Whole) else width
            console.print(renderable)
        console.width = width
        if summary.load_snippet:
            console.print(Text("Load it", style="bold"))
            for line in summary.load_snippet.strip().splitlines():
                # These lines are for copying: they are never wrapped, also on a narrow console.
                console.print(_text(f"    {line}"), soft_wrap=True)
    # Tables pad every line to their width; in a file or a diff the padding is useless.
    text = "\n".join(line.rstrip() for line in capture.get().split("\n"))
    console.out(text, end="", highlight=False)


def _text(name: str, style: str = "") -> Text:
    """Returns a name without control characters for the terminal, since its file is not trusted."""
    return Text(printable(name), style=style)


def _title(text: str, explanation: str = "") -> RenderableType:
    return Text.assemble((text, "bold"), (f"  {printable(explanation)}" if explanation else "", "dim"))


def _table(padding: tuple[int, ...] = (0, 1)) -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding, header_style="dim")  # type: ignore[arg-type]


class _Whole(Padding):
    """A table that is never narrower than MIN_WIDTH."""


def _whole(table: Table) -> RenderableType:
    return _Whole(table, (0, 0, 1, 2))


def _indented(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (0, 0, 1, 2))


def _heading(summary: Summary) -> Iterator[RenderableType]:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for label, text in summary.facts:
        rows.add_row(label, _text(text))
    if summary.outcome != "nothing_to_swap":
        rows.add_row("result", _text(summary.verdict, VERDICTS[summary.outcome]))
    if summary.network:
        parts = [Text.assemble(f"{row.stage} ", _speedup(row)) for row in summary.network]
        rows.add_row("speed", Text(", ").join(parts))
    if summary.output:
        rows.add_row("written", _text(summary.output))
    yield rows
    yield ""


def _speedup(row: StageRow) -> Text:
    return Text(speedup_text(row), style=STYLES[row.verdict])


def _layers(summary: Summary, width: int) -> Iterator[RenderableType]:
    """Yields for every layer and the whole network its time before, its time after, and what computes it."""
    if not summary.layers:
        yield _title("Nothing to swap")
        if not summary.left:
            yield _indented(Text("The model has no transposed convolution."))
        return
    roof = any(stage.roof_ms is not None for layer in summary.layers for stage in layer.stages)
    explanation = "milliseconds, medians"
    if summary.errors:
        explanation += f"; errors: relative, against {summary.reference.partition(':')[0].partition(',')[0]}"
    yield _title("Layers", explanation if summary.network or summary.errors else "")
    blocks = [([_text(layer.name), *_described(layer)], _layer_cells(layer)) for layer in summary.layers]
    whole = [_stage_cells(row) for row in summary.network]
    whole += [_error_cells(row, _what(row)) for row in _network_errors(summary)]
    blocks.append(([Text("whole network", style="bold")] if whole else [], whole))
    if width < MIN_WIDTH:
        yield from _stacked(blocks, width, roof)
    else:
        yield _indented(_beside(blocks, roof))
    remarks = [*summary.remarks]
    if roof:
        remarks.append(_roof_explained(summary))
    elif summary.network and summary.no_roof:
        remarks.append(f"{summary.no_roof[0].upper()}{summary.no_roof[1:]}.")
    if remarks:
        yield from (Padding(_text(remark), (0, 0, 0, 2)) for remark in remarks)
        yield ""


def _beside(blocks: list[Block], roof: bool) -> Table:
    """Returns a table with names on the left of their numbers."""
    table = _table(padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", ratio=1)
    table.add_column("", no_wrap=True)
    for column in ("PyTorch", "ours"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("run by", no_wrap=True)
    if roof:
        table.add_column("roof", justify="right", no_wrap=True)
    for labels, rows in blocks:
        _add_rows(table, labels, rows)
        table.add_section()
    return table


def _stacked(blocks: list[Block], width: int, roof: bool) -> Iterator[RenderableType]:
    """Yields names above their numbers, and of the last two columns those that fit."""
    head = [Text(word, style="dim") for word in ("", "PyTorch", "ours", "", "run by", "roof")]
    rows = [head, *(row for _, block in blocks for row in block)]
    sizes = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    room = [size for size in range(4, 6 + roof) if sum(sizes[:size]) + size + 1 <= width]

    def line(row: list[Text]) -> Text:
        cells = row[: max(room, default=4)]
        for place, cell in enumerate(cells):
            cell.align("right" if place in (1, 2, 5) else "left", sizes[place])
        joined = Text(" ", no_wrap=True, overflow="ignore").join([Text(" "), *cells])
        joined.rstrip()
        return joined

    yield line(head)
    for labels, block in blocks:
        yield from (Padding(label, (0, 0, 0, 2)) for label in labels)
        yield from map(line, block)
        if labels or block:
            yield ""


def _described(layer: LayerRow) -> list[Text]:
    lines = [_text(layer.geometry, "dim")]
    return [*lines, _text(layer.form, "dim")] if layer.form else lines


def _layer_cells(layer: LayerRow) -> list[list[Text]]:
    rows = [_stage_cells(row) for row in layer.stages if row.stage != "both"]
    if layer.error is not None:
        rows.append(_error_cells(layer.error, "error"))
    return rows


def _stage_cells(row: StageRow) -> list[Text]:
    roof = "" if row.of_roof is None else f"{row.of_roof:.0%}"
    times = [Text(milliseconds(row.times.original_ms)), Text(milliseconds(row.times.swapped_ms))]
    first, *others = row.family.split(", ")
    return [Text(row.stage), *times, _speedup(row), _text(f"{first}+" if others else first), Text(roof)]


def _error_cells(row: ErrorRow, what: str) -> list[Text]:
    used = "exact" if row.swapped == 0 else f"{row.of_limit:.0%} of limit"
    style = "" if row.passed else "bold red"
    ours = Text(error_text(row.swapped), style=style)
    return [Text(what), Text(error_text(row.original)), ours, Text(used, style=style), Text(), Text()]


def _network_errors(summary: Summary) -> list[ErrorRow]:
    """Returns the largest errors of output, gradient and buffer of the network as a whole."""
    found: dict[str, ErrorRow] = {}
    for row in summary.errors:
        if row.what.startswith("layer_"):
            continue
        what = _what(row)
        if what not in found or (not row.passed, row.of_limit) > (
            not found[what].passed,
            found[what].of_limit,
        ):
            found[what] = row
    return list(found.values())


def _what(row: ErrorRow) -> str:
    return "gradient" if row.what.startswith("grad") else row.what


def _add_rows(table: Table, labels: list[Text], rows: list[list[Text]]) -> None:
    """Adds one row of many lines, so that a label may wrap without separating the numbers."""
    if not labels and not rows:
        return
    columns = [Text("\n").join(cells) for cells in zip(*rows, strict=True)]
    table.add_row(Text("\n").join(labels), *columns[: len(table.columns) - 1])


def _roof_explained(summary: Summary) -> str:
    assert summary.ceilings is not None
    used = {layer.mode for layer in summary.layers}
    rates = ", ".join(
        f"{rate:.0f} TFLOP/s {mode}" for mode, rate in summary.ceilings.tflops.items() if mode in used
    )
    return (
        f"Roof: the share of this chip's limit that ours reaches: {summary.ceilings.copy_gbps:.0f} GB/s, {rates}, "
        "measured in the same run."
    )


def _left(summary: Summary) -> Iterator[RenderableType]:
    if not summary.left:
        return
    if summary.layers:
        yield _title("Layers that stay as they are")
    table = _table()
    table.add_column("layer", overflow="fold", ratio=3)
    table.add_column("geometry", overflow="fold", ratio=3)
    table.add_column("why", overflow="fold", ratio=4)
    for name, geometry, reason in summary.left:
        table.add_row(_text(name), _text(geometry), _text(reason, "yellow"))
    yield _indented(table)


def _errors(summary: Summary) -> Iterator[RenderableType]:
    if not summary.errors:
        return
    yield _title("Verification", f"largest error of each kind; reference: {summary.reference}")
    table = _table()
    table.add_column("compared", overflow="fold", ratio=3)
    table.add_column("mode", no_wrap=True)
    table.add_column("largest at", overflow="fold", ratio=3)
    for column in ("PyTorch", "ours", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary.errors:
        table.add_row(
            Text(row.what.replace("_", " ")),
            row.mode,
            _text(row.name or (MODEL_ITSELF if row.what.startswith("layer_") else "")),
            error_text(row.original),
            Text(error_text(row.swapped), style="green" if row.passed else "bold red"),
            error_text(row.limit),
        )
    yield _whole(table)


def _times(summary: Summary) -> Iterator[RenderableType]:
    if not summary.network and not any(layer.stages for layer in summary.layers):
        return
    yield _title("Time", "median of interleaved runs in ms, +- half of the interquartile range")
    table = _table()
    table.add_column("", overflow="fold", ratio=1)
    table.add_column("stage", no_wrap=True)
    table.add_column("PyTorch", justify="right", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("speedup", no_wrap=True)
    _add_rows(table, [Text("whole network", style="bold")], [_time_cells(row) for row in summary.network])
    for layer in summary.layers:
        if layer.stages:
            table.add_section()
            labels = [_text(layer.name), _text(layer.form, "dim")]
            _add_rows(table, labels, [_time_cells(row) for row in layer.stages])
    yield _whole(table)


def _time_cells(row: StageRow) -> list[Text]:
    times = row.times
    original = _with_spread(times.original_ms, times.original_spread)
    swapped = _with_spread(times.swapped_ms, times.swapped_spread)
    if row.stage == "both":  # a sum has no known spread
        original, swapped = Text(milliseconds(times.original_ms)), Text(milliseconds(times.swapped_ms))
    return [Text(row.stage), original, swapped, _speedup(row)]


def _with_spread(value: float, spread: float) -> Text:
    return Text(f"{milliseconds(value)} +-{max(1, round(spread * 100))}%")


def _kernels(summary: Summary) -> Iterator[RenderableType]:
    explained = [layer for layer in summary.layers if layer.kernels]
    if not explained:
        return
    yield _title("What computes it, and why")
    for layer in explained:
        yield Padding(_text(f"{layer.name}  {layer.form}"), (0, 0, 0, 2))
        for line in layer.kernels:
            indent = len(line) - len(line.lstrip())
            yield Padding(_text(line.strip(), "dim"), (0, 0, 0, 4 + indent))
    yield ""


def _failures(summary: Summary) -> Iterator[RenderableType]:
    if summary.outcome != "mismatch":
        return
    lines = [_text(line, "red") for line in summary.failures[:FAILURES_SHOWN]]
    if (more := len(summary.failures) - FAILURES_SHOWN) > 0:
        lines.append(Text(f"and {more} more"))
    if summary.first_divergence:
        lines.append(_text(f"first layer that diverges: {summary.first_divergence}", "bold"))
    yield from _bullets("Failures", lines)


def _notes(summary: Summary) -> Iterator[RenderableType]:
    yield from _bullets("Notes", [_text(line) for line in summary.notes])


def _bullets(title: str, lines: list[Text]) -> Iterator[RenderableType]:
    if not lines:
        return
    yield _title(title)
    grid: Any = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", line)
    yield _indented(grid)
