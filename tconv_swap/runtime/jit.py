"""Turns the description of a kernel into machine code: renders, compiles and caches it on disk."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tconv_swap.runtime import cores, nvrtc
from tconv_swap.runtime.cache import cache_directory, csrc_directory, write_atomically
from tconv_swap.runtime.program import Constant, Kernel

logger = logging.getLogger("tconv_swap")

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")

_lock = threading.Lock()
#: The kernels that a thread is compiling, by the path of what is kept: other threads wait for its result.
_being_compiled: dict[Path, Future[tuple[bytes, str]]] = {}


def _forget_threads() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    _being_compiled.clear()


# The threads of the parent do not run in a forked process.
os.register_at_fork(after_in_child=_forget_threads)


@lru_cache(maxsize=1)
def _kernel_files() -> dict[str, str]:
    directory = csrc_directory() / "kernels"
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".cu", ".cuh")
    }


@lru_cache(maxsize=1)
def sources_digest() -> bytes:
    """Returns a digest of every file in csrc/kernels and below."""
    digest = hashlib.sha256()
    for name, text in _kernel_files().items():
        digest.update(f"{name}\0{text}\0".encode())
    return digest.digest()


def _render_constant(name: str, value: Constant) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {value};"


def render(kernel: Kernel) -> str:
    """Returns the source that is compiled: the storage types, the named constants, and the kernel's file."""
    constants = "\n".join(_render_constant(name, value) for name, value in kernel.constants)
    return f'#include "common/types.cuh"\n{constants}\n#line 1 "{kernel.source}"\n{_kernel_files()[kernel.source]}'


def compile_kernel(kernel: Kernel, architecture: str) -> bytes:
    """Returns the machine code of a kernel for an architecture such as ``"sm_90"``, from the cache on disk if it is
    complete there.
    If it cannot be written there, a warning says so.

    Raises:
        CompileError: with the compiler's log and the path of the rendered source.
    """
    return compile_with_log(kernel, architecture)[0]


def compile_with_log(kernel: Kernel, architecture: str) -> tuple[bytes, str]:
    """Returns the same, and the compiler's resource report (registers, spills) of every entry in the source. Where
    another thread is compiling the kernel, it waits for that one's result."""
    source = render(kernel)
    stem = _stem(kernel, architecture, source)
    kept = _read(stem)
    if kept is not None:
        return kept
    own: Future[tuple[bytes, str]] = Future()
    with _lock:
        first = _being_compiled.setdefault(stem, own)
    if first is not own:
        return first.result()
    try:
        # Another thread may have ended between the two lines above.
        own.set_result(_read(stem) or _compile(kernel, architecture, source, stem))
    except BaseException as error:
        own.set_exception(error)
    finally:
        with _lock:
            del _being_compiled[stem]
    return own.result()


def _compile(kernel: Kernel, architecture: str, source: str, stem: Path) -> tuple[bytes, str]:
    """Compiles a kernel and keeps what ``_read`` reads."""
    headers = {name: text for name, text in _kernel_files().items() if name.endswith(".cuh")}
    logger.info("compiling %s for %s", kernel.entry, architecture)
    try:
        cubin, log = nvrtc.compile_cubin(source, kernel.source, headers, _options(architecture))
    except nvrtc.CompileError as error:
        path = stem.with_suffix(".cu")
        with suppress(OSError):  # the compiler's message matters more
            write_atomically(path, source.encode())
            raise nvrtc.CompileError(f"{error}\nThe source is in {path}") from None
        raise
    try:
        write_atomically(stem.with_suffix(".log"), f"{_seal(cubin, log)}\n{log}".encode())
        write_atomically(stem.with_suffix(".cubin"), cubin)
    except OSError as error:
        # The disk is full, or `cache clear` is running: the machine code is valid all the same.
        warn_of_unkept(cache_directory(), error.strerror or str(error))
    return cubin, log


def compile_kernels(kernels: Sequence[Kernel], architecture: str) -> tuple[list[bytes], bool]:
    """Returns the machine code of several kernels, and whether any of them was not on disk. Those are compiled in
    parallel.

    Raises:
        CompileError: as ``compile_kernel``.
    """
    found = {kernel: _read(_stem(kernel, architecture, render(kernel))) for kernel in kernels}
    missing = [kernel for kernel, kept in found.items() if kept is None]
    if missing:
        with ThreadPoolExecutor(min(len(missing), cores.share())) as pool:
            made = pool.map(compile_with_log, missing, [architecture] * len(missing))
            found.update(zip(missing, made, strict=True))
    return [kept[0] for kept in found.values() if kept is not None], bool(missing)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ``compile_all`` did: kernels that it compiled, that it found on disk, and that do not compile, with the
    error of each."""

    compiled: int = 0
    found: int = 0
    failures: tuple[Exception, ...] = ()


def compile_all(
    kernels: Iterable[Kernel], architecture: str, progress: Callable[[int, int], object] | None = None
) -> Compiled:
    """Puts the machine code of kernels into the cache, on all cores of this process (``cores.share``): the compiler
    runs without the interpreter's lock. If the caller is interrupted, kernels whose compilation has not begun are left.

    Args:
        progress: called in the caller's thread with how many are done and how many there are.
    """
    wanted = list(dict.fromkeys(kernels))
    missing = [kernel for kernel in wanted if not is_kept(kernel, architecture)]
    found = len(wanted) - len(missing)
    failures: list[Exception] = []
    with ThreadPoolExecutor(cores.share()) as pool:
        futures = [pool.submit(compile_kernel, kernel, architecture) for kernel in missing]
        try:
            for done, future in enumerate(as_completed(futures), found + 1):
                if progress is not None:
                    progress(done, len(wanted))
                if isinstance(error := future.exception(), RuntimeError):
                    failures.append(error)
                elif error is not None:
                    raise error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Compiled(len(missing) - len(failures), found, tuple(failures))


def is_kept(kernel: Kernel, architecture: str) -> bool:
    """Returns whether the machine code of a kernel is on disk, complete."""
    return _read(_stem(kernel, architecture, render(kernel))) is not None


def is_on_disk(kernel: Kernel, architecture: str) -> bool:
    """Returns whether there is machine code of a kernel on disk, which may be damaged: it is not read."""
    return _stem(kernel, architecture, render(kernel)).with_suffix(".cubin").exists()


def _options(architecture: str) -> tuple[str, ...]:
    return (*OPTIONS, f"--gpu-architecture={architecture}")


def _stem(kernel: Kernel, architecture: str, source: str) -> Path:
    """Returns the path, without its suffix, of what is kept for a kernel and its rendered source."""
    key = hashlib.sha256()
    for part in (source, sources_digest(), repr(_options(architecture)), repr(nvrtc.version())):
        key.update(hashlib.sha256(part if isinstance(part, bytes) else part.encode()).digest())
    return cache_directory() / "kernels" / f"{kernel.entry}-{architecture}-{key.hexdigest()[:32]}"


def _read(stem: Path) -> tuple[bytes, str] | None:
    """Returns the machine code and the log that are kept; None if one is missing, unreadable or damaged."""
    try:
        cubin = stem.with_suffix(".cubin").read_bytes()
        seal, _, log = stem.with_suffix(".log").read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return (cubin, log) if seal == _seal(cubin, log) else None


def _seal(cubin: bytes, log: str) -> str:
    """Returns the first line of a log, a digest: a driver may crash on damaged machine code, so the digest is
    checked."""
    digest = hashlib.sha256(cubin)
    digest.update(log.encode())
    return f"{len(cubin)} bytes, sha256 with this log {digest.hexdigest()}"


def warn_of_unkept(directory: Path, reason: str) -> None:
    """Warns once, however many kernels there are, and threads that compile them."""
    with _lock:
        _warn_of_unkept(directory, reason)


@lru_cache(maxsize=16)
def _warn_of_unkept(directory: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels are not kept in %s (%s): the next process compiles them again", directory, reason
    )
