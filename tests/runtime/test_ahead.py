"""What is planned and compiled in the background. No GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tconv_swap.runtime import ahead, cores, jit, launch
from tconv_swap.runtime.program import Kernel, Launch, Plan

ROOT = Path(__file__).parents[2]
KERNELS = [Kernel(f"{name}.cu", name, ()) for name in ("first", "second", "third")]


def plan_of(*kernels: Kernel) -> Plan:
    return Plan("family", "why", (), tuple(Launch(kernel, 1, 32, ()) for kernel in kernels))


@pytest.fixture(autouse=True)
def _one_planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans one job after the other, and leaves no thread behind."""
    monkeypatch.setattr(cores, "usable", lambda: 2)
    forget_threads()
    yield
    forget_threads()


def forget_threads() -> None:
    for threads in (ahead._planner, ahead._compilers):
        threads().shutdown()
        threads.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    found: list[Kernel] = []
    monkeypatch.setattr(ahead, "_ended", {})
    monkeypatch.setattr(jit, "compile_kernel", lambda kernel, architecture: found.append(kernel))
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel, architecture: kernel in found)
    yield found
    settled()


def settled() -> None:
    """Waits until nothing runs in the background."""
    for _ in range(2):  # a job may begin another one
        ahead._planner().submit(int).result()
    ahead._compilers().shutdown()
    ahead._compilers.cache_clear()


def test_each_kernel_that_is_not_loaded_is_compiled_once(
    compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launch._kernels, (KERNELS[1], "sm_90a"), 7)
    ahead.begin("a layer", lambda: [plan_of(*KERNELS), plan_of(KERNELS[0])], "sm_90a")
    settled()
    assert sorted(kernel.entry for kernel in compiled) == ["first", "third"]
    assert not ahead._jobs


def test_other_plans_are_made_if_a_kernel_was_missing(compiled: list[Kernel]) -> None:
    for layer in range(2):
        ahead.begin(layer, lambda: [plan_of(KERNELS[0])], "sm_90a", lambda: [plan_of(*KERNELS)])
        settled()
        assert [kernel.entry for kernel in compiled[:1]] == ["first"]
        # The first one may be asked for again while it is being compiled.
        assert {kernel.entry for kernel in compiled[1:]} - {"first"} == {"second", "third"}


def test_nothing_else_is_planned_if_no_kernel_was_missing(compiled: list[Kernel]) -> None:
    compiled.append(KERNELS[0])
    ahead.begin("a layer", lambda: [plan_of(KERNELS[0])], "sm_90a", lambda: [plan_of(*KERNELS)])
    settled()
    assert compiled == KERNELS[:1]


def test_processes_that_begin_together_compile_different_kernels_first(
    compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [Kernel(f"{i}.cu", str(i), ()) for i in range(40)]
    orders = []
    for process in (1, 2):
        compiled.clear()
        ahead._ended.clear()
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        ahead.begin("a layer", lambda: [plan_of(*kernels)], "sm_90a")
        settled()
        orders.append(list(compiled))
    assert orders[0] != orders[1]
    for order in orders:
        assert set(order) == set(kernels)
        # Those that are needed first are still compiled first.
        assert all(abs(order.index(kernel) - place) < ahead._SHUFFLED for place, kernel in enumerate(kernels))


def test_threads_in_the_background_leave_the_cores_to_others(compiled: list[Kernel]) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    nice = ahead._compilers().submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert nice.result() == min(19, own + ahead.NICENESS)


def test_what_is_needed_soon_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Kernel] = []
    begun, go_on = threading.Event(), threading.Event()

    def compile_kernel(kernel: Kernel, architecture: str) -> None:
        begun.set()
        assert go_on.wait(20)
        compiled.append(kernel)

    monkeypatch.setattr(jit, "compile_kernel", compile_kernel)
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel, architecture: False)
    monkeypatch.setattr(ahead, "_ended", {})
    for kernel, urgency in zip(KERNELS, (ahead.LATER, ahead.LATER, ahead.SOON), strict=True):
        ahead.begin(kernel, lambda kernel=kernel: [plan_of(kernel)], "sm_90a", urgency=urgency)
        assert begun.wait(20)
    ahead._planner().submit(int).result()
    go_on.set()
    settled()
    assert compiled == [KERNELS[0], KERNELS[2], KERNELS[1]]


def test_a_job_that_runs_is_waited_for_and_one_that_waits_is_cancelled(compiled: list[Kernel]) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def first() -> list[Plan]:
        begun.set()
        assert go_on.wait(20)
        ended.append("first")
        return []

    ahead.begin("first", first, "sm_90a")
    ahead.begin("second", lambda: [plan_of(*KERNELS)], "sm_90a")
    assert begun.wait(20)
    ahead.settle("second")
    threading.Timer(0.05, go_on.set).start()
    ahead.settle("first")
    assert ended == ["first"]
    ahead.settle("no such job")
    settled()
    assert compiled == []


def test_jobs_are_planned_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 4)
    forget_threads()
    together = threading.Barrier(3, timeout=20)
    met: list[int] = []
    for key in range(3):
        ahead.begin(key, lambda: met.append(together.wait()) or [], "sm_90a")  # type: ignore[func-returns-value]
    for key in range(3):
        ahead.settle(key)
    assert sorted(met) == [0, 1, 2]
    made = ahead.make_all([lambda: [plan_of(KERNELS[together.wait() * 0])]] * 3)
    assert made == [plan_of(KERNELS[0])] * 3


def test_the_same_job_is_begun_once(compiled: list[Kernel]) -> None:
    go_on = threading.Event()
    calls: list[int] = []
    ahead.begin("blocks the others", lambda: [plan_of()] if go_on.wait(20) else [], "sm_90a")
    for _ in range(3):
        ahead.begin("a layer", lambda: calls.append(1) or [], "sm_90a")  # type: ignore[func-returns-value]
    go_on.set()
    settled()
    ahead.begin("a layer", lambda: calls.append(2) or [], "sm_90a")  # type: ignore[func-returns-value]
    settled()
    assert calls == [1]


def test_the_oldest_jobs_are_forgotten(compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MAX_ENDED", 3)
    for key in range(5):
        ahead.begin(key, list, "sm_90a")
        settled()
    assert list(ahead._ended) == [2, 3, 4]


def test_a_failure_is_left_to_the_call_that_needs_the_plan(
    compiled: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[Plan]:
        raise RuntimeError("no such layer")

    with caplog.at_level("INFO", "tconv_swap"):
        ahead.begin("a layer", fail, "sm_90a")
        settled()
    assert "not planned ahead: no such layer" in caplog.text
    assert not ahead._jobs


def test_a_forked_process_has_threads_of_its_own(compiled: list[Kernel]) -> None:
    ahead.begin("in the parent", list, "sm_90a")
    settled()
    child = os.fork()
    if child == 0:
        made: list[int] = []
        ahead.begin("in the child", lambda: made.append(1) or [], "sm_90a")  # type: ignore[func-returns-value]
        end = time.monotonic() + 20
        while not made and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(0 if made else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_ends_does_not_wait_for_what_is_queued() -> None:
    """A kernel takes 0.2 s here; of the plans and kernels that are queued, only those that have begun are made."""
    code = (
        "import os, time\n"
        "os.sched_getaffinity = lambda _: {0, 1}\n"
        "from tconv_swap.runtime import ahead, jit\n"
        "from tconv_swap.runtime.program import Kernel, Launch, Plan\n"
        "jit.is_on_disk = lambda *_: False\n"
        "jit.compile_kernel = lambda kernel, _: (time.sleep(0.2), print(kernel.entry, flush=True))\n"
        "kernels = [Kernel(f'{i}.cu', str(i), ()) for i in range(200)]\n"
        "plan = Plan('', '', (), tuple(Launch(kernel, 1, 32, ()) for kernel in kernels))\n"
        "ahead.begin('first', lambda: [plan], 'sm_90a')\n"
        "ahead.begin('second', lambda: [time.sleep(0.3)] and [plan], 'sm_90a', urgency=ahead.LATER)\n"
        "ahead.begin('third', lambda: print('planned the third'), 'sm_90a')\n"
        "time.sleep(0.25)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert "planned the third" not in done.stdout
    assert 1 <= len(done.stdout.split()) < 100
    assert not done.stderr
