"""What the command line says on stderr while it works: progress, warnings, log records, the final error."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tconv_swap.files.fileformat import printable


class Progress:
    """A spinner on a terminal; elsewhere one plain line for each new thing; nothing at all if quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._status: Status | None = None
        self._last_topic = ""

    def __call__(self, text: str) -> None:
        """Show what comes next."""
        text = printable(text)
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(Text(text))
                self._status.start()
            self._status.update(Text(text))
            return
        # In a log a line for every single layer would bury the rest.
        topic = text.split(" ", 1)[0]
        if topic != self._last_topic:
            self.line(topic if topic == "timing" else text)
        self._last_topic = topic

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(f"tconv-swap: {printable(text)}"), soft_wrap=True)

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Progress]:
    """Progress, and one line for every Python warning and every log record of ours from WARNING on."""
    progress = Progress(quiet=quiet)
    handler = _LogLines(progress)
    logger = logging.getLogger("tconv_swap")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, category, *_, **__: progress.line(
                f"{category.__name__}: {message}"
            )
            yield progress
    finally:
        progress.stop()
        logger.removeHandler(handler)


def print_error(text: str) -> None:
    """The one line on stderr that says why there is no result; printed however quiet."""
    sys.stderr.write(f"tconv-swap: error: {printable(text)}\n")


class _LogLines(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> Any:
        self._progress.line(record.getMessage())
