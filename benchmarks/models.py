"""Whole networks, PyTorch's layers against ours, end to end: ``python -m benchmarks.models``.

Forward (eval, no gradients), backward and training step (SGD), in TF32 and under float16 autocast, in NCHW and in
channels_last, eager and under ``torch.compile``; and the share of the original's time that transposed convolutions take
at all, which bounds what anybody can gain. The JSON is written after every row: an interrupted run leaves what it has,
and ``--resume`` goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

import tconv_swap
from benchmarks.layers import _commit
from benchmarks.models_report import chart, fill_readmes, table
from benchmarks.networks import NETWORKS, Network
from tconv_swap.cuda.cache import write_atomically
from tconv_swap.explanation import explain
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.bench import BenchmarkReport, benchmark
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import LAYOUTS, MODES
from tconv_swap.measurement.stages import (
    Stage,
    autocast_of,
    capture_calls,
    network_variant,
    sum_of_squares,
)

BENCHMARK = "models"
PRECISIONS = ("tf32", "fp16")
RUNTIMES = ("eager", "compile")
#: Why a row was not even begun.
NO_TIME, GPU_LOST = NOT_TRIED = ("no time left", "the GPU was lost by an error before")
#: Between the outputs of a layer, relative (L2): the rounding of TF32 or float16 on both sides, and not much more.
MOST_DIFFERENCE = 3e-3


class Case(NamedTuple):
    """One row."""

    network: str
    precision: str
    layout: str
    runtime: str

    def __str__(self) -> str:
        return " ".join(self)


class Autocast(nn.Module):
    """A network under float16 autocast, as a training loop runs it; the backward pass is outside, as it must be."""

    def __init__(self, network: nn.Module, device_type: str) -> None:
        super().__init__()
        self.network = network
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.float16):
            return self.network(*args, **kwargs)


class Setting(NamedTuple):
    """What is the same for all rows."""

    device: torch.device
    tiny: bool
    iters: int | None
    budget_s: float = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 all was measured, 1 something was not (it is listed), 2 usage."""
    options = _parser().parse_args(arguments)
    if options.render:
        document = json.loads(options.json.read_text(encoding="utf-8"))
        write_atomically(options.json.with_suffix(".svg"), chart(document).encode())
        fill_readmes(document, options.json.name)
        return 0
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        _say("torch.cuda.is_available() is False: no GPU; --device cpu --tiny tries the program")
        return 2
    setting = Setting(device, options.tiny, options.iters, options.budget)
    cases = list(_cases(options))
    document = run(cases, setting, options)
    print(table(document))
    return 1 if document["not_measured"] else 0


def run(cases: Sequence[Case], setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Measure; what cannot be measured is listed, and the rest goes on."""
    begin = time.monotonic()
    document: dict[str, Any] = {
        "benchmark": BENCHMARK,
        "environment": environment(setting.device),
        "settings": {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _commit(),
            "iters": setting.iters,
            "budget_s": setting.budget_s,
            "tiny": setting.tiny,
            "seconds": 0.0,
        },
        "rows": [],
        "not_measured": [],
    }
    failed: list[str] = []
    if options.resume and options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        document["rows"] = before["rows"]
        failed = [line for line in before["not_measured"] if not line.endswith(NOT_TRIED)]
    done = {Case(*(row[field] for field in Case._fields)) for row in document["rows"]}
    left = [case for case in cases if case not in done]
    # Last what failed before: it may take the GPU with it.
    left.sort(key=lambda case: any(line.startswith(f"{case}: ") for line in failed))
    if setting.device.type == "cuda" and options.workers:
        compile_ahead(left, setting, options.workers, options.ahead)
        _say(f"compiled ahead: {time.monotonic() - begin:.0f} s")
    for place, case in enumerate(left, start=1):
        spent = time.monotonic() - begin
        if options.seconds and spent > options.seconds:
            document["not_measured"] += [f"{later}: {NO_TIME}" for later in left[place - 1 :]]
            break
        try:
            row = measure(case, setting)
            document["rows"].append(row)
            line = ", ".join(f"{c['stage']} {c['speedup']:.2f}x" for c in row["stages"])
        except Exception as error:  # whatever it is, the other rows are worth having
            line = f"not measured: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            document["not_measured"].append(f"{case}: {line}")
        torch.compiler.reset()
        document["settings"]["seconds"] = round(time.monotonic() - begin, 1)
        _say(f"[{place}/{len(left)}, {document['settings']['seconds']:.0f} s] {case}: {line}")
        if not _usable(setting.device):
            document["not_measured"] += [f"{later}: {GPU_LOST}" for later in left[place:]]
            _say(f"{GPU_LOST}; --resume goes on in a new process")
            break
        _save(document, options.json)
    _save(document, options.json)
    return document


def _usable(device: torch.device) -> bool:
    """An illegal access takes the process's GPU with it: everything after it would fail too."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def measure(case: Case, setting: Setting) -> dict[str, Any]:
    """One row: both networks built anew, compared, timed interleaved.

    Raises:
        ValueError: the outputs differ by more than rounding explains.
        Exception: whatever the networks raise.
    """
    network = NETWORKS[case.network]
    with _switched(case):
        original, swapped, inputs = _pair(case, network, setting)
        difference = _difference(original, swapped, inputs)
        if not difference <= MOST_DIFFERENCE:
            raise ValueError(f"the outputs of a layer differ by {difference:.1e} of their norm")
        made = explain(swapped, inputs)
        if case.runtime == "compile":
            original, swapped = _compiled(original), _compiled(swapped)
        timing = benchmark(
            original,
            swapped,
            inputs,
            iters=setting.iters,
            warmup=None if setting.iters is None else min(2, setting.iters - 1),
            budget_s=setting.budget_s,
            per_layer=case.runtime == "eager",
            loss=_loss,
        )
    if not timing.network:
        raise ValueError("; ".join(timing.notes))
    return {
        **case._asdict(),
        "batch": 2 if setting.tiny else network.batch,
        "difference": difference,
        "layers": len({layer.name for layer in made.layers}),
        "families": sorted({stage.family for layer in made.layers for stage in layer.stages}),
        "by_pytorch": list(made.native) if setting.device.type == "cuda" else [],
        "stages": [comparison.to_dict() for comparison in timing.network],
        "share": _shares(timing),
        "peak_memory": [peak.to_dict() for peak in timing.peak_memory or ()],
        "notes": timing.notes,
    }


def _shares(timing: BenchmarkReport) -> dict[str, float | None]:
    """Of the original's time, 0 to 1, that of its transposed convolutions: forward, backward, and a step's both."""
    found = {"forward": timing.transposed_share("forward"), "backward": timing.transposed_share("backward")}
    step = next((c.original.median_ms for c in timing.network if c.stage == "step"), None)
    layers = sum(layer.original.median_ms * layer.calls for layer in timing.layers)
    whole = step and timing.layers and {layer.stage for layer in timing.layers} == {"forward", "backward"}
    return found | {"step": min(1.0, layers / step) if step and whole else None}


@contextmanager
def _switched(case: Case) -> Iterator[None]:
    """TF32 allowed in every case, as where speed matters, and no chatter of torch.compile's."""
    with MODES["tf32"].switched_on(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pair(case: Case, network: Network, setting: Setting) -> tuple[nn.Module, nn.Module, Inputs]:
    torch.manual_seed(0)
    original = network.build(setting.tiny).to(setting.device)
    inputs = Inputs.of(network.inputs(2 if setting.tiny else network.batch, setting.tiny, setting.device))
    if case.layout == "channels_last":
        original = original.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=LAYOUTS[case.layout])
    if case.precision == "fp16":
        original = Autocast(original, setting.device.type)
    swapped = tconv_swap.swap_layers(copy.deepcopy(original))
    return original, swapped, inputs


def _compiled(network: nn.Module) -> nn.Module:
    found: Any = torch.compile(network, dynamic=False)
    return found  # type: ignore[no-any-return]


def _loss(output: Any) -> Tensor:
    """Torchvision's detectors give a dict of losses in train mode, the others outputs."""
    return sum_of_squares(output)


def _difference(original: nn.Module, swapped: nn.Module, inputs: Inputs) -> float:
    """Relative L2 between the outputs of PyTorch's layers and of ours, on what reaches them; of the worst layer.

    A guard against timing something else: `tconv_swap.verify` proves more, against float64, in minutes.
    """
    layers = [name for name, m in swapped.named_modules() if isinstance(m, tconv_swap.ConvTranspose2d)]
    if not layers:
        raise ValueError("nothing is swapped")
    original.eval()
    worst = 0.0
    with torch.no_grad():
        for called in capture_calls(original, layers, lambda: inputs.map(torch.clone)(original)):
            with autocast_of(called):
                ours, theirs = (
                    called.inputs(network.get_submodule(called.name)).double()
                    for network in (swapped, original)
                )
            apart = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300))
            # A NaN is larger than any number.
            worst = max(worst, apart if apart == apart else math.inf)
    return worst


def compile_ahead(cases: Sequence[Case], setting: Setting, workers: int, limit_s: float) -> None:
    """Run every case once in processes of their own, so that kernels and compiled graphs lie on disk.

    Whatever goes wrong there goes wrong again where it is measured, and is reported then.
    """
    # Those that compile take longest: first.
    ordered = sorted(cases, key=lambda case: case.runtime != "compile")
    # Each worker is one of many: it must not start a compiler for every core.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    jobs = [pool.submit(_run_once, case, setting) for case in ordered]
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    try:
        for _ in as_completed(jobs, timeout=limit_s):
            pass
    except TimeoutError:
        _say(f"{sum(not job.done() for job in jobs)} cases are compiled when they are measured")
    # What has begun would disturb the measurements; what is finished lies on disk.
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in active_children():
        worker.terminate()
        worker.join()


def _run_once(case: Case, setting: Setting) -> None:
    """Each stage as `benchmark` will run it: another need of gradients would be another graph."""
    # Dynamo stops compiling a function that it has seen in too many versions: those of the cases before.
    torch.compiler.reset()
    with _switched(case):
        original, swapped, inputs = _pair(case, NETWORKS[case.network], setting)
        networks = [swapped]
        if case.runtime == "compile":
            networks = [_compiled(original), _compiled(swapped)]
        for network, stage in product(networks, get_args(Stage)):
            variant = network_variant(network.train(stage != "forward"), inputs, stage, _loss)
            variant.run(variant.prepare())


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Eager ones first: they are what most people run, and compile fastest."""
    for runtime in options.runtime or RUNTIMES:
        for name in options.network or NETWORKS:
            for precision in options.precision or PRECISIONS:
                for layout in options.layout or LAYOUTS:
                    if runtime == "eager" or not NETWORKS[name].no_compile:
                        yield Case(name, precision, layout, runtime)


def _save(document: dict[str, Any], path: Path) -> None:
    """One row on a line, all at once or not at all."""
    rows = ",\n".join("  " + json.dumps(row) for row in document["rows"])
    head = json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1)
    write_atomically(path, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 all was measured, 1 something was not (it is listed), 2 usage or no GPU.",
    )
    parser.add_argument(
        "--network", action="append", choices=list(NETWORKS), help="repeatable; all without it"
    )
    parser.add_argument(
        "--precision", action="append", choices=PRECISIONS, help="repeatable; both without it"
    )
    parser.add_argument(
        "--layout", action="append", choices=list(LAYOUTS), help="repeatable; both without it"
    )
    parser.add_argument(
        "--runtime",
        action="append",
        choices=RUNTIMES,
        help="repeatable; both without it. A network whose `no_compile` says why is run eagerly alone",
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument(
        "--tiny", action="store_true", help="small networks, to try the program without a GPU"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0.5,
        metavar="S",
        help="as many samples of each timing as fit, from 5 to 200 (default: %(default)s)",
    )
    parser.add_argument("--iters", type=int, metavar="N", help="so many samples instead")
    parser.add_argument("--seconds", type=float, help="start no further row after so long")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile ahead; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--ahead",
        type=float,
        default=100.0,
        metavar="S",
        help="compile nothing ahead after so long (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json holds already")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).parent / "results" / "h200-models.json",
        metavar="FILE",
        help="where the rows go (default: %(default)s)",
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="measure nothing: draw the chart of --json beside it, and put it and the table into the READMEs",
    )
    return parser


def _say(line: str) -> None:
    print(f"benchmarks.models: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
