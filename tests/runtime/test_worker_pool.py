"""Compiling and planning in processes beside the caller's."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from forked import run_python

from tconv_swap.cli import diagnosis
from tconv_swap.runtime import nvrtc, nvrtc_program, worker_pool

OPTIONS = ("--gpu-architecture=sm_90a",)
SOURCE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }'


@pytest.fixture(autouse=True)
def _own_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    worker_pool.end_all()
    monkeypatch.setattr(worker_pool, "_cannot_start", False)
    monkeypatch.setattr(worker_pool, "_is_watched", False)  # by a thread that still sleeps for another test
    yield
    worker_pool.end_all()


def compiled(factor: int = 2) -> bytes:
    return nvrtc.compile_cubin(SOURCE.replace("FACTOR", str(factor)), "scale.cu", {}, OPTIONS)[0]


def compiled_here(factor: int = 2) -> bytes:
    source = nvrtc_program.Source(SOURCE.replace("FACTOR", str(factor)), "scale.cu", {}, OPTIONS)
    return nvrtc_program.compile_program(nvrtc._library_path(), source).cubin


def process_ids() -> list[int]:
    return [worker._process.pid for _, worker in worker_pool._idle]


def comes_true(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_one_process_compiles_in_turn_what_this_one_would() -> None:
    assert compiled() == compiled_here()
    first = process_ids()
    assert "in a process beside this one" in diagnosis._nvrtc().text
    assert compiled(3) == compiled_here(3) != compiled_here()
    assert len(first) == 1
    assert process_ids() == first


def test_headers_and_the_log_come_with_it() -> None:
    source = f'#include "factor.cuh"\n{SOURCE}'
    headers = {"factor.cuh": "constexpr int FACTOR = 2;"}
    cubin, log = nvrtc.compile_cubin(source, "scale.cu", headers, (*OPTIONS, "--ptxas-options=-v"))
    assert cubin
    assert "Used" in log
    assert "\0" not in log


def test_what_does_not_compile_is_an_error_and_the_process_stays() -> None:
    compiled()
    before = process_ids()
    with pytest.raises(nvrtc.CompileError, match=r'(?s)scale.cu does not compile .*"FACTOR" is undefined'):
        nvrtc.compile_cubin(SOURCE, "scale.cu", {}, OPTIONS)
    with pytest.raises(nvrtc.CompileError, match="does not compile"):
        nvrtc.compile_cubin(SOURCE, "scale.cu", {}, ("--no-such-option",))
    assert process_ids() == before


def test_threads_compile_at_a_time_each_its_own() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compiled, range(1, 10)))
    assert found == [compiled_here(factor) for factor in range(1, 10)]
    assert 1 <= len(process_ids()) <= 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_process_that_ends_is_replaced(how: signal.Signals) -> None:
    compiled()
    (before,) = process_ids()
    os.kill(before, how)
    time.sleep(0.1)
    assert compiled(5) == compiled_here(5)
    assert process_ids() == ([] if how == signal.SIGKILL else [before])
    assert compiled(6) == compiled_here(6)
    assert len(process_ids()) == 1


@pytest.mark.parametrize("executable", ["", "/no/such/file", "/bin/true", "/bin/cat"])
def test_an_embedded_interpreter_compiles_in_its_own_process(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert compiled() == compiled_here()
    assert process_ids() == []
    assert worker_pool._cannot_start == bool(executable)
    assert not worker_pool.can_start()
    assert "in this process" in diagnosis._nvrtc().text


def test_an_executable_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(worker_pool, "START_SECONDS", 0.2)
    begin = time.monotonic()
    assert compiled() == compiled_here()
    assert time.monotonic() - begin < 20


def test_a_frozen_program_does_not_start_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert compiled() == compiled_here()
    assert process_ids() == []


def test_processes_end_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 0.05)
    for _ in range(2):
        compiled()
        assert comes_true(lambda: not worker_pool._idle)
        assert comes_true(lambda: not worker_pool._is_watched)


def test_a_process_is_as_nice_as_the_thread_it_works_for() -> None:
    compiled()
    (own,) = process_ids()

    def work_nicely() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 3)
        compiled()

    thread = threading.Thread(target=work_nicely)
    thread.start()
    thread.join()
    first, other = process_ids()
    assert first == own
    assert os.getpriority(os.PRIO_PROCESS, other) == os.getpriority(os.PRIO_PROCESS, own) + 3


def test_a_forked_process_has_its_own() -> None:
    compiled()
    before = process_ids()
    child = os.fork()
    if not child:  # no exception may reach pytest here
        code = 1
        with suppress(BaseException):
            code = int(process_ids() != [] or compiled(8) != compiled_here(8) or len(process_ids()) != 1)
            worker_pool.end_all()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert compiled(7) == compiled_here(7)
    assert process_ids() == before


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_no_process_outlives_its_caller(how: str) -> None:
    end = "os.kill(os.getpid(), 9)" if how == "kill" else "pass"
    script = (
        "import os\nfrom tconv_swap.runtime import nvrtc, worker_pool\n"
        f"nvrtc.compile_cubin({SOURCE.replace('FACTOR', '2')!r}, 'scale.cu', {{}}, {OPTIONS!r})\n"
        f"print(worker_pool._idle[0][1]._process.pid, flush=True)\n{end}\n"
    )
    done = run_python("-c", script, env=os.environ)
    assert done.returncode == (-9 if how == "kill" else 0), done.stderr
    worker = Path(f"/proc/{int(done.stdout)}/cmdline")
    assert comes_true(lambda: not (worker.exists() and worker.read_bytes()))
