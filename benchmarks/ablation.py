"""What each family of kernels is worth: ``python -m benchmarks.ablation --json benchmarks/results/h200-ablation.json``.

The suite and layers drawn at random, every family that can compute a stage against the others and PyTorch's operator.
Processes plan and compile ahead, one process measures; the file is written every half minute, and ``--resume`` goes on
from it. Exit codes: 0 all was measured, 1 time ran out or something failed (it is listed), 2 usage, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation_measure import DIRECTIONS, TIMING, Announce, Prepared, Task, measure, prepare
from benchmarks.ablation_report import report
from benchmarks.ablation_rows import Row, summary
from benchmarks.layers import commit_of_tree, positive
from benchmarks.measuring_process import MeasuringProcess, NotStartedError, StoppedError, Work
from benchmarks.random_layers import OF_EACH_CLASS, SEED, random_layers
from tconv_swap.cuda import call, host
from tconv_swap.cuda.cache import write_atomically
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import LAYOUTS
from tconv_swap.measurement.suite import Layer, load_suite

BENCHMARK = "ablation"
SECONDS = 480.0
#: For the samples of one way to compute one stage.
SECONDS_PER_WAY = 0.015
MODES = ("tf32", "fp16")
#: Measured last, of every so many layers.
OTHER_MODES, OTHER_SHARE = ("bf16", "fp32"), 4
SAVE_SECONDS = 30.0
#: Without a word for so long the measuring process counts as hung: cuDNN tries ten algorithms of a large layer.
SILENCE_SECONDS, START_SECONDS = 45.0, 240.0
#: Of the GPU's memory held by the allocator, above which it is given back between tasks.
MOST_RESERVED_BYTES = 48 << 30
#: Tasks on their way to a worker: enough to keep all at work, few enough to keep their order.
TASKS_PER_WORKER = 3


@dataclass
class Results:
    """``done``: the tasks that were measured, or that failed. ``failures``: a line each."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def save(self, path: Path, *, judged: bool) -> None:
        """Write all; ``judged``: and what it says, which takes a while to work out."""
        document = {
            "benchmark": BENCHMARK,
            "environment": self.environment,
            "settings": self.settings,
            "failures": self.failures,
            **(summary(self.rows) if judged else {}),
            "done": sorted(self.done),
            "rows": [asdict(row) for row in self.rows],
        }
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Results:
        """What ``save`` wrote.

        Raises:
            ValueError: the file is not of this benchmark.
            OSError: it cannot be read.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("benchmark") != BENCHMARK:
            raise ValueError(f"{path} is not of benchmarks.{BENCHMARK}")
        return cls(
            document["environment"],
            document["settings"],
            [Row(**row) for row in document["rows"]],
            {tuple(key) for key in document["done"]},
            document["failures"],
        )


def tasks(suite: Sequence[Layer], drawn: Sequence[Layer]) -> list[Task]:
    """All that is to be measured, in an order whose every beginning is a sample of the whole; the modes that matter
    less last."""
    shuffled = random.Random(SEED)
    layers = [(layer, True) for layer in suite] + [(layer, False) for layer in drawn]
    found = []
    for modes, share in ((MODES, 1), (OTHER_MODES, OTHER_SHARE)):
        batch = [
            Task(layer, of_suite, mode, layout, direction)
            for layer, of_suite in layers[::share]
            for mode in modes
            for layout in LAYOUTS
            for direction in DIRECTIONS
        ]
        shuffled.shuffle(batch)
        found += batch
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = make_parser().parse_args(arguments)
    if options.report:
        print(report(Results.load(options.json).rows))
        return 0
    if not torch.cuda.is_available():
        say("torch.cuda.is_available() is False: no GPU")
        return 2
    begin = time.monotonic()
    index = torch.cuda.current_device()
    device, facts = torch.device("cuda", index), call.device_facts(index)
    settings = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit_of_tree(),
        "seed": SEED,
        "random_layers_of_each_class": OF_EACH_CLASS,
        "seconds_per_way": options.seconds_per_way,
    }
    results = Results(environment(device), settings)
    if options.resume and options.json.exists():
        results = Results.load(options.json)
    waiting = [task for task in tasks(load_suite().layers, random_layers()) if task.key not in results.done]
    make = partial(_measuring, device, facts.architecture, options.seconds_per_way)
    process = MeasuringProcess[Prepared, list[Row]](make, SILENCE_SECONDS, START_SECONDS)
    process.start()
    # Spawned, because a forked process must not touch CUDA.
    pool = ProcessPoolExecutor(options.workers, get_context("spawn"), initializer=_as_worker)
    try:
        complete = run(
            waiting,
            results,
            partial(prepared, pool, partial(prepare, device=facts), options.workers * TASKS_PER_WORKER),
            process,
            options.json,
            lambda: options.seconds - (time.monotonic() - begin),
        )
    finally:
        process.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        # They may be in the middle of a task, which nobody waits for.
        for worker in active_children():
            worker.kill()
    print(report(results.rows), flush=True)
    return 0 if complete and not results.failures else 1


Prepare = Callable[[Sequence[Task]], Iterator[tuple[Task, Future[Prepared]]]]


def run(
    waiting: Sequence[Task],
    results: Results,
    prepared: Prepare,
    process: MeasuringProcess[Prepared, list[Row]],
    path: Path,
    seconds_left: Callable[[], float],
) -> bool:
    """Measure what is ready as it becomes so, until the time is over; returns whether all was. What cannot be measured
    is noted, and the rest goes on."""
    saved, launches, measured = seconds_left(), 0, 0
    try:
        for task, future in prepared(waiting):
            try:
                ready = future.result()
                launches += ready.launches
                rows = _measured(ready, process, results.failures)
            except (BrokenExecutor, NotStartedError):
                raise  # nothing would be prepared or measured any more
            except Exception as error:  # whatever it is, the other rows are worth having
                results.failures.append(f"{task}: {_first_line(error)}")
                say(results.failures[-1])
                rows = []
            results.rows += rows
            results.done.add(task.key)
            measured += 1
            left = seconds_left()
            say(
                f"[{measured}/{len(waiting)}, {left:.0f} s left, {launches} launches prepared] {task}: {_told(rows)}"
            )
            if saved - left >= SAVE_SECONDS:
                results.save(path, judged=False)
                saved = left
            if left <= 0:
                break
    except (BrokenExecutor, NotStartedError) as error:
        results.failures.append(_first_line(error))
        say(results.failures[-1])
    results.save(path, judged=True)
    return measured == len(waiting)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _measured(
    ready: Prepared, process: MeasuringProcess[Prepared, list[Row]], failures: list[str]
) -> list[Row]:
    """The task's rows; again without a family that hung or killed the process.

    Raises:
        StoppedError: it was PyTorch's operator, or nobody's fault in particular.
        NotStartedError: there is no process to measure in.
        TaskError: whatever was raised there.
    """
    while True:
        try:
            return process.run(ready)
        except StoppedError as error:
            stage, _, family = error.running.partition("/")
            if stage not in ready.stages or family == TIMING or family not in ready.stages[stage].plans:
                raise
            failures.append(f"{ready.task}: {error}")
            say(failures[-1])
            stages = {**ready.stages, stage: ready.stages[stage].without(family, error.how)}
            ready = replace(ready, stages=stages)


def prepared(
    pool: Executor, prepare: Callable[[Task], Prepared], most: int, waiting: Sequence[Task]
) -> Iterator[tuple[Task, Future[Prepared]]]:
    """The tasks as they become ready, about in their order; at most ``most`` are on their way."""
    left = iter(waiting)
    pending: dict[Future[Prepared], Task] = {}
    while True:
        for task in left:
            pending[pool.submit(prepare, task)] = task
            if len(pending) >= most:
                break
        if not pending:
            return
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        # One at a time, in the order in which they were asked for: meanwhile others become ready.
        first = next(future for future in pending if future in done)
        yield pending.pop(first), first


def _as_worker() -> None:
    """The process that launches comes first."""
    os.nice(10)
    torch.set_num_threads(1)


def _measuring(device: torch.device, architecture: str, seconds: float) -> Work[Prepared, list[Row]]:
    """In the measuring process, once: the launcher built and PyTorch at its best."""
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    host.library()

    def work(prepared: Prepared, announce: Announce) -> list[Row]:
        rows = measure(prepared, device, architecture, seconds, announce)
        if torch.cuda.memory_reserved(device) > MOST_RESERVED_BYTES:
            torch.cuda.empty_cache()
        return rows

    return work


def _told(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.stage} {min(row.microseconds, key=lambda name: row.microseconds[name])} "
        f"{min(row.microseconds.values()):.1f} us of {len(row.microseconds)}"
        + ("" if row.regret is None else f", {row.chosen} x{row.regret:.2f}")
        for row in rows
    )


def say(line: str) -> None:
    """To standard error, at once."""
    print(f"benchmarks.ablation: {line}", file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description="Time every family of kernels on the suite and on random layers: what each is worth.",
        epilog="Exit codes: 0 all was measured, 1 time ran out or something failed, 2 usage or no GPU.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="where the results are kept")
    parser.add_argument("--resume", action="store_true", help="go on from what the file holds")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: print what the file says (needs no GPU)"
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=SECONDS,
        metavar="S",
        help="stop after so many (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds-per-way",
        type=positive(float),
        default=SECONDS_PER_WAY,
        metavar="S",
        help="for the timing of one family in one stage of one layer (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=positive(int),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that compile (default: one for each CPU)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
