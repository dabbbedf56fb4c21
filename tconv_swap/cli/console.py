"""Prints on stderr while a command works: progress, warnings, log records, the final error."""

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
    """Shows progress: on a terminal a spinner, and a bar with the time left if the amount of work is known;
    elsewhere one plain line for each new kind of work; nothing if quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._shown: progress.Progress | None = None
        self._last_topic = ""
        self._total: int | None = None

    def __call__(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows the next step.

        Args:
            text: a few words, of which the first names the kind of work.
            done, total: how much of this kind of work is done, and how much there is in total; None if unknown.

        Raises:
            KeyboardInterrupt, SystemExit: a signal has come, and other code caught its exception.
        """
        raise_again()
        text = printable(text)
        if self._console.is_terminal:
            self._show(text, done, total)
            return
        # In a log, one line per layer would make the rest hard to find.
        topic = text.split(" ", 1)[0]
        if topic != self._last_topic:
            self.line(topic if total is not None else text)
        self._last_topic = topic

    def _show(self, text: str, done: int | None, total: int | None) -> None:
        if self._shown is None or total != self._total:
            # Each kind of work has its own bar, since the time left is computed from the time spent.
            self.stop()
            columns: list[progress.ProgressColumn] = [progress.SpinnerColumn(), _PlainText()]
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
        """Shows a step of the current work, on a terminal only."""
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], description=printable(text))

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(Text(f"tconv-swap: {printable(text)}"), soft_wrap=True)

    def stop(self) -> None:
        """Removes the bar."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


class _PlainText(progress.ProgressColumn):
    """Shows the description as plain text: names from the user's file are not markup."""

    def render(self, task: progress.Task) -> Text:
        return Text(task.description, overflow="ellipsis", no_wrap=True)


@contextlib.contextmanager
def progress_shown(*, quiet: bool) -> Iterator[Progress]:
    """Shows progress, and one line for every Python warning and every log record of ours from WARNING on.

    What the library logs as INFO, such as a compilation, is shown as a detail.
    """
    shown = Progress(quiet=quiet)
    handler = _LogLines(shown)
    logger = logging.getLogger("tconv_swap")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    try:
        with warnings.catch_warnings():
            # torch 2.11 warns of its own code whenever a graph of torch.fx is copied.
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
    """Prints the one line on stderr that says why there is no result, even if quiet."""
    sys.stderr.write(f"tconv-swap: error: {printable(text)}\n")


def prepare_streams() -> None:
    """Makes sure that printing cannot fail because of the encoding, a closed pipe or a missing width."""
    # If a stream is closed at the start (`>&-`), Python sets it to None, and the next file that is opened gets its
    # number. With a read-only stdout printing fails, as it should. Nobody can read errors on a closed stderr, so they
    # are discarded.
    if sys.stdout is None:
        sys.stdout = _open(os.O_RDONLY)
    if sys.stderr is None:
        sys.stderr = _open(os.O_WRONLY)
    # If the reader of a pipe has ended, such as `| head`, the result is still valid, so the exit code does not change.
    # It does not change either if stderr cannot be written.
    sys.stdout = _discarding(sys.stdout, BrokenPipeError)
    sys.stderr = _discarding(sys.stderr, OSError)
    # A terminal of unknown width reports 0, for which rich would print nothing.
    columns = os.environ.get("COLUMNS", "1")
    if not (columns.isdecimal() and int(columns) > 0):
        del os.environ["COLUMNS"]


def silence_stdout() -> None:
    """Discards what stdout cannot take: Python would try again at exit, and fail with another exit code."""
    with contextlib.suppress(OSError, ValueError):
        _discard(sys.stdout.fileno())


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Sends everything that is printed to stdout inside to stderr: the output of the network's own code must not get
    into the report or the JSON.

    This includes the output of native code and of subprocesses.
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
        # C code may still have output in its buffer.
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(before, descriptor)
        os.close(before)


def _open(flags: int) -> TextIO:
    """Returns the null device as a stream whose descriptor stays open until the process ends."""
    return open(os.open(os.devnull, flags), "w", encoding="utf-8", closefd=False)


def _discarding(stream: TextIO, what: type[OSError]) -> TextIO:
    """Returns the same stream, except that an error of this class discards all further output, and that characters
    which the encoding lacks are escaped. Python would raise in the middle of the output."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = _DiscardingFile(stream.fileno(), what)
    # Every line on stderr appears at once.
    lines = raw.isatty() or stream is sys.stderr
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=lines)


class _DiscardingFile(io.FileIO):
    def __init__(self, descriptor: int, what: type[OSError]) -> None:
        # Python's own stream closes it.
        super().__init__(descriptor, "w", closefd=False)
        self._what = what

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except self._what:
            _discard(self.fileno())
            return len(data)


def _discard(descriptor: int) -> None:
    """Discards everything that is written to the descriptor from now on."""
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
