"""Finds NVRTC, NVIDIA's run-time compiler, and says what it compiles for. Every CUDA build of torch includes it; it
needs no GPU."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from tconv_swap.runtime import worker_pool
from tconv_swap.runtime.nvrtc_program import Source, compile_program, describe


class CompileError(RuntimeError):
    """A kernel does not compile; the message contains the compiler's log."""


class NvrtcMissingError(RuntimeError):
    """The NVRTC library cannot be found."""


def _candidates(major: str) -> Iterator[str]:
    name = f"libnvrtc.so.{major}"
    yield name
    torch_directory = Path(torch.__file__).parent
    for root in (torch_directory.parent, Path(sysconfig.get_path("purelib"))):
        yield str(root / "nvidia" / f"cu{major}" / "lib" / name)
        yield str(root / "nvidia" / "cuda_nvrtc" / "lib" / name)
    yield str(torch_directory / "lib" / name)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield str(Path(home) / "lib64" / name)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise NvrtcMissingError(
            f"torch {torch.__version__} is not a CUDA build, so it brings no NVRTC; "
            "install a CUDA build of torch"
        )
    major = torch.version.cuda.split(".")[0]
    tried = list(dict.fromkeys(_candidates(major)))
    for path in tried:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise NvrtcMissingError(
        f"libnvrtc.so.{major} was not found; it comes with the package nvidia-cuda-nvrtc. "
        f"Looked in: {', '.join(tried)}"
    )


@lru_cache(maxsize=1)
def _library_path() -> str:
    """Returns the path of the library that is loaded. It may lie where only torch looks for it."""
    name = str(_library()._name)
    if "/" in name:
        return name
    with open("/proc/self/maps") as maps:
        paths = [Path(line.split(maxsplit=5)[-1].strip()) for line in maps]
    return next((str(path) for path in paths if path.name.startswith(name)), name)


def _check(code: int, what: str) -> None:
    if code != 0:
        raise CompileError(f"{what}: {describe(_library(), code)}")


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


#: Systems on a chip (Jetson, DRIVE). They share a major version with other GPUs, but not machine code.
_TEGRA = frozenset((53, 62, 72, 87, 88, 101, 110))


@lru_cache(maxsize=1)
def architectures() -> tuple[int, ...]:
    """Returns the architectures that this NVRTC compiles for, such as 90. NVRTC does not list variants with a letter.

    Raises:
        NvrtcMissingError: there is no NVRTC.
        CompileError: NVRTC fails to list them.
    """
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
    found = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
    return tuple(found)


def architecture_for(major: int, minor: int) -> str:
    """Returns the name of the architecture to compile for, for a GPU of compute capability ``major.minor``.

    A GPU that is newer than NVRTC runs machine code for an older GPU of the same major version. If NVRTC knows none,
    or is missing, this is the GPU's own name, and compiling for it raises an error that says what is wrong.
    """
    # Only sm_90a has wgmma, and NVRTC accepts it under that name only.
    own, letter = 10 * major + minor, "a" if major == 9 else ""
    try:
        known = architectures()
    except (NvrtcMissingError, CompileError):
        known = ()
    if own not in known and own not in _TEGRA and not letter:
        older = [one for one in known if 10 * major <= one < own and one not in _TEGRA]
        own = max(older, default=own)
    return f"sm_{own}{letter}"


def compile_cubin(
    source: str, name: str, headers: Mapping[str, str], options: Sequence[str]
) -> tuple[bytes, str]:
    """Compiles CUDA C++ to machine code, in a process beside this one.

    Args:
        source: the text; messages call it ``name``.
        headers: the text of each file that it may include, by its name in the ``#include``.
        options: options of NVRTC, among them ``--gpu-architecture=sm_XX``.

    Returns:
        The cubin and the compiler's log.

    Raises:
        NvrtcMissingError: there is no NVRTC.
        CompileError: with the log.
    """
    made = worker_pool.call(compile_program, _library_path(), Source(source, name, headers, options))
    if made.error:
        raise CompileError(made.error)
    return made.cubin, made.log
