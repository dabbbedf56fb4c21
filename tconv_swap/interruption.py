"""Signals that end a command: whoever swallows the exception that they raise does not swallow them."""

from __future__ import annotations

import signal
from types import FrameType

_received: list[int] = []


def obey_signals() -> None:
    """From now on SIGTERM raises too, so that a half-written file is removed; SIGINT does unless it is ignored."""
    signal.signal(signal.SIGTERM, _on_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)


def raise_again() -> None:
    """To be called now and then: a library that was being imported, or a destructor, may have gone on.

    Raises:
        KeyboardInterrupt, SystemExit: a signal has come.
    """
    if signal.SIGTERM in _received:
        raise SystemExit(128 + signal.SIGTERM)
    if _received:
        raise KeyboardInterrupt


def obeyed() -> None:
    """Ctrl-C has ended the part of the work that it was meant to end: what is left goes on."""
    while signal.SIGINT in _received:
        _received.remove(signal.SIGINT)


def _on_signal(number: int, _: FrameType | None) -> None:
    _received.append(number)
    raise_again()
