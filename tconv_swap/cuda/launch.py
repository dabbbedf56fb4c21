"""The bridge to csrc/launch.cpp: build it once, hand it kernels and plans, get a handle to call."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tconv_swap.cuda import jit
from tconv_swap.cuda.cache import cache_directory, csrc_directory, write_atomically
from tconv_swap.cuda.compiler import BuildError, find_compiler, find_ninja, tools
from tconv_swap.cuda.program import Kernel, Output, Plan

logger = logging.getLogger("tconv_swap")

#: What compilers say of a line of a source; of themselves, and of their linker, they say it without a number.
_REFUSAL = re.compile(r":\d+(:\d+)?: (fatal )?error: ")

#: For a compiler, beside torch's own: which C++ its headers are of, torch says.
FLAGS = ("-O2", "-DAT_PER_OPERATOR_HEADERS")

_lock = threading.Lock()
_kernels: dict[tuple[Kernel, str], int] = {}


class RefusedError(BuildError):
    """The compiler refuses a file of csrc/ with this torch, and will do so again."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = load()
    library.tconv_last_error.restype = ctypes.c_char_p
    return library


def load(source: str = "launch.cpp") -> ctypes.CDLL:
    """The shared library of a file of csrc/: its ops with PyTorch, its functions to call.

    Raises:
        BuildError: as ``build``.
        OSError: the system does not load it.
    """
    try:
        return _load(build(source))
    except OSError:  # built by another system that shares this cache
        library_path(source).unlink(missing_ok=True)
        return _load(build(source))


def _load(path: Path) -> ctypes.CDLL:
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def relaunch_address() -> int | None:
    """Of the function that csrc/node.cpp launches by."""
    return ctypes.cast(_library().tconv_relaunch, ctypes.c_void_p).value


def library_path(source: str = "launch.cpp") -> Path:
    """Where the shared library of a file of csrc/ for this torch is, or will be."""
    path = csrc_directory() / source
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine())).encode())
    for read in (path, *sorted(path.parent.glob("*.h"))):
        digest.update(read.read_bytes())
    return (
        cache_directory()
        / "host"
        / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"
        / f"{path.stem}.so"
    )


def is_built(source: str = "launch.cpp") -> bool:
    """Whether the shared library is there, whole: of half of one, a system's loader may die."""
    path = library_path(source)
    try:
        return path.with_suffix(".sha256").read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def build(source: str = "launch.cpp") -> Path:
    """The shared library of a file of csrc/, built on the first use for this torch, source and headers, then kept.

    Raises:
        BuildError: naming the missing tool, or what cannot be written.
        RefusedError: with the compiler's output.
    """
    target = library_path(source)
    if is_built(source):
        return target
    try:
        find_compiler()
        find_ninja()
    except BuildError as error:
        raise BuildError(
            f"the CUDA launcher of tconv_swap is built on its first use and needs a C++ compiler and ninja, but {error}"
        ) from None
    what = {"launch.cpp": "the CUDA launcher", "node.cpp": "the CUDA launcher's way past Python"}[source]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(target.parent / "lock", "w") as lock,
            # torch's own lock is a file that a killed process leaves behind; in a directory of our own it is alone.
            tempfile.TemporaryDirectory(dir=target.parent) as directory,
        ):
            with suppress(OSError):  # a file system without locks: then several may build, each for itself
                fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system however the process ends
            if not is_built(source):
                logger.warning(
                    "tconv_swap: building %s for torch %s, once (a few seconds)", what, torch.__version__
                )
                built = _built(source, what, Path(directory))
                digest = hashlib.sha256(built.read_bytes()).hexdigest()
                os.replace(built, target)
                write_atomically(target.with_suffix(".sha256"), digest.encode())
    except OSError as error:
        raise BuildError(f"{what} of tconv_swap cannot be built in {target.parent}: {error}") from error
    return target


def _built(source: str, what: str, directory: Path) -> Path:
    from torch.utils import cpp_extension

    name = f"tconv_swap_{Path(source).stem}"
    libraries = Path(torch.__file__).parent / "lib"
    try:
        with tools():
            built = cpp_extension.load(
                name=name,
                sources=[str(csrc_directory() / source)],
                build_directory=str(directory),
                extra_cflags=list(FLAGS),
                extra_ldflags=[f"-L{libraries}", "-ltorch_cuda", "-ldl"],
                with_cuda=False,
                is_python_module=False,
                is_standalone=False,
            )
    except RuntimeError as error:
        # A compiler that was killed, or found the disk full, may build it next time.
        kind = RefusedError if _REFUSAL.search(str(error)) else BuildError
        raise kind(
            f"{what} of tconv_swap does not build from {csrc_directory() / source}:\n{error}"
        ) from error
    return Path(built or directory / f"{name}.so")


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(_library().tconv_last_error().decode())


def _kernel(kernel: Kernel, architecture: str) -> int:
    key = (kernel, architecture)
    if key not in _kernels:
        handle = ctypes.c_void_p()
        cubin = jit.compile_kernel(kernel, architecture)
        _check(_library().tconv_load_kernel(cubin, kernel.entry.encode(), ctypes.byref(handle)))
        assert handle.value is not None
        _kernels[key] = handle.value
    return _kernels[key]


def _strides(output: Output) -> list[int]:
    order = list(range(len(output.shape)))
    if output.channels_last:
        order = [0, 2, 3, 1]
    strides = [0] * len(order)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(output.shape[dimension], 1)
    return strides


def _may_overlap(architecture: str) -> bool:
    """Programmatic dependent launch is of compute capability 9.0 and later; kernels for others do not wait."""
    return int("".join(filter(str.isdigit, architecture))) >= 90


def plan_words(
    plan: Plan, dtype: torch.dtype, architecture: str, inputs: Sequence[Tensor | None] = ()
) -> list[int]:
    """A plan, and how its inputs lie, as the numbers that tconv_add_plan in csrc/launch.cpp reads."""
    words = [DTYPE_CODES[dtype], plan.workspace_bytes, len(plan.outputs)]
    for output in plan.outputs:
        words += [DTYPE_CODES[output.dtype or dtype], len(output.shape), *output.shape, *_strides(output)]
    words.append(len(plan.launches))
    for launch in plan.launches:
        words += [
            _kernel(launch.kernel, architecture),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            int(launch.overlaps_previous and _may_overlap(architecture)),
            len(launch.arguments),
        ]
        for argument in launch.arguments:
            words += [int(argument.kind), argument.value]
        words.append(len(launch.tensor_maps))
        for one in launch.tensor_maps:
            words += [int(one.base.kind), one.base.value, one.offset]
            words += [int(one.element), one.swizzle_bytes, one.fetched_bytes, len(one.sizes)]
            words += [*one.sizes, *one.strides, *one.box, *one.steps]
        words.append(len(launch.structs))
        for struct in launch.structs:
            words += [len(struct), *struct]
    words.append(len(inputs))
    for tensor in inputs:
        if tensor is None:
            words += [0, 0]
        else:
            words += [1, tensor.dim(), *tensor.shape, *tensor.stride()]
    return words


#: c10::ScalarType.
DTYPE_CODES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


def add_plan(
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    architecture: str,
    inputs: Sequence[Tensor | None] = (),
) -> int:
    """Compile and load what a plan needs; returns the handle that ``torch.ops.tconv_swap.launch`` takes.

    ``torch.ops.tconv_swap.relaunch`` takes it too where ``inputs`` says how the plan's inputs lie.

    Raises:
        BuildError, CompileError: what has to be built or compiled does not.
        RuntimeError: the driver refuses.
    """
    with _lock, torch.cuda.device(device):
        words = plan_words(plan, dtype, architecture, inputs)
        array = (ctypes.c_int64 * len(words))(*words)
        handle = ctypes.c_int64()
        _check(_library().tconv_add_plan(array, device.index, ctypes.byref(handle)))
        return handle.value
