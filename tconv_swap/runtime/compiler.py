"""Finds the C++ compiler and ninja that build the host part, and makes torch's builder use exactly these."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """The host part cannot be built; the message names what is missing."""


def find_compiler() -> str:
    """Returns the command in ``CXX``, which may have several words (``ccache g++``), else ``g++`` or ``c++``.

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
    """Splits a command into words, as a shell does."""
    try:
        return shlex.split(command)
    except ValueError:  # an unclosed quotation mark
        return [command]


def find_ninja() -> Path:
    """Returns the directory of ninja: one of PATH, or where pip installs it. The latter is not in PATH if a virtual
    environment's Python was started by its full path.

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
    """Inside, torch's builder finds this compiler and this ninja, which it looks up in the environment.

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
