"""Runs work in a separate process that may hang or die: one wrong kernel can destroy the process's GPU context.

The worker announces what it runs next. If it stays silent for too long or dies, it is killed, the caller learns what
ran, and the next task gets a new process.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

_TaskT = TypeVar("_TaskT")
_ResultT = TypeVar("_ResultT")

#: Called as ``work(task, announce)``.
Work = Callable[[_TaskT, Callable[[str], None]], _ResultT]

_READY, _RUNNING, _DONE, _FAILED = "ready", "running", "done", "failed"


class StoppedError(RuntimeError):
    """The process hung or died. ``running``: its last announcement."""

    def __init__(self, running: str, how: str) -> None:
        super().__init__(f"{how} in {running}")
        self.running = running
        self.how = how


class NotStartedError(RuntimeError):
    """The process hung or died before it was ready for a task."""


class TaskError(RuntimeError):
    """The work raised an exception; the message holds its type and text."""


class MeasuringProcess(Generic[_TaskT, _ResultT]):
    """Runs one process at a time, which calls ``make()(task, announce)`` for each task.

    Args:
        make: called in the process before its first task; returns the function that works. Both are pickled.
        silence_s: seconds without an announcement after which the process counts as hung.
        start_s: the same limit until the process is ready for its first task.
    """

    def __init__(self, make: Callable[[], Work[_TaskT, _ResultT]], silence_s: float, start_s: float) -> None:
        self._make = make
        self._silence_s = silence_s
        self._start_s = start_s
        # Spawned, because a forked process must not touch CUDA.
        self._context = get_context("spawn")
        self._process: Any = None
        self._connection: Connection | None = None
        self._is_ready = False

    def start(self) -> None:
        """Starts the process; the first task waits until it is ready."""
        ours, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        self._process.start()
        theirs.close()  # so that reading ends when the process dies
        self._connection = ours
        self._is_ready = False

    def wait_until_ready(self) -> Connection:
        """Waits until the process, which is started if there is none, is ready for a task; returns its connection.

        Raises:
            NotStartedError: the process never became ready.
        """
        if self._process is None:
            self.start()
        assert self._connection is not None
        if not self._is_ready:
            try:
                self._next(self._connection, self._start_s, "its start")
            except StoppedError as error:
                self.stop()
                raise NotStartedError(f"the process that measures: {error}") from None
            self._is_ready = True
        return self._connection

    def run(self, task: _TaskT) -> _ResultT:
        """Returns the result for one task.

        Raises:
            NotStartedError: the process never became ready.
            StoppedError: the process hung or died; the next task gets another one.
            TaskError: the work raised.
        """
        connection, running = self.wait_until_ready(), "its first step"
        try:
            connection.send(task)
            while True:
                kind, value = self._next(connection, self._silence_s, running)
                if kind == _DONE:
                    return value  # type: ignore[no-any-return]
                if kind == _FAILED:
                    raise TaskError(value)
                running = value
        except StoppedError:
            self.stop()
            raise
        except OSError as error:
            self.stop()
            raise StoppedError(running, "died") from error

    def stop(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = self._connection = None

    def _next(self, connection: Connection, seconds: float, running: str) -> tuple[str, Any]:
        if not connection.poll(seconds):
            raise StoppedError(running, f"no answer for {seconds:g} s")
        try:
            return connection.recv()  # type: ignore[no-any-return]
        except EOFError:
            raise StoppedError(running, "died") from None


def _serve(connection: Connection, make: Callable[[], Work[_TaskT, _ResultT]]) -> None:
    work = make()
    connection.send((_READY, None))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            result = work(task, lambda what: connection.send((_RUNNING, what)))
        except Exception as error:
            connection.send((_FAILED, f"{type(error).__name__}: {error}"))
        else:
            connection.send((_DONE, result))
