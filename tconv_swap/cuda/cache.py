"""Where compiled things are kept between processes."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("tconv_swap")

ENVIRONMENT_VARIABLE = "TCONV_SWAP_CACHE"

COMPILED = ("kernels", "host")
TUNED = ("tuned",)
"""What of the cache directory is ours: it may be one that holds other things too."""


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """The writable cache directory: ``$TCONV_SWAP_CACHE``, else ``$XDG_CACHE_HOME/tconv_swap``, else
    ``~/.cache/tconv_swap``. Where none can be written, one of this process's own until it ends, with a warning."""
    configured = _configured()
    reason = _why_unusable(configured)
    if not reason:
        return configured
    logger.warning(
        "cannot keep compiled kernels in %s (%s); set %s", configured, reason, ENVIRONMENT_VARIABLE
    )
    directory = Path(tempfile.mkdtemp(prefix="tconv_swap-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def cache_problem() -> str:
    """Why nothing is kept between processes, in one line; empty where it is kept."""
    configured = _configured()
    reason = _why_unusable(configured)
    return reason and (
        f"{configured} cannot be used ({reason}): every process compiles its kernels again, and what `tune` finds "
        f"out is lost; set {ENVIRONMENT_VARIABLE}"
    )


def _configured() -> Path:
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(os.environ[ENVIRONMENT_VARIABLE])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "tconv_swap"
    return Path(os.path.expanduser("~")) / ".cache" / "tconv_swap"


def _why_unusable(directory: Path) -> str:
    """Makes the directory where there is none."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except FileExistsError:
        return "it is no directory"
    except OSError as error:
        return error.strerror or str(error)


def _remove(directory: Path, owner: int) -> None:
    # A forked process inherits what is to be done at exit, but not the directory.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``path`` whole or not at all: two processes may race for the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass(frozen=True)
class CacheUse:
    """What lies in the cache: files and bytes in all, and how many of the files are what `tune` found out."""

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
    """The size of the cache; files that vanish meanwhile do not count."""
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
    """Remove what is ours from the cache directory; a process that runs meanwhile compiles again what it misses.

    Args:
        tuned: also what `tune` found out.

    Returns:
        One line for everything that could not be removed.
    """
    failed: list[str] = []
    for part in COMPILED + TUNED * tuned:
        path = cache_directory() / part
        try:
            if path.is_dir():
                shutil.rmtree(path)
        except OSError as error:
            failed.append(f"{error.filename or path} was not removed ({error.strerror or error})")
    return failed


def csrc_directory() -> Path:
    """csrc/: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "launch.cpp").is_file():
            return candidate
    raise FileNotFoundError(f"csrc/ is neither inside nor beside {package}: the installation is incomplete")
