"""Prints the table of ways on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tconv_swap.files.fileformat import printable
from tconv_swap.report.ways import WayTable
from tconv_swap.report.words import milliseconds

STYLES = {"faster": "green", "slower": "red", "noisy": "yellow", "same": "", "": ""}


def ways_shown(tables: Sequence[WayTable], width: int) -> Iterator[RenderableType]:
    """Yields a table for each stage, and the conclusions.

    Args:
        tables: the tables of the report.
        width: columns of the console; if it is narrow, today's times are left out, which hardly differ.
    """
    for table in tables:
        yield Text.assemble((f"Ways to run it, {table.title}", "bold"), ("  milliseconds, medians", "dim"))
        yield Padding(_drawn(table, width), (0, 0, 0, 2))
        lines = [table.headline, f"It is {table.bound}." if table.bound else ""]
        if table.needs:
            lines.append(f"This way needs: {'; '.join(table.needs)}.")
        yield from (Padding(Text(printable(line)), (0, 0, 0, 2)) for line in lines if line)
        yield ""


def _drawn(table: WayTable, width: int) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    drawn.add_column("way", no_wrap=width >= 72, overflow="fold")
    wide = width >= 100
    if wide:
        drawn.add_column("today", justify="right", no_wrap=True)
    drawn.add_column("ms", justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    drawn.add_column("", overflow="fold")
    for line in table.lines:
        times = ["" if ms is None else milliseconds(ms) for ms in (line.today_ms, line.ms)]
        drawn.add_row(
            Text(printable(line.name), style="bold" if line.chosen else ""),
            *(times if wide else times[1:]),
            Text(line.speedup, style=STYLES[line.verdict]),
            Text(printable(line.remark)),
        )
    return drawn
