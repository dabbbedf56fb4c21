"""The regret of "auto": its candidates, its timing, what its rows say; with a pretended GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation_cases import DRAWN, GENERAL_ALONE, SUITE, Clock
from pretended_gpu import H200, pretended_gpu

from benchmarks import ablation_measure, regret, regret_classes, selection
from benchmarks.ablation_measure import Call, Task, measure, prepare
from benchmarks.families import MASKS, PYTORCH, family_of, plans_of
from benchmarks.kernels import problem_of
from benchmarks.regret import RegretRow, candidates
from benchmarks.sweep import Results
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import Timing

DIRECTIONS = selection.directions_of(argparse.Namespace(stage=None))
LAYERS = {layer.name: layer for layer in (*SUITE, *DRAWN)}
TASK = Task(
    Layer("small", "made up", Geometry(2, 128, 8, 8, 64, (4, 4), (2, 2), (1, 1)), True, False),
    False,
    "fp16",
    "nchw",
    "backward",
)


@pytest.mark.parametrize(
    ("name", "mode", "layout", "stage"),
    [
        ("cyclegan1", "fp16", "nchw", "forward"),
        ("kb57", "fp16", "nchw", "forward"),
        ("dcgan1", "tf32", "channels_last", "grad_input"),
        ("cyclegan1", "fp16", "nchw", "grad_weight"),
        ("centernet_dw", "tf32", "nchw", "grad_weight"),
    ],
)
def test_the_candidates(name: str, mode: str, layout: str, stage: str) -> None:
    layer = LAYERS[name]
    problem = problem_of(layer, MODES[mode], layout)
    if stage == "forward":
        ranked = plan.forward_candidates(problem, layer.bias, H200, regret.MAX_PLANS)
        taken = plan.plan_forward(problem, layer.bias, H200)
    else:
        problem = plan.with_weight_layout(problem, problem.channels_last)
        ranked = plan.backward_candidates(problem, MASKS[stage], H200, regret.MAX_PLANS)
        taken = plan.plan_backward(problem, MASKS[stage], H200)
    found, chosen = candidates(problem, stage, layer.bias, H200)
    families = plans_of(problem, stage, layer.bias, H200)
    assert {made.digest for made in families.values()} <= {made.digest for made in found.values()}
    assert families.keys() <= found.keys()
    assert len({made.digest for made in found.values()}) == len(found) <= max(8, len(families) + 1)
    assert found[chosen] == taken
    assert chosen == next(iter(found)) == family_of(taken)
    assert len(found) >= min(8, len({made.digest for made in ranked}))


def test_stages_for_which_pytorchs_operator_is_taken() -> None:
    problem = problem_of(GENERAL_ALONE, MODES["fp16"], "nchw")
    found, chosen = candidates(problem, "forward", True, H200)
    assert chosen == PYTORCH
    assert PYTORCH not in found


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    selection.add_selection(parser)
    return parser.parse_args(arguments)


def test_about_1100_rows_whose_prefixes_are_samples() -> None:
    layers = selection.layers_of("both")
    assert (len(selection.layers_of("suite")), len(selection.layers_of("random"))) == (len(SUITE), 60)
    found = selection.tasks_of(options())
    assert found == selection.tasks_of(options())
    assert len(set(found)) == len(found) == 8 * len(layers)
    for beginning in (found[:80:2], found[1:80:2]):
        assert {task.mode for task in beginning} == set(selection.MODES)
        assert 0.15 < sum(task.of_suite for task in beginning) / len(beginning) < 0.5
    assert DIRECTIONS == {"forward": ("forward",), "backward": ("grad_input", "grad_weight")}


def test_a_part_of_the_rows() -> None:
    wanted = options("--stage", "grad_weight", "--mode", "fp16", "--layers", "suite", "--layout", "nchw")
    assert selection.directions_of(wanted) == {"forward": (), "backward": ("grad_weight",)}
    found = selection.tasks_of(wanted)
    assert len(found) == len(SUITE)
    assert {task.key[1:] for task in found} == {("fp16", "nchw", "backward")}


def a_slow_choice(calls: Mapping[str, Call], chosen: str) -> dict[str, Timing]:
    """Runs every call; what "auto" takes needs 3 ms, PyTorch's operator 4 and every other plan 2."""
    for call in calls.values():
        call()
    slow = {chosen: 3.0, PYTORCH: 4.0}
    return {name: Timing(ms, ms, ms, 5) for name in calls for ms in [slow.get(name, 2.0)]}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_of_a_pretended_gpu(direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ablation_measure.jit, "compile_kernel", lambda kernel, architecture: b"")
    monkeypatch.setattr(ablation_measure, "perf_counter", Clock())
    ready = prepare(replace(TASK, direction=direction), H200, candidates, DIRECTIONS)
    with pretended_gpu(monkeypatch):
        measured = measure(ready, torch.device("cpu"), H200.architecture, a_slow_choice, lambda _: None)
    rows = regret.rows_of(ready, measured, H200)
    assert [row.stage for row in rows] == [s for s, of in selection.STAGES.items() if of == direction]
    for row in rows:
        assert row.microseconds.keys() == {PYTORCH, *row.plans}
        assert row.chosen in row.microseconds
        assert row.problem["kernel"] == (4, 4)
        assert row.problem["bias"]
        assert row.regret == (1.5 if row.chosen in row.plans else 2.0)
        assert row.of_layer is not None
        assert 1 <= len(row.of_layer) <= 4
        assert set(row.of_layer) < row.plans.keys()
        if row.chosen in row.plans:
            assert row.chosen in row.of_layer
            assert row.regret_of_choice == (1.5 if len(row.of_layer) > 1 else 1.0)
    alike = [
        (row.plans[name], row.plans[f"{name} 2"])
        for row in rows
        for name in row.plans
        if f"{name} 2" in row.plans and name.startswith("forward_implicit_gemm")
    ]
    for best, second in alike:
        assert best["schedule"] != second["schedule"]
        assert "IN_CHANNELS" not in best["schedule"]
    assert bool(alike) == (direction == "forward")
    results = Results("regret", {"gpu": "pretended"}, {}, rows, {TASK.key})
    results.save(tmp_path / "rows.json", regret.summary(rows))
    kept = Results.load(tmp_path / "rows.json", "regret", RegretRow)
    assert [row.microseconds for row in kept.rows] == [row.microseconds for row in rows]
    assert "small" in regret.report(kept.rows)


def test_only_calls_near_the_fastest_or_taken_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    times = {PYTORCH: 9.0, "a": 1.0, "a 2": 1.2, "b": 4.0, "c": 2.0}

    def time_interleaved(calls: Mapping[str, Call], **options: Any) -> dict[str, Timing]:
        asked.append((list(calls), options["iters"]))
        return {name: Timing(times[name] * len(asked), 1, 1, 5) for name in calls}

    monkeypatch.setattr(regret, "time_interleaved", time_interleaved)
    calls: dict[str, Call] = dict.fromkeys(times, list)
    found = regret.timed(calls, "b", torch.device("cpu"))
    assert asked == [(list(times), regret.SAMPLES), (["a", "a 2", "b"], regret.FINAL_SAMPLES)]
    assert {name: timing.median_ms for name, timing in found.items()} == times | {
        "a": 2.0,
        "a 2": 2.4,
        "b": 8.0,
    }


def made_up(times: Mapping[str, float], **changes: Any) -> RegretRow:
    row = RegretRow("layer", "1x1", "k4s2", True, "tf32", "nchw", "forward", "a", times, {}, {}, {})
    return replace(row, **changes)


def test_the_summary_of_the_rows() -> None:
    rows = [
        made_up({"a": 1.0, "b": 2.0, PYTORCH: 4.0}),
        made_up({"a": 2.0, "b": 1.0}, layer="slow"),
        made_up({"a": 1.04, "b": 1.0, PYTORCH: 1.04}),
        made_up({"b": 1.0}),
        made_up({"a": 1.26, "b": 1.0}, of_suite=False, stage="grad_input"),
    ]
    found = {one.group: one for one in regret.regrets(rows)}
    assert list(found) == ["forward, suite", "grad_input, random layers", "all, suite", "all, random layers"]
    suite = found["all, suite"]
    assert suite.mean == pytest.approx((1 * 2 * 1.04) ** (1 / 3))
    assert (suite.rows, suite.largest, suite.above) == (3, 2.0, 1)
    assert suite.as_good == pytest.approx(2 / 3)
    assert suite.over_pytorch == pytest.approx(2.0)
    assert found["all, random layers"].above == 1
    assert (suite.of_choice, suite.of_limit) == (None, None)
    assert "\n  2.00 slow tf32 nchw forward: a 2.0 us, b 1.0 us\n" in regret.report(rows)
    assert regret.report([]) == "nothing was measured"


def test_the_parts_of_the_regret() -> None:
    times = {"a": 3.0, "b": 2.0, "c": 1.0, PYTORCH: 4.0}
    plans: dict[str, dict[str, str]] = {name: {} for name in "abc"}
    rows = [made_up(times, plans=plans, of_layer=["a", "b"], chosen=chosen) for chosen in ("a", "b", PYTORCH)]
    assert [row.regret_of_choice for row in rows] == [1.5, 1.0, None]
    found = {one.group: one for one in regret.regrets(rows)}["all, suite"]
    assert found.of_choice == pytest.approx(1.5**0.5)
    assert found.of_limit == pytest.approx(2.0)
    assert found.mean == pytest.approx((3 * 2 * 4) ** (1 / 3))


def test_without_a_gpu_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert regret.main(["--json", str(tmp_path / "found.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


def row_of(layout: str, ours: float, pytorch: float, of_suite: bool = False) -> RegretRow:
    """Returns a row of a layer that memory bounds on an H200."""
    geometry = Geometry(64, 128, 16, 16, 128, (1, 1))
    return RegretRow(
        layer="one",
        geometry="",
        layer_class="a class",
        of_suite=of_suite,
        mode="fp16",
        layout=layout,
        stage="forward",
        chosen="ours",
        failures={},
        microseconds={"ours": ours, "pytorch": pytorch},
        problem={**geometry._asdict(), "kernel": [1, 1], "bias": False},
        plans={},
    )


def test_classes_are_compared_with_pytorchs_faster_layout() -> None:
    other = row_of("nchw", 1.0, 1.0, of_suite=True)
    rows = [row_of("channels_last", 2.0, 6.0), row_of("nchw", 8.0, 24.0), other]
    (found,) = regret_classes.results_of(rows)
    assert (found.layer_class, found.stage, found.rows, found.slower) == ("a class", "forward", 2, 1)
    assert found.over_pytorch == pytest.approx(math.sqrt(6 / 8 * 6 / 2))
    roof = (2 * 64 * 128 * 16 * 16 + 128 * 128) * 2 / 4256e3
    assert found.roof == pytest.approx(math.sqrt(roof / 8 * roof / 2))
    assert "a class" in regret.report(rows)
