"""Writes the report of a committed run into README.md: `python -m benchmarks.readme`.

The run is `tconv-swap demo --dir /tmp/demo --json benchmarks/results/demo.json`.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tconv_swap.report import make_console
from tconv_swap.report.summary import summarise
from tconv_swap.report.terminal import print_summary

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RUN = ROOT / "benchmarks" / "results" / "demo.json"
#: The columns of the report: the geometry and the shape of each layer fit into a line.
WIDTH = 110
BEGIN, END = "<!-- report -->\n", "<!-- /report -->\n"


def rendered(document: Mapping[str, Any]) -> str:
    """Returns the report of a run, without its notes and the lines that load the file, as a block of Markdown."""
    stream = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=str(WIDTH)):
        print_summary(make_console(stream), summarise(document))
    shown = re.split(r"^(?:Notes|Load it)$", stream.getvalue(), maxsplit=1, flags=re.MULTILINE)[0]
    return f"```\n{shown.rstrip()}\n```\n"


def with_report(text: str, document: Mapping[str, Any]) -> str:
    """Returns a page with the report of a run between its two markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"the page needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{rendered(document)}{END}{after}"


def main() -> None:
    document = json.loads(RUN.read_text(encoding="utf-8"))
    README.write_text(with_report(README.read_text(encoding="utf-8"), document), encoding="utf-8")


if __name__ == "__main__":
    main()
