"""The C++ compiler and the ninja that build the host part: those that are looked for are those that run."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """The host part cannot be built: the message names what is missing."""


def find_compiler() -> str:
    """The command of ``CXX``, of more words than one perhaps (``ccache g++``), else ``g++`` or ``c++``.

    Raises:
        BuildError: there is none.
    """
    named = os.environ.get("CXX", "").strip()
    for command in [named] if named else ["g++", "c++"]:
        if shutil.which(words(command)[0]) is not None:
            return command
    raise BuildError(
        f"{named or 'g++'!r} was not found; install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
    )


def words(command: str) -> list[str]:
    """As a shell takes it apart."""
    try:
        return shlex.split(command)
    except ValueError:  # a quotation mark without its other
        return [command]


def find_ninja() -> Path:
    """The directory that it is in: of PATH, or where pip puts it, which is not in PATH where a virtual environment's
    Python is called by its own path.

    Raises:
        BuildError: there is none.
    """
    places = [os.environ.get("PATH", os.defpath)]
    try:
        import ninja

        places.append(ninja.BIN_DIR)
    except (ImportError, AttributeError):
        pass
    for place in places:
        if (found := shutil.which("ninja", path=place)) is not None:
            return Path(found).parent
    raise BuildError("ninja was not found; pip install ninja")


@contextmanager
def tools() -> Iterator[None]:
    """Meanwhile, torch's builder, which asks the environment, takes these.

    Raises:
        BuildError: as above.
    """
    path = os.pathsep.join([str(find_ninja()), os.environ.get("PATH", os.defpath)])
    wanted = {"CXX": find_compiler(), "PATH": path}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
