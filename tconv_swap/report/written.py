"""Renders the report for a file, in the form that the file's name requires."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ReportError(Exception):
    """A report that cannot be made; the message is one line."""


def check(target: Path) -> None:
    """Checks, before any work is done, that a report with this name can be made.

    Raises:
        ReportError: the name has no known ending.
    """
    if target.suffix.lower() not in RENDERERS:
        raise ReportError(f"{target}: give a name that ends in {' or '.join(RENDERERS)}")


def render(target: Path, document: Mapping[str, Any]) -> str:
    """Returns the text of the report, in the form that the name of `target` requires.

    Raises:
        ReportError: as in `check`.
    """
    check(target)
    return RENDERERS[target.suffix.lower()](document)


def _markdown(document: Mapping[str, Any]) -> str:
    from tconv_swap.report.markdown import markdown

    return markdown(document)


def _page(document: Mapping[str, Any]) -> str:
    from tconv_swap.report.page import page  # imported here: importing matplotlib takes more than a second

    return page(document)


RENDERERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    ".md": _markdown,
    ".html": _page,
    ".htm": _page,
}
