"""A sweep from its command line to its file, with real processes and a pretended measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measuring_process, sweep, sweep_prepared
from benchmarks.layers import commit_of_tree
from benchmarks.measuring_process import Work
from benchmarks.sweep import Results, Sweep, shuffled
from benchmarks.sweep_options import make_parser


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def key(self) -> tuple[str, ...]:
        return (str(self.value),)


@dataclass(frozen=True)
class Doubled:
    value: int
    launches: int = 1

    def without(self, running: str, how: str) -> None:
        return None


@dataclass(frozen=True)
class Found:
    value: int


def double(task: Number) -> Doubled:
    if task.value == 3:
        raise ValueError("three\nand more")
    return Doubled(2 * task.value)


def _make() -> Work[Doubled, list[Found]]:
    return lambda ready, announce: [Found(ready.value)]


def _report(rows: Sequence[Found]) -> str:
    return f"{sorted(row.value for row in rows)}"


def _summary(rows: Sequence[Found]) -> dict[str, Any]:
    return {"sum": sum(row.value for row in rows)}


DOUBLES = Sweep[Number, Doubled, Found]("doubles", double, _make, Found, str, _report, _summary)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start faster than spawned ones, and a GPU that nothing uses."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.sweep"])
    for module in (sweep, measuring_process):
        monkeypatch.setattr(module, "get_context", lambda _: context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sweep, "environment", lambda device: {"gpu": "pretended"})


@pytest.mark.usefixtures("pretended_gpu")
def test_a_run_in_processes_and_its_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("numbers", "", 60.0)
    path = tmp_path / "rows.json"
    tasks = shuffled([Number(value) for value in range(8)], 1)
    assert tasks != sorted(tasks, key=lambda task: task.value)
    options = parser.parse_args(["--json", str(path), "--workers", "2", "--part", "1/2"])
    assert DOUBLES.main(tasks, {"seed": 1}, options) == (1 if Number(3) in tasks[1::2] else 0)
    kept = Results.load(path, "doubles", Found)
    assert kept.done == {task.key for task in tasks[1::2]}
    assert kept.settings["part"] == "1/2"
    options = parser.parse_args(["--json", str(path), "--workers", "1", "--resume"])
    assert DOUBLES.main(tasks, {"seed": 1}, options) == 1
    kept = Results.load(path, "doubles", Found)
    assert sorted(row.value for row in kept.rows) == [0, 2, 4, 8, 10, 12, 14]
    assert kept.failures == ["Number(value=3): ValueError: three"]
    assert '"sum": 50' in path.read_text()
    capsys.readouterr()
    assert DOUBLES.read(parser.parse_args(["--json", str(path), "--report"])) == 0
    assert capsys.readouterr().out == "[0, 2, 4, 8, 10, 12, 14]\n"
    assert DOUBLES.read(options) is None


@pytest.mark.usefixtures("pretended_gpu")
def test_tasks_that_are_prepared_on_one_machine_and_measured_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = make_parser("numbers", "", 60.0)
    rows, plans = tmp_path / "rows.json", tmp_path / "plans"
    tasks = [Number(value) for value in range(6)]
    options = parser.parse_args(["--json", str(rows), "--prepare", str(plans), "--workers", "1"])
    assert DOUBLES.command(None, lambda: tasks, {}, options) == 0
    assert not rows.exists()
    options = parser.parse_args(["--json", str(rows), "--prepared", str(plans), "--part", "1/2"])
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "prepared", None)
        assert DOUBLES.main(tasks, {}, options) == 1
    kept = Results.load(rows, "doubles", Found)
    assert sorted(row.value for row in kept.rows) == [2, 10]
    assert kept.failures == ["Number(value=3): ValueError: three"]
    with pytest.raises(ValueError, match=r"of benchmarks\.doubles"):
        sweep_prepared.read(plans, "halves")
    # The rows are of the tree that planned, whatever tree measures.
    assert sweep_prepared.read(plans, "doubles").commit == kept.settings["commit"] == commit_of_tree()
