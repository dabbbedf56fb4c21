"""``tune`` if something does not run, cannot be kept or is interrupted, with a pretended GPU."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_cases import run
from torch import Tensor, nn

import tconv_swap
from tconv_swap import tuning
from tconv_swap.cli import workflow
from tconv_swap.cuda import tuned
from tconv_swap.cuda.choice import NATIVE, CallKind
from tconv_swap.cuda.tuned import Winner
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.tuning import Candidate, TunedProblem, TuneReport

H200 = plan.Device("sm_90a", 132, 227 << 10)
PROBLEM = plan.Problem(
    Geometry(8, 64, 16, 16, 32, (4, 4), (2, 2), (1, 1)), torch.float32, "ieee", False, False
)
POSED = CallKind(PROBLEM, (), False, 0)
NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")
UNKNOWN = TunedProblem(
    "forward: x",
    (Candidate("implicit_gemm", "a", None, "does not run"), Candidate(NATIVE, "PyTorch", 10.0)),
    1,
)


class Measured:
    """Maps each candidate's number to what runs; PyTorch's operator is the last and, at 1 us, the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: set[str] = set()
        self.results: dict[str, float] = {}
        self.benchmark: list[bool] = []
        nothing = torch.zeros(1)
        monkeypatch.setattr(tuning.call, "device_facts", lambda index: H200)
        monkeypatch.setattr(tuning.jit, "compile_all", lambda kernels, architecture: None)
        monkeypatch.setattr(tuning, "_tensors", lambda posed, device: (nothing, nothing, None))
        monkeypatch.setattr(tuning.launch, "add_plan", lambda made, *_: made.digest)
        monkeypatch.setattr(tuning, "_launching", lambda digest, tensors: lambda: self.of(digest))
        monkeypatch.setattr(tuning, "_native", lambda posed, tensors: self.of(NATIVE))
        monkeypatch.setattr(tuning, "_in_float64", lambda posed, tensors: self.of("float64"))
        monkeypatch.setattr(tuning, "time_interleaved", self.time)
        self.plans = plan.forward_candidates(PROBLEM, False, H200, 3)

    def of(self, name: str) -> list[Tensor]:
        self.benchmark.append(torch.backends.cudnn.benchmark)
        if name in self.fails:
            raise NO_MEMORY
        return [torch.full((4,), self.results.get(name, 1.0))]

    def time(self, runs: dict[str, Callable[[], Any]], **_: object) -> dict[str, SimpleNamespace]:
        assert runs
        return {name: SimpleNamespace(median_ms=1 / (1000 + int(name))) for name in runs}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def test_pytorchs_operator_may_fail_like_any_candidate(measured: Measured) -> None:
    measured.fails = {NATIVE}
    measured.results = {measured.plans[1].digest: 2.0}
    problem, winner = tuning.measure_problem(POSED, 3, 0.1)
    by_family = {candidate.what: candidate for candidate in problem.candidates}
    assert "out of memory" in by_family["PyTorch's operator"].failure
    assert "wrong: 1.0e+00 from float64" in [one.failure for one in problem.candidates]
    assert winner is not None
    assert (winner.native, bool(winner.kernel)) == (False, True)
    assert "PyTorch's operator did not run" in winner.why
    assert math.isnan(problem.speedup_over_pytorch)


def test_float64_decides_where_pytorch_and_ours_differ(measured: Measured) -> None:
    """cuDNN computes some gradients in float16 wrongly: ours, which are right, must not be left out for it."""
    measured.results = {NATIVE: 2.0, measured.plans[1].digest: 2.0}
    problem, winner = tuning.measure_problem(POSED, 3, 0.1)
    assert winner is not None
    assert (winner.native, winner.kernel) == (False, measured.plans[0].digest)
    failed = [one.failure for one in problem.candidates if one.failure]
    assert failed == ["wrong: 1.0e+00 from float64"] * 2
    assert problem.candidates[problem.chosen].microseconds is not None


def test_float64_is_computed_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        tuning,
        "_native",
        lambda posed, tensors: seen.append(
            (torch.backends.cudnn.enabled, [None if t is None else t.dtype for t in tensors])
        ),
    )
    tuning._in_float64(POSED, (torch.zeros(()), torch.zeros((), dtype=torch.float16), None))
    assert seen == [(False, [torch.float64, torch.float64, None])]


def test_there_is_no_winner_if_nothing_runs(measured: Measured) -> None:
    measured.fails = {NATIVE, *(made.digest for made in measured.plans)}
    problem, winner = tuning.measure_problem(POSED, 3, 0.1)
    assert winner is None
    assert all("out of memory" in candidate.failure for candidate in problem.candidates)


def test_unknown_times_are_null_in_json_and_unknown_in_text() -> None:
    report = TuneReport("GPU", (UNKNOWN,), "/x.json")
    (problem,) = json.loads(json.dumps(report.to_dict(), allow_nan=False))["problems"]
    assert (problem["speedup_over_default"], problem["speedup_over_pytorch"]) == (None, 1.0)
    assert "unknown over the default choice, 1.00x over PyTorch" in str(report)


# All of it


LAYER = nn.Sequential(tconv_swap.ConvTranspose2d(2, 2, 2))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Winner]:
    """Two problems are tuned; returns what is kept of them."""
    found: dict[str, Winner] = {}
    monkeypatch.setattr(tuning, "_collect", lambda *_: [POSED, POSED._replace(has_bias=True)])
    monkeypatch.setattr(tuning, "_name", lambda device: "GPU")
    monkeypatch.setattr(tuned, "machine", lambda device: {"gpu": "GPU"})
    monkeypatch.setattr(tuned, "cache_directory", lambda: tmp_path)

    def keep(device: int, new: dict[str, Winner]) -> Path:
        found.update(new)
        return tmp_path / "gpu.json"

    monkeypatch.setattr(tuned, "keep", keep)
    return found


def test_an_interruption_keeps_what_is_measured(
    measured: Measured, kept: dict[str, Winner], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tuning.measure_problem

    def interrupted(posed: CallKind, *arguments: Any) -> Any:
        if posed.has_bias:
            raise KeyboardInterrupt
        return real(posed, *arguments)

    monkeypatch.setattr(tuning, "measure_problem", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tconv_swap.tune(LAYER, torch.randn(1, 2, 2, 2))
    assert set(kept) == {tuned.problem_key(PROBLEM, (), False)}


def test_cudnn_benchmark_is_on_while_tuning(measured: Measured, kept: dict[str, Winner]) -> None:
    before = torch.backends.cudnn.benchmark
    report = tconv_swap.tune(LAYER, torch.randn(1, 2, 2, 2))
    assert len(kept) == len(report.problems) == 2
    assert measured.benchmark
    assert all(measured.benchmark)
    assert torch.backends.cudnn.benchmark == before


def test_a_report_is_returned_if_winners_cannot_be_kept(
    measured: Measured,
    kept: dict[str, Winner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*arguments: object) -> Path:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/somewhere/else")

    monkeypatch.setattr(tuned, "keep", refuse)
    with caplog.at_level(logging.WARNING, logger="tconv_swap"):
        report = tconv_swap.tune(LAYER, torch.randn(1, 2, 2, 2))
    assert len(report.problems) == 2
    assert report.path is None
    assert str(tuned.path_for({"gpu": "GPU"})) in report.not_kept
    assert "not kept: " in str(report)
    assert [record.getMessage() for record in caplog.records] == [
        f"the winners of the tuning are not kept: {report.not_kept}"
    ]


# The command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(LAYER, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_the_tune_command_writes_unknown_times(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "tune_layers", lambda *_: TuneReport("GPU", (UNKNOWN,), "/x.json"))
    assert run("tune", file, "--json", tmp_path / "r.json").exit_code == 0
    (problem,) = json.loads((tmp_path / "r.json").read_text())["problems"]
    assert problem["speedup_over_default"] is None


def test_the_tune_command_says_what_is_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = TuneReport("GPU", (UNKNOWN,), None, "/x.json: Disk quota exceeded")
    monkeypatch.setattr(workflow, "tune_layers", lambda *_: report)
    result = run("tune", file, "--json", "-", "--quiet")
    assert result.exit_code == 5
    assert "not kept: /x.json: Disk quota exceeded" in result.stderr
    told = json.loads(result.stdout)
    assert (told["exit_code"], told["not_kept"]) == (5, report.not_kept)


def test_an_interrupted_command_says_what_is_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workflow, "tune_layers", interrupted)
    result = run("tune", file)
    assert result.exit_code == 130
    assert "interrupted; what was measured until then is kept" in result.stderr
