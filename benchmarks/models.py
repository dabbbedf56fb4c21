"""Times whole networks, PyTorch's layers against ours, end to end: ``python -m benchmarks.models``.

`--runtime best` finds the best way of each network: PyTorch's layers and ours in every layout and runtime, forward and
a training step, beside how the network is run today.

The other runtimes measure each way alone: forward (eval, no gradients), backward and training step (SGD), in TF32 and
under float16 autocast, in NCHW and in channels_last, eager and under ``torch.compile``; the forward pass also replayed
from a CUDA graph, by the GPU's time; and the share of the original's time that transposed convolutions take, which
bounds every possible gain.

The JSON is written after every row with its commit: an interrupted run leaves its rows, and ``--resume`` continues from
them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.layers import commit_of_tree
from benchmarks.models_best import best_chart
from benchmarks.models_report import chart, fill_readmes, table
from benchmarks.models_row import Case, Setting, measure, run_once
from benchmarks.models_turns import rows_by_turns
from benchmarks.models_ways import LAYOUT, ORDER, RUNTIME, measure_best
from benchmarks.models_ways import PRECISIONS as BEST_PRECISIONS
from benchmarks.networks import NETWORKS
from benchmarks.sweep_options import Part
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.runtime.cache import write_atomically

BENCHMARK = "models"
PRECISIONS = ("tf32", "fp16")
RUNTIMES = ("eager", "compile", RUNTIME)
#: The cores for each network whose best ways are measured at the same time: one for its process, the others for
#: Inductor's threads. With fewer, launches of the network that is being timed would wait for a core.
CORES_OF_A_ROW = 3
#: The reasons why a row was not even started.
NO_TIME, GPU_LOST = NOT_TRIED = ("no time left", "the GPU was lost by an error before")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0 all was measured, 1 something was not (it is listed), 2 usage."""
    options = make_parser().parse_args(arguments)
    if options.show:
        print(table(json.loads(options.json.read_text(encoding="utf-8"))))
        return 0
    if options.render:
        document = json.loads(options.json.read_text(encoding="utf-8"))
        write_atomically(options.json.with_suffix(".svg"), chart(document).encode())
        if (drawn := best_chart(document)) is not None:
            write_atomically(options.json.with_name(f"{options.json.stem}-best.svg"), drawn.encode())
        fill_readmes(document, options.json.name)
        return 0
    if options.merge:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        document = merged(files)
        _save(document, options.json)
        print(table(document))
        return 1 if document["not_measured"] else 0
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        _say("torch.cuda.is_available() is False: no GPU; --device cpu --tiny tries the program")
        return 2
    setting = Setting(device, options.tiny, options.iters, options.budget)
    cases = options.part.of(list(every_case(options)))
    document = run(cases, setting, options)
    print(table(document))
    return 1 if document["not_measured"] else 0


def run(cases: Sequence[Case], setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Measures every case; lists those that cannot be measured."""
    begin = time.monotonic()
    document: dict[str, Any] = {
        "benchmark": BENCHMARK,
        "environment": environment(setting.device),
        "settings": {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit_of_tree(),
            "iters": setting.iters,
            "budget_s": setting.budget_s,
            "tiny": setting.tiny,
            "seconds": 0.0,
        },
        "rows": [],
        "not_measured": [],
    }
    failed: list[str] = []
    if (options.resume or options.renew) and options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        document["rows"] = before["rows"]
        failed = [line for line in before["not_measured"] if not line.endswith(NOT_TRIED)]
    left = _left(cases, document, failed, renew=options.renew)
    if setting.device.type == "cuda" and options.workers:
        compile_ahead(
            [case for case in left if case.runtime != RUNTIME], setting, options.workers, options.ahead
        )
        _say(f"compiled ahead: {time.monotonic() - begin:.0f} s")

    def seconds_left() -> float:
        return options.seconds - (time.monotonic() - begin) if options.seconds else math.inf

    tried: set[Case] = set()
    why = NO_TIME
    for case, found in _measured(left, setting, options, seconds_left):
        tried.add(case)
        if isinstance(found, Exception):  # whatever it is, the other rows are useful
            line = f"not measured: {type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
            document["not_measured"].append(f"{case}: {line}")
        else:
            document["rows"] = [other for other in document["rows"] if _case(other) != case]
            document["rows"].append(found | {"commit": document["settings"]["commit"]})
            line = ", ".join(f"{c['stage']} {c['speedup']:.2f}x" for c in found["stages"])
            if "seconds" in found:
                line += " ({whole:.0f} s, {gpu:.0f} s of them on the GPU)".format(**found["seconds"])
        document["settings"]["seconds"] = round(time.monotonic() - begin, 1)
        _say(f"[{len(tried)}/{len(left)}, {document['settings']['seconds']:.0f} s] {case}: {line}")
        if not _usable(setting.device):
            why = GPU_LOST
            _say(f"{GPU_LOST}; --resume continues in a new process")
            break
        _save(document, options.json)
    document["not_measured"] += _missing([case for case in left if case not in tried], document, why)
    _save(document, options.json)
    return document


def _measured(
    left: Sequence[Case], setting: Setting, options: argparse.Namespace, seconds_left: Callable[[], float]
) -> Iterator[tuple[Case, dict[str, Any] | Exception]]:
    """Yields the row of each case for which there is time, or why it has none. Best ways on a GPU come last, several at
    a time."""
    by_turns = [case for case in left if case.runtime == RUNTIME and setting.device.type == "cuda"]
    for case in [case for case in left if case not in by_turns]:
        if seconds_left() <= 0:
            return
        found: dict[str, Any] | Exception
        try:
            found = (measure_best if case.runtime == RUNTIME else measure)(case, setting)
        except Exception as error:
            found = error
        torch.compiler.reset()
        yield case, found
    if not by_turns:
        return
    cores = (os.cpu_count() or 1) // options.part.count
    at_once = options.at_once or max(1, cores // CORES_OF_A_ROW)
    yield from rows_by_turns(by_turns, setting, at_once, max(1, cores // at_once - 1), seconds_left)


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows of several files; for a case in several of them that of the last, completed by the others."""
    rows = {_case(row): row for document in documents for row in document["rows"]}
    lines = dict.fromkeys(line for document in documents for line in document["not_measured"])
    return {
        **documents[0],
        "rows": list(rows.values()),
        "not_measured": [line for line in lines if not any(line.startswith(f"{case}: ") for case in rows)],
    }


def _left(cases: Sequence[Case], document: dict[str, Any], failed: list[str], *, renew: bool) -> list[Case]:
    """Returns the cases to measure: first those without a row, last those that failed, which may break the GPU."""
    commits = {_case(row): row.get("commit") for row in document["rows"]}
    commit = document["settings"]["commit"]
    left = [case for case in cases if case not in commits or (renew and commits[case] != commit)]
    return sorted(
        left, key=lambda case: (any(line.startswith(f"{case}: ") for line in failed), case in commits)
    )


def _missing(cases: Sequence[Case], document: dict[str, Any], why: str) -> list[str]:
    """Returns those of the cases that were not started which have no row of another commit either."""
    present = {_case(row) for row in document["rows"]}
    return [f"{case}: {why}" for case in cases if case not in present]


def _case(row: Mapping[str, Any]) -> Case:
    return Case(*(row[field] for field in Case._fields))


def _usable(device: torch.device) -> bool:
    """Returns whether the GPU still works: after an illegal access everything in this process would fail."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


def compile_ahead(cases: Sequence[Case], setting: Setting, workers: int, limit_s: float) -> None:
    """Runs every case once in separate processes, so that kernels and compiled graphs are on disk.

    An error here occurs again when the case is measured, and is reported then.
    """
    # Cases that compile take longest, so they come first.
    ordered = sorted(cases, key=lambda case: case.runtime == "eager")
    # There are many workers, so none of them may start a compiler for every core.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    jobs = [pool.submit(run_once, case, setting) for case in ordered]
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    try:
        for _ in as_completed(jobs, timeout=limit_s):
            pass
    except TimeoutError:
        _say(f"{sum(not job.done() for job in jobs)} cases are compiled when they are measured")
    # Workers that still run would disturb the measurements; finished work is on disk.
    for worker in active_children():
        worker.terminate()
    # The pool's own thread waits for the workers: of two that wait for one process, one may miss its end.
    pool.shutdown(cancel_futures=True)


def every_case(options: argparse.Namespace) -> Iterator[Case]:
    """Yields all cases, eager ones first: most users run these, and they compile fastest."""
    for runtime in options.runtime or RUNTIMES:
        if runtime == RUNTIME:
            yield from _best_cases(options)
            continue
        for name in options.network or NETWORKS:
            for precision in options.precision or PRECISIONS:
                for layout in options.layout or LAYOUTS:
                    if runtime == "eager" or not NETWORKS[name].no_compile:
                        yield Case(name, precision, layout, runtime)


def _best_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases of best ways, float16 first; a row has both layouts."""
    for precision in BEST_PRECISIONS:
        for name in ORDER:
            if name in (options.network or NETWORKS) and precision in (options.precision or PRECISIONS):
                yield Case(name, precision, LAYOUT, RUNTIME)


def _save(document: dict[str, Any], path: Path) -> None:
    """Writes each row on one line, in the order of `every_case`, all at once or not at all."""
    every = list(every_case(make_parser().parse_args([])))
    document["rows"].sort(key=lambda row: every.index(_case(row)))
    rows = ",\n".join("  " + json.dumps(row) for row in document["rows"])
    head = json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1)
    write_atomically(path, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 all was measured, 1 something was not (it is listed), 2 usage or no GPU.",
    )
    parser.add_argument(
        "--network", action="append", choices=list(NETWORKS), help="repeatable (default: all)"
    )
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="repeatable (default: both)")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="repeatable (default: both)")
    parser.add_argument(
        "--runtime",
        action="append",
        choices=RUNTIMES,
        help="repeatable (default: all). best: every way to run the network, PyTorch's best and ours, in both "
        "layouts. A network whose `no_compile` gives a reason is not compiled",
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
        help="seconds for the samples of each timing, which are 5 to 200 (default: %(default)s)",
    )
    parser.add_argument("--iters", type=int, metavar="N", help="take this many samples instead")
    parser.add_argument("--seconds", type=float, help="start no further row after this time")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile ahead; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--ahead",
        type=float,
        default=100.0,
        metavar="S",
        help="stop compiling ahead after this time (default: %(default)s)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help="networks whose best ways are measured at a time: one uses the GPU while the others compile "
        f"(default: one for each {CORES_OF_A_ROW} cores)",
    )
    parser.add_argument(
        "--part",
        type=Part.of_text,
        default=Part(),
        metavar="I/N",
        help="measure the I-th of N parts of the rows, counted from 0: one for each GPU",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: write the rows of these files to --json",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json holds already")
    parser.add_argument(
        "--renew",
        action="store_true",
        help="like --resume; then, if no row is missing, measure those of other commits again",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(__file__).parent / "results" / "h200-models.json",
        metavar="FILE",
        help="the file for the rows (default: %(default)s)",
    )
    parser.add_argument("--show", action="store_true", help="measure nothing: print every row of --json")
    parser.add_argument(
        "--render",
        action="store_true",
        help="measure nothing: draw the chart of --json beside it, and put it and the means into the READMEs",
    )
    return parser


def _say(line: str) -> None:
    print(f"benchmarks.models: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
