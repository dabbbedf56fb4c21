"""The report as a file: which form a name asks for, and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class ReportError(Exception):
    """A report that cannot be made; the message is one line."""


def check(target: Path) -> None:
    """Finds out before any work is done whether a report of this name can be made.

    Raises:
        ReportError: the name ends in nothing that is known.
    """
    if target.suffix.lower() not in RENDERERS:
        raise ReportError(f"{target}: give a name that ends in {' or '.join(RENDERERS)}")


def render(target: Path, document: Mapping[str, Any]) -> str:
    """Returns the text of the report, in the form that the name of `target` asks for.

    Raises:
        ReportError: as in `check`.
    """
    check(target)
    return RENDERERS[target.suffix.lower()](document)


def _markdown(document: Mapping[str, Any]) -> str:
    from tconv_swap.report.markdown import markdown

    return markdown(document)


def _page(document: Mapping[str, Any]) -> str:
    from tconv_swap.report.page import page  # here, because importing matplotlib takes more than a second

    return page(document)


RENDERERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    ".md": _markdown,
    ".html": _page,
    ".htm": _page,
}
