"""Work in a process of its own: its results, and what the caller learns when it fails, dies or falls silent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from benchmarks.measuring_process import MeasuringProcess, NotStartedError, StoppedError, TaskError


def work(task: str, announce: Callable[[str], None]) -> tuple[str, int]:
    announce(f"before {task}")
    announce(task)
    if task == "dies":
        os._exit(3)
    if task == "leaves":
        raise SystemExit("the GPU is lost")
    if task == "hangs":
        time.sleep(60)
    if task == "raises":
        raise ValueError("no such thing")
    return task, os.getpid()


def make() -> Callable[[str, Callable[[str], None]], tuple[str, int]]:
    return work


def make_nothing() -> Callable[[str, Callable[[str], None]], tuple[str, int]]:
    raise SystemExit("no")


def test_one_process_does_all_tasks_until_it_stops() -> None:
    process = MeasuringProcess[str, tuple[str, int]](make, silence_s=3, start_s=60)
    try:
        first, again = process.run("one"), process.run("two")
        assert (first[0], again[0]) == ("one", "two")
        assert first[1] == again[1] != os.getpid()
        with pytest.raises(TaskError, match="ValueError: no such thing"):
            process.run("raises")
        assert process.run("one") == first
        for name, how in (("dies", "died"), ("leaves", "died"), ("hangs", "no answer for 3 s")):
            with pytest.raises(StoppedError) as stopped:
                process.run(name)
            assert (stopped.value.running, stopped.value.how) == (name, how)
            assert str(stopped.value) == f"{how} in {name}"
            another = process.run("one")
            assert another[1] != first[1]
            with pytest.raises(ProcessLookupError):
                os.kill(first[1], 0)
            first = another
    finally:
        process.stop()
    process.stop()


def test_a_process_that_does_not_start_raises() -> None:
    process = MeasuringProcess[str, tuple[str, int]](make_nothing, silence_s=3, start_s=60)
    for _ in range(2):
        with pytest.raises(NotStartedError, match="died in its start"):
            process.run("one")
