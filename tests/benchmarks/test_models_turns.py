"""Several networks at a time, the GPU by turns: who holds it, what comes of rows that fail, die or have no time."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from benchmarks.measuring_process import MeasuringProcess, StoppedError, TaskError
from benchmarks.models import merged
from benchmarks.models_row import Case, Setting
from benchmarks.models_turns import Turn, rows_by_turns

CPU = torch.device("cpu")
SETTING = Setting(CPU, True, None)

Alone = Callable[[], AbstractContextManager[None]]


def case(name: str) -> Case:
    return Case(name, "fp16", "any", "best")


def test_one_process_holds_the_gpu_except_while_compiling(tmp_path: Path) -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with Turn(tmp_path / "turn", CPU):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with Turn(tmp_path / "turn", CPU) as turn:
        thread.start()
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0"):
            assert not entered.wait(0.3)
        turn._compilation_begins(_Arguments(CallbackTrigger.DYNAMO))
        assert entered.wait(10)
        began = time.monotonic()
        threading.Timer(0.3, left.set).start()
        turn._compilation_ends(_Arguments(CallbackTrigger.DYNAMO))
        assert time.monotonic() - began > 0.2
        held = turn.held_s
        assert 0.3 < held < 5
        time.sleep(0.1)
    assert turn.held_s > held + 0.1
    thread.join(10)
    assert not thread.is_alive()


class _Arguments:
    def __init__(self, trigger: CallbackTrigger) -> None:
        self.callback_trigger = trigger


def test_compiling_releases_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("benchmarks.models_turns.fcntl.flock", lambda file, how: done.append(str(int(how))))
    with Turn(tmp_path / "turn", CPU):
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        done.append("calls")
        compiled(torch.zeros(1))
        done.append("called")
        compiled(torch.zeros(1))
    exclusive, unlock = "2", "8"
    assert done == [exclusive, "calls", unlock, exclusive, "called", unlock]
    compiled(torch.zeros(2))
    assert len(done) == 6


def measured(case: Case, setting: Setting, announce: Callable[[str], None], alone: Alone) -> dict[str, Any]:
    announce(f"measuring {case.network}")
    if case.network == "dies":
        os._exit(1)
    return {**case._asdict(), "threads": os.environ["TORCHINDUCTOR_COMPILE_THREADS"]}


@pytest.mark.exhaustive
def test_rows_of_processes() -> None:
    cases = [case(name) for name in ("dies", "one")]
    found = dict(rows_by_turns(cases, SETTING, 3, 2, lambda: math.inf, measured))
    assert found.keys() == set(cases)
    row = found[cases[1]]
    assert isinstance(row, dict)
    assert 0 <= row.pop("seconds")["gpu"] < 60
    assert row == {**cases[1]._asdict(), "threads": "2"}
    assert isinstance(found[cases[0]], StoppedError)
    assert str(found[cases[0]]) == "died in measuring dies"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ


def test_a_row_that_raises_is_returned_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(process: MeasuringProcess[Case, dict[str, Any]], task: Case) -> dict[str, Any]:
        raise TaskError("ValueError: no\nand more")

    monkeypatch.setattr(MeasuringProcess, "start", lambda process: None)
    monkeypatch.setattr(MeasuringProcess, "run", fail)
    ((_, error),) = rows_by_turns([case("fails")], SETTING, 1, 1, lambda: math.inf, measured)
    assert isinstance(error, TaskError)
    assert str(error) == "ValueError: no\nand more"


def slow(case: Case, setting: Setting, announce: Callable[[str], None], alone: Alone) -> dict[str, Any]:
    time.sleep(1000)
    return {}


def test_after_the_time_limit_nothing_starts_and_running_rows_are_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.models_turns.GRACE_SECONDS", 0.5)
    cases = [case(name) for name in ("one", "two", "three")]
    assert dict(rows_by_turns(cases, SETTING, 1, 1, lambda: 0.0, slow)) == {}


def test_while_one_process_times_the_others_and_their_children_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process and its child count; the other finds that they do not while it is alone, and that they do later."""
    monkeypatch.setenv("COUNTS", str(tmp_path))
    cases = [case("counts"), case("times")]
    found = dict(rows_by_turns(cases, SETTING, 2, 1, lambda: math.inf, counting_or_timing))
    row = found[cases[1]]
    assert isinstance(row, dict), row
    assert row["alone"] == [0, 0]
    assert min(row["later"]) > 0
    assert isinstance(found[cases[0]], dict), found[cases[0]]


@pytest.mark.exhaustive
def test_processes_continue_after_the_death_of_the_one_that_stopped_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTS", str(tmp_path))
    cases = [case("counts"), case("dies")]
    found = dict(rows_by_turns(cases, SETTING, 2, 1, lambda: math.inf, counting_or_timing))
    assert isinstance(found[cases[1]], StoppedError)
    assert isinstance(found[cases[0]], dict), found[cases[0]]


#: Counts until there is a file, or until the process that started it is gone. It leaves the core to those that it is
#: counted beside, which import torch meanwhile.
COUNT = """
import os, pathlib, sys, time
parent = os.getppid()
while os.getppid() == parent and not pathlib.Path(sys.argv[2]).exists():
    open(sys.argv[1], "a").write("x")
    time.sleep(0.005)
"""


def counting_or_timing(
    case: Case, setting: Setting, announce: Callable[[str], None], alone: Alone
) -> dict[str, Any]:
    compiling = partial(callback_handler.install_callbacks, CallbackTrigger.DYNAMO, "0")
    directory = Path(os.environ["COUNTS"])
    counts = [directory / "process", directory / "child"]
    end = directory / "end"
    if case.network == "counts":
        child = subprocess.Popen([sys.executable, "-c", COUNT, counts[1], end], start_new_session=True)
        with compiling():
            while not end.exists():
                counts[0].open("a").write("x")
                time.sleep(0.005)
        return {"child": child.wait()}

    def sizes() -> list[int]:
        return [path.stat().st_size for path in counts]

    def counted() -> list[int]:
        before = sizes()
        time.sleep(0.3)
        return [after - size for size, after in zip(before, sizes(), strict=True)]

    with compiling():
        while not all(path.exists() for path in counts):
            time.sleep(0.01)
    with alone():
        time.sleep(0.1)  # a process stops a moment after the signal
        if case.network == "dies":
            end.touch()
            os._exit(1)
        found = {"alone": counted()}
    found["later"] = counted()
    end.touch()
    return found


def test_rows_of_parts_are_merged() -> None:
    def document(rows: list[str], missing: list[str]) -> dict[str, Any]:
        return {
            "benchmark": "models",
            "rows": [case(name)._asdict() for name in rows],
            "not_measured": [f"{case(name)}: no time left" for name in missing],
        }

    found = merged([document(["a"], ["b", "c"]), document(["b"], ["c"])])
    assert [row["network"] for row in found["rows"]] == ["a", "b"]
    assert found["not_measured"] == ["c fp16 any best: no time left"]
