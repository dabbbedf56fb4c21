"""The ratchet: what fell, what is slower than PyTorch's, what is missing; on every kind of results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ratchet
from benchmarks.ratchet import compare, main, results_of, speeds_of

RESULTS = Path(ratchet.__file__).parent / "results"


def regret(*rows: tuple[str, float, float], failures: tuple[str, ...] = ()) -> dict[str, Any]:
    """Rows of a name, PyTorch's time and ours."""
    return {
        "benchmark": "regret",
        "failures": list(failures),
        "rows": [
            {
                "layer": name,
                "mode": "tf32",
                "layout": "nchw",
                "stage": "forward",
                "chosen": "a",
                "microseconds": {"pytorch": theirs, "a": ours, "b": 1.0},
            }
            for name, theirs, ours in rows
        ],
    }


def test_equal_results_hold() -> None:
    before = regret(("one", 4.0, 1.0), ("two", 3.0, 2.0))
    verdict = compare(regret(("one", 8.0, 2.0), ("two", 3.0, 2.0), ("new", 2.0, 1.0)), before)
    assert verdict.holds
    assert verdict.means == ("tf32 nchw forward: 2.449x, 2.449x (1.000) over 2 rows",)
    assert str(verdict).count("  none") == 5


@pytest.mark.parametrize(("ours", "fell"), [(1 / 0.93, 0), (1 / 0.91, 1)])
def test_a_row_that_fell(ours: float, fell: int) -> None:
    others = [(str(n), 4.0, 1.0) for n in range(9)]
    verdict = compare(regret(("one", 4.0, ours), *others), regret(("one", 4.0, 1.0), *others))
    assert len(verdict.fallen) == fell
    assert verdict.fallen_means == ()
    assert verdict.holds == (not fell)
    if fell:
        assert verdict.fallen[0].startswith("one tf32 nchw forward: 3.64x (4 / 1.099), was 4.00x (4 / 1)")


@pytest.mark.parametrize(("ours", "fell"), [(1 / 0.985, 0), (1 / 0.975, 1)])
def test_a_mean_that_fell(ours: float, fell: int) -> None:
    names = [str(n) for n in range(5)]
    verdict = compare(
        regret(*((name, 4.0, ours) for name in names)), regret(*((name, 4.0, 1.0) for name in names))
    )
    assert verdict.fallen == ()
    assert len(verdict.fallen_means) == fell
    assert verdict.holds == (not fell)


def test_slower_missing_and_failed_rows_are_named() -> None:
    before = regret(("one", 0.9, 1.0), ("gone", 3.0, 2.0))
    verdict = compare(regret(("one", 0.9, 1.0), ("new", 0.98, 1.0), failures=("two: no memory",)), before)
    assert verdict.slower == ("one tf32 nchw forward: 0.90x (0.9 / 1)",)
    assert verdict.missing == ("gone tf32 nchw forward",)
    assert verdict.failures == ("two: no memory",)
    assert not verdict.holds


@pytest.mark.parametrize(
    "name", ["forward", "backward", "models", "blocks", "varying", "ablation", "regret", "neighbours"]
)
def test_the_committed_results_beside_themselves(name: str) -> None:
    document = json.loads(results_of(name).read_text())
    verdict = compare(document, document)
    assert verdict.means
    assert all("(1.000)" in line for line in verdict.means)
    assert verdict.fallen == verdict.fallen_means == verdict.missing == ()
    rows = speeds_of(document)
    assert len({one.name for one in rows}) == len(rows)


def test_a_slower_row_of_every_kind_is_named() -> None:
    """Each with our time of one row made twice as long."""
    changed: list[str] = []
    for name in ("forward", "models", "blocks", "varying", "ablation"):
        before = json.loads(results_of(name).read_text())
        now = copy.deepcopy(before)
        if name == "forward":
            now["rows"][0]["ours"]["median_ms"] *= 2
        elif name == "models":
            now["rows"][0]["stages"][0]["swapped"]["median_ms"] *= 2
        elif name == "blocks":
            now["kernels"][0]["forward_us"] *= 2
        elif name == "varying":
            warm = now["streams"][0]["sides"]["warm"]
            warm["first"] = [2 * seconds for seconds in warm["first"]]
        else:
            row = next(row for row in now["rows"] if row["chosen"] not in ("pytorch", "apart"))
            row["microseconds"] = {**row["microseconds"], row["chosen"]: 1e6}
        verdict = compare(now, before)
        assert len(verdict.fallen) == 1, name
        changed += verdict.fallen
    assert [line.split()[0] for line in changed[:2]] == ["kb57", "dcgan"]


def test_neighbours_and_overhead() -> None:
    def neighbours(worst: float) -> dict[str, Any]:
        row = {
            "layer": "one",
            "geometry": "",
            "layer_class": "k4s2",
            "of_suite": True,
            "mode": "tf32",
            "layout": "nchw",
            "stage": "forward",
            "microseconds": {"layer": 1.0, "batch +1": worst},
            "macs": {"layer": 1, "batch +1": 1},
            "families": {},
            "failures": {},
        }
        return {"benchmark": "neighbours", "rows": [row]}

    assert compare(neighbours(1.25), neighbours(1.25)).holds
    assert compare(neighbours(1.25), neighbours(1.1)).fallen
    assert compare(neighbours(1.35), neighbours(1.35)).slower
    overhead = {
        "benchmark": "overhead",
        "rows": [{"row": "auto: forward", "pytorch_us": 20.0, "ours_us": 10.0}],
    }
    assert [(one.group, one.speed) for one in speeds_of(overhead)] == [("auto", 2.0)]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, committed = tmp_path / "new.json", tmp_path / "committed.json"
    new.write_text(json.dumps(regret(("one", 4.0, 2.0))))
    committed.write_text(json.dumps(regret(("one", 4.0, 1.0))))
    assert main([str(new), str(committed)]) == 1
    assert "one tf32 nchw forward: 2.00x (4 / 2), was 4.00x" in capsys.readouterr().out
    assert main([str(committed), str(committed)]) == 0
    # Without a second file, the committed one of that benchmark is the bar.
    forward = tmp_path / "h200-forward.json"
    document = json.loads((RESULTS / forward.name).read_text())
    for row in document["rows"]:
        row["ours"]["median_ms"] = min(row["ours"]["median_ms"], row["pytorch"]["median_ms"])
    forward.write_text(json.dumps(document))
    assert main([str(forward)]) == 0
    document["rows"].pop()
    forward.write_text(json.dumps(document))
    assert main([str(forward)]) == 1
    assert main([str(forward), str(committed)]) == 2
    assert main([str(RESULTS / "demo.json"), str(RESULTS / "demo.json")]) == 2
    assert main([str(tmp_path / "none.json")]) == 2
