"""What the command line says on stderr while it works: progress, warnings, log records, the final error."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from rich import progress
from rich.console import Console
from rich.text import Text

from tconv_swap.files.fileformat import printable
from tconv_swap.interruption import raise_again


class Progress:
    """On a terminal a spinner, with a bar and the time left where it is known how much there is to do; elsewhere one
    plain line for each new thing; nothing at all if quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._shown: progress.Progress | None = None
        self._last_topic = ""
        self._total: int | None = None

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Show what comes next.

        Args:
            text: in a few words; the first says what kind of work it is.
            done, total: how much of that kind of work is behind, and how much there is in all; None if unknown.

        Raises:
            KeyboardInterrupt, SystemExit: a signal has come, and was swallowed.
        """
        raise_again()
        text = printable(text)
        if self._console.is_terminal:
            self._show(text, done, total)
            return
        # In a log a line for every single layer would bury the rest.
        topic = text.split(" ", 1)[0]
        if topic != self._last_topic:
            self.line(topic if total is not None else text)
        self._last_topic = topic

    def _show(self, text: str, done: int | None, total: int | None) -> None:
        if self._shown is None or total != self._total:
            # A bar of its own for each kind of work: the time left is worked out from the time spent.
            self.stop()
            columns: list[progress.ProgressColumn] = [progress.SpinnerColumn(), _Words()]
            if total is not None:
                columns += [
                    progress.BarColumn(bar_width=24),
                    progress.MofNCompleteColumn(),
                    progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                ]
            self._shown = progress.Progress(*columns, console=self._console, transient=True)
            self._shown.add_task(text, total=total)
            self._shown.start()
            self._total = total
        self._shown.update(self._shown.task_ids[0], description=text, completed=done)

    def detail(self, text: str) -> None:
        """What is going on inside of what was shown last; only on a terminal."""
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], description=printable(text))

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(f"tconv-swap: {printable(text)}"), soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class _Words(progress.ProgressColumn):
    """The description as plain text: it may hold a foreign name, which is no markup."""

    def render(self, task: progress.Task) -> Text:
        return Text(task.description, overflow="ellipsis", no_wrap=True)


@contextlib.contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Progress]:
    """Progress, and one line for every Python warning and every log record of ours from WARNING on.

    What the library reports as INFO, such as a compilation, is shown in passing.
    """
    shown = Progress(quiet=quiet)
    handler = _LogLines(shown)
    logger = logging.getLogger("tconv_swap")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    try:
        with warnings.catch_warnings():
            # What torch 2.11 tells itself whenever a graph of torch.fx is copied.
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            warnings.showwarning = lambda message, category, *_, **__: shown.line(
                f"{category.__name__}: {message}"
            )
            yield shown
    finally:
        shown.stop()
        logger.setLevel(level)
        logger.removeHandler(handler)


def print_error(text: str) -> None:
    """The one line on stderr that says why there is no result; printed however quiet."""
    sys.stderr.write(f"tconv-swap: error: {printable(text)}\n")


def prepare_streams() -> None:
    """See to it that what is printed cannot fail for want of a letter, nor of a stream."""
    # A name that the terminal's encoding lacks is escaped: Python would raise in the middle of the output.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Started with it closed (`>&-`), Python has None there, and the next file to be opened gets its number. What is
    # printed to a file that can only be read fails as it would have; of stderr nobody is left to be told.
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def silence_stdout() -> None:
    """Let what stdout does not take be lost: Python would try again at exit, and fail with an exit code of its own."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LogLines(logging.Handler):
    def __init__(self, shown: Progress) -> None:
        super().__init__(logging.INFO)
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._shown.line(record.getMessage())
        else:
            self._shown.detail(record.getMessage())
