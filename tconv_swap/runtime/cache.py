"""The cache directory: what is compiled and tuned is kept there between processes."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

logger = logging.getLogger("tconv_swap")

ENVIRONMENT_VARIABLE = "TCONV_SWAP_CACHE"

COMPILED = ("kernels", "host", "plans")
TUNED = ("tuned",)
"""The parts of the cache directory that are ours: the directory may hold other files too."""

PROBE_BYTES = 64 << 10
"""About the size of a cubin. An empty file would not do: it can be created even where the disk is full."""

ATTEMPTS = 10
"""How often a file is written while others remove its directory."""

Raised: TypeAlias = tuple[type[BaseException], BaseException, TracebackType]


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """Returns the writable cache directory: ``$TCONV_SWAP_CACHE``, else ``$XDG_CACHE_HOME/tconv_swap``, else
    ``~/.cache/tconv_swap``. If that cannot be written, it warns and returns a temporary directory of this process."""
    configured, reason = _configured()
    if not reason:
        return configured
    logger.warning(
        "cannot keep compiled kernels in %s (%s); set %s", configured, reason, ENVIRONMENT_VARIABLE
    )
    directory = Path(tempfile.mkdtemp(prefix="tconv_swap-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def cache_problem() -> str:
    """Returns one line that says why nothing is kept between processes; empty if everything is kept."""
    configured, reason = _configured()
    return reason and (
        f"{configured} cannot be used ({reason}): every process compiles its kernels again, and what `tune` finds "
        f"out is lost; set {ENVIRONMENT_VARIABLE}"
    )


def _configured() -> tuple[Path, str]:
    """Returns the configured directory, which is created if it is missing, and why it cannot be used, or ``""``."""
    if os.environ.get(ENVIRONMENT_VARIABLE):
        directory = Path(os.environ[ENVIRONMENT_VARIABLE])
    elif os.environ.get("XDG_CACHE_HOME"):
        directory = Path(os.environ["XDG_CACHE_HOME"]) / "tconv_swap"
    else:
        directory = Path("~/.cache/tconv_swap")
    try:
        # The process may change its directory, and a shell leaves the `~` in `VARIABLE="~/cache"` as it is.
        directory = directory.expanduser().absolute()
    except RuntimeError:
        return directory, "this user has no home directory"
    except OSError as error:
        return directory, _reason(error)
    return directory, _why_unusable(directory)


def _why_unusable(directory: Path) -> str:
    """Creates the directory if it is missing; returns why it cannot be used. Its parts may belong to another user,
    for instance to root, who ran the program first."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _probe(directory)
    except FileExistsError:
        return "it is no directory"
    except OSError as error:
        return _reason(error)
    for part in COMPILED:
        try:
            _probe(directory / part)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{part}: {_reason(error)}"
    return ""


def _probe(directory: Path) -> None:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(os.urandom(PROBE_BYTES))  # some file systems store zeros without using space
        file.flush()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _remove(directory: Path, owner: int) -> None:
    # A forked process inherits this exit handler, but the directory is its parent's.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes ``path`` whole or not at all: two processes may race for the same file, and its directory may be removed
    meanwhile.

    The umask decides its mode, so that users who share a directory can read each other's files.

    Raises:
        OSError: it cannot be written.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            _write_atomically(path, content)
            break
        except (FileNotFoundError, FileExistsError):  # the latter by mkdir, of a directory that is then gone
            if not left:
                raise


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by `tempfile`: only the owner can read the files that it creates.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@dataclass(frozen=True)
class CacheUse:
    """What the cache holds: its files and bytes in total, and how many of the files are results of `tune`."""

    directory: Path
    files: int
    bytes: int
    tuned: int

    def describe(self) -> str:
        """ "312 files, 45.1 MiB"."""
        return f"{self.files} file{'s' if self.files != 1 else ''}, {self.bytes / 2**20:.1f} MiB"

    def __str__(self) -> str:
        return f"{self.directory}: {self.describe()}"


def cache_use() -> CacheUse:
    """Returns what the cache holds. Files that another process removes meanwhile are not counted."""
    directory = cache_directory()
    files, size, tuned = 0, 0, 0
    for part in (*COMPILED, *TUNED):
        for path in (directory / part).rglob("*"):
            try:
                if path.is_file():
                    size += path.stat().st_size
                    files += 1
                    tuned += part in TUNED
            except OSError:
                continue
    return CacheUse(directory, files, size, tuned)


def clear_cache(*, tuned: bool = True) -> list[str]:
    """Remove our files from the cache directory. A process that is running compiles again what it then misses.

    Args:
        tuned: also remove the results of `tune`.

    Returns:
        One line for each part that could not be removed.
    """
    failed: list[str] = []
    for part in COMPILED + TUNED * tuned:
        path = cache_directory() / part
        try:
            _remove_directory(path)
        except OSError as error:
            failed.append(f"{error.filename or path} was not removed ({error.strerror or error})")
    return failed


def _remove_directory(path: Path) -> None:
    """Removes what the directory holds at the call. What others write into it meanwhile may stay, with its folders."""

    def pass_over_changes_by_others(_function: object, entry: str, raised: Raised) -> None:
        error = raised[1]
        if not isinstance(error, OSError):
            raise error
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            if error.filename is not None:  # it may be relative to its folder
                error.filename = entry
            raise error

    shutil.rmtree(path, onerror=pass_over_changes_by_others)  # `onexc` is of Python 3.12


def csrc_directory() -> Path:
    """Returns csrc/: inside the package if that was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "launch.cpp").is_file():
            return candidate
    raise FileNotFoundError(f"csrc/ is neither inside nor beside {package}: the installation is incomplete")
