"""The benchmark of changing sizes: its streams, its table, and the whole program on a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_python

from benchmarks import planning, sizes, varying
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


def test_the_program_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        return run_python(*command[1:], env=env)

    pretended = SimpleNamespace(run=forked, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(varying, "subprocess", pretended)
    path = tmp_path / "varying.json"
    code = varying.main(["--device", "cpu", "--tiny", "--stream", "mask-head", "--json", str(path)])
    document = json.loads(path.read_text())
    assert code == 0, document
    (entry,) = document["streams"]
    assert list(entry["sides"]) == ["pytorch", "cold", "warm"]
    assert all(len(side["first"]) == len(side["again"]) == 4 for side in entry["sides"].values())
    assert "mask-head" in capsys.readouterr().out


def test_sides_run_in_turn_and_the_median_of_each_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {
        "pytorch": iter([[3.0, 1.0], [1.0, 9.0], [2.0, 2.0]]),
        "cold": iter([[9.0, 1.0]]),
        "warm": iter([[1.5, 0.5], [4.0, 0.5], [0.5, 0.5]]),
    }
    ran: list[str] = []

    def run(name: str, side: str, *_: Any) -> dict[str, Any]:
        ran.append(side)
        return {"first": next(calls[side]), "again": [0.1] * len(ran)}

    monkeypatch.setattr(varying, "_in_a_process", run)
    options = varying.make_parser().parse_args(["--tiny", "--rounds", "3"])
    entry = varying.measure("mask-head", options)
    assert ran == ["pytorch", "cold", "warm", "pytorch", "warm", "pytorch", "warm"]
    assert {side: run["first"] for side, run in entry["sides"].items()} == {
        "pytorch": [2.0, 2.0],
        "cold": [9.0, 1.0],
        "warm": [1.5, 0.5],
    }
    assert entry["sides"]["warm"]["again"] == [0.1] * 3
    assert entry["sides"]["pytorch"]["totals"] == [4.0, 10.0, 4.0]
    _, theirs, cold, warm = varying.table([entry]).splitlines()
    assert theirs.endswith("4.000 to 10.000")
    assert warm.endswith("1.000 to 4.500")
    assert not cold.endswith("10.000")
    failed = {"error": "killed"}
    assert varying.median_of_runs([{"first": [1.0], "again": []}, failed]) == failed


def test_a_failing_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varying, "_in_a_process", lambda *_: {"error": "killed"})
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
