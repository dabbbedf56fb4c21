"""Measures how far what "auto" takes is from the best plan: ``python -m benchmarks.regret --json FILE``.

On the suite and 60 random layers, in each mode, layout and stage, it times in one run what "auto" takes, the other
plans that the planner can name (the best of every family that can compute the stage, and further schedules), and
PyTorch's operator. ``benchmarks.sweep`` describes how it runs. Exit codes: 0 all was measured, 1 time ran out or
something failed (it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch

from benchmarks.ablation_measure import Announce, Call, Prepared, StagePlans, Task, measure, prepare
from benchmarks.ablation_rows import MAX_REGRET, Row, geometric_mean, worst
from benchmarks.families import MASKS, PYTORCH, family_of, plans_of, plans_of_layer
from benchmarks.measuring_process import Work
from benchmarks.regret_classes import report as report_of_classes
from benchmarks.regret_row import RegretRow
from benchmarks.selection import add_selection, directions_of, settings_of, tasks_of
from benchmarks.sweep import Sweep, measuring
from benchmarks.sweep_options import gpu_of
from benchmarks.sweep_options import make_parser as sweep_parser
from benchmarks.table import Table
from tconv_swap.cuda.choice import CANDIDATES, Step, choose_backward, choose_forward
from tconv_swap.kernels import plan
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.measurement.timing import Timing, time_interleaved
from tconv_swap.runtime.program import Plan

BENCHMARK = "regret"
SECONDS = 300.0
#: The number of our plans that are timed; there are more only if there are more families.
MAX_PLANS = CANDIDATES
WARMUP = 2
#: The number of first samples of everything; then the number of further samples of what is within this factor of the
#: fastest, and of what "auto" takes.
SAMPLES, FINAL_SAMPLES, NEAR = 5, 9, 1.3
#: A way within this factor of the best is as good: the rest is noise.
AS_GOOD = 1.05


def candidates(problem: Problem, stage: str, has_bias: bool, device: Device) -> tuple[dict[str, Plan], str]:
    """Returns the plans to time, by name, and the name of what "auto" takes: its own plan, the best of every family,
    then further ones in the planner's ranking."""
    steps: tuple[Step, ...]
    if stage == "forward":
        named = plan.forward_candidates(problem, has_bias, device, MAX_PLANS)
        steps = (choose_forward(problem, has_bias, device, "auto"),)
    else:
        named = plan.backward_candidates(problem, MASKS[stage], device, MAX_PLANS)
        steps = choose_backward(problem, MASKS[stage], device, "auto")
    (step,) = steps  # a single gradient is one step
    families = list(plans_of(problem, stage, has_bias, device).values())
    taken = [step.plan] if step.plan is not None else []
    distinct = list({made.digest: made for made in (*taken, *families, *named)}.values())
    found: dict[str, Plan] = {}
    count: Counter[str] = Counter()
    for made in distinct[: max(MAX_PLANS, len(taken) + len(families))]:
        family = family_of(made)
        count[family] += 1
        found[family if count[family] == 1 else f"{family} {count[family]}"] = made
    return found, next(iter(found)) if taken else PYTORCH


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = make_parser().parse_args(arguments)
    facts = gpu_of(options)
    directions = directions_of(options)
    found = sweep(facts, directions)
    return found.command(facts, lambda: tasks_of(options), settings_of(options), options)


def sweep(
    facts: Device | None, directions: Mapping[str, tuple[str, ...]]
) -> Sweep[Task, Prepared, RegretRow]:
    """Returns the benchmark for a GPU of these facts; without a GPU, it only reads files."""
    return Sweep(
        BENCHMARK,
        partial(prepare, device=facts, ways=candidates, directions=directions),  # type: ignore[arg-type]
        partial(_measuring, facts),  # type: ignore[arg-type]
        RegretRow,
        _progress_words,
        report,
        summary,
    )


def _measuring(facts: Device) -> Work[Prepared, list[RegretRow]]:
    device = torch.device("cuda", torch.cuda.current_device())

    def measured(prepared: Prepared, announce: Announce) -> list[RegretRow]:
        timer = partial(timed, device=device)
        rows = measure(prepared, device, facts.architecture, timer, announce)
        return rows_of(prepared, rows, facts)

    return measuring(device, measured)


def timed(calls: Mapping[str, Call], chosen: str, device: torch.device) -> Mapping[str, Timing]:
    """Times all calls, then again those near the fastest and what "auto" takes: the smallest of many medians of few
    samples is too small by chance."""
    first = time_interleaved(calls, device=device, warmup=WARMUP, iters=SAMPLES)
    limit = NEAR * min(timing.median_ms for timing in first.values())
    final = {
        name: calls[name] for name, timing in first.items() if timing.median_ms <= limit or name == chosen
    }
    return {**first, **time_interleaved(final, device=device, warmup=1, iters=FINAL_SAMPLES)}


def rows_of(prepared: Prepared, rows: Iterable[Row], device: Device) -> list[RegretRow]:
    """Returns the rows with a description of their plans."""
    layer = prepared.task.layer
    problem = {**layer.geometry._asdict(), "bias": layer.bias}
    return [
        RegretRow(
            **{one.name: getattr(row, one.name) for one in fields(Row)},
            problem=problem,
            plans=_described(prepared.stages[row.stage].plans),
            of_layer=_of_layer(prepared.stages[row.stage], row.stage, layer.bias, device),
        )
        for row in rows
    ]


def _of_layer(stage: StagePlans, name: str, has_bias: bool, device: Device) -> list[str]:
    digests = {made.digest for made in plans_of_layer(stage.problem, name, has_bias, device)}
    return [way for way, made in stage.plans.items() if made.digest in digests]


def _described(plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
    values: dict[tuple[str, str], set[Any]] = {}
    for made in plans.values():
        for entry, constant, value in _constants(made):
            values.setdefault((entry, constant), set()).add(value)
    return {
        name: {
            "family": made.family,
            "why": made.why,
            "digest": made.digest,
            "launches": [
                f"{one.kernel.entry} {one.grid} x {one.block}, {one.shared_bytes} bytes"
                for one in made.launches
            ],
            "schedule": ", ".join(
                f"{constant}={value}"
                for entry, constant, value in _constants(made)
                if len(values[entry, constant]) > 1
            ),
        }
        for name, made in plans.items()
    }


def _constants(made: Plan) -> Iterator[tuple[str, str, Any]]:
    for one in made.launches:
        for constant, value in one.kernel.constants:
            yield one.kernel.entry, constant, value


def summary(rows: Sequence[RegretRow]) -> dict[str, Any]:
    """Returns the regret of every stage: for the suite's rows, the random ones and all."""
    return {"regrets": [asdict(regret) for regret in regrets(rows)]}


@dataclass(frozen=True, slots=True)
class Regret:
    """The regret of what "auto" takes, relative to the fastest measured, over a group of rows.

    Attributes:
        group: its name, such as ``"forward, suite"``.
        rows: the number of rows in which what "auto" takes was timed.
        mean: the geometric mean; ``largest``: the largest.
        as_good: the share of rows within ``AS_GOOD``; ``above``: the number of rows above ``MAX_REGRET``.
        over_pytorch: the geometric mean of PyTorch's time over that of what "auto" takes.
        of_choice: the regret of the choice among the layer's kernels; ``of_limit``: of what these take at best, because
            a layer has at most four. Geometric means of the rows that our kernels compute; None where the layer's are
            not known.
    """

    group: str
    rows: int
    mean: float
    largest: float
    as_good: float
    above: int
    over_pytorch: float
    of_choice: float | None
    of_limit: float | None


def regrets(rows: Sequence[RegretRow]) -> list[Regret]:
    """Returns the regret of every stage on the suite and on the random layers, then of all."""
    groups: dict[str, list[tuple[RegretRow, float]]] = {}
    for row in rows:
        if row.regret is not None:
            where = "suite" if row.of_suite else "random layers"
            for name in (f"{row.stage}, {where}", f"all, {where}"):
                groups.setdefault(name, []).append((row, row.regret))
    return [_regret(name, groups[name]) for name in sorted(groups, key=lambda one: one.startswith("all"))]


def _regret(name: str, group: Sequence[tuple[RegretRow, float]]) -> Regret:
    values = [regret for _, regret in group]
    gains = [
        row.microseconds[PYTORCH] / row.microseconds[row.chosen]
        for row, _ in group
        if PYTORCH in row.microseconds
    ]
    parts = [(row.regret_of_choice, regret) for row, regret in group]
    known = [(choice, regret / choice) for choice, regret in parts if choice is not None]
    return Regret(
        group=name,
        rows=len(values),
        mean=geometric_mean(values),
        largest=max(values),
        as_good=sum(value <= AS_GOOD for value in values) / len(values),
        above=sum(value > MAX_REGRET for value in values),
        over_pytorch=geometric_mean(gains),
        of_choice=geometric_mean([choice for choice, _ in known]) if known else None,
        of_limit=geometric_mean([limit for _, limit in known]) if known else None,
    )


def report(rows: Sequence[RegretRow]) -> str:
    """Returns the regret of each group, the worst rows, and the speed of each class of random layers, as text."""
    if not rows:
        return "nothing was measured"
    groups = [
        [
            one.group,
            str(one.rows),
            f"{one.mean:.3f}",
            f"{one.largest:.2f}",
            f"{one.as_good:.0%}",
            str(one.above),
            f"{one.over_pytorch:.2f}",
            *("-" if part is None else f"{part:.3f}" for part in (one.of_choice, one.of_limit)),
        ]
        for one in regrets(rows)
    ]
    headings = [
        "group",
        "rows",
        "regret",
        "largest",
        "within 5 %",
        "above 1.25",
        "over PyTorch",
        "choice",
        "limit",
    ]
    lines = [Table(headings, groups, left=1).text(), *map(_line, worst(rows)), "", report_of_classes(rows)]
    return "\n".join(lines)


def _line(row: Row) -> str:
    best = min(row.microseconds, key=lambda name: row.microseconds[name])
    taken, fastest = (f"{name} {row.microseconds[name]:.1f} us" for name in (row.chosen, best))
    return f"{row.regret:6.2f} {' '.join(row.key)}: {taken}, {fastest}"


def _progress_words(rows: Sequence[RegretRow]) -> str:
    return "; ".join(
        f"{row.stage} {row.chosen} of {len(row.microseconds)}"
        + ("" if row.regret is None else f" {row.microseconds[row.chosen]:.1f} us x{row.regret:.2f}")
        for row in rows
    )


def make_parser() -> argparse.ArgumentParser:
    parser = sweep_parser(
        BENCHMARK, 'Time what "auto" takes beside all other plans and PyTorch\'s operator.', SECONDS
    )
    add_selection(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
