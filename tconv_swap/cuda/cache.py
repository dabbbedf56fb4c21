"""Where compiled things are kept between processes."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("tconv_swap")

ENVIRONMENT_VARIABLE = "TCONV_SWAP_CACHE"

COMPILED = ("kernels", "host")
TUNED = ("tuned",)
"""What of the cache directory is ours: it may be one that holds other things too."""

PROBE_BYTES = 64 << 10
"""About a cubin: where the disk is full or a quota used up, an empty file can still be made."""


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """The writable cache directory: ``$TCONV_SWAP_CACHE``, else ``$XDG_CACHE_HOME/tconv_swap``, else
    ``~/.cache/tconv_swap``. Where none can be written, one of this process's own until it ends, with a warning."""
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
    """Why nothing is kept between processes, in one line; empty where it is kept."""
    configured, reason = _configured()
    return reason and (
        f"{configured} cannot be used ({reason}): every process compiles its kernels again, and what `tune` finds "
        f"out is lost; set {ENVIRONMENT_VARIABLE}"
    )


def _configured() -> tuple[Path, str]:
    """The directory that is asked for, and why it cannot be used; made where there is none."""
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
    """Makes the directory where there is none. What lies in it may be another user's, of root's first run, say."""
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
        file.write(os.urandom(PROBE_BYTES))  # zeros may take no room
        file.flush()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _remove(directory: Path, owner: int) -> None:
    # A forked process inherits what is to be done at exit, but not the directory.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write ``path`` whole or not at all: two processes may race for the same file.

    Its mode is what the umask says, so that users who share a directory read each other's files.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not of `tempfile`, whose files are readable by their owner alone.
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
