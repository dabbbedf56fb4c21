"""Checks the files of a command: no output may be a file that is read, or another output."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from tconv_swap.cli.request import NetworkRequest, Place
from tconv_swap.files.fileformat import printable
from tconv_swap.files.usercode import parse_factory
from tconv_swap.runtime import cache


class PlaceError(ValueError):
    """An output would destroy another file; the message is one line that names the option."""


def files_read(request: NetworkRequest) -> list[Place]:
    """Returns the files that loading reads or executes, as far as this is known without importing anything."""
    found: list[Place] = [("MODEL", request.model)]
    if request.inputs is not None:
        found.append(("--inputs", request.inputs))
    if request.module is not None:
        found.append(("--module", request.module))
    named = [] if request.factory is None else [("--model", parse_factory(request.factory)[0])]
    named += [("--trust", option.partition(":")[0]) for option in request.trust]
    for option, place in named:
        files = [Path(place)] if place.endswith(".py") else _module_files(place)
        found += [(option, file) for file in files]
    return found


def check_apart(read: Iterable[Place], written: Iterable[Place]) -> None:
    """Checks that no output is a file that is read, part of this package or of its cache, or another output.

    Two names are the same file if the file system says so (symbolic and hard links, `..`). Two outputs whose names
    differ only in case also count as the same file unless both exist, since they are on some file systems.

    Raises:
        PlaceError: an output is one of these; the message names both options, or the output and what it would destroy.
    """
    read, written = list(read), list(written)
    for index, (option, target) in enumerate(written):
        for source, path in read:
            if _is_same(target, path, new=False):
                what = "the input itself" if source == "MODEL" else f"the file of {source}, which is read"
                raise PlaceError(f"{option}: {printable(target)} is {what}: give {option} another name")
        for other, path in written[:index]:
            if _is_same(target, path, new=True):
                raise PlaceError(f"{option} and {other} name the same file")
        if whose := _owner(target):
            raise PlaceError(f"{option}: {printable(target)} belongs to {whose}: give {option} another name")


def check_not_imported(written: Iterable[Place]) -> None:
    """Checks that no output is the file of a module that has been imported, for example by MODEL's code.

    Raises:
        PlaceError: an output is such a file.
    """
    there = {_identity(target): option for option, target in written} | {None: ""}
    if len(there) == 1:  # only its `None`: no output exists that could be overwritten
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        option = there.get(_identity(Path(file)) if isinstance(file, str) else None)
        if option:
            raise PlaceError(f"{option} names the file of the module {name}: give {option} another name")


def _module_files(dotted: str) -> Iterator[Path]:
    """Yields the files that importing a module executes: its own and those of the packages that contain it."""
    parts = dotted.split(".")
    places: list[str] | None = [*sys.path, os.getcwd()]
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return
        if spec.has_location and spec.origin is not None:
            yield Path(spec.origin)
        if spec.submodule_search_locations is None:
            return
        places = list(spec.submodule_search_locations)


def _is_same(first: Path, second: Path, *, new: bool) -> bool:
    """
    Args:
        new: both are written, so on a file system that ignores case they may be one file.
    """
    identities = _identity(first), _identity(second)
    if None not in identities:
        return identities[0] == identities[1]
    one, other = (Path(os.path.realpath(path)) for path in (first, second))
    names = [_casefolded(path.name) if new else path.name for path in (one, other)]
    if names[0] != names[1]:
        return False
    parents = _identity(one.parent), _identity(other.parent)
    return one.parent == other.parent if None in parents else parents[0] == parents[1]


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what `os.path.samefile` compares; None if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _casefolded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _owner(target: Path) -> str:
    """Returns the owner of a file that would be overwritten; empty if it is none that this program knows."""
    if not target.is_file():
        return ""
    place = Path(os.path.realpath(target))
    package = Path(__file__).resolve().parents[1]
    if package in place.parents or package.parent / "csrc" in place.parents:
        return "tconv-swap itself"
    if not cache.cache_problem():
        kept = cache.cache_directory().resolve()
        if any(kept / part in place.parents for part in (*cache.COMPILED, *cache.TUNED)):
            return "the cache of tconv-swap"
    return ""
