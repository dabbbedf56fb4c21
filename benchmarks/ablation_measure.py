"""Times one direction of one layer with every family and with PyTorch's operator: prepares without a GPU, times on one.

Plans and kernels are prepared by processes on all cores; the one process that has the GPU measures.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.ablation_rows import Row
from benchmarks.families import APART, MASKS, PYTORCH, chosen, plans_of
from benchmarks.kernels import problem_of
from benchmarks.stage_row import stage_fields
from benchmarks.truth import Data, errors
from tconv_swap.files.fileformat import first_line
from tconv_swap.kernels.plan import with_weight_layout
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import Timing
from tconv_swap.runtime import jit, launch, native
from tconv_swap.runtime.program import Plan
from tconv_swap.tuning import MAX_ERROR

#: The stages that share their tensors.
DIRECTIONS = {"forward": ("forward",), "backward": tuple(MASKS)}
#: Called with the name of what runs next: if no further call comes, this one hangs or has died.
Announce = Callable[[str], None]
Call = Callable[[], list[Tensor]]
Tensors = tuple[Tensor, Tensor, Tensor | None]
#: Returns, for a problem, a stage, whether there is a bias, and the GPU, the plans to measure by name, and the name of
#: the plan that the rule takes.
Ways = Callable[[Problem, str, bool, Device], tuple[dict[str, Plan], str]]
#: Times calls in one run; the second argument is the name of the one that the rule takes.
Timer = Callable[[Mapping[str, Call], str], Mapping[str, Timing]]
TIMING = "timing"
#: The results of a stage, by their names in benchmarks.truth.
_RESULTS = {
    "forward": ("output",),
    "grad_input": ("grad_input",),
    "grad_weight": ("grad_weight",),
    "gradients": ("grad_input", "grad_weight"),
}
#: A call that takes this many times as long as the fastest is not timed again.
HOPELESS = 10


@dataclass(frozen=True, slots=True)
class Task:
    """The unit that is prepared and measured at once."""

    layer: Layer
    of_suite: bool
    mode: str
    layout: str
    direction: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.layer.name, self.mode, self.layout, self.direction

    def __str__(self) -> str:
        return " ".join(self.key)


@dataclass(frozen=True, slots=True)
class StagePlans:
    """``chosen``: what the rule takes. ``failures``: families whose kernels do not compile, or that were removed."""

    problem: Problem
    chosen: str
    plans: Mapping[str, Plan]
    failures: Mapping[str, str]

    def without(self, family: str, why: str) -> StagePlans:
        """Returns the same without one family."""
        plans = {name: made for name, made in self.plans.items() if name != family}
        return replace(self, plans=plans, failures={**self.failures, family: why})


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task whose kernels are in the cache on disk; ``stages`` by name."""

    task: Task
    stages: Mapping[str, StagePlans]

    @property
    def launches(self) -> int:
        """Returns the number of launches of all plans."""
        return sum(len(made.launches) for stage in self.stages.values() for made in stage.plans.values())

    def without(self, running: str, how: str) -> Prepared | None:
        """Returns the same without the way that ran when the process stopped; None if that was PyTorch's operator or no
        particular way."""
        stage, _, way = running.partition("/")
        if stage not in self.stages or way == TIMING or way not in self.stages[stage].plans:
            return None
        return replace(self, stages={**self.stages, stage: self.stages[stage].without(way, how)})


def best_of_families(
    problem: Problem, stage: str, has_bias: bool, device: Device
) -> tuple[dict[str, Plan], str]:
    """Returns the best plan of each family, by the family's name."""
    plans = plans_of(problem, stage, has_bias, device)
    return plans, chosen(problem, stage, has_bias, device, plans)


def prepare(
    task: Task, device: Device, ways: Ways, directions: Mapping[str, tuple[str, ...]] = DIRECTIONS
) -> Prepared:
    """Plans and compiles; needs no GPU. ``directions``: the stages to measure of each."""
    problem = problem_of(task.layer, MODES[task.mode], task.layout)
    if task.direction == "backward":
        problem = with_weight_layout(problem, problem.channels_last)
    stages: dict[str, StagePlans] = {}
    for stage in directions[task.direction]:
        plans, taken = ways(problem, stage, task.layer.bias, device)
        failures: dict[str, str] = {}
        for family, made in list(plans.items()):
            try:
                for one in made.launches:
                    jit.compile_kernel(one.kernel, device.architecture)
            except RuntimeError as error:
                failures[family] = first_line(error)
                del plans[family]
        if stage == "gradients" and not plans:
            continue  # computing both gradients separately shows the same
        stages[stage] = StagePlans(problem, taken, plans, failures)
    return Prepared(task, stages)


def measure(
    prepared: Prepared,
    device: torch.device,
    architecture: str,
    timer: Timer,
    announce: Announce,
) -> list[Row]:
    """Returns the rows of a task.

    PyTorch's operator comes first. If a result differs from its result, float64 decides which of the two is wrong; a
    wrong way is not timed but noted as a failure.

    Raises:
        RuntimeError: there is not enough memory for the tensors themselves.
        SystemExit: the GPU is lost.
    """
    task, rows = prepared.task, []
    fastest: dict[str, Call] = {}
    with MODES[task.mode].switched_on():
        tensors: Tensors | None = None
        for stage, planned in prepared.stages.items():
            tensors = tensors or _tensors(planned.problem, task, device)
            calls, failures = _calls(stage, planned, tensors, device, architecture, announce)
            if stage == "gradients" and {"grad_input", "grad_weight"} <= fastest.keys():
                calls[APART] = _both(fastest["grad_input"], fastest["grad_weight"])
            times = _timed_if_right(calls, planned.problem, stage, tensors, failures, device, announce)
            if not times:
                continue
            limit = HOPELESS * min(times.values())
            running = {name: calls[name] for name, time in times.items() if time <= limit}
            announce(f"{stage}/{TIMING}")
            timings = timer(running, planned.chosen)
            times |= {name: timing.median_ms * 1e3 for name, timing in timings.items()}
            fastest[stage] = running[min(running, key=lambda name: times[name])]
            rows.append(_row(task, stage, planned.chosen, times, failures))
    return rows


def _row(task: Task, stage: str, chosen: str, times: Mapping[str, float], failures: Mapping[str, str]) -> Row:
    return Row(
        **stage_fields(task.layer, task.of_suite, task.mode, task.layout, stage),
        chosen=chosen,
        microseconds=times,
        failures=failures,
    )


def _tensors(problem: Problem, task: Task, device: torch.device) -> Tensors:
    """Returns random tensors with the layouts of the problem: input, weight, bias, or grad_output, input, weight."""
    g = problem.geometry
    generator = torch.Generator(device).manual_seed(zlib.crc32(task.layer.name.encode()))

    def random(shape: tuple[int, ...], channels_last: bool) -> Tensor:
        values = torch.randn(shape, dtype=problem.dtype, device=device, generator=generator)
        return values.contiguous(memory_format=torch.channels_last) if channels_last else values

    input = random(g.input_shape, problem.channels_last)
    weight = random(g.weight_shape, problem.weight_channels_last)
    if task.direction == "backward":
        return random(g.output_shape, problem.channels_last), input, weight
    return input, weight, random((g.out_channels,), False) if task.layer.bias else None


def _calls(
    stage: str,
    planned: StagePlans,
    tensors: Tensors,
    device: torch.device,
    architecture: str,
    announce: Announce,
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns the calls that compute the stage, PyTorch's operator first, and why the others do not."""
    calls: dict[str, Call] = {}
    failures = dict(planned.failures)
    if PYTORCH not in failures:
        calls[PYTORCH] = partial(by_pytorch, planned.problem, stage, tensors)
    for family, made in planned.plans.items():
        announce(f"{stage}/{family}")
        try:
            handle = launch.add_plan(made, planned.problem.dtype, device, architecture)
        except RuntimeError as error:
            failures[family] = first_line(error)
        else:
            calls[family] = partial(torch.ops.tconv_swap.launch.default, handle, list(tensors))
    return calls, failures


def by_pytorch(problem: Problem, stage: str, tensors: Tensors) -> list[Tensor]:
    """Returns what PyTorch's operator computes in a stage."""
    g = problem.geometry
    arguments = (g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    first, second, third = tensors
    if stage == "forward":
        return [native.forward(first, second, third, arguments)]
    assert third is not None
    return native.backward(first, second, third, arguments, MASKS[stage])


def _both(grad_input: Call, grad_weight: Call) -> Call:
    return lambda: [*grad_input(), *grad_weight()]


def _timed_if_right(
    calls: Mapping[str, Call],
    problem: Problem,
    stage: str,
    tensors: Tensors,
    failures: dict[str, str],
    device: torch.device,
    announce: Announce,
) -> dict[str, float]:
    """Returns the microseconds of one call, with its launch, of each call that gives the right result: that of the
    first, until another differs. Adds the others to ``failures``."""
    truth: list[Tensor] = []
    times: dict[str, float] = {}
    for name, call in calls.items():
        announce(f"{stage}/{name}")
        try:
            for result in call():
                result.fill_(math.nan)  # freed at once, so that the next call gets this memory
            synchronize(device)
            begin = perf_counter()
            results = call()
            synchronize(device)
            elapsed = perf_counter() - begin
            distances = list(map(_distance, results, truth))
        except RuntimeError as error:
            failures[name] = first_line(error)
            check_alive(device)
            continue
        times[name] = elapsed * 1e6
        if all(distance <= _allowed(problem) for distance in distances):
            truth = truth or results
            continue
        theirs, ours = (_from_float64(found, problem, stage, tensors) for found in (truth, results))
        if not theirs <= _allowed(problem):
            before = [other for other in times if other != name]
            failures.update(dict.fromkeys(before, f"wrong: {theirs:.1e} from float64"))
            times, truth = {name: times[name]}, results
        if not ours <= _allowed(problem):
            failures[name] = f"wrong: {ours:.1e} from float64"
            del times[name]
            truth = truth if times else []
    return times


def _from_float64(results: Sequence[Tensor], problem: Problem, stage: str, tensors: Tensors) -> float:
    """Returns the relative L2 distance of the worst result."""
    first, second, third = tensors
    if stage == "forward":
        data = Data(first, second, third, first)
    else:
        assert third is not None
        data = Data(second, third, None, first)
    return max(
        errors(name, {stage: result}, problem.geometry, data)[stage].l2
        for name, result in zip(_RESULTS[stage], results, strict=True)
    )


def _distance(found: Tensor, truth: Tensor) -> float:
    """Returns the relative L2 distance."""
    return float((found - truth).float().norm() / truth.float().norm().clamp_min(1e-30))


def _allowed(problem: Problem) -> float:
    return MAX_ERROR["tf32" if problem.is_tf32 else str(problem.dtype).removeprefix("torch.")]


def check_alive(device: torch.device) -> None:
    """Ends the process if the GPU's context is lost: nothing could run in it any more."""
    try:
        synchronize(device)
    except RuntimeError as error:
        raise SystemExit(f"the GPU is lost: {first_line(error)}") from error


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
