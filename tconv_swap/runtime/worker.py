"""Computes functions of this package for another process: as a script it answers what its standard input requests,
until that ends.

``worker_pool`` starts it without site-packages, so that it starts in 50 ms: it imports the standard library and the
modules of the functions. Planning needs dtypes of torch and nothing else of it, so a module with dtypes takes its
place.
"""

from __future__ import annotations

import gc
import pickle
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

#: What the script writes when it has started.
READY = b"ready\n"


class Request(NamedTuple):
    """A function, by its module and name, and its arguments, pickled."""

    module: str
    name: str
    arguments: bytes


class Reply(NamedTuple):
    """The result, pickled, or what the function or the pickling raised."""

    result: bytes
    error: str


class _Dtype:
    """Pickled as the dtype of torch of the same name."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


# Pickling looks a dtype up here.
_Dtype.__module__ = "torch"


def replace_modules() -> None:
    """Makes the modules of this package importable without what ``import tconv_swap`` imports."""
    package, torch = ModuleType("tconv_swap"), ModuleType("torch")
    package.__path__ = [str(Path(__file__).parents[1])]
    for name, itemsize in (("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2)):
        setattr(torch, name, _Dtype(name, itemsize))
    sys.modules.update({package.__name__: package, torch.__name__: torch})


def answer(request: Request) -> Reply:
    """Computes the function."""
    try:
        function = getattr(import_module(request.module), request.name)
        return Reply(pickle.dumps(function(*pickle.loads(request.arguments))), "")
    except Exception as error:
        return Reply(b"", f"{type(error).__name__}: {error}")


def main() -> None:
    # Ctrl-C reaches all processes of a terminal; this one ends with its parent, which closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Searches make many objects and no cycles: looking for these takes a sixth of their time.
    gc.disable()
    replace_modules()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(READY)
    replies.flush()
    while True:
        try:
            request = Request(*pickle.load(requests))
        except EOFError:
            return
        pickle.dump(tuple(answer(request)), replies)
        replies.flush()


if __name__ == "__main__":
    main()
