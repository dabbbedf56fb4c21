"""Where compiled things are kept between processes."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("tconv_swap")

ENVIRONMENT_VARIABLE = "TCONV_SWAP_CACHE"


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """The writable cache directory: ``$TCONV_SWAP_CACHE``, else ``$XDG_CACHE_HOME/tconv_swap``, else
    ``~/.cache/tconv_swap``. Where none can be written, one of this process's own, with a warning."""
    candidates = []
    if os.environ.get(ENVIRONMENT_VARIABLE):
        candidates.append(Path(os.environ[ENVIRONMENT_VARIABLE]))
    elif os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(os.environ["XDG_CACHE_HOME"]) / "tconv_swap")
    else:
        candidates.append(Path(os.path.expanduser("~")) / ".cache" / "tconv_swap")
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=candidate):
                return candidate
        except OSError as error:
            logger.warning(
                "cannot keep compiled kernels in %s (%s); set %s", candidate, error, ENVIRONMENT_VARIABLE
            )
    return Path(tempfile.mkdtemp(prefix="tconv_swap-"))


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


def csrc_directory() -> Path:
    """csrc/: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "launch.cpp").is_file():
            return candidate
    raise FileNotFoundError(f"csrc/ is neither inside nor beside {package}: the installation is incomplete")
