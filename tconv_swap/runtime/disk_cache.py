"""Keeps results of planning on disk: a process plans a layer without a search if an earlier one has planned it."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tconv_swap.runtime.cache import cache_directory, write_atomically

logger = logging.getLogger("tconv_swap")

_Result = TypeVar("_Result")

#: What the results depend on beside the arguments: the sources of planning, in the package's folder.
_SOURCES = ("geometry.py", "runtime/integers.py", "runtime/program.py", "kernels")
_MAX_IN_MEMORY = 1024

#: Of each thread, ``call``: who makes its results.
_thread = threading.local()
#: Of threads that need the same result one makes it, with the lock of its file.
_locks: dict[Path, threading.Lock] = {}


class NotKeptError(LookupError):
    """A result that is neither in memory nor on disk, where none may be made (``only_kept``)."""


@contextmanager
def only_kept() -> Iterator[None]:
    """Inside, this thread makes no result that is not kept.

    Raises:
        NotKeptError: one was needed.
    """
    before = getattr(_thread, "call", None)
    _thread.call = _refuse
    try:
        yield
    finally:
        _thread.call = before


def _refuse(*_: object) -> NoReturn:
    raise NotKeptError("it would have to be searched")


def search_by(call: Callable[..., Any]) -> None:
    """Lets ``call(function, *arguments)``, which returns what the function returns, make the results that this thread
    needs and that are not kept."""
    _thread.call = call


def disk_cache(function: Callable[..., _Result]) -> functools._lru_cache_wrapper[_Result]:
    """Decorates a pure function of a layer and a GPU whose arguments and results are plain data, the latter not None.
    Its results are kept in memory and, for later processes, on disk.

    Arguments are equal if their ``repr`` is. Whoever can write to the cache directory can run code in this process: by
    a pickle as by the library that lies beside it.
    """

    module, name = function.__module__, function.__qualname__

    def once(*arguments: Hashable) -> _Result:
        path = path_of(f"{module}.{name}", arguments)
        try:
            with _locks.setdefault(path, threading.Lock()):
                return kept_or_made(path, arguments)
        finally:
            _locks.pop(path, None)

    def kept_or_made(path: Path, arguments: tuple[Hashable, ...]) -> _Result:
        kept: _Result | None = read(path)
        if kept is not None:
            return kept
        call = getattr(_thread, "call", None)
        made: _Result = (
            function(*arguments) if call is None else call(search, sources_digest(), module, name, arguments)
        )
        keep(path, made)
        return made

    return lru_cache(maxsize=_MAX_IN_MEMORY)(functools.wraps(function)(once))


def search(digest: bytes, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """Returns what a decorated function makes, for the process whose ``sources_digest`` this is.

    Raises:
        RuntimeError: this process has read other sources, as after an update of the package.
    """
    if digest != sources_digest():
        raise RuntimeError("the sources of planning have changed")
    return unwrap(getattr(import_module(module), name))(*arguments)


def path_of(name: str, arguments: tuple[Hashable, ...]) -> Path:
    """Returns the path of what these sources keep under a name and arguments, which are equal if their ``repr`` is."""
    key = hashlib.sha256(sources_digest())
    key.update(f"{name}{arguments!r}".encode())
    return cache_directory() / "plans" / f"{name.removeprefix('tconv_swap.kernels.')}-{key.hexdigest()[:32]}"


def read(path: Path) -> Any:
    """Returns what is kept; None if nothing is, or if it is damaged."""
    try:
        return pickle.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # whatever a damaged pickle raises
        logger.info("%s cannot be read (%s)", path.name, error)
        return None


def keep(path: Path, value: object) -> None:
    """Writes a value, if that is possible, which other processes ``read``."""
    try:
        write_atomically(path, pickle.dumps(value))
    except OSError as error:
        logger.info("%s is not kept (%s)", path.name, error)


@lru_cache(maxsize=1)
def sources_digest() -> bytes:
    """Returns a digest of every file on which the results depend."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in _SOURCES:
        place = package / source
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.digest()


# Threads of the parent, which do not run in a forked process, may hold them.
os.register_at_fork(after_in_child=_locks.clear)
