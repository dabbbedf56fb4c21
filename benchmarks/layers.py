"""Times every layer of the suite on a GPU, PyTorch's against ours, paired in one run: ``python -m benchmarks.layers``.

Exit codes: 0 all was measured, 1 something could not be measured (it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernels import STAGE_MASKS, compile_ahead, steps_of
from benchmarks.layers_report import render
from benchmarks.measure import Effort, Machine, measure
from benchmarks.render import progress_line, text
from benchmarks.results import Results
from tconv_swap.cuda import call, tuned
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.modes import LAYOUTS, MODES, Mode
from tconv_swap.measurement.suite import Layer, Suite, load_suite
from tconv_swap.runtime.program import Plan

HERE = Path(__file__).parent
README = HERE / "README.md"
RESULTS = HERE / "results"

SECONDS_PER_ROW = 0.5
DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
    "frozen": ("frozen",),
}


class Configuration(NamedTuple):
    """The rows of one direction, which are measured at once."""

    layer: Layer
    mode: Mode
    layout: str
    direction: str

    def __str__(self) -> str:
        return f"{self.layer.name} {self.mode.name} {self.layout} {self.direction}"

    @property
    def stages(self) -> tuple[str, ...]:
        if self.direction != "backward":
            return (self.direction,)
        return tuple(name for name in STAGE_MASKS if name != "grad_bias" or self.layer.bias)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    suite = load_suite()
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.render:
            render(RESULTS, README, suite.targets)
            return 0
        if options.show:
            print(text(Results.load(options.show), suite.targets))
            return 0
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    try:
        layers = suite.select(options.only.split(",")) if options.only else suite.layers
    except ValueError as error:
        parser.error(str(error))
    device = _gpu()
    if device is None:
        _say("torch.cuda.is_available() is False: no GPU; `python -m benchmarks.cpu` measures the CPU")
        return 2
    configurations = [
        Configuration(layer, MODES[mode], layout, direction)
        for layer in layers
        for direction in DIRECTIONS[options.direction]
        for mode in MODES
        if mode in (options.dtype or MODES)
        for layout in LAYOUTS
        if layout in (options.layout or LAYOUTS)
    ]
    results = run(configurations, suite, device, options)
    print(text(results, suite.targets))
    return 1 if results.failures else 0


def run(
    configurations: Sequence[Configuration], suite: Suite, device: torch.device, options: argparse.Namespace
) -> Results:
    """Measures every configuration; notes those that cannot be measured. Writes the JSON after every layer, so that an
    interrupted run keeps its rows."""
    torch.backends.cudnn.benchmark = True
    facts = call.device_facts(device.index)
    begin = time.monotonic()
    _say("measuring the ceilings")
    results = Results(environment(device), _settings(options), measure_ceilings(device))
    machine = Machine(device, facts, results.ceilings, options.backend, tuned.winners(device.index))
    effort = Effort(options.seconds_per_row, options.iters)
    plans = [made for configuration in configurations for made in _plans(configuration, machine)]
    if compiled := compile_ahead(plans, facts.architecture):
        _say(f"{compiled} kernels compiled or found in the cache")
    for index, configuration in enumerate(configurations):
        layer, mode, layout, direction = configuration
        try:
            rows = measure(layer, mode, layout, direction, machine, effort)
        except Exception as error:  # whatever it is, the other rows are useful
            rows = []
            results.failures.append(f"{configuration}: {type(error).__name__}: {_first_line(error)}")
            _say(results.failures[-1])
        # The buffers of a layer take gigabytes, and no two layers need the same sizes.
        torch.cuda.empty_cache()
        results.rows += rows
        for row in rows:
            seconds = time.monotonic() - begin
            _say(f"[{index + 1}/{len(configurations)}, {seconds:.0f} s] {progress_line(row)}")
        done = index + 1
        if options.json and (done == len(configurations) or configurations[done].layer is not layer):
            results.settings["seconds"] = round(time.monotonic() - begin, 1)
            results.save(options.json, suite.targets)
    return results


def _gpu() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _plans(configuration: Configuration, machine: Machine) -> list[Plan]:
    layer, mode, layout, _ = configuration
    try:
        stages = [
            steps_of(layer, mode, layout, stage, machine.facts, machine.backend, machine.winners)
            # A backward pass runs after a forward pass.
            for stage in dict.fromkeys(("forward", *configuration.stages))
        ]
    except Exception:  # measuring it will report the reason
        return []
    return [step.plan for steps in stages for step in steps if step.plan is not None]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layers",
        description="Time every layer of the suite on a GPU: PyTorch's and ours, paired, in one run.",
        epilog="Exit codes: 0 all was measured, 1 something could not be measured, 2 usage or no GPU.",
    )
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these layers instead of all")
    parser.add_argument("--dtype", choices=list(MODES), action="append", help="repeatable (default: all)")
    parser.add_argument("--layout", choices=list(LAYOUTS), action="append", help="repeatable (default: both)")
    parser.add_argument(
        "--direction",
        choices=list(DIRECTIONS),
        default="forward",
        help="default: forward; frozen: forward with kept weights",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", "kernel"],
        default="auto",
        help="the backend of our side (default: what a user gets)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results to this file after each layer"
    )
    parser.add_argument(
        "--seconds-per-row",
        type=positive(float),
        default=SECONDS_PER_ROW,
        metavar="S",
        help="seconds for the timing of one layer in one dtype and layout (default: %(default)s)",
    )
    parser.add_argument(
        "--iters", type=positive(int), metavar="N", help="take exactly this many samples instead"
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="measure nothing: draw benchmarks/results/h200-layers.svg, and put it and the means into "
        "benchmarks/README.md",
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing: print every row of the results in FILE"
    )
    return parser


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def positive(argument: str) -> float:
        value = kind(argument)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{argument} is not positive")
        return value

    positive.__name__ = kind.__name__  # argparse names the type in its message
    return positive


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit_of_tree(),
        "direction": options.direction,
        "backend": options.backend,
        "seconds_per_row": options.seconds_per_row,
        "iters": options.iters,
        "cudnn_benchmark_limit": torch.backends.cudnn.benchmark_limit,
    }


def commit_of_tree() -> str | None:
    """Returns git's name of the tree that is measured; None outside a checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _say(line: str) -> None:
    print(f"benchmarks.layers: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
