"""The ablation's way through a run: preparing, measuring, saving, going on; with a pretended GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ablation_cases import DRAWN, SUITE, Clock, made_up
from pretended_gpu import GPU, H200, pretended_gpu
from sampling import sampled

from benchmarks import ablation, ablation_measure
from benchmarks.ablation_measure import Call, Prepared, StagePlans, Task, best_of_families, measure
from benchmarks.ablation_rows import Row
from benchmarks.families import APART, PYTORCH, family_of
from benchmarks.kernels import problem_of
from benchmarks.measuring_process import NotStartedError, StoppedError, TaskError
from benchmarks.random_layers import CLASSES, class_of
from benchmarks.sweep import Results, prepared
from benchmarks.sweep_options import Part
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.modes import LAYOUTS, MODES
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import Timing, time_interleaved
from tconv_swap.runtime.program import Plan

TASK = Task(
    Layer("small", "made up", Geometry(2, 256, 8, 8, 128, (4, 4), (2, 2), (1, 1)), True, False),
    False,
    "fp16",
    "nchw",
    "backward",
)

CPU = torch.device("cpu")
SWEEP = ablation.sweep(None, 0.001)


def prepare(task: Task) -> Prepared:
    return ablation_measure.prepare(task, H200, best_of_families)


def timed(calls: Mapping[str, Call], chosen: str) -> Mapping[str, Timing]:
    return time_interleaved(calls, budget_s=0.001)


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_measure.jit, "compile_kernel", lambda kernel, architecture: b"")


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize(
    ("direction", "mode", "layout"),
    sampled(itertools.product(("forward", "backward"), ("tf32", "fp16"), LAYOUTS), 3),
)
def test_every_family_is_measured_against_pytorchs_result(
    direction: str, mode: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepare(replace(TASK, mode=mode, layout=layout, direction=direction))
    announced: list[str] = []
    with pretended_gpu(monkeypatch):
        rows = measure(ready, CPU, H200.architecture, timed, announced.append)
    assert [row.stage for row in rows] == list(ready.stages)
    for row in rows:
        stage = ready.stages[row.stage]
        apart = {APART} if row.stage == "gradients" else set()
        assert row.microseconds.keys() == {PYTORCH, *stage.plans} | apart
        assert not row.failures
        assert all(time > 0 for time in row.microseconds.values())
        assert {f"{row.stage}/{name}" for name in row.microseconds} < set(announced)
    assert len(rows) == (1 if direction == "forward" else 3 if (mode, layout) == ("fp16", "nchw") else 2)


@pytest.mark.usefixtures("_no_compiler")
def test_plans_that_are_wrong_or_do_not_run_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(replace(TASK, direction="forward"))
    wrong, refused = list(ready.stages["forward"].plans)[:2]
    add, run = GPU.add_plan, GPU.launch
    wrong_handles: list[int] = []

    def add_plan(gpu: GPU, made: Plan, *others: Any) -> int:
        if family_of(made) == refused:
            raise RuntimeError("refused\nand more")
        handle = add(gpu, made, *others)
        wrong_handles.extend([handle] * (family_of(made) == wrong))
        return handle

    def launched(gpu: GPU, handle: int, *tensors: Any) -> list[torch.Tensor]:
        return [result * (1.5 if handle in wrong_handles else 1) for result in run(gpu, handle, *tensors)]

    monkeypatch.setattr(GPU, "add_plan", add_plan)
    monkeypatch.setattr(GPU, "launch", launched)
    with pretended_gpu(monkeypatch):
        (row,) = measure(ready, CPU, H200.architecture, timed, lambda _: None)
    assert row.failures == {
        wrong: "wrong: 5.0e-01 from float64",
        refused: "RuntimeError: refused",
    }
    assert row.microseconds.keys() == {PYTORCH, *ready.stages["forward"].plans} - {wrong, refused}


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_float64_decides_if_pytorch_is_wrong(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(replace(TASK, direction=direction))
    by_pytorch = ablation_measure.by_pytorch

    def wrong(*arguments: Any) -> list[torch.Tensor]:
        return [1.5 * result for result in by_pytorch(*arguments)]

    monkeypatch.setattr(ablation_measure, "by_pytorch", wrong)
    with pretended_gpu(monkeypatch):
        rows = measure(ready, CPU, H200.architecture, timed, lambda _: None)
    for row in rows:
        if row.stage == "gradients":  # whose fastest parts apart are ours
            assert row.failures[PYTORCH] == "wrong: 5.0e-01 from float64"
            continue
        assert row.failures == {PYTORCH: "wrong: 5.0e-01 from float64"}
        assert row.microseconds.keys() == ready.stages[row.stage].plans.keys()


@pytest.mark.usefixtures("_no_compiler")
def test_plans_that_are_far_too_slow_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(replace(TASK, direction="forward"))
    slow = next(iter(ready.stages["forward"].plans))
    add, run = GPU.add_plan, GPU.launch
    slow_handles: list[int] = []
    calls: list[int] = []
    clock = Clock()

    def add_plan(gpu: GPU, made: Plan, *others: Any) -> int:
        handle = add(gpu, made, *others)
        slow_handles.extend([handle] * (family_of(made) == slow))
        return handle

    def launched(gpu: GPU, handle: int, *tensors: Any) -> list[torch.Tensor]:
        calls.append(handle)
        clock.now += 1.0 if handle in slow_handles else 0.0
        return run(gpu, handle, *tensors)

    monkeypatch.setattr(GPU, "add_plan", add_plan)
    monkeypatch.setattr(GPU, "launch", launched)
    monkeypatch.setattr(ablation_measure, "perf_counter", clock)
    with pretended_gpu(monkeypatch):
        (row,) = measure(ready, CPU, H200.architecture, timed, lambda _: None)
    assert row.microseconds[slow] > 1e6
    assert [calls.count(handle) for handle in slow_handles] == [2]
    assert min(calls.count(handle) for handle in set(calls) - set(slow_handles)) > 5


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(kernel: Any, architecture: str) -> bytes:
        if kernel.entry == "grad_input_implicit_gemm_mma":
            raise ablation_measure.jit.nvrtc.CompileError("no\nand more")
        return b""

    monkeypatch.setattr(ablation_measure.jit, "compile_kernel", compile_kernel)
    stage = prepare(TASK).stages["grad_input"]
    assert stage.failures == {"grad_input_implicit_gemm_mma": "CompileError: no"}
    assert "grad_input_implicit_gemm_mma" not in stage.plans
    assert stage.plans


class Process:
    """In the place of the measuring process: gives a row for each task, or what ``stopping`` says."""

    def __init__(self, stopping: Mapping[str, Exception] | None = None) -> None:
        self.stopping = dict(stopping or {})
        self.asked: list[Prepared] = []

    def run(self, ready: Prepared) -> list[Row]:
        self.asked.append(ready)
        for name, error in self.stopping.items():
            if any(name in stage.plans or name == stage.chosen for stage in ready.stages.values()):
                raise error
        task = ready.task
        return [
            made_up(
                {PYTORCH: 2, "a": 1}, layer=task.layer.name, mode=task.mode, layout=task.layout, stage=stage
            )
            for stage in ready.stages
        ]


def ready(task: Task) -> Prepared:
    problem = problem_of(task.layer, MODES[task.mode], task.layout)
    plans = {"a": Plan("a", "", (), ()), "b": Plan("b", "", (), ())}
    return Prepared(task, {"forward": StagePlans(problem, task.layout, plans, {})})


def at_once(waiting: Sequence[Task]) -> Iterator[tuple[Task, Future[Prepared]]]:
    for task in waiting:
        future: Future[Prepared] = Future()
        future.set_result(ready(task))
        yield task, future


WAITING = [replace(TASK, layout=layout, mode=mode) for layout in LAYOUTS for mode in MODES]


def no_results() -> Results[Row]:
    return Results("ablation", {"gpu": "pretended"}, {"commit": "1", "part": "0/1"})


def load(path: Path) -> Results[Row]:
    return Results.load(path, "ablation", Row)


def run(
    process: Any, path: Path, results: Results[Row], seconds_left: Callable[[], float] = lambda: 1.0
) -> bool:
    waiting = [task for task in WAITING if task.key not in results.done]
    return SWEEP.run(waiting, results, at_once, process, path, seconds_left)


def test_a_run_that_ended_early_is_continued(tmp_path: Path) -> None:
    path, left = tmp_path / "found.json", iter([9.0, 5.0, 0.0])
    assert not run(Process(), path, no_results(), lambda: next(left))
    kept = load(path)
    assert len(kept.done) == len(kept.rows) == 2
    process = Process()
    assert run(process, path, kept)
    assert [one.task for one in process.asked] == WAITING[2:]
    assert load(path) == kept
    assert {row.key[:3] for row in kept.rows} == {task.key[:3] for task in WAITING}
    assert '"verdicts"' in path.read_text()


def test_the_file_is_saved_every_half_minute(tmp_path: Path) -> None:
    path, left = tmp_path / "found.json", iter([100.0, 80.0, 69.0, 60.0])
    with pytest.raises(StopIteration):
        run(Process(), path, no_results(), lambda: next(left))
    assert len(load(path).rows) == 2


def test_a_family_that_hangs_is_left_out_and_the_rest_measured(tmp_path: Path) -> None:
    process = Process({"b": StoppedError("forward/b", "no answer for 45 s")})
    results = no_results()
    assert run(process, tmp_path / "found.json", results)
    assert len(results.rows) == len(WAITING)
    assert [list(one.stages["forward"].plans) for one in process.asked[:2]] == [["a", "b"], ["a"]]
    assert process.asked[1].stages["forward"].failures == {"b": "no answer for 45 s"}
    assert results.failures[0] == "small tf32 nchw backward: no answer for 45 s in forward/b"


@pytest.mark.parametrize(
    "error", [StoppedError("forward/timing", "died"), StoppedError("forward/pytorch", "died"), TaskError("x")]
)
def test_a_failed_task_is_noted_and_the_others_are_measured(error: Exception, tmp_path: Path) -> None:
    process, results = Process({"channels_last": error}), no_results()
    assert run(process, tmp_path / "found.json", results)
    assert len(results.rows) == len(results.failures) == len(WAITING) // 2
    assert len(results.done) == len(process.asked) == len(WAITING)


def test_every_prefix_of_the_tasks_is_a_sample() -> None:
    all_tasks = ablation.tasks(SUITE, DRAWN)
    assert all_tasks == ablation.tasks(SUITE, DRAWN)
    assert len(all_tasks) == len(set(all_tasks))
    assert {task.layer for task in all_tasks} == {*SUITE, *DRAWN}
    first = [task for task in all_tasks if task.mode in ablation.MODES]
    assert first == all_tasks[: len(first)]
    assert len(first) == 2 * 2 * 2 * (len(SUITE) + len(DRAWN))
    beginning = first[:150]
    assert {task.mode for task in beginning} == set(ablation.MODES)
    assert {class_of(task.layer.geometry) for task in beginning} >= set(CLASSES)
    assert 0.15 < sum(task.of_suite for task in beginning) / len(beginning) < 0.45


def test_a_result_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"benchmark": "layers"}')
    with pytest.raises(ValueError, match=r"not of benchmarks\.ablation"):
        load(tmp_path / "other.json")


def test_without_a_gpu_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ablation.main(["--json", str(tmp_path / "found.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("error", [NotStartedError("died"), BrokenExecutor("out of memory")])
def test_a_broken_pool_leaves_the_rest_for_another_run(error: Exception, tmp_path: Path) -> None:
    process, results = Process({"channels_last": error}), no_results()
    assert not run(process, tmp_path / "found.json", results)
    assert len(results.rows) == len(results.done) == len(WAITING) // 2
    assert load(tmp_path / "found.json") == results


def test_the_report_comes_from_the_file_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    run(Process(), path, no_results())
    assert ablation.main(["--json", str(path), "--report"]) == 0
    assert "| forward | a | 8 | 8 | 2.00 | 2.000 |" in capsys.readouterr().out


def test_tasks_are_yielded_as_they_become_ready() -> None:
    futures: list[Future[Prepared]] = []

    class Pool:
        def submit(self, work: Callable[[Task], Prepared], task: Task) -> Future[Prepared]:
            futures.append(Future())
            if len(futures) in (3, 6):
                futures[-1].set_result(work(task))
            return futures[-1]

    tasks = prepared(Pool(), ready, WAITING)  # type: ignore[arg-type]
    task, future = next(tasks)
    assert len(futures) == len(WAITING)
    assert future.result().task == task
    for one, unfinished in zip(WAITING, futures, strict=True):
        if not unfinished.done():
            unfinished.set_result(ready(one))
    assert [task, *(one for one, _ in tasks)] == [WAITING[2], *WAITING[:2], *WAITING[3:]]


def test_parts_are_merged_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    found = []
    for index, path in enumerate(paths):
        part = Part.of_text(f"{index}/2")
        results = no_results()
        results.settings["part"] = str(part)
        assert SWEEP.run(part.of(WAITING), results, at_once, Process(), path, lambda: 1.0)
        found.append(results)
    assert found[0].done | found[1].done == {task.key for task in WAITING}
    merged = tmp_path / "all.json"
    assert ablation.main(["--json", str(merged), "--merge", *map(str, paths)]) == 0
    assert "| forward | a | 8 | 8 | 2.00 | 2.000 |" in capsys.readouterr().out
    assert load(merged).rows == found[0].rows + found[1].rows
    with pytest.raises(ValueError, match="both files have"):
        found[0].joined(found[0])
    found[1].settings["commit"] = "2"
    with pytest.raises(ValueError, match="not parts of one run"):
        found[0].joined(found[1])


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "a/b"])
def test_a_malformed_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Part.of_text(text)
