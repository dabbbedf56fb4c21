"""The benchmark of changing sizes: its streams, its table, and the whole program on a CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import planning, sizes, varying
from benchmarks.measuring_process import MeasuringProcess, StoppedError
from benchmarks.streams import STREAMS
from tconv_swap import plan_swap


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_stream_has_layers_to_swap_and_sizes_that_they_take(stream: varying.Stream) -> None:
    network = stream.network(True)
    assert len(plan_swap(network, include_1d=True).swapped) > 0
    with torch.no_grad():
        for shape in (*stream.shapes(True), stream.warm_up(True)):
            assert network(torch.randn(shape)).isfinite().all()


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_the_warm_up_size_is_not_in_the_stream(stream: varying.Stream) -> None:
    for tiny in (False, True):
        shapes = list(stream.shapes(tiny))
        assert stream.warm_up(tiny) not in shapes
        assert len(set(shapes)) == (2 if stream.name == "last-batch" else len(shapes))


def test_only_calls_that_all_sides_finished_are_compared() -> None:
    sides = {
        "pytorch": {"first": [1.0, 2.0, 3.0], "again": [0.5, 0.5]},
        "cold": {"first": [4.0, 5.0], "again": []},
        "warm": {"error": "no kernel"},
    }
    text = varying.table([{"name": "unet", "calls": 3, "sides": sides}])
    _, theirs, cold, warm = text.splitlines()
    assert theirs.split() == ["unet", "pytorch", "2/3", "3.000", "2.000", "0", "0.000"]
    assert cold.split() == ["unet", "cold", "2/3", "9.000", "5.000", "0", "0.000"]
    assert "no kernel" in warm


class InThisProcess(MeasuringProcess[Any, Any]):
    """Does the work without a process."""

    def start(self) -> None:
        self._process, self._work = SimpleNamespace(kill=lambda: None, join=lambda: None), self._make()

    def wait_until_ready(self) -> Any:
        return None

    def run(self, task: Any) -> Any:
        return self._work(task, print)


@pytest.fixture
def keep_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("keep_tf32")
def test_the_program_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(varying, "MeasuringProcess", InThisProcess)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    path = tmp_path / "varying.json"
    code = varying.main(["--device", "cpu", "--tiny", "--stream", "last-batch", "--json", str(path)])
    document = json.loads(path.read_text())
    assert code == 0, document
    (entry,) = document["streams"]
    assert list(entry["sides"]) == ["pytorch", "cold", "warm"]
    calls = len(STREAMS["last-batch"].shapes(True))
    assert all(len(side["first"]) == len(side["again"]) == calls for side in entry["sides"].values())
    assert "last-batch" in capsys.readouterr().out


def test_two_processes_call_in_turn(tmp_path: Path) -> None:
    options = varying.make_parser().parse_args(["--device", "cpu", "--tiny"])
    runs = varying.run_in_turn("mask-head", ("pytorch", "warm"), str(tmp_path), options)
    assert all(len(run[key]) == 4 and min(run[key]) > 0 for run in runs.values() for key in run), runs


class Recorded:
    """A process that takes a second for a call, and dies in one of them."""

    calls: ClassVar[list[str]] = []

    def __init__(self, make: Any, *_: float) -> None:
        self.side = make.args[1]

    def start(self) -> None:
        self.calls.append(f"{self.side} starts")

    def wait_until_ready(self) -> None:
        self.calls.append(f"{self.side} is ready")

    def run(self, shape: tuple[int, ...]) -> float:
        self.calls.append(self.side)
        if self.calls.count(self.side) == 2 and self.side == "warm":
            raise StoppedError("its first step", "died")
        return 1.0

    def stop(self) -> None:
        self.calls.append(f"{self.side} stops")


def test_processes_are_ready_before_the_first_call_and_end_with_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(varying, "CALLS_OF_A_TURN", 3)
    monkeypatch.setattr(varying, "MeasuringProcess", Recorded)
    options = varying.make_parser().parse_args(["--tiny", "--seconds", "4.5"])
    runs = varying.run_in_turn("mask-head", ("pytorch", "warm"), "", options)
    assert runs == {
        "pytorch": {"first": [1.0] * 4, "again": [1.0]},
        "warm": {"error": "died in its first step"},
    }
    assert Recorded.calls == [
        *("pytorch starts", "warm starts", "pytorch is ready", "warm is ready"),
        *("pytorch", "pytorch", "pytorch", "warm", "warm", "pytorch", "pytorch"),
        *("pytorch stops", "warm stops"),
    ]


def test_the_median_of_each_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {
        "pytorch": iter([[3.0, 1.0], [1.0, 9.0], [2.0, 2.0]]),
        "cold": iter([[9.0, 1.0]]),
        "warm": iter([[1.5, 0.5], [4.0, 0.5], [0.5, 0.5]]),
    }
    ran: list[tuple[str, ...]] = []

    def run(name: str, sides: tuple[str, ...], *_: Any) -> dict[str, Any]:
        ran.append(sides)
        return {side: {"first": next(calls[side]), "again": [0.1] * len(ran)} for side in sides}

    monkeypatch.setattr(varying, "run_in_turn", run)
    options = varying.make_parser().parse_args(["--tiny", "--rounds", "3"])
    entry = varying.measure("mask-head", options)
    assert ran == [("cold",), *[("pytorch", "warm")] * 3]
    assert {side: run["first"] for side, run in entry["sides"].items()} == {
        "pytorch": [2.0, 2.0],
        "cold": [9.0, 1.0],
        "warm": [1.5, 0.5],
    }
    assert entry["sides"]["warm"]["again"] == [0.1] * 2
    assert entry["sides"]["pytorch"]["totals"] == [4.0, 10.0, 4.0]
    _, theirs, cold, warm = varying.table([entry]).splitlines()
    assert theirs.endswith("4.000 to 10.000")
    assert warm.endswith("1.000 to 4.500")
    assert not cold.endswith("10.000")
    failed = {"error": "killed"}
    assert varying.median_of_runs([{"first": [1.0], "again": []}, failed]) == failed


def test_a_failing_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, sides: tuple[str, ...], *_: Any) -> dict[str, Any]:
        return {side: {"error": "killed"} for side in sides}

    monkeypatch.setattr(varying, "run_in_turn", fail)
    path = tmp_path / "varying.json"
    assert varying.main(["--device", "cpu", "--tiny", "--stream", "hifigan", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["streams"][0]["sides"]["cold"] == {"error": "killed"}


def test_the_cost_of_sizes_is_listed_with_the_worst_first() -> None:
    rows = [
        {"row": "a", "before_us": 10.0, "after_us": 5.0},
        {"row": "b", "before_us": 10.0, "after_us": 20.0},
    ]
    _, worst, best, mean = sizes.table(rows).splitlines()
    assert worst.split() == ["b", "10.0", "20.0", "0.500"]
    assert best.split() == ["a", "10.0", "5.0", "2.000"]
    assert mean.split()[-1] == "1.000"


def test_planning_a_new_size_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning.main(["--only", "maskrcnn", "--sizes", "2"]) == 0
    head, layer, median = capsys.readouterr().out.splitlines()
    assert "forward us" in head
    assert layer.split()[0] == "maskrcnn"
    assert float(layer.split()[1]) == float(median.split()[-1]) > 0
