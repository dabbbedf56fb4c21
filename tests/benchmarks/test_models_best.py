"""The best ways of whole networks: a tiny row on the CPU, the order of the rows, the table and the chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models, models_best, models_report, models_ways
from benchmarks.models_row import Case, Setting
from tconv_swap.verification import VerifyReport
from tconv_swap.ways import optimize, way

CPU = Setting(torch.device("cpu"), True, None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled takes minutes; test_best_way_run.py compiles. Each timing has milliseconds: it does not matter
    which way is the fastest."""
    monkeypatch.setattr(way, "RUNTIMES", ("eager",))
    monkeypatch.setattr(models_ways, "TIMING_S", 0.01)
    monkeypatch.setattr(models_ways, "FINAL_S", 0.01)


def options(*arguments: str) -> Any:
    return models.make_parser().parse_args([*arguments, "--device", "cpu", "--tiny"])


@pytest.fixture
def measured(tmp_path: Path, no_compiler: None) -> dict[str, Any]:
    path = tmp_path / "rows.json"
    arguments = ["--runtime", "best", "--network", "vae", "--precision", "tf32", "--json", str(path)]
    assert models.main([*arguments, "--device", "cpu", "--tiny"]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_row(measured: dict[str, Any]) -> None:
    (row,) = measured["rows"]
    assert [stage["stage"] for stage in row["stages"]] == ["step", "forward"]
    for stage in row["stages"]:
        assert stage["pytorch_way"].startswith("pytorch")
        assert stage["our_way"].startswith("ours")
        assert stage["speedup"] == stage["original"]["median_ms"] / stage["swapped"]["median_ms"]
        assert stage["over_today"] == stage["today"]["median_ms"] / stage["swapped"]["median_ms"]
        assert {one["way"] for one in stage["ways"]} == {
            f"{layers}{layout}" for layers in ("pytorch", "ours") for layout in ("", "+channels_last")
        }
    text = models_report.table(measured)
    assert "PyTorch's best way" in text
    assert "our best way over PyTorch's best way, training step" in text
    chart = models_best.best_chart(measured)
    assert chart is not None
    assert "our best way" in chart


def test_other_rows_have_no_best_way() -> None:
    committed = Path(models.__file__).parent / "results" / "h200-models.json"
    document = json.loads(committed.read_text())
    document["rows"] = [row for row in document["rows"] if row["runtime"] != "best"]
    assert models_best.best_table(document) is None
    assert models_best.best_chart(document) is None
    assert "best way" not in models_report.table(document)


def test_the_first_readme_shows_the_best_ways_alone(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Path(models.__file__).parent / "results" / "h200-models.json"
    rows = [row for row in json.loads(committed.read_text())["rows"] if row["runtime"] == "eager"]
    measured["rows"] += rows[:2]
    for folder in (tmp_path, tmp_path / "benchmarks"):
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text(
            "before\n<!-- models chart -->\n<!-- end of models chart -->\nafter\n"
        )
    monkeypatch.setattr(models_report, "ROOT", tmp_path)
    models_report.fill_readmes(measured, "h200-models.json")
    first, below = ((folder / "README.md").read_text() for folder in (tmp_path, tmp_path / "benchmarks"))
    assert "](benchmarks/results/h200-models-best.svg)" in first
    assert "h200-models.svg" not in first
    assert "Our best way over PyTorch's best way, forward: " in first
    assert "](results/h200-models-best.svg)" in below
    assert "](results/h200-models.svg)" in below
    assert "Eager, forward: " in below


@pytest.mark.usefixtures("no_compiler")
def test_a_way_that_computes_something_else_gives_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object, **__: object) -> VerifyReport:
        return VerifyReport(failures=["the output differs"])

    monkeypatch.setattr(optimize, "verify_way", failed)
    path = tmp_path / "rows.json"
    arguments = ["--runtime", "best", "--network", "vae", "--precision", "tf32", "--json", str(path)]
    assert models.main([*arguments, "--device", "cpu", "--tiny"]) == 1
    (line,) = json.loads(path.read_text())["not_measured"]
    assert "none of our ways is right: " in line
    assert "ours+channels_last is not chosen: the output differs" in line


def test_float16_comes_first() -> None:
    cases = list(models.every_case(options("--runtime", "best")))
    assert len(cases) == 20
    assert cases[0] == Case(models_ways.ORDER[0], "fp16", "any", "best")
    assert [case.network for case in cases[:10]] == [*models_ways.ORDER]
    assert set(models_ways.ORDER) == set(models.NETWORKS)
    assert cases[10].precision == "tf32"


@pytest.mark.usefixtures("no_compiler")
def test_the_next_step_is_announced() -> None:
    heard: list[str] = []
    row = models_ways.measure_best(Case("vae", "tf32", "any", "best"), CPU, heard.append)
    ways = len(row["stages"][0]["ways"])
    forward = next(place for place, text in enumerate(heard) if text.startswith("forward, "))
    assert forward > ways
    for begin in (0, forward):
        assert ", trying pytorch, " in heard[begin]
        assert any(", verifying ours" in text for text in heard[begin + ways :])


@pytest.mark.usefixtures("no_compiler")
def test_a_row_says_what_bounds_both_ways() -> None:
    row = models_ways.measure_best(Case("vae", "tf32", "any", "best"), CPU)
    for stage in row["stages"]:
        assert stage["pytorch_bound"].startswith("bound by ")
        assert stage["our_bound"].startswith("bound by ")
    (first, *_) = models_best.best_bounds({"rows": [row]})
    step = row["stages"][0]
    assert first == f"vae, tf32, training step, {step['pytorch_way']}: {step['pytorch_bound']}"
    del step["pytorch_bound"], step["our_bound"]  # rows that were measured before have none
    assert len(list(models_best.best_bounds({"rows": [row]}))) == 2


@pytest.mark.usefixtures("no_compiler")
def test_a_row_without_memory_for_a_way_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's memory is shared with other networks: the way might have been the fastest."""
    build = optimize.build

    def refusing(network: Any, way: way.Way, *arguments: Any, **options: Any) -> Any:
        if way.name == "ours+channels_last":
            raise torch.OutOfMemoryError
        return build(network, way, *arguments, **options)

    monkeypatch.setattr(optimize, "build", refusing)
    with pytest.raises(ValueError, match=r"step: not enough memory for ours\+channels_last"):
        models_ways.measure_best(Case("vae", "tf32", "any", "best"), CPU)
