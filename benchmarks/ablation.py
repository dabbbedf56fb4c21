"""Measures what each family of kernels is worth: ``python -m benchmarks.ablation --json
benchmarks/results/h200-ablation.json``.

On the suite and on random layers, it times every family that can compute a stage beside the others and PyTorch's
operator. ``benchmarks.sweep`` describes how it runs. Exit codes: 0 all was measured, 1 time ran out or something failed
(it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from benchmarks.ablation_measure import (
    DIRECTIONS,
    Announce,
    Call,
    Prepared,
    Task,
    best_of_families,
    measure,
    prepare,
)
from benchmarks.ablation_report import report
from benchmarks.ablation_rows import Row, summary
from benchmarks.layers import positive
from benchmarks.measuring_process import Work
from benchmarks.random_layers import OF_EACH_CLASS, SEED, random_layers
from benchmarks.sweep import Sweep, measuring, shuffled
from benchmarks.sweep_options import gpu_of
from benchmarks.sweep_options import make_parser as sweep_parser
from tconv_swap.kernels.problem import Device
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.measurement.timing import Timing, time_interleaved

BENCHMARK = "ablation"
SECONDS = 480.0
#: The seconds for the samples of one way to compute one stage.
SECONDS_PER_WAY = 0.015
MODES = ("tf32", "fp16")
#: One of so many layers is measured in these modes too, at the end.
OTHER_MODES, OTHER_SHARE = ("bf16", "fp32"), 4


def tasks(suite: Sequence[Layer], drawn: Sequence[Layer]) -> list[Task]:
    """Returns all tasks in an order in which every prefix is a sample of the whole; the less important modes come
    last."""
    layers = [(layer, True) for layer in suite] + [(layer, False) for layer in drawn]
    return [
        task
        for modes, share in ((MODES, 1), (OTHER_MODES, OTHER_SHARE))
        for task in shuffled(
            [
                Task(layer, of_suite, mode, layout, direction)
                for layer, of_suite in layers[::share]
                for mode in modes
                for layout in LAYOUTS
                for direction in DIRECTIONS
            ],
            SEED,
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = make_parser().parse_args(arguments)
    facts = gpu_of(options)
    found = sweep(facts, options.seconds_per_way)
    settings = {
        "seed": SEED,
        "random_layers_of_each_class": OF_EACH_CLASS,
        "seconds_per_way": options.seconds_per_way,
    }
    return found.command(facts, lambda: tasks(load_suite().layers, random_layers()), settings, options)


def sweep(facts: Device | None, seconds_per_way: float) -> Sweep[Task, Prepared, Row]:
    """Returns the benchmark for a GPU of these facts; without a GPU, it only reads files."""
    return Sweep(
        BENCHMARK,
        partial(prepare, device=facts, ways=best_of_families),  # type: ignore[arg-type]
        partial(_measuring, facts, seconds_per_way),  # type: ignore[arg-type]
        Row,
        _progress_words,
        report,
        summary,
    )


def _measuring(facts: Device, seconds: float) -> Work[Prepared, list[Row]]:
    device = torch.device("cuda", torch.cuda.current_device())

    def timed(calls: Mapping[str, Call], chosen: str) -> Mapping[str, Timing]:
        return time_interleaved(calls, device=device, budget_s=seconds * len(calls))

    def measured(prepared: Prepared, announce: Announce) -> list[Row]:
        return measure(prepared, device, facts.architecture, timed, announce)

    return measuring(device, measured)


def _progress_words(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.stage} {min(row.microseconds, key=lambda name: row.microseconds[name])} "
        f"{min(row.microseconds.values()):.1f} us of {len(row.microseconds)}"
        + ("" if row.regret is None else f", {row.chosen} x{row.regret:.2f}")
        for row in rows
    )


def make_parser() -> argparse.ArgumentParser:
    parser = sweep_parser(
        BENCHMARK,
        "Time every family of kernels on the suite and on random layers: what each is worth.",
        SECONDS,
    )
    parser.add_argument(
        "--seconds-per-way",
        type=positive(float),
        default=SECONDS_PER_WAY,
        metavar="S",
        help="seconds for the timing of one family in one stage of one layer (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
