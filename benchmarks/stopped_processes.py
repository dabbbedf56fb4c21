"""Stops the other processes of a benchmark while one of them times: compilers on the other cores slow its launches."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROC = Path("/proc")


@contextmanager
def others_stopped() -> Iterator[None]:
    """Stops every process that descends from this process's parent, but not this one and its own descendants; lets
    them continue afterwards."""
    others = descendants(os.getppid()) - descendants(os.getpid()) - {os.getpid()}
    _send(signal.SIGSTOP, others)
    try:
        yield
    finally:
        _send(signal.SIGCONT, others)


def continue_descendants() -> None:
    """Lets all descendants of this process continue, in case the one that stopped them was killed."""
    _send(signal.SIGCONT, descendants(os.getpid()))


def descendants(process: int) -> set[int]:
    """Returns the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # The second field is the name in parentheses, which may contain spaces; the fourth is the parent.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    waiting = [process]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found.update(mine)
        waiting += mine
    return found


def _send(number: signal.Signals, processes: Collection[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
