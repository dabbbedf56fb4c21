"""Keeps the prepared tasks of a sweep in a file: a machine without a GPU plans and compiles, one with a GPU measures.

Kernels are not in the file but in the cache on disk (``TCONV_SWAP_CACHE``), which has to travel with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layers import commit_of_tree


@dataclass(frozen=True)
class PreparedTasks:
    """What became ready of each task, by its key, or the exception that it raised. ``commit``: git's name of the tree
    that planned."""

    benchmark: str
    commit: str | None
    ready: dict[tuple[str, ...], Any]

    def of(self, waiting: Sequence[Any]) -> Iterator[tuple[Any, Future[Any]]]:
        """Yields those of the tasks that are here, in the order of ``waiting``."""
        for task in waiting:
            if task.key in self.ready:
                future: Future[Any] = Future()
                found = self.ready[task.key]
                if isinstance(found, Exception):
                    future.set_exception(found)
                else:
                    future.set_result(found)
                yield task, future


def write(path: Path, benchmark: str, prepared: Iterable[tuple[Any, Future[Any]]]) -> int:
    """Writes what becomes ready of each task; returns the number of tasks."""
    ready = {task.key: future.exception() or future.result() for task, future in prepared}
    tasks = PreparedTasks(benchmark, commit_of_tree(), ready)
    path.write_bytes(pickle.dumps(tasks, protocol=pickle.HIGHEST_PROTOCOL))
    return len(ready)


def read(path: Path, benchmark: str) -> PreparedTasks:
    """Reads what ``write`` wrote.

    Raises:
        ValueError: the file is of another benchmark.
        OSError: the file cannot be read.
    """
    found: PreparedTasks = pickle.loads(path.read_bytes())
    if found.benchmark != benchmark:
        raise ValueError(f"{path} is of benchmarks.{found.benchmark}")
    return found
