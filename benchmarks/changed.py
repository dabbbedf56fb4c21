"""Times the plans that a change of planners changes: ``python -m benchmarks.changed``. Two steps:

``--dump FILE``, in the tree before and in the tree after the change, keeps what "auto" takes for the suite and for
random layers. It needs no GPU. ``--time BEFORE AFTER``, in the tree after, times on a GPU the stages whose plans
differ, before and after in turn, beside PyTorch's operator, and compares the results with float64. Both plans run on
the kernels of this tree, so a change of kernel code is not seen, constants that this tree's code does not name make no
difference, and a plan of a kernel that this tree lacks is only listed. Exit codes: 0 nothing is slower, 1 a stage is
slower by more than a tenth or failed (it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.ablation_measure import Prepared, StagePlans, Task, Timer, measure
from benchmarks.ablation_rows import Row, geometric_mean
from benchmarks.families import MASKS, PYTORCH, family_of
from benchmarks.kernels import H200, problem_of
from benchmarks.random_layers import OF_EACH_CLASS, SEED, random_layers
from benchmarks.regret import timed
from benchmarks.sweep_options import current_gpu
from tconv_swap.cuda.choice import choose_backward, choose_forward
from tconv_swap.files.fileformat import first_line
from tconv_swap.kernels.plan import with_weight_layout
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import LAYOUTS, MODES
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import csrc_directory, write_atomically
from tconv_swap.runtime.program import Launch, Plan

BEFORE, AFTER = "before", "after"
SUITE = "suite"
STAGES = ("forward", "grad_input", "grad_weight")
#: A change of this factor is not noise.
NOTABLE = 1.1


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a layer in one mode and layout. ``drawn``: ``"suite"``, or the seed of a random layer."""

    drawn: str
    layer: Layer
    mode: str
    layout: str
    stage: str


#: What "auto" takes: a plan of ours, or None for PyTorch's operator.
Plans: TypeAlias = Mapping[Stage, tuple[Problem, Plan | None]]


def plans_of(layers: Mapping[str, Sequence[Layer]], device: Device = H200) -> Plans:
    """Returns what "auto" takes for each stage of these layers, which are given by where they are drawn."""
    return {stage: taken for drawn, those in layers.items() for stage, taken in _plans(drawn, those, device)}


def _plans(
    drawn: str, layers: Sequence[Layer], device: Device
) -> Iterator[tuple[Stage, tuple[Problem, Plan | None]]]:
    for layer in layers:
        for mode in MODES if drawn == SUITE else ("tf32", "fp16"):
            for layout in LAYOUTS:
                problem = problem_of(layer, MODES[mode], layout)
                step = choose_forward(problem, layer.bias, device, "auto")
                yield Stage(drawn, layer, mode, layout, "forward"), (problem, step.plan)
                problem = with_weight_layout(problem, problem.channels_last)
                for name in STAGES[1:]:
                    (step,) = choose_backward(problem, MASKS[name], device, "auto")
                    yield Stage(drawn, layer, mode, layout, name), (problem, step.plan)


@lru_cache(maxsize=256)
def _names_in(source: str) -> frozenset[str]:
    """Returns every word of a file of kernels and of the headers that it includes; none if this tree lacks it."""
    path = csrc_directory() / "kernels" / source
    if not path.is_file():
        return frozenset()
    text = path.read_text(encoding="utf-8")
    headers = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    return frozenset(re.findall(r"\w+", text)).union(*map(_names_in, headers))


def can_run(plan: Plan | None) -> bool:
    """Returns whether this tree has the kernels of a plan."""
    return plan is None or all(_names_in(launch.kernel.source) for launch in plan.launches)


def _with_used_constants(plan: Plan) -> Plan:
    """Returns the plan without the constants of kernels that their code does not name."""

    def used(launch: Launch) -> Launch:
        kernel = launch.kernel
        names = _names_in(kernel.source)
        constants = tuple(constant for constant in kernel.constants if constant[0] in names)
        return launch._replace(kernel=kernel._replace(constants=constants))

    return plan._replace(launches=tuple(map(used, plan.launches)))


def changed(before: Plans, after: Plans) -> dict[Stage, Prepared]:
    """Returns the stages whose plans differ and can run, with both plans."""
    found = {}
    for stage in before.keys() & after.keys():
        (problem, old), (_, new) = before[stage], after[stage]
        if not can_run(old):
            continue
        old, new = (one and _with_used_constants(one) for one in (old, new))
        if (old and old.digest) == (new and new.digest):
            continue
        plans = {name: made for name, made in ((BEFORE, old), (AFTER, new)) if made is not None}
        task = Task(
            stage.layer,
            stage.drawn == SUITE,
            stage.mode,
            stage.layout,
            "forward" if stage.stage == "forward" else "backward",
        )
        ours = StagePlans(problem, PYTORCH if new is None else AFTER, plans, {})
        found[stage] = Prepared(task, {stage.stage: ours})
    return dict(sorted(found.items(), key=lambda one: (one[0].drawn, one[0].layer.name, one[0].mode)))


@dataclass(frozen=True, slots=True)
class Change:
    """The times of a stage in microseconds; None for what did not run. ``failures``: why."""

    drawn: str
    row: Row
    families: tuple[str, str]

    @property
    def before(self) -> float | None:
        return self.row.microseconds.get(BEFORE if self.families[0] != PYTORCH else PYTORCH)

    @property
    def after(self) -> float | None:
        return self.row.microseconds.get(AFTER if self.families[1] != PYTORCH else PYTORCH)

    @property
    def gain(self) -> float | None:
        return None if self.before is None or self.after is None else self.before / self.after


def time_changes(
    stages: Mapping[Stage, Prepared], device: torch.device, architecture: str, timer: Timer
) -> Iterator[Change]:
    """Times each stage; one that fails has a row without times."""
    for stage, prepared in stages.items():
        plans = prepared.stages[stage.stage].plans
        families = tuple(family_of(plans[name]) if name in plans else PYTORCH for name in (BEFORE, AFTER))
        try:
            (row,) = measure(prepared, device, architecture, timer, lambda _: None)
        except RuntimeError as error:
            failures = {"all": first_line(error)}
            row = Row(
                layer=stage.layer.name,
                geometry=str(stage.layer),
                layer_class="",
                of_suite=stage.drawn == SUITE,
                mode=stage.mode,
                layout=stage.layout,
                stage=stage.stage,
                chosen=AFTER,
                microseconds={},
                failures=failures,
            )
        yield Change(stage.drawn, row, families)  # type: ignore[arg-type]


def report(changes: Sequence[Change]) -> str:
    """Returns a line for each stage, the most gained first, and the geometric mean of each group as text."""
    ranked = sorted(changes, key=lambda one: -(one.gain or 0.0))
    text = "\n".join(map(_line, ranked))
    for drawn in dict.fromkeys(one.drawn for one in changes):
        gains = [one.gain for one in changes if one.drawn == drawn and one.gain is not None]
        if gains:
            spread = f"{min(gains):.2f} to {max(gains):.2f}"
            text += f"\n{drawn}: {len(gains)} stages are {geometric_mean(gains):.3f} times as fast, {spread}"
    failures = [f"{' '.join(one.row.key)}: {one.row.failures}" for one in changes if one.row.failures]
    return "\n".join((text, *failures))


def _line(one: Change) -> str:
    times = one.row.microseconds
    before, after, pytorch = (
        "-" if us is None else f"{us:.1f}" for us in (one.before, one.after, times.get(PYTORCH))
    )
    old, new = one.families
    gain = "-" if one.gain is None else f"{one.gain:.2f}"
    return f"{gain:>5} {one.drawn} {' '.join(one.row.key)}: {old} {before} -> {new} {after} us; PyTorch {pytorch}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = make_parser().parse_args(arguments)
    if options.dump:
        drawn = {str(seed): random_layers(OF_EACH_CLASS, seed) for seed in options.seed or [SEED]}
        plans = plans_of({SUITE: load_suite().layers, **drawn})
        write_atomically(options.dump, pickle.dumps(plans))
        print(f"{len(plans)} stages of {', '.join((SUITE, *drawn))} in {options.dump}")
        return 0
    before, after = (pickle.loads(path.read_bytes()) for path in options.time)
    stages = changed(before, after)
    gone = [stage for stage in before.keys() & after.keys() if not can_run(before[stage][1])]
    print(f"{len(stages)} of {len(after)} stages have another plan", flush=True)
    for stage in gone:
        key = f"{stage.drawn} {stage.layer.name} {stage.mode} {stage.layout} {stage.stage}"
        print(f"not timed, the kernel before is gone: {key}")
    facts = current_gpu()
    if facts is None:
        print("torch.cuda.is_available() is False: no GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    made = (plan for one in stages.values() for stage in one.stages.values() for plan in stage.plans.values())
    jit.compile_all((launch.kernel for plan in made for launch in plan.launches), facts.architecture)
    changes = list(time_changes(stages, device, facts.architecture, partial(timed, device=device)))
    print(report(changes))
    if options.json:
        rows = [asdict(one) for one in changes]
        document: dict[str, Any] = {"benchmark": "changed", "environment": environment(device), "rows": rows}
        write_atomically(options.json, json.dumps(document, indent=1).encode())
    return int(any(one.gain is None or one.gain < 1 / NOTABLE for one in changes))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.changed", description=(__doc__ or "").partition("\n\n")[0]
    )
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--dump", type=Path, metavar="FILE", help="keep what this tree plans")
    step.add_argument(
        "--time", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="time the plans that differ"
    )
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        help=f"of random layers, with --dump (repeatable; default {SEED})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to this file")
    return parser


if __name__ == "__main__":
    # Pickles name the module of a class, which must not be __main__.
    from benchmarks import changed as module

    sys.exit(module.main())
