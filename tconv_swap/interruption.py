"""Signals that end a command, from its first import to the end of its process.

SIGINT (Ctrl-C) gives exit code 130 and SIGTERM 143, always with one line that says so. While the package is imported, a
signal ends the process at once, since no work has begun. While a command works, both signals raise an exception, so
that a half-written file is removed; the signal is remembered, in case other code catches the exception. Once the exit
code is decided, both are ignored: everything is written, and the process ends within a second.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
#: The names of the script that pip installs.
_SCRIPTS = ("tconv-swap", "tconv-swap.exe", "tconv-swap-script.py")
_MODULE = "tconv_swap"

_received: list[int] = []
_handled: set[int] = set()


def end_while_importing() -> None:
    """Calls `end_at_signals` if our own command imports this package; does nothing in a program that uses the
    library."""
    if _is_own_command():
        end_at_signals()


def end_at_signals() -> None:
    """Makes a signal end the process at once, without a traceback, since no work has begun.

    An ignored signal stays ignored, such as SIGINT in a background process of a script.
    """
    _handle(_leave_at_once)


def raise_at_signals() -> None:
    """Makes SIGINT and SIGTERM raise an exception, unless they are ignored."""
    _handle(on_signal)


def ignore_signals() -> None:
    """Makes both signals leave the exit code as it is. Does nothing if our handlers were not installed before.

    A Python handler is not enough: the interpreter removes it before the process has ended.
    """
    for number in _handled:
        signal.signal(number, signal.SIG_IGN)


def received() -> int | None:
    """Returns the signal that has come since `raise_at_signals`, SIGTERM if both have; None if none has."""
    return max(_received, default=None)


def handlers_are_installed() -> bool:
    """Returns whether our handlers are installed. If they are and `received` is None, the code of the user raised the
    KeyboardInterrupt."""
    return signal.SIGINT in _handled


def describe(number: int) -> str:
    """Returns `interrupted` or `terminated`."""
    return _NAMES[signal.Signals(number)]


def raise_again() -> None:
    """Raises again for a signal that has come. Call it regularly: an import or a destructor may have caught the
    exception.

    Raises:
        KeyboardInterrupt, SystemExit: a signal has come.
    """
    number = received()
    if number == signal.SIGTERM:
        raise SystemExit(128 + number)
    if number is not None:
        raise KeyboardInterrupt


def _handle(handler: object) -> None:
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if number in _handled or before in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handler)  # type: ignore[arg-type]
            _handled.add(number)


def forget_interruption() -> None:
    """Forgets a Ctrl-C that ended only one part of the work; the rest of the work goes on."""
    while signal.SIGINT in _received:
        _received.remove(signal.SIGINT)


def on_signal(number: int, _: FrameType | None) -> None:
    _received.append(number)
    raise_again()


def _leave_at_once(number: int, _: FrameType | None) -> None:
    os.write(2, f"tconv-swap: error: {describe(number)}; no file was written\n".encode())
    os._exit(128 + number)


def _is_own_command() -> bool:
    if sys.argv[:1] == ["-m"]:
        words = sys.orig_argv
        return f"-m{_MODULE}" in words or ("-m" in words and words[words.index("-m") + 1] == _MODULE)
    return bool(sys.argv) and Path(sys.argv[0]).name in _SCRIPTS
