"""What the command line says on stderr while it works: progress, warnings, log records, the final error."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

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
    """See to it that what is printed cannot fail for want of a letter, nor of a reader, nor of a width."""
    # Started with it closed (`>&-`), Python has None there, and the next file to be opened gets its number. What is
    # printed to a file that can only be read fails as it would have; of stderr nobody is left to be told.
    if sys.stdout is None:
        sys.stdout = _open(os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _open(os.O_WRONLY)
    # Nobody reads any more (`| head`): what was found out stays true. An error that stderr does not take changes no
    # exit code.
    sys.stdout = _losing(sys.stdout, BrokenPipeError)
    sys.stderr = _losing(sys.stderr, OSError)
    # 0 is what a terminal says that does not know; rich would print nothing at all.
    columns = os.environ.get("COLUMNS", "1")
    if not (columns.isdecimal() and int(columns) > 0):
        del os.environ["COLUMNS"]


def silence_stdout() -> None:
    """Let what stdout does not take be lost: Python would try again at exit, and fail with an exit code of its own."""
    with contextlib.suppress(OSError, ValueError):
        _lose(sys.stdout.fileno())


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Inside, what anybody prints to stdout goes to stderr: a foreign forward must not get into the report or the JSON.

    Also what native code and subprocesses print.
    """
    with contextlib.redirect_stdout(sys.stderr), _descriptor_redirected(1, 2):
        yield


@contextlib.contextmanager
def _descriptor_redirected(descriptor: int, to: int) -> Iterator[None]:
    try:
        before = os.dup(descriptor)
        os.dup2(to, descriptor)
    except OSError:  # one of them is closed
        yield
        return
    try:
        yield
    finally:
        # What C code has printed may still wait in its buffer.
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(before, descriptor)
        os.close(before)


def _open(flags: int) -> TextIO:
    """The null device as a stream, whose descriptor stays open to the end of the process."""
    return open(os.open(os.devnull, flags), "w", encoding="utf-8", closefd=False)


def _losing(stream: TextIO, what: type[OSError]) -> TextIO:
    """The same stream, where errors of this class lose what is printed and everything after it; names that the
    terminal's encoding lacks are escaped, where Python would raise in the middle of the output."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = _LosingFile(stream.fileno(), what)
    # Of stderr every line is seen at once.
    lines = raw.isatty() or stream is sys.stderr
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=lines)


class _LosingFile(io.FileIO):
    def __init__(self, descriptor: int, what: type[OSError]) -> None:
        # Python's own stream closes it.
        super().__init__(descriptor, "w", closefd=False)
        self._what = what

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._what:
            _lose(self.fileno())
            return len(data)


def _lose(descriptor: int) -> None:
    """From now on what is written there goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class _LogLines(logging.Handler):
    def __init__(self, shown: Progress) -> None:
        super().__init__(logging.INFO)
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._shown.line(record.getMessage())
        else:
            self._shown.detail(record.getMessage())
