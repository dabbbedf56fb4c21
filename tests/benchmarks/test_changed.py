"""The plans that a change of planners changes: what is dumped, what differs, and its times on a pretended GPU."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ablation_cases import DRAWN, SUITE, Clock
from pretended_gpu import H200, pretended_gpu

from benchmarks import ablation_measure, changed
from benchmarks.ablation_measure import Call
from benchmarks.families import PYTORCH
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import Timing

SMALL = Layer("small", "made up", Geometry(2, 128, 8, 8, 64, (4, 4), (2, 2), (1, 1)), True, False)


@pytest.fixture(scope="module")
def plans() -> changed.Plans:
    return changed.plans_of({"7": [SMALL]})


def with_another(plans: changed.Plans, stage: str, native: bool = False) -> changed.Plans:
    """Returns the plans with another one for this stage in float16 and NCHW."""
    found = dict(plans)
    for key, (problem, made) in plans.items():
        if (key.mode, key.layout, key.stage) == ("fp16", "nchw", stage):
            others = plan.forward_candidates(problem, True, H200, 8)
            other = next(one for one in others if made is None or one.digest != made.digest)
            found[key] = problem, None if native else other
    return found


def test_every_stage_is_dumped(plans: changed.Plans, tmp_path: Path) -> None:
    assert {(one.mode, one.layout, one.stage) for one in plans} == {
        (mode, layout, stage)
        for mode in ("tf32", "fp16")
        for layout in ("nchw", "channels_last")
        for stage in changed.STAGES
    }
    assert pickle.loads(pickle.dumps(plans)) == plans


def test_the_command_dumps_the_suite_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: dict[str, int] = {}

    def plans_of(layers: Mapping[str, list[Layer]]) -> changed.Plans:
        drawn.update({name: len(those) for name, those in layers.items()})
        return {}

    monkeypatch.setattr(changed, "plans_of", plans_of)
    assert changed.main(["--dump", str(tmp_path / "a"), "--seed", "5", "--seed", "6"]) == 0
    assert drawn == {"suite": len(SUITE), "5": len(DRAWN), "6": len(DRAWN)}
    assert changed.main(["--dump", str(tmp_path / "b")]) == 0
    if not torch.cuda.is_available():
        assert changed.main(["--time", str(tmp_path / "a"), str(tmp_path / "b")]) == 2


def test_only_stages_with_another_plan_are_timed(plans: changed.Plans) -> None:
    assert changed.changed(plans, plans) == {}
    (stage,) = changed.changed(plans, with_another(plans, "forward"))
    assert (stage.mode, stage.layout, stage.stage) == ("fp16", "nchw", "forward")


def with_kernel(plans: changed.Plans, **other: object) -> changed.Plans:
    """Returns the plans with kernels of which a field is another."""

    def launches(made: plan.Plan) -> tuple[plan.Launch, ...]:
        return tuple(one._replace(kernel=one.kernel._replace(**other)) for one in made.launches)  # type: ignore[arg-type]

    return {
        key: (problem, made and made._replace(launches=launches(made)))
        for key, (problem, made) in plans.items()
    }


def test_a_constant_that_no_code_names_makes_no_difference(plans: changed.Plans) -> None:
    assert changed.changed(with_kernel(plans, constants=(("NO_CODE_NAMES_IT", 3),)), plans)
    named = {
        key: (problem, made and made._replace(launches=tuple(map(_with_unnamed_constant, made.launches))))
        for key, (problem, made) in plans.items()
    }
    assert changed.changed(named, plans) == {}


def _with_unnamed_constant(launch: plan.Launch) -> plan.Launch:
    constants = (*launch.kernel.constants, ("NO_CODE_NAMES_IT", 3))
    return launch._replace(kernel=launch.kernel._replace(constants=constants))


def test_a_plan_of_a_kernel_that_is_gone_is_listed(
    plans: changed.Plans, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = with_kernel(plans, source="forward/gone.cu")
    assert changed.changed(before, plans) == {}
    for name, those in (("before", before), ("after", plans)):
        (tmp_path / name).write_bytes(pickle.dumps(those))
    changed.main(["--time", str(tmp_path / "before"), str(tmp_path / "after")])
    assert "not timed, the kernel before is gone: 7 small fp16 nchw forward" in capsys.readouterr().out


@pytest.mark.parametrize("native", [False, True])
def test_changes_on_a_pretended_gpu(
    native: bool, plans: changed.Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timer(calls: Mapping[str, Call], chosen: str) -> dict[str, Timing]:
        for call in calls.values():
            call()
        assert chosen == (PYTORCH if native else changed.AFTER)
        ms = {changed.BEFORE: 3.0, changed.AFTER: 2.0, PYTORCH: 4.0}
        return {name: Timing(ms[name], ms[name], ms[name], 5) for name in calls}

    monkeypatch.setattr(ablation_measure, "perf_counter", Clock())
    stages = changed.changed(plans, with_another(plans, "forward", native))
    with pretended_gpu(monkeypatch):
        (change,) = changed.time_changes(stages, torch.device("cpu"), H200.architecture, timer)
    assert change.before == 3000.0
    assert change.after == (4000.0 if native else 2000.0)
    assert change.gain == pytest.approx(0.75 if native else 1.5)
    assert (change.families[1] == PYTORCH) is native
    assert "small fp16 nchw forward" in changed.report([change])
    assert f"7: 1 stages are {change.gain:.3f} times as fast" in changed.report([change])


def test_a_stage_that_fails_is_listed(plans: changed.Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(changed, "measure", fail)
    stages = changed.changed(plans, with_another(plans, "forward"))
    (change,) = changed.time_changes(stages, torch.device("cpu"), H200.architecture, lambda *_: {})
    assert change.gain is None
    assert "out of memory" in changed.report([change])


def test_plans_of_other_layers_are_left_out(plans: changed.Plans) -> None:
    other = changed.plans_of({"8": [replace(SMALL, name="other")]})
    assert changed.changed(plans, other) == {}
