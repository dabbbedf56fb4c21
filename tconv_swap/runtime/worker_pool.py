"""Computes pure functions in processes beside this one.

NVRTC in threads of one process has the throughput of less than five cores, whatever their number (on 16 cores of an
H200's host 63 kernels took 6.6, 5.0 and 5.0 s in 4, 8 and 16 threads, and 6.0, 3.7 and 2.1 s in as many processes:
docs/first-calls.md), and planning, which is Python, that of one. A process starts in 50 ms and takes 30 MB; it ends
when it has had nothing to do for ``IDLE_SECONDS``.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from tconv_swap.runtime import worker
from tconv_swap.runtime.worker import READY, Reply, Request

_Result = TypeVar("_Result")

logger = logging.getLogger("tconv_swap")

IDLE_SECONDS = 10.0
#: An interpreter that has not answered after this time is none.
START_SECONDS = 20.0

_lock = threading.Lock()
#: Those that wait for a request, and since when; the last one is taken first.
_idle: list[tuple[float, _Worker]] = []
#: Whether a thread waits to end the idle ones.
_is_watched = False
#: Whether no process can be started: an embedded interpreter, or a system that forbids it.
_cannot_start = False


class _Worker:
    """A process of worker.py. ``niceness``: that of the thread that starts it."""

    def __init__(self, niceness: int) -> None:
        """Raises OSError or EOFError: it does not start."""
        self.niceness = niceness
        flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
        self._process = subprocess.Popen(
            [sys.executable, *flags, worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        answered = select.poll()
        answered.register(self._replies, select.POLLIN)
        if not answered.poll(1000 * START_SECONDS) or os.read(self._replies.fileno(), len(READY)) != READY:
            self._process.kill()
            self.end()
            raise EOFError(f"{sys.executable} does not answer as an interpreter")

    def answer(self, request: Request) -> Reply:
        """Raises OSError, EOFError or UnpicklingError: the process has ended."""
        self._requests.write(pickle.dumps(tuple(request)))
        self._requests.flush()
        return Reply(*pickle.load(self._replies))

    def end(self) -> None:
        """Closes its input, by which it ends, and waits for its end."""
        self.leave()
        self._process.wait()

    def leave(self) -> None:
        """Closes this process's ends of its pipes."""
        with suppress(OSError):
            self._requests.close()
        self._replies.close()


def call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Returns ``function(*arguments)``, computed in a process beside this one; in this one where none can be started,
    or where it ends or the function raises in it.

    Args:
        function: a pure one of a module of this package that imports only the standard library, others of its kind
            and dtypes of torch (``worker.py``).
        arguments: data that can be pickled, as can the result.
    """
    taken = _taken(_niceness())
    if taken is not None:
        request = Request(function.__module__, function.__qualname__, pickle.dumps(arguments))
        try:
            reply = taken.answer(request)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            logger.info("a process beside this one has ended (%s): %s runs in this one", error, request.name)
            taken.end()
        except BaseException:
            taken.leave()
            raise
        else:
            _give_back(taken)
            if not reply.error:
                result: _Result = pickle.loads(reply.result)
                return result
            logger.info("%s fails in a process beside this one (%s)", request.name, reply.error)
    return function(*arguments)


def can_start() -> bool:
    """Returns whether processes can be started beside this one, as far as is known."""
    # A frozen program is its own executable.
    return bool(sys.executable) and not _cannot_start and not getattr(sys, "frozen", False)


def _niceness() -> int:
    with suppress(AttributeError, OSError):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return 0


def _taken(niceness: int) -> _Worker | None:
    """Returns an idle worker or a new one; None where none can be started."""
    global _cannot_start
    with _lock:
        for place in reversed(range(len(_idle))):
            if _idle[place][1].niceness == niceness:
                return _idle.pop(place)[1]
    if not can_start():
        return None
    try:
        return _Worker(niceness)
    except (OSError, EOFError) as error:
        logger.info("no process can be started beside this one (%s)", error)
        _cannot_start = True
        return None


def _give_back(taken: _Worker) -> None:
    global _is_watched
    with _lock:
        _idle.append((time.monotonic(), taken))
        begins, _is_watched = not _is_watched, True
    if begins:
        try:
            threading.Thread(target=_end_idle_ones, name="tconv_swap-idle", daemon=True).start()
        except RuntimeError:  # the interpreter ends
            _is_watched = False


def _end_idle_ones() -> None:
    """Ends workers that have had nothing to do, until there are no idle ones."""
    global _is_watched
    while True:
        with _lock:
            if not _idle:
                _is_watched = False
                return
            left = _idle[0][0] + IDLE_SECONDS - time.monotonic()
            idle = _idle.pop(0)[1] if left <= 0 else None
        if idle is None:
            time.sleep(left)
        else:
            idle.end()


def end_all() -> None:
    """Ends the workers that have nothing to do."""
    with _lock:
        ended, _idle[:] = list(_idle), []
    for _, one in ended:
        one.leave()
    for _, one in ended:
        one.end()


def _forget_processes() -> None:
    """Leaves the processes of the parent to it."""
    global _lock, _is_watched
    _lock = threading.Lock()  # a thread of the parent may have held it
    for _, one in _idle:
        one.leave()
    _idle.clear()
    _is_watched = False


os.register_at_fork(after_in_child=_forget_processes)
atexit.register(end_all)
