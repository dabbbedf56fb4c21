"""The ablation of the kernel families: its layers, candidates, arithmetic and its way through a run; on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import GPU, H200, pretended_gpu

from benchmarks import ablation, ablation_measure
from benchmarks.ablation import Results
from benchmarks.ablation_measure import Prepared, StagePlans, Task, measure, prepare
from benchmarks.ablation_report import report
from benchmarks.ablation_rows import FALLBACKS, Row, regrets, verdicts, worst, worth_of
from benchmarks.families import APART, PYTORCH, chosen, family_of, plans_of
from benchmarks.kernels import problem_of
from benchmarks.measuring_process import StoppedError, TaskError
from benchmarks.random_layers import CLASSES, MOST_ELEMENTS, MOST_MACS, OTHER, class_of, random_layers
from tconv_swap.cuda.cache import csrc_directory
from tconv_swap.cuda.plan import with_weight_layout
from tconv_swap.cuda.problem import Problem
from tconv_swap.cuda.program import Plan
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.modes import LAYOUTS, MODES
from tconv_swap.measurement.suite import Layer, load_suite

SUITE = load_suite().layers
DRAWN = random_layers()
BY_NAME = {layer.name: layer for layer in (*SUITE, *DRAWN)}


# The random layers


def test_the_random_layers_are_the_same_again_and_differ_by_the_seed() -> None:
    assert random_layers() == DRAWN
    assert {layer.geometry for layer in random_layers(seed=1)}.isdisjoint(
        layer.geometry for layer in DRAWN if layer.geometry.batch > 1 and layer.geometry.height > 30
    )
    assert random_layers(2) == DRAWN[: 2 * len(CLASSES)]


def test_at_least_60_random_layers_of_every_class_of_moderate_size() -> None:
    assert (
        len({layer.geometry for layer in DRAWN}) == len({layer.name for layer in DRAWN}) == len(DRAWN) >= 60
    )
    assert [class_of(layer.geometry) for layer in DRAWN] == list(CLASSES) * (len(DRAWN) // len(CLASSES))
    for layer in DRAWN:
        g = layer.geometry
        assert max(math.prod(g.input_shape), math.prod(g.output_shape)) <= MOST_ELEMENTS
        assert g.macs <= MOST_MACS
    sizes = [size for layer in DRAWN for size in layer.geometry.input_shape[1:]]
    assert sum(size % 8 != 0 for size in sizes) >= len(sizes) / 4


@pytest.mark.parametrize("layer", DRAWN, ids=lambda layer: layer.name)
def test_pytorch_takes_every_random_layer(layer: Layer) -> None:
    g = layer.geometry
    input, weight = (torch.empty(shape, device="meta") for shape in (g.input_shape, g.weight_shape))
    output = torch.nn.functional.conv_transpose2d(
        input, weight, None, g.stride, g.padding, g.output_padding, g.groups, g.dilation
    )
    assert tuple(output.shape) == g.output_shape


def test_the_classes_of_the_suite() -> None:
    found = {class_of(layer.geometry) for layer in SUITE}
    assert found == {*CLASSES, OTHER}
    assert class_of(BY_NAME["kb81"].geometry) == OTHER
    assert class_of(BY_NAME["dcgan1"].geometry) == "one pixel"
    assert class_of(BY_NAME["hifigan_up1"].geometry) == "vocoder"


# The families

#: Layers, modes, layouts and stages that between them have every family.
HAVING_ALL = (
    ("kb78", "fp16", "nchw", "forward"),
    ("kb81", "fp16", "nchw", "forward"),
    ("kb75", "fp16", "nchw", "forward"),
    ("fcn_up_dw", "fp16", "channels_last", "forward"),
    ("dcgan1", "fp16", "channels_last", "forward"),
    ("dcgan2", "fp16", "nchw", "forward"),
    ("dcgan5", "fp16", "channels_last", "forward"),
    ("cyclegan1", "tf32", "channels_last", "forward"),
    ("cyclegan1", "tf32", "channels_last", "grad_input"),
    ("cyclegan1", "tf32", "nchw", "grad_input"),
    ("cyclegan1", "fp16", "nchw", "grad_input"),
    ("cyclegan1", "fp16", "nchw", "grad_weight"),
    ("cyclegan1", "fp16", "nchw", "gradients"),
    ("cyclegan1", "fp16", "channels_last", "grad_weight"),
    ("cyclegan1", "tf32", "nchw", "grad_weight"),
    ("cyclegan1", "tf32", "channels_last", "grad_weight"),
    ("kb71", "tf32", "nchw", "grad_weight"),
    ("dcgan5", "fp16", "nchw", "grad_input"),
    ("dcgan5", "fp16", "nchw", "grad_weight"),
    ("centernet_dw", "tf32", "nchw", "gradients"),
    ("dcgan1", "tf32", "channels_last", "gradients"),
    ("fcn32s", "fp16", "nchw", "gradients"),
    ("dcgan5", "fp16", "nchw", "gradients"),
)


def posed(name: str, mode: str, layout: str, stage: str) -> Problem:
    problem = problem_of(BY_NAME[name], MODES[mode], layout)
    return problem if stage == "forward" else with_weight_layout(problem, problem.channels_last)


def families(name: str, mode: str, layout: str, stage: str) -> dict[str, Plan]:
    return plans_of(posed(name, mode, layout, stage), stage, BY_NAME[name].bias, H200)


def test_every_family_of_the_package_is_listed_for_a_layer() -> None:
    found: set[str] = set()
    for case in HAVING_ALL:
        for name in families(*case):
            found |= set(name.removeprefix("arranged ").split(" + "))
    for stage in ("forward", "grad_input", "grad_weight"):
        wide = Problem(BY_NAME["kb81"].geometry, torch.float64, "ieee", False, False)
        found |= set(plans_of(wide, stage, False, H200))
    helpers = ("pack_", "arrange", "part_phases", "reduce_slices", "general_grad_bias")
    sources = {path.stem for path in (csrc_directory() / "kernels").glob("*.cu")}
    assert found == {
        name for name in sources if not name.startswith(helpers) and not name.endswith("_reduce")
    }


def test_the_ways_by_a_copy_are_told_from_those_without() -> None:
    assert {"forward_wgmma", "arranged forward_boxes"} <= families(
        "cyclegan1", "tf32", "nchw", "forward"
    ).keys()
    both = families("cyclegan1", "fp16", "nchw", "gradients")
    assert list(both) == ["arranged grad_input_boxes + grad_weight_boxes"]
    assert family_of(both["arranged grad_input_boxes + grad_weight_boxes"]) in both


@pytest.mark.parametrize("case", HAVING_ALL, ids=" ".join)
def test_what_the_rule_takes_is_among_what_is_measured(case: tuple[str, str, str, str]) -> None:
    problem, stage, bias = posed(*case), case[-1], BY_NAME[case[0]].bias
    found = families(*case)
    assert {family_of(made): made for made in found.values()} == found
    taken = chosen(problem, stage, bias, H200, found)
    assert taken in {*found, PYTORCH} | ({APART} if stage == "gradients" else set())


def test_the_rule_takes_pytorch_where_ours_would_be_the_general_kernel() -> None:
    problem = posed("vocoder_1", "fp16", "nchw", "forward")
    assert list(plans_of(problem, "forward", True, H200)) == ["general_forward"]
    assert chosen(problem, "forward", True, H200, ["general_forward"]) == PYTORCH


# What rows say


def row(times: Mapping[str, float], *, taken: str = PYTORCH, **changes: Any) -> Row:
    made = Row("layer", "1x1", "k4s2", True, "tf32", "nchw", "forward", taken, times, {})
    return replace(made, **changes)


def test_the_worth_of_a_family_is_a_geometric_mean_of_the_next_best() -> None:
    rows = [
        row({"pytorch": 8, "a": 2, "b": 4}, layer="1"),
        row({"pytorch": 3, "a": 6, "b": 4}, layer="2"),
        row({"pytorch": 10, "b": 5}, layer="3", of_suite=False),
        row({"a": 1}, layer="4"),
        row({"pytorch": 8, "a": 1}, layer="5", stage="grad_input"),
        row({"pytorch": 9, "a": 1}, layer="6", layout="channels_last"),
    ]
    worth = worth_of(rows, "forward", "a")
    assert worth is not None
    assert (worth.rows, worth.wins) == (4, 2)
    assert worth.of_stage == pytest.approx((2 * 1 * 1 * 1 * 9) ** (1 / 5))
    assert worth.margin == pytest.approx((2 * 9) ** (1 / 2))
    assert (worth.combination, worth.of_combination) == ("tf32 channels_last", pytest.approx(9))
    assert (worth.layer_class, worth.of_class) == ("k4s2, tf32 nchw", pytest.approx(2 ** (1 / 4)))
    assert worth.of_suite == pytest.approx(18 ** (1 / 4))
    assert worth.of_random == pytest.approx(1)
    assert worth_of(rows, "gradients", "a") is None


@pytest.mark.parametrize(("gain", "keeps"), [(1.009, False), (1.011, True)])
def test_a_family_stays_that_is_worth_more_than_a_hundredth_of_its_stage(gain: float, keeps: bool) -> None:
    rows = [row({"pytorch": gain, "a": 1}, layer=str(n)) for n in range(4)]
    assert [(one.family, one.keeps) for one in verdicts(rows)] == [("a", keeps)]


@pytest.mark.parametrize(("gain", "keeps"), [(1.29, False), (1.31, True)])
def test_a_family_stays_that_is_worth_much_on_a_class(gain: float, keeps: bool) -> None:
    rare = [row({"pytorch": gain, "a": 1}, layer=f"rare {n}", layer_class="pose") for n in range(3)]
    rest = [row({"pytorch": 1, "b": 9}, layer=str(n)) for n in range(200)]
    found = {one.family: one.keeps for one in verdicts(rare + rest)}
    assert found == {"a": keeps, "b": False}


def test_of_two_that_do_the_same_one_goes() -> None:
    rows = [row({"pytorch": 2, "a": 1, "b": 1.001}, layer=str(n)) for n in range(4)]
    assert [(one.family, one.keeps) for one in verdicts(rows)] == [("b", False), ("a", True)]


def test_what_other_gpus_need_stays() -> None:
    rows = [row({"pytorch": 1, "forward_tile": 2}, layer=str(n)) for n in range(4)]
    assert [(one.keeps, one.fallback) for one in verdicts(rows)] == [(True, True)]
    assert "general_forward" in FALLBACKS


def test_the_regret_of_the_rule() -> None:
    rows = [
        row({"pytorch": 1, "a": 2}, taken="a", layer="1"),
        row({"pytorch": 2, "a": 1}, taken="a", layer="2"),
        row({"pytorch": 2}, taken="a", layer="3"),
    ]
    (found,) = regrets(rows)
    assert (found.rows, found.mean, found.largest, found.above) == (2, pytest.approx(2**0.5), 2, 1)
    assert [one.layer for one in worst(rows)] == ["1"]
    told = report(rows)
    assert "| forward | 2 | 1.414 | 2.00 | 1 |" in told
    assert "| 1 (1x1) | tf32 nchw forward | a 2.0 us | pytorch 1.0 us | 2.00 |" in told


# A run

TASK = Task(
    Layer("small", "made up", Geometry(2, 128, 8, 8, 64, (4, 4), (2, 2), (1, 1)), True, False),
    False,
    "fp16",
    "nchw",
    "backward",
)


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_measure.jit, "compile_kernel", lambda kernel, architecture: b"")


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["tf32", "fp16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_family_is_measured_against_pytorchs_result(
    direction: str, mode: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepare(replace(TASK, mode=mode, layout=layout, direction=direction), H200)
    announced: list[str] = []
    with pretended_gpu(monkeypatch):
        rows = measure(ready, torch.device("cpu"), H200.architecture, 0.001, announced.append)
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
def test_what_is_wrong_or_does_not_run_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(replace(TASK, direction="forward"), H200)
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
        (row,) = measure(ready, torch.device("cpu"), H200.architecture, 0.001, lambda _: None)
    assert row.failures == {
        wrong: "wrong: 5.0e-01 from the result of pytorch",
        refused: "RuntimeError: refused",
    }
    assert row.microseconds.keys() == {PYTORCH, *ready.stages["forward"].plans} - {wrong, refused}


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_kernel(kernel: Any, architecture: str) -> bytes:
        if kernel.entry == "grad_input_tile":
            raise ablation_measure.jit.nvrtc.CompileError("no\nand more")
        return b""

    monkeypatch.setattr(ablation_measure.jit, "compile_kernel", compile_kernel)
    stage = prepare(TASK, H200).stages["grad_input"]
    assert stage.failures == {"grad_input_tile": "CompileError: no"}
    assert "grad_input_tile" not in stage.plans
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
            row({PYTORCH: 2, "a": 1}, layer=task.layer.name, mode=task.mode, layout=task.layout, stage=stage)
            for stage in ready.stages
        ]


def ready(task: Task) -> Prepared:
    problem = problem_of(task.layer, MODES[task.mode], task.layout)
    plans = {"a": Plan("a", "", (), ()), "b": Plan("b", "", (), ())}
    return Prepared(task, {"forward": StagePlans(problem, task.layout, plans, {})}, 0)


def at_once(waiting: Sequence[Task]) -> Iterator[tuple[Task, Future[Prepared]]]:
    for task in waiting:
        future: Future[Prepared] = Future()
        future.set_result(ready(task))
        yield task, future


WAITING = [replace(TASK, layout=layout, mode=mode) for layout in LAYOUTS for mode in MODES]


def run(process: Any, path: Path, results: Results, seconds_left: Callable[[], float] = lambda: 1.0) -> bool:
    waiting = [task for task in WAITING if task.key not in results.done]
    return ablation.run(waiting, results, at_once, process, path, seconds_left)


def test_a_run_that_ends_early_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, left = tmp_path / "found.json", iter([9.0, 5.0, 0.0])
    assert not run(Process(), path, Results({}, {}), lambda: next(left))
    kept = Results.load(path)
    assert len(kept.done) == len(kept.rows) == 2
    process = Process()
    assert run(process, path, kept)
    assert [one.task for one in process.asked] == WAITING[2:]
    assert Results.load(path) == kept
    assert {row.key[:3] for row in kept.rows} == {task.key[:3] for task in WAITING}
    assert '"verdicts"' in path.read_text()


def test_it_saves_every_half_minute(tmp_path: Path) -> None:
    path, left = tmp_path / "found.json", iter([100.0, 80.0, 69.0, 60.0])
    with pytest.raises(StopIteration):
        run(Process(), path, Results({}, {}), lambda: next(left))
    assert len(Results.load(path).rows) == 2


def test_a_family_that_hangs_is_left_out_and_the_rest_measured(tmp_path: Path) -> None:
    process = Process({"b": StoppedError("forward/b", "no answer for 45 s")})
    results = Results({}, {})
    assert run(process, tmp_path / "found.json", results)
    assert len(results.rows) == len(WAITING)
    assert [list(one.stages["forward"].plans) for one in process.asked[:2]] == [["a", "b"], ["a"]]
    assert process.asked[1].stages["forward"].failures == {"b": "no answer for 45 s"}
    assert results.failures[0] == "small tf32 nchw backward: no answer for 45 s in forward/b"


@pytest.mark.parametrize(
    "error", [StoppedError("forward/timing", "died"), StoppedError("forward/pytorch", "died"), TaskError("x")]
)
def test_what_cannot_be_measured_is_noted_and_the_rest_goes_on(error: Exception, tmp_path: Path) -> None:
    process, results = Process({"channels_last": error}), Results({}, {})
    assert run(process, tmp_path / "found.json", results)
    assert len(results.rows) == len(results.failures) == len(WAITING) // 2
    assert len(results.done) == len(process.asked) == len(WAITING)


def test_what_comes_first_is_a_sample_of_the_whole() -> None:
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
        Results.load(tmp_path / "other.json")


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ablation.main(["--json", str(tmp_path / "found.json")]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_workers_prepare_ahead_in_about_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        submitted = 0

        def submit(self, work: Callable[[Task], Prepared], task: Task) -> Future[Prepared]:
            self.submitted += 1
            future: Future[Prepared] = Future()
            future.set_result(work(task))
            return future

    pool = Pool()
    found = []
    for task, future in ablation._prepared(pool, ready, 3, WAITING):  # type: ignore[arg-type]
        found.append(task)
        assert future.result().task == task
        assert pool.submitted <= len(found) + 2
    assert found == WAITING
