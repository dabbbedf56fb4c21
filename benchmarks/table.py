"""Draws tables as text of a fixed width or as Markdown."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text. The first ``left`` columns are words, the others numbers."""

    headings: Sequence[str]
    rows: Iterable[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """Returns lines of at most ``WIDTH`` columns; text that does not fit ends in an ellipsis."""
        return self._drawn(RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False), WIDTH)

    def markdown(self) -> str:
        return self._drawn(RichTable(box=box.MARKDOWN), 1000)

    def _drawn(self, table: RichTable, width: int) -> str:
        for index, heading in enumerate(self.headings):
            table.add_column(
                heading, justify="left" if index < self.left else "right", no_wrap=True, overflow="ellipsis"
            )
        for row in self.rows:
            table.add_row(*row)
        file = io.StringIO()
        console = Console(
            file=file, width=width, markup=False, emoji=False, highlight=False, color_system=None
        )
        console.print(table)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n") + "\n"


def bullets(items: Iterable[str], otherwise: str) -> str:
    """Returns a line for each item, or ``otherwise`` if there is none."""
    return "".join(f"- {line}\n" for line in list(items) or [otherwise])
