"""Tables, drawn as text of a fixed width or as Markdown, and the places in a README that they are put into."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

WIDTH = 110

_PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text. The first ``left`` columns are words, the others numbers."""

    headings: Sequence[str]
    rows: Iterable[Sequence[str]]
    left: int = 1

    def text(self) -> str:
        """At most ``WIDTH`` columns; what does not fit is cut with an ellipsis."""
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


def places(readme: str) -> list[str]:
    """The names of the result files that a text has a place for:

    ``<!-- results: h200-forward.json -->`` ... ``<!-- end of results -->``
    """
    return [match[2] for match in _PLACE.finditer(readme)]


def fill_places(readme: str, tables: Mapping[str, str]) -> str:
    """The text with every place filled for which there is a table, and the other places as they are."""

    def filled(match: re.Match[str]) -> str:
        if match[2] not in tables:
            return match[0]
        return f"{match[1]}\n{tables[match[2]].strip()}\n\n{match[3]}"

    return _PLACE.sub(filled, readme)


def bullets(items: Iterable[str], otherwise: str) -> str:
    """One line for each item, or a line that says there is none."""
    return "".join(f"- {line}\n" for line in list(items) or [otherwise])
