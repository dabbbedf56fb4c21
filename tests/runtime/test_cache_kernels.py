"""Compiled kernels on disk: damaged files, full disks, caches that are cleared during a compilation,
threads that compile at the same time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tconv_swap.runtime import cores, jit
from tconv_swap.runtime.program import Kernel

KERNEL = Kernel(
    "common/split_k_reduce.cu", "split_k_reduce", (("Element", "float"), ("THREADS", 32), ("LANES", 1))
)
CUBIN, LOG = b"\x7fELF" + bytes(range(256)) * 40, "ptxas info: 32 registers\nand µ more"


class Compiler:
    """A compiler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: object) -> tuple[bytes, str]:
        self.calls += 1
        return CUBIN, LOG


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    compiler = Compiler()
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(jit.nvrtc, "version", lambda: (12, 8))
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", compiler)
    jit._warn_of_unkept.cache_clear()
    yield compiler
    jit._warn_of_unkept.cache_clear()


def files(directory: Path) -> tuple[Path, Path]:
    (cubin,), (log,) = (list((directory / "kernels").glob(f"*.{kind}")) for kind in ("cubin", "log"))
    return cubin, log


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "no bytes": lambda cubin, log: cubin.write_bytes(b""),
    "cut off": lambda cubin, log: cubin.write_bytes(CUBIN[:3000]),
    "zeros": lambda cubin, log: cubin.write_bytes(bytes(len(CUBIN))),
    "another file": lambda cubin, log: cubin.write_bytes(b"<html>quota exceeded</html>"),
    "gone": lambda cubin, log: cubin.unlink(),
    "a log of no text": lambda cubin, log: log.write_bytes(b"\xff\xfe\x00"),
    "an empty log": lambda cubin, log: log.write_bytes(b""),
    "a log that is cut off": lambda cubin, log: log.write_bytes(log.read_bytes()[:-3]),
    "a log of an older version": lambda cubin, log: log.write_text(LOG),
    "no log": lambda cubin, log: log.unlink(),
}


def test_a_whole_kernel_is_read_again(compiler: Compiler) -> None:
    for _ in range(3):
        assert jit.compile_with_log(KERNEL, "sm_80") == (CUBIN, LOG)
    assert compiler.calls == 1


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_kernel_is_compiled_anew(
    damage: Callable[[Path, Path], object], compiler: Compiler, tmp_path: Path
) -> None:
    jit.compile_kernel(KERNEL, "sm_80")
    damage(*files(tmp_path))
    for _ in range(3):
        assert jit.compile_with_log(KERNEL, "sm_80") == (CUBIN, LOG)
    assert compiler.calls == 2


def test_what_can_be_neither_read_nor_replaced_does_not_matter(compiler: Compiler, tmp_path: Path) -> None:
    jit.compile_kernel(KERNEL, "sm_80")
    unreadable(files(tmp_path)[1])
    assert jit.compile_with_log(KERNEL, "sm_80") == (CUBIN, LOG)


def full(path: Path, content: bytes) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))


def test_a_full_disk_costs_one_warning(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(jit, "write_atomically", full)
    with caplog.at_level(logging.WARNING, logger="tconv_swap"):
        for _ in range(3):
            assert jit.compile_kernel(KERNEL, "sm_80") == CUBIN
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled kernels are not kept in {tmp_path} (Disk quota exceeded): the next process compiles them again"
    ]


def test_on_a_full_disk_the_compilers_words_are_not_lost(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> tuple[bytes, str]:
        raise jit.nvrtc.CompileError("it does not compile")

    monkeypatch.setattr(jit, "write_atomically", full)
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", refuse)
    with pytest.raises(jit.nvrtc.CompileError, match="it does not compile"):
        jit.compile_kernel(KERNEL, "sm_80")


@pytest.mark.parametrize("when", ["open", "replace"])
def test_a_cache_that_is_cleared_meanwhile(
    when: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cleared(*arguments: object, **named: object) -> None:
        shutil.rmtree(tmp_path / "kernels")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patched:
        if when == "open":
            patched.setattr(Path, "mkdir", lambda *_, **__: None)  # it is gone again
        else:
            patched.setattr(os, "replace", cleared)
        assert jit.compile_kernel(KERNEL, "sm_80") == CUBIN
    assert jit.compile_kernel(KERNEL, "sm_80") == CUBIN
    assert jit.compile_kernel(KERNEL, "sm_80") == CUBIN
    assert compiler.calls == 2


def kernels(count: int) -> list[Kernel]:
    return [
        Kernel(KERNEL.source, KERNEL.entry, (("Element", "float"), ("THREADS", 32 * i), ("LANES", 1)))
        for i in range(1, count + 1)
    ]


def test_the_kernels_of_a_plan_are_compiled_at_the_same_time(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 4)
    together = threading.Barrier(3, timeout=20)

    def compile_cubin(source: str, *others: object) -> tuple[bytes, str]:
        together.wait()
        return source.encode(), LOG

    wanted = kernels(4)
    already = jit.compile_kernel(wanted[2], "sm_80")
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", compile_cubin)
    found, compiled = jit.compile_kernels(wanted, "sm_80")
    assert compiled
    assert found[2] == already == CUBIN
    for index in (0, 1, 3):
        assert found[index] == jit.render(wanted[index]).encode()
    assert jit.compile_kernels(wanted, "sm_80") == (found, False)


def test_one_of_several_threads_compiles_a_kernel(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: object) -> tuple[bytes, str]:
        begun.set()
        assert go_on.wait(20)
        return compiler(*arguments)

    monkeypatch.setattr(jit.nvrtc, "compile_cubin", slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(jit.compile_kernel, KERNEL, "sm_80")
        assert begun.wait(20)
        others = [pool.submit(jit.compile_kernel, KERNEL, "sm_80") for _ in range(2)]
        threading.Timer(0.05, go_on.set).start()
        assert [one.result(20) for one in (first, *others)] == [CUBIN] * 3
    assert compiler.calls == 1
    assert not jit._being_compiled


def test_threads_that_wait_get_the_compilers_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def refuse(*arguments: object) -> tuple[bytes, str]:
        begun.set()
        assert go_on.wait(20)
        raise jit.nvrtc.CompileError("it does not compile")

    monkeypatch.setattr(jit.nvrtc, "compile_cubin", refuse)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(jit.compile_kernel, KERNEL, "sm_80")
        assert begun.wait(20)
        second = pool.submit(jit.compile_kernel, KERNEL, "sm_80")
        threading.Timer(0.05, go_on.set).start()
        for one in (first, second):
            with pytest.raises(jit.nvrtc.CompileError, match="it does not compile"):
                one.result(20)
    monkeypatch.setattr(jit.nvrtc, "compile_cubin", compiler)
    assert jit.compile_kernel(KERNEL, "sm_80") == CUBIN


def test_threads_warn_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full disk, while the first warning is being written."""
    warned: list[str] = []

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def warn(text: str, *arguments: object) -> None:
        time.sleep(0.1)
        warned.append(text % arguments)

    monkeypatch.setattr(jit, "write_atomically", full)
    monkeypatch.setattr(jit.logger, "warning", warn)
    kernels = [KERNEL._replace(constants=(*KERNEL.constants, ("NUMBER", i))) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(jit.compile_kernel, kernels, ["sm_80"] * 4)) == [CUBIN] * 4
    assert len(warned) == 1
    assert "No space left on device" in warned[0]
