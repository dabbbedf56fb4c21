"""Measures whether a layer's neighbours are as fast as the layer: ``python -m benchmarks.neighbours --json FILE``.

Takes the suite and 60 random layers, and neighbours of each: one image, one row or one column more or less, 8 channels
more or less. Times what "auto" takes, and reports the time for a multiply-add over that of the layer itself; all of one
layer are timed in one run. ``benchmarks.sweep`` describes how it runs. Exit codes: 0 all was measured, 1 time ran out
or something failed (it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

import torch
from torch import Tensor

from benchmarks.ablation_measure import (
    TIMING,
    Announce,
    Call,
    Task,
    Tensors,
    by_pytorch,
    check_alive,
    synchronize,
)
from benchmarks.families import MASKS, PYTORCH, family_of
from benchmarks.kernels import problem_of
from benchmarks.measuring_process import Work
from benchmarks.neighbours_rows import OWN, Row, neighbours_of, report, summary
from benchmarks.selection import add_selection, directions_of, settings_of, tasks_of
from benchmarks.stage_row import stage_fields
from benchmarks.sweep import Sweep, measuring
from benchmarks.sweep_options import gpu_of
from benchmarks.sweep_options import make_parser as sweep_parser
from tconv_swap.cuda.choice import choose_backward, choose_forward
from tconv_swap.files.fileformat import first_line
from tconv_swap.kernels.plan import with_weight_layout
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.measurement.modes import MODES
from tconv_swap.measurement.timing import time_interleaved
from tconv_swap.runtime import jit, launch
from tconv_swap.runtime.program import Plan

BENCHMARK = "neighbours"
SECONDS = 300.0
WARMUP, SAMPLES = 2, 7

#: For each neighbour its problem, and the plan that "auto" takes; None: PyTorch's operator.
Planned = Mapping[str, tuple[Problem, Plan | None]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task whose kernels are in the cache on disk: for each stage, by the neighbour's name. ``failures``: what does
    not compile, or was removed, as "stage/neighbour"."""

    task: Task
    stages: Mapping[str, Planned]
    failures: Mapping[str, str]

    @property
    def launches(self) -> int:
        """Returns the number of launches of all plans."""
        plans = [made for planned in self.stages.values() for _, made in planned.values()]
        return sum(len(made.launches) for made in plans if made is not None)

    def without(self, running: str, how: str) -> Prepared | None:
        """Returns the same without what ran when the process stopped; None if that was the layer itself, or all of
        them."""
        stage, _, name = running.partition("/")
        if name == OWN or name not in self.stages.get(stage, {}):
            return None
        left = {other: planned for other, planned in self.stages[stage].items() if other != name}
        return replace(self, stages={**self.stages, stage: left}, failures={**self.failures, running: how})


def prepare(task: Task, device: Device, directions: Mapping[str, tuple[str, ...]]) -> Prepared:
    """Plans and compiles; needs no GPU."""
    stages: dict[str, dict[str, tuple[Problem, Plan | None]]] = {}
    failures: dict[str, str] = {}
    layers = {
        name: replace(task.layer, geometry=geometry)
        for name, geometry in neighbours_of(task.layer.geometry).items()
    }
    for stage in directions[task.direction]:
        planned = stages[stage] = {}
        for name, layer in layers.items():
            problem = problem_of(layer, MODES[task.mode], task.layout)
            if stage == "forward":
                made = choose_forward(problem, layer.bias, device, "auto").plan
            else:
                problem = with_weight_layout(problem, problem.channels_last)
                (step,) = choose_backward(
                    problem, MASKS[stage], device, "auto"
                )  # a single gradient is one step
                made = step.plan
            try:
                for one in made.launches if made is not None else ():
                    jit.compile_kernel(one.kernel, device.architecture)
            except RuntimeError as error:
                failures[f"{stage}/{name}"] = first_line(error)
            else:
                planned[name] = problem, made
    return Prepared(task, stages, failures)


def measure(prepared: Prepared, device: torch.device, architecture: str, announce: Announce) -> list[Row]:
    """Returns the rows of a task; none if the layer itself does not run.

    Raises:
        RuntimeError: there is not enough memory for the tensors.
        SystemExit: the GPU is lost.
    """
    task, rows = prepared.task, []
    failures = dict(prepared.failures)
    with MODES[task.mode].switched_on():
        buffers = _buffers(prepared, device)
        for stage, planned in prepared.stages.items():
            calls: dict[str, Call] = {}
            for name, (problem, made) in planned.items():
                announce(f"{stage}/{name}")
                tensors = _tensors(problem, task, buffers)
                try:
                    run = _call(problem, stage, made, tensors, device, architecture)
                    run()
                    synchronize(device)
                except RuntimeError as error:
                    failures[f"{stage}/{name}"] = first_line(error)
                    check_alive(device)
                else:
                    calls[name] = run
            if OWN not in calls:
                continue
            announce(f"{stage}/{TIMING}")
            timings = time_interleaved(calls, device=device, warmup=WARMUP, iters=SAMPLES)
            times = {name: timing.median_ms * 1e3 for name, timing in timings.items()}
            rows.append(_row(prepared, stage, times, failures))
    return rows


def _call(
    problem: Problem,
    stage: str,
    made: Plan | None,
    tensors: Tensors,
    device: torch.device,
    architecture: str,
) -> Call:
    if made is None:
        return partial(by_pytorch, problem, stage, tensors)
    handle = launch.add_plan(made, problem.dtype, device, architecture)
    return partial(torch.ops.tconv_swap.launch.default, handle, list(tensors))


def _row(prepared: Prepared, stage: str, times: Mapping[str, float], failures: Mapping[str, str]) -> Row:
    task, planned = prepared.task, prepared.stages[stage]
    return Row(
        **stage_fields(task.layer, task.of_suite, task.mode, task.layout, stage),
        microseconds=times,
        macs={name: planned[name][0].geometry.macs for name in times},
        families={name: _family(planned[name][1]) for name in times},
        failures={
            name.partition("/")[2]: why for name, why in failures.items() if name.startswith(f"{stage}/")
        },
    )


def _family(made: Plan | None) -> str:
    return PYTORCH if made is None else family_of(made)


def _buffers(prepared: Prepared, device: torch.device) -> list[Tensor]:
    """Returns random elements for an input, a weight, an output and a bias of every neighbour: each uses the first
    ones."""
    problems = [problem for planned in prepared.stages.values() for problem, _ in planned.values()]
    generator = torch.Generator(device).manual_seed(zlib.crc32(prepared.task.layer.name.encode()))
    return [
        torch.randn(
            max((math.prod(shape) for shape in shapes), default=0),
            dtype=MODES[prepared.task.mode].dtype,
            device=device,
            generator=generator,
        )
        for shapes in zip(*(_shapes(problem) for problem in problems), strict=True)
    ]


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    g = problem.geometry
    return g.input_shape, g.weight_shape, g.output_shape, (g.out_channels,)


def _tensors(problem: Problem, task: Task, buffers: Sequence[Tensor]) -> Tensors:
    """Returns input, weight and bias, or grad_output, input and weight, with the layouts of the problem."""
    lie = problem.channels_last, problem.weight_channels_last, problem.channels_last, False
    input, weight, output, bias = starmap(_view, zip(buffers, _shapes(problem), lie, strict=True))
    if task.direction == "backward":
        return output, input, weight
    return input, weight, bias if task.layer.bias else None


def _view(buffer: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    flat = buffer[: math.prod(shape)]
    if not channels_last:
        return flat.view(shape)
    first, channels, height, width = shape
    return flat.view(first, height, width, channels).permute(0, 3, 1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = make_parser().parse_args(arguments)
    facts = gpu_of(options)
    found = sweep(facts, directions_of(options))
    return found.command(facts, lambda: tasks_of(options), settings_of(options), options)


def sweep(facts: Device | None, directions: Mapping[str, tuple[str, ...]]) -> Sweep[Task, Prepared, Row]:
    """Returns the benchmark for a GPU of these facts; without a GPU, it only reads files."""
    return Sweep(
        BENCHMARK,
        partial(prepare, device=facts, directions=directions),  # type: ignore[arg-type]
        partial(_measuring, facts),  # type: ignore[arg-type]
        Row,
        _progress_words,
        report,
        summary,
    )


def _measuring(facts: Device) -> Work[Prepared, list[Row]]:
    device = torch.device("cuda", torch.cuda.current_device())

    def measured(prepared: Prepared, announce: Announce) -> list[Row]:
        return measure(prepared, device, facts.architecture, announce)

    return measuring(device, measured)


def _progress_words(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.stage} {row.microseconds[OWN]:.1f} us, {row.worst} x{row.ratio(row.worst):.2f}" for row in rows
    )


def make_parser() -> argparse.ArgumentParser:
    parser = sweep_parser(
        BENCHMARK,
        'Time what "auto" takes of layers beside what it takes of the layers next to them.',
        SECONDS,
    )
    add_selection(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
