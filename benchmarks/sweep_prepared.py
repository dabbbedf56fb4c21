"""Keeps the prepared tasks of a sweep in a file: a machine without a GPU plans and compiles, one with a GPU measures.

Kernels are not in the file but in the cache on disk (``TCONV_SWAP_CACHE``), which has to travel with it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.layers import commit_of_tree


def write(path: Path, benchmark: str, prepared: Iterable[tuple[Any, Future[Any]]]) -> int:
    """Writes what becomes ready of each task, or the exception that it raised; returns the number of tasks."""
    ready = {task.key: future.exception() or future.result() for task, future in prepared}
    path.write_bytes(pickle.dumps((benchmark, _commit(), ready), protocol=pickle.HIGHEST_PROTOCOL))
    return len(ready)


def read(path: Path, benchmark: str, waiting: Sequence[Any]) -> Iterator[tuple[Any, Future[Any]]]:
    """Yields those of the tasks that are in the file, in the order of ``waiting``.

    Raises:
        ValueError: the file is of another benchmark or another commit.
        OSError: the file cannot be read.
    """
    of_benchmark, commit, ready = pickle.loads(path.read_bytes())
    if (of_benchmark, commit) != (benchmark, _commit()):
        raise ValueError(f"{path} is of benchmarks.{of_benchmark} and commit {commit}")
    for task in waiting:
        if task.key in ready:
            future: Future[Any] = Future()
            found = ready[task.key]
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)
            yield task, future


def _commit() -> str | None:
    # A copy of the tree may lack files that nothing here reads: whether it is dirty says nothing.
    commit = commit_of_tree()
    return commit.removesuffix("-dirty") if commit is not None else None
