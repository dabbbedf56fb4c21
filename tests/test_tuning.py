"""``tune``: the file of winners, the choice by them, and the report; the measurement itself on a GPU."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sampling import sampled
from torch import nn
from tuned_cases import pretended_machine

import tconv_swap
from tconv_swap.cuda import call, tuned
from tconv_swap.cuda.choice import NATIVE, choose_backward, choose_forward
from tconv_swap.cuda.tuned import Winner, problem_key
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.tuning import Candidate, TunedProblem, TuneReport, _fastest

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN = Geometry(128, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
PROBLEM = plan.Problem(DCGAN, torch.float16, "ieee", False, False)
KEY = problem_key(PROBLEM, (), True)
MACHINE = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "1.2",
    "torch": "2.11",
    "cudnn": "9",
    "kernels": "0",
}
WINNERS = {KEY: Winner(True, "0123", "tuned: 12.0 us, PyTorch's 8.0")}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, str]]:
    with pretended_machine(monkeypatch, tmp_path, dict(MACHINE)) as facts:
        yield facts


# The file


def test_winners_are_read_again_and_new_ones_are_added(machine: dict[str, str], tmp_path: Path) -> None:
    assert tuned.winners(0) == {}
    path = tuned.keep(0, WINNERS)
    assert tuned.winners(0) == WINNERS
    other = {"another": Winner(False, "4567", "tuned")}
    assert tuned.keep(0, other) == path
    assert tuned.winners(0) == WINNERS | other
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text())["machine"] == machine


@pytest.mark.parametrize("changed", ["compute_capability", "driver", "torch", "cudnn", "kernels"])
def test_winners_of_another_machine_are_not_used_with_one_warning(
    changed: str, machine: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    tuned.keep(0, WINNERS)
    machine[changed] = "another"
    for _ in range(3):
        assert tuned.winners(0) == {}
    assert len(caplog.records) == 1
    assert "tune again" in caplog.text
    tuned.keep(0, {})
    machine[changed] = MACHINE[changed]
    tuned.winners.cache_clear()
    assert tuned.winners(0) == WINNERS


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: text.replace('"schema": 1', '"schema": 0'),
        lambda text: text.replace('"driver": "1.2"', '"driver": "1.3"'),
        lambda text: text.replace('"native": true', '"native": "no"'),
        lambda text: text.replace('"native": true', '"extra": true'),
        lambda text: text.replace('"kernel": "0123"', '"kernel": null'),
    ],
)
def test_a_corrupt_file_is_ignored_with_one_warning_and_overwritten(
    spoil, machine: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned.keep(0, WINNERS)
    path.write_text(spoil(path.read_text()))
    tuned.winners.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert tuned.winners(0) == {}
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    tuned.keep(0, WINNERS)
    assert tuned.winners(0) == WINNERS


def test_the_key_contains_every_field_of_a_problem() -> None:
    problems = [
        PROBLEM,
        plan.Problem(DCGAN.with_batch(64), torch.float16, "ieee", False, False),
        plan.Problem(DCGAN, torch.bfloat16, "ieee", False, False),
        plan.Problem(DCGAN, torch.float32, "ieee", False, False),
        plan.Problem(DCGAN, torch.float32, "tf32", False, False),
        plan.Problem(DCGAN, torch.float16, "ieee", True, False),
        plan.Problem(DCGAN, torch.float16, "ieee", False, True),
        plan.Problem(DCGAN, torch.float16, "ieee", True, True),
    ]
    masks = [(), (True, False, False), (False, True, False), (False, True, True), (False, False, True)]
    keys = {problem_key(problem, mask, False) for problem in problems for mask in masks}
    assert len(keys) == len(problems) * len(masks)
    assert problem_key(PROBLEM, (), True) != problem_key(PROBLEM, (), False)
    assert KEY == "forward with bias: 128x128x16x16, 128->64 k4 s2 p1, float16 contiguous"


def test_the_digest_covers_planners_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuned._sources.__wrapped__()
    assert before == tuned._sources.__wrapped__()
    monkeypatch.setattr(tuned.jit, "sources_digest", lambda: b"another kernel")
    assert tuned._sources.__wrapped__() != before


# The choice that follows


def test_candidates_are_different_and_the_default_is_the_first() -> None:
    found = plan.forward_candidates(PROBLEM, True, H200, 8)
    assert found[0] == plan.plan_forward(PROBLEM, True, H200)
    assert 1 < len(found) <= 8
    assert len({made.digest for made in found}) == len(found)
    assert plan.forward_candidates(PROBLEM, True, H200, 1) == found[:1]
    rgb = Geometry(128, 64, 32, 32, 8, (4, 4), (2, 2), (1, 1))
    both = plan.forward_candidates(plan.Problem(rgb, torch.float32, "tf32", False, False), True, H200, 8)
    assert {"narrow_mma", "implicit_gemm"} <= {made.family for made in both}


def test_candidates_for_gradients() -> None:
    rgb = plan.Problem(
        Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)), torch.float32, "tf32", False, False
    )
    for mask in ((True, False, False), (False, True, False), (False, True, True)):
        found = plan.backward_candidates(rgb, mask, H200, 8)
        assert found[0] == plan.plan_backward(rgb, mask, H200)
        assert 1 < len(found) <= 8
        assert len({made.digest for made in found}) == len(found)
        assert all(made.outputs == found[0].outputs for made in found)
        winner = {problem_key(rgb, mask, False): Winner(False, found[-1].digest, "tuned")}
        (step,) = choose_backward(rgb, mask, H200, "auto", winner)
        assert (step.mask, step.plan) == (mask, found[-1])
    both = (True, True, True)
    apart = choose_backward(rgb, both, H200, "auto", winner)
    assert [step.mask for step in apart] == [(True, False, False), (False, True, True)]
    assert apart[1].plan == found[-1]


@pytest.mark.parametrize(
    ("channels_last", "dtype"),
    sampled(itertools.product((False, True), (torch.float16, torch.float32, torch.float64)), 2),
    ids=str,
)
def test_every_layer_has_candidates(dtype: torch.dtype, channels_last: bool) -> None:
    """Some families compute no layer of some dtypes, groups and kernels; the others are still candidates."""
    geometries = (
        Geometry(2, 64, 8, 16, 32, (2, 2), (2, 2)),
        Geometry(2, 21, 10, 9, 21, (8, 8), (4, 4), (2, 2), groups=21),
        Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
        Geometry(3, 100, 1, 1, 24, (4, 4)),
        Geometry(2, 20, 5, 7, 12, (3, 3), (1, 1), (1, 1)),
    )
    for geometry in geometries:
        problem = plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)
        found = plan.forward_candidates(problem, True, H200, 8)
        assert found[0] == plan.plan_forward(problem, True, H200)
        for mask in ((True, False, False), (False, True, False), (False, True, True)):
            found = plan.backward_candidates(problem, mask, H200, 8)
            assert found[0] == plan.plan_backward(problem, mask, H200)
            assert len({made.digest for made in found}) == len(found)


def test_the_winner_among_our_plans_is_used() -> None:
    candidates = plan.forward_candidates(PROBLEM, True, H200, 8)
    winners = {KEY: Winner(False, candidates[2].digest, "tuned: 5 us")}
    for backend in ("auto", "kernel"):
        step = choose_forward(PROBLEM, True, H200, backend, winners)
        assert step.plan == candidates[2]
        assert "tuned: 5 us" in step.why
    assert choose_forward(PROBLEM, False, H200, "auto", winners).plan != candidates[2]


def test_pytorchs_operator_is_chosen_only_under_auto() -> None:
    candidates = plan.forward_candidates(PROBLEM, True, H200, 8)
    winners = {KEY: Winner(True, candidates[1].digest, "tuned: PyTorch's 4 us")}
    auto = choose_forward(PROBLEM, True, H200, "auto", winners)
    assert (auto.family, auto.why) == (NATIVE, "tuned: PyTorch's 4 us")
    assert choose_forward(PROBLEM, True, H200, "kernel", winners).plan == candidates[1]


def test_a_winner_that_is_no_longer_a_candidate_is_ignored() -> None:
    winners = {KEY: Winner(False, "gone", "tuned")}
    step = choose_forward(PROBLEM, True, H200, "auto", winners)
    assert step == choose_forward(PROBLEM, True, H200, "auto")


def test_gradients_are_chosen_separately(plans_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.gradients_nchw_to_nhwc, "plan_backward", lambda *_: None)
    monkeypatch.setattr(plan, "_grad_input", lambda p, d: general.plan_grad_input(p))
    monkeypatch.setattr(plan, "_grad_weight", lambda p, d: general.plan_grad_weight(p, d))
    monkeypatch.setattr(plan, "_grad_weight_and_bias", lambda p, d: None)
    monkeypatch.setattr(plan, "expected_clocks", lambda *_: math.inf)
    for_input, for_others = (True, False, False), (False, True, True)
    ours = {
        problem_key(PROBLEM, mask, False): Winner(
            False, plan.plan_backward(PROBLEM, mask, H200).digest, f"tuned {mask}"
        )
        for mask in (for_input, for_others)
    }
    (together,) = choose_backward(PROBLEM, (True, True, True), H200, "auto", ours)
    assert together.plan == plan.plan_backward(PROBLEM, (True, True, True), H200)
    del ours[problem_key(PROBLEM, for_input, False)]
    kernel, native = choose_backward(PROBLEM, (True, True, True), H200, "auto", ours)
    assert (kernel.mask, kernel.family, native.mask) == (for_others, "general", for_input)
    ours[problem_key(PROBLEM, for_others, False)] = Winner(True, "", "tuned: PyTorch's")
    (native,) = choose_backward(PROBLEM, (True, True, True), H200, "auto", ours)
    assert (native.mask, native.plan) == ((True, True, True), None)


# The report


def test_the_default_stays_if_no_candidate_is_clearly_faster() -> None:
    assert _fastest({0: 100.0, 1: 98.0, 2: 99.0}, [0, 1, 2]) == 0
    assert _fastest({0: 100.0, 1: 90.0, 2: 89.0}, [0, 1, 2]) == 1
    assert _fastest({0: 100.0, 1: 90.0, 2: 89.0}, [2, 0, 1]) == 2
    assert _fastest({0: 100.0, 2: 89.0}, [1, 0, 2]) == 2


def test_a_report_is_read_and_written() -> None:
    problem = TunedProblem(
        KEY,
        (
            Candidate("implicit_gemm", "first", 12.0),
            Candidate("implicit_gemm", "second", 8.0),
            Candidate("narrow_mma", "third", None, "wrong: 1.0 from PyTorch's result"),
            Candidate(NATIVE, "PyTorch's operator", 16.0),
        ),
        1,
    )
    assert problem.speedup_over_default == 1.5
    assert problem.speedup_over_pytorch == 2.0
    report = TuneReport("NVIDIA H200", (problem,), "/somewhere.json")
    assert json.loads(json.dumps(report.to_dict()))["problems"][0]["chosen"] == 1
    text = str(report)
    assert "1.50x over the default choice, 2.00x over PyTorch" in text
    assert "*      8.0 us  implicit_gemm: second" in text
    assert "wrong: 1.0" in text


def test_on_the_cpu_there_is_nothing_to_tune() -> None:
    model = tconv_swap.swap_layers(nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = tconv_swap.tune(model, torch.randn(2, 4, 3, 3))
    assert report.problems == ()
    assert "nothing to tune" in str(report)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("count", [0, 9])
def test_bad_arguments_are_named(count: int) -> None:
    with pytest.raises(ValueError, match=f"candidates: expected 1 to 8, got {count}"):
        tconv_swap.tune(tconv_swap.ConvTranspose2d(2, 2, 2), torch.randn(1, 2, 2, 2), candidates=count)


# On a GPU


@pytest.mark.gpu
def test_tuning_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuned, "cache_directory", lambda: tmp_path)
    tuned.winners.cache_clear()
    model = nn.Sequential(
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
    ).cuda()
    x = torch.randn(4, 32, 9, 9, device="cuda")
    expected = model(x)
    tconv_swap.swap_layers(model)
    report = tconv_swap.tune(model, x, candidates=3, budget_s=0.1)
    stages = [problem.problem.partition(":")[0] for problem in report.problems]
    # The input needs no gradient.
    assert stages.count("forward with bias") == 2
    assert sorted(set(stages)) == [
        "forward with bias",
        "gradient of input",
        "gradient of weight and bias",
    ]
    for problem in report.problems:
        times = [c.microseconds for c in problem.candidates if c.microseconds is not None]
        assert problem.candidates[problem.chosen].microseconds <= min(times) * 1.03
        assert not any(c.failure for c in problem.candidates)
    assert str(tmp_path) in report.path
    kept = tuned.winners(torch.cuda.current_device())
    assert set(kept) == {problem.problem for problem in report.problems}
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    # The chosen candidate is what runs.
    steps = []
    real = call.choice.choose_forward

    def spy(*args):
        steps.append(real(*args))
        return steps[-1]

    monkeypatch.setattr(call.choice, "choose_forward", spy)
    call.forget()
    model(x)
    for step, problem in zip(
        steps, [p for p in report.problems if p.problem.startswith("forward")], strict=True
    ):
        assert step.family == problem.candidates[problem.chosen].family
        assert step.plan is None or "tuned" in step.why
    tuned.winners.cache_clear()
    call.forget()
