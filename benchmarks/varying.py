"""Times PyTorch's layers and ours over streams of changing sizes: ``python -m benchmarks.varying``.

Each stream (streams.py) runs in separate processes, in TF32 and NCHW, with cudnn.benchmark off: ours with no kernel on
disk ("cold", but with the C++ parts built); then PyTorch's layers, and ours with those kernels on disk ("warm"). Each
process initialises CUDA and cuDNN by a call of PyTorch's layers with a size outside the stream, then times every call
of the stream up to the end of the GPU's work, and does so a second time. It stops after ``--seconds``: the table
compares the calls that all sides have finished, and gives their number.

Hosts stall, and slow down for seconds: PyTorch's process and the warm one make some calls each in turn, so that both
meet the same times. With ``--rounds`` they are started so often, and the time of each call is the median of its times
in all runs: what stalls one run is left out, what a call takes in every run is not. The totals of all runs stand
beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring_process import MeasuringProcess, NotStartedError, StoppedError, TaskError, Work
from benchmarks.streams import STREAMS, Shape
from tconv_swap.measurement.environment import environment
from tconv_swap.runtime.cache import ENVIRONMENT_VARIABLE, write_atomically

PYTORCH, COLD, WARM = SIDES = ("pytorch", "cold", "warm")
#: The seconds of one process for the calls of both passes over its stream.
SECONDS = 10.0
#: The first call of a turn may take longer, because the GPU changes to another process for it.
CALLS_OF_A_TURN = 10
#: After this time without an answer a process counts as hung: a call of a stream, and its start.
SILENCE_SECONDS, START_SECONDS = 60.0, 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0 all was measured, 1 a process failed (it is listed), 2
    usage."""
    options = make_parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.varying needs an NVIDIA GPU; --device cpu --tiny tries the program", file=sys.stderr
        )
        return 2
    if device.type == "cuda":
        build_host_parts()
    document: dict[str, Any] = {"benchmark": "varying", "environment": environment(device), "streams": []}
    failed = False
    for name in options.stream or list(STREAMS):
        entry = measure(name, options)
        failed |= any("error" in side for side in entry["sides"].values())
        document["streams"].append(entry)
        print(table([entry], head=len(document["streams"]) == 1), flush=True)
        if options.json:
            write_atomically(options.json, json.dumps(document, indent=1).encode())
    return int(failed)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the sides of a stream in separate processes; cold and warm share a cache that is empty at first."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="tconv-swap-varying-") as cache:
        link_host_parts(Path(cache))
        for sides in ((COLD,), *((PYTORCH, WARM),) * options.rounds):
            for side, run in run_in_turn(name, sides, cache, options).items():
                runs[side].append(run)
    medians = {side: median_of_runs(of_side) for side, of_side in runs.items()}
    return {"name": name, "calls": len(STREAMS[name].shapes(options.tiny)), "sides": medians}


def median_of_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the median seconds of each call that all runs have finished, with ``totals``, those of the first pass of
    each run in their order; the first run that failed, if one has."""
    failed = [run for run in runs if "error" in run]
    if failed:
        return dict(failed[0])
    calls = {
        key: [statistics.median(of_call) for of_call in zip(*(run[key] for run in runs), strict=False)]
        for key in ("first", "again")
    }
    return {**calls, "totals": [sum(run["first"]) for run in runs]}


def run_in_turn(
    name: str, sides: Sequence[str], cache: str, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Runs a process of each side; these make the calls of both passes over a stream in turn.

    Returns:
        For each side the seconds of the calls of each pass, as many as its time allowed, or its ``error``.
    """
    processes: dict[str, MeasuringProcess[Shape, float]] = {
        side: MeasuringProcess(
            partial(make_caller, name, side, cache, options.device, options.tiny),
            SILENCE_SECONDS,
            START_SECONDS,
        )
        for side in sides
    }
    runs: dict[str, dict[str, Any]] = {side: {"first": [], "again": []} for side in sides}
    try:
        for process in processes.values():
            process.start()
        for side, process in processes.items():
            with _keeping_errors(runs, side):
                process.wait_until_ready()
        shapes = STREAMS[name].shapes(options.tiny)
        turns = [shapes[at : at + CALLS_OF_A_TURN] for at in range(0, len(shapes), CALLS_OF_A_TURN)]
        for key, turn, side in product(("first", "again"), turns, sides):
            for shape in turn:
                run = runs[side]
                if "error" in run or sum(map(sum, run.values())) > options.seconds:
                    break
                with _keeping_errors(runs, side):
                    run[key].append(processes[side].run(shape))
    finally:
        for process in processes.values():
            process.stop()
    return runs


@contextmanager
def _keeping_errors(runs: dict[str, dict[str, Any]], side: str) -> Iterator[None]:
    try:
        yield
    except (NotStartedError, StoppedError, TaskError) as error:
        runs[side] = {"error": str(error)}


def make_caller(name: str, side: str, cache: str, device_name: str, tiny: bool) -> Work[Shape, float]:
    """Makes a stream's network ready in this process; returns the function that takes the shape of an input and returns
    the seconds of a call."""
    import tconv_swap

    # NVRTC has a cache of its own, which would be warm after another stream or run.
    os.environ.update({ENVIRONMENT_VARIABLE: cache, "CUDA_CACHE_DISABLE": "1"})
    stream, device = STREAMS[name], torch.device(device_name)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    network = stream.network(tiny).to(device).train(stream.trains)
    step = _step(network, stream.trains)
    step(torch.randn(stream.warm_up(tiny), device=device))
    if side != PYTORCH:
        network = tconv_swap.swap_layers(network, include_1d=True)
        step = _step(network, stream.trains)
    _finish(device)

    def call(shape: Shape, _announce: Callable[[str], None]) -> float:
        x = torch.randn(shape, device=device)
        _finish(device)
        begin = time.perf_counter()
        step(x)
        _finish(device)
        return time.perf_counter() - begin

    return call


def _step(network: nn.Module, trains: bool) -> Any:
    if not trains:
        return torch.no_grad()(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()

    return step


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_host_parts() -> None:
    """Builds the host part if this process's cache lacks it: these seconds belong to no stream."""
    from tconv_swap.runtime import host

    host.library()


def link_host_parts(cache: Path) -> None:
    """Links what is built from C++ in this process's cache into the cache of other processes."""
    from tconv_swap.runtime.cache import cache_directory

    built = cache_directory() / "host"
    if built.is_dir():
        (cache / "host").symlink_to(built.resolve(), target_is_directory=True)


def table(entries: Sequence[Mapping[str, Any]], head: bool = True) -> str:
    """Returns a line for each stream and side: the total and the slowest call of the first pass, over the calls that
    all sides have finished, and the total of the second."""
    lines = []
    if head:
        lines.append(
            f"{'stream':14}{'side':9}{'calls':>9}{'total s':>10}{'worst s':>10}{'again: calls':>14}{'total s':>10}"
        )
    for entry in entries:
        sides = entry["sides"]
        done = {name: side for name, side in sides.items() if "error" not in side}
        first, again = (
            min((len(side[key]) for side in done.values()), default=0) for key in ("first", "again")
        )
        for name, side in sides.items():
            start = f"{entry['name']:14}{name:9}"
            if "error" in side:
                lines.append(f"{start}  {side['error']}")
                continue
            seconds, more = side["first"][:first], side["again"][:again]
            totals = side.get("totals", ())
            of_all = f"  {min(totals):.3f} to {max(totals):.3f}" if len(totals) > 1 else ""
            lines.append(
                f"{start}{first:>5}/{entry['calls']:<3}{sum(seconds):>10.3f}{max(seconds, default=0):>10.3f}"
                f"{again:>14}{sum(more):>10.3f}{of_all}"
            )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.varying", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the seconds of every call to this file")
    parser.add_argument("--stream", action="append", choices=list(STREAMS), help="only this one (repeatable)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="how long a process may call (default 10)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="how often PyTorch's side and the warm one run"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and sizes, to try the program")
    return parser


if __name__ == "__main__":
    sys.exit(main())
