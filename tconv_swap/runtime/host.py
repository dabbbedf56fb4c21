"""The host part: csrc/*.cpp is built once for each torch by the user's compiler, kept on disk, and loaded on first
use."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import torch

from tconv_swap.runtime.cache import cache_directory, csrc_directory, write_atomically
from tconv_swap.runtime.compiler import BuildError, find_compiler, find_ninja, tools

logger = logging.getLogger("tconv_swap")

SOURCES = ("call.cpp", "blocks.cpp", "compute.cpp", "launch.cpp")

#: An error in a source file. Errors of the compiler itself and of the linker name no line.
_REFUSAL = re.compile(r":\d+(:\d+)?: (fatal )?error: ")

#: Flags for the compiler, beside torch's own, which select the C++ standard.
FLAGS = ("-O2", "-DAT_PER_OPERATOR_HEADERS")

_stand_ins: list[tuple[str, Callable[..., object], str]] = []
_registered = torch.library.Library("tconv_swap", "IMPL")


class RefusedError(BuildError):
    """The compiler refuses a file of csrc/ with this torch, and would refuse it again."""


def stand_in(op: str, kernel: Callable[..., object], key: str) -> None:
    """Registers a Python kernel of an op. When the host part is loaded, its own kernel replaces this one."""
    _stand_ins.append((op, kernel, key))
    _registered.impl(op, kernel, key)


@contextmanager
def _without_stand_ins() -> Iterator[None]:
    """Inside, the stand-ins are not registered; they are registered again if the block fails."""
    global _registered
    _registered._destroy()
    try:
        yield
    except BaseException:
        _registered = torch.library.Library("tconv_swap", "IMPL")
        for op, kernel, key in _stand_ins:
            _registered.impl(op, kernel, key)
        raise


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Returns the functions of the host part. From now on PyTorch knows its ops.

    Raises:
        BuildError: as ``build``.
        OSError: the system cannot load it.
    """
    loaded = build_and_load()
    loaded.tconv_last_error.restype = ctypes.c_char_p
    loaded.tconv_known.restype = ctypes.c_int64
    return loaded


def is_loaded() -> bool:
    """Returns whether ``library`` has been called successfully."""
    return library.cache_info().currsize > 0


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Builds and loads the host part if necessary; returns whether it is available. If not, one warning says why."""
    try:
        library()
    except (BuildError, OSError) as error:
        logger.warning("tconv_swap: layers on CUDA are computed by PyTorch's operator: %s", error)
        return False
    return True


def build_and_load() -> ctypes.CDLL:
    try:
        return load(build())
    except OSError:  # built by another system that shares this cache
        library_path().unlink(missing_ok=True)
        return load(build())


def load(path: Path) -> ctypes.CDLL:
    with _without_stand_ins():
        torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def library_path() -> Path:
    """Returns the path of the shared library for this torch, machine and source, whether or not it exists."""
    directory = csrc_directory()
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine())).encode())
    for read in (*(directory / source for source in SOURCES), *sorted(directory.glob("*.h"))):
        digest.update(read.read_bytes())
    return (
        cache_directory() / "host" / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}" / "tconv_swap.so"
    )


def is_built() -> bool:
    """Returns whether the shared library exists and is complete: loading a truncated one may crash the process."""
    path = library_path()
    try:
        return path.with_suffix(".sha256").read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def build() -> Path:
    """Returns the shared library. It is built on first use for this torch, source and headers, and then kept.

    Raises:
        BuildError: a tool is missing, or a file cannot be written; the message names it.
        RefusedError: the compiler refused a file, now or at an earlier attempt; the message has its output.
    """
    target = library_path()
    if is_built():
        return target
    refusal, compiler = target.with_suffix(".txt"), os.environ.get("CXX", "")
    with suppress(OSError):
        if refusal.read_text().startswith(f"{compiler}\n"):
            raise RefusedError(
                f"csrc/ does not build with this torch; {refusal} says why, and is to be removed to try again"
            )
    try:
        find_compiler()
        find_ninja()
    except BuildError as error:
        raise BuildError(
            f"the host part of tconv_swap is built on its first use and needs a C++ compiler and ninja, but {error}"
        ) from None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(target.parent / "lock", "w") as lock,
            # torch locks by a file that a killed process leaves behind: in a new directory there is none.
            tempfile.TemporaryDirectory(dir=target.parent) as directory,
        ):
            with suppress(OSError):  # a file system without locks: each process builds for itself
                fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system however the process ends
            if not is_built():
                logger.warning(
                    "tconv_swap: building the host part for torch %s, once (some 10 seconds)",
                    torch.__version__,
                )
                built = compile_library(Path(directory))
                digest = hashlib.sha256(built.read_bytes()).hexdigest()
                os.replace(built, target)
                write_atomically(target.with_suffix(".sha256"), digest.encode())
    except RefusedError as error:
        with suppress(OSError):
            write_atomically(refusal, f"{compiler}\n{error}".encode())
        raise
    except OSError as error:
        raise BuildError(
            f"the host part of tconv_swap cannot be built in {target.parent}: {error}"
        ) from error
    return target


def compile_library(directory: Path) -> Path:
    """Builds the shared library in a new directory, without loading it, and returns its path."""
    from torch.utils import cpp_extension

    libraries = Path(torch.__file__).parent / "lib"
    try:
        with tools():
            built = cpp_extension.load(
                name="tconv_swap_host",
                sources=[str(csrc_directory() / source) for source in SOURCES],
                build_directory=str(directory),
                extra_cflags=list(FLAGS),
                extra_ldflags=["-shared", f"-L{libraries}", "-ltorch_cuda", "-ldl"],
                with_cuda=False,
                is_python_module=False,
                # Otherwise torch's builder also loads the library, and a process that has it from another cache
                # would register every op twice, which ends the process.
                is_standalone=True,
            )
    except RuntimeError as error:
        # If the compiler was killed or the disk was full, the next attempt may succeed.
        kind = RefusedError if _REFUSAL.search(str(error)) else BuildError
        raise kind(f"the host part of tconv_swap does not build from {csrc_directory()}:\n{error}") from error
    return Path(built)
