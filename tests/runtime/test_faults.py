"""Faults around the cache while a process runs: calls still work, and a warning says what is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tconv_swap.runtime import cache, host

ROOT = Path(__file__).resolve().parents[2]
KERNEL = (
    "import torch, tconv_swap\n"
    "from tconv_swap.runtime import host, jit\n"
    "from tconv_swap.runtime.program import Kernel\n"
    "def compiled(lanes):\n"
    "    constants = (('Element', 'float'), ('THREADS', 32), ('LANES', lanes))\n"
    "    return jit.compile_kernel(Kernel('common/split_k_reduce.cu', 'split_k_reduce', constants), 'sm_80')\n"
    "def on_the_cpu():\n"
    "    theirs = torch.nn.ConvTranspose2d(4, 6, 4, 2, 1)\n"
    "    ours = tconv_swap.swap_layers(theirs, inplace=False)\n"
    "    x = torch.randn(2, 4, 8, 8)\n"
    "    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)\n"
)


def python(code: str, directory: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL + code],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TCONV_SWAP_CACHE": str(directory),
            "TMPDIR": str(directory.parent),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    output, words = process.communicate(timeout=240)
    assert process.returncode == 0, words
    return output, words


def test_two_processes_race_for_one_cache(tmp_path: Path) -> None:
    """One process builds the host part, the other waits for it; each has every kernel; a third process finds all of
    them. Both ask at the same time. The host part is a small one, and its compiler takes a second, so that the process
    that waits has asked before the other is ready."""
    directory, sources, asking = (tmp_path / name for name in ("cache", "csrc", "asking"))
    sources.mkdir()
    asking.mkdir()
    for name in host.SOURCES:
        (sources / name).write_text("")
    (sources / host.SOURCES[0]).write_text(
        "#include <cstdint>\n"
        'extern "C" const char* tconv_last_error() { return ""; }\n'
        'extern "C" int64_t tconv_known() { return 7; }\n'
    )
    compiler = tmp_path / "slow-g++"
    compiler.write_text('#!/bin/sh\nsleep 1\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    code = (
        "import os, pathlib, time\n"
        f"host.csrc_directory = lambda: pathlib.Path({str(sources)!r})\n"
        f"asking = pathlib.Path({str(asking)!r})\n"
        "(asking / str(os.getpid())).touch()\n"
        "while len(list(asking.iterdir())) < 2:\n"
        "    time.sleep(0.01)\n"
        "assert host.library().tconv_known() == 7\n"
        "found = [compiled(lanes) for lanes in (1, 4)]\n"
        "print(host.build(), *(hash(one) for one in found))\n"
    )
    environment = {"PYTHONHASHSEED": "0", "CXX": str(compiler)}
    both = [python(code, directory, **environment) for _ in range(2)]
    outputs, words = zip(*map(ended, both), strict=True)
    assert outputs[0] == outputs[1]
    assert sorted("building the host part" in each for each in words) == [False, True]
    assert len(list((directory / "kernels").iterdir())) == 4  # nothing half written is left
    library = Path(outputs[0].split()[0])
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "lock",
        "tconv_swap.sha256",
        "tconv_swap.so",
    ]
    written = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    third = ended(python(code, directory, **environment))
    assert third[0] == outputs[0]
    assert "building" not in third[1]
    assert written == {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_a_disk_that_takes_no_more_than_a_few_bytes(tmp_path: Path) -> None:
    """The system refuses to write more than 4 KiB to a file: nothing is kept, but every call works."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "assert compiled(1)[:4] == b'\\x7fELF' == compiled(2)[:4]\n"
        "on_the_cpu()\n"
    )
    _, words = ended(python(code, tmp_path / "cache"))
    lines = [line for line in words.splitlines() if "File too large" in line]
    assert sum(line.startswith("cannot keep compiled kernels in") for line in lines) == 1, words
    assert sum(line.startswith("compiled kernels are not kept in") for line in lines) == 1, words
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_cache_that_is_removed_while_a_process_runs(tmp_path: Path) -> None:
    code = (
        "import shutil\n"
        "first = compiled(1)\n"
        "shutil.rmtree(jit.cache_directory())\n"
        "assert not jit.cache_directory().exists()\n"
        "assert compiled(1) == first and compiled(2)[:4] == b'\\x7fELF'\n"
        "assert len(list((jit.cache_directory() / 'kernels').iterdir())) == 4\n"
        "on_the_cpu()\n"
    )
    _, words = ended(python(code, tmp_path / "cache"))
    assert "not kept" not in words


def test_a_file_system_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of another process are not touched; this process uses a directory of its own."""

    def refuse(*, dir: Path) -> object:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    directory = cache.cache_directory.__wrapped__()
    assert directory.parent == tmp_path / "temporary"
    assert "cache (Read-only file system); set TCONV_SWAP_CACHE" in caplog.text
    assert "Read-only file system" in cache.cache_problem()
    cache.write_atomically(directory / "kernels" / "one", b"code")
    assert list((tmp_path / "cache").iterdir()) == []
