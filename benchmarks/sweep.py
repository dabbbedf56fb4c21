"""Runs a benchmark of many small tasks: processes plan and compile ahead, one process measures, a file keeps the rows.

A task becomes ready in a pool of processes, which need no GPU, and is then measured in the one process that has it.
The file is written every half minute. A run that is cut by its time keeps what it has: the tasks come in an order
whose every beginning is a sample of the whole, and another run goes on from the file.
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
from typing import Any, Generic, Protocol, TypeVar

import torch

from benchmarks.layers import commit_of_tree, positive
from benchmarks.measuring_process import MeasuringProcess, NotStartedError, StoppedError, Work
from tconv_swap.measurement.environment import environment
from tconv_swap.runtime import host
from tconv_swap.runtime.cache import write_atomically

SAVE_SECONDS = 30.0
#: Without a word for so long the measuring process counts as hung: cuDNN tries ten algorithms of a large layer.
SILENCE_SECONDS, START_SECONDS = 45.0, 240.0
#: Of the GPU's memory held by the allocator, above which it is given back between tasks.
MOST_RESERVED_BYTES = 48 << 30
#: The settings in which the parts of one run differ.
OF_A_PART = ("created", "part")


class Task(Protocol):
    """What is prepared and measured at once. Its text names it in messages."""

    @property
    def key(self) -> tuple[str, ...]:
        """Tells it from all others."""


class Ready(Protocol):
    """A task whose kernels are in the cache on disk."""

    @property
    def launches(self) -> int:
        """Of all plans."""

    def without(self, running: str, how: str) -> Any:
        """The same without what was announced as ``running`` when the process stopped; None: that is nothing that can
        be left out."""


TaskT = TypeVar("TaskT", bound=Task)
ReadyT = TypeVar("ReadyT", bound=Ready)
RowT = TypeVar("RowT")


@dataclass
class Results(Generic[RowT]):
    """Rows, which are dataclasses. ``done``: the tasks that were measured, or that failed. ``failures``: a line each of
    what could not be measured."""

    benchmark: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[RowT] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def save(self, path: Path, summary: dict[str, Any] | None = None) -> None:
        """Write all, and what a summary says, one row on a line."""
        document = {
            "benchmark": self.benchmark,
            "environment": self.environment,
            "settings": self.settings,
            "failures": self.failures,
            **(summary or {}),
        }
        lists = {"done": sorted(self.done), "rows": [asdict(row) for row in self.rows]}  # type: ignore[call-overload]
        text = json.dumps(document, indent=1).removesuffix("\n}")
        for name, entries in lists.items():
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
            text += f',\n "{name}": [\n{lines}\n ]'
        write_atomically(path, f"{text}\n}}\n".encode())

    @classmethod
    def load(cls, path: Path, benchmark: str, row: Callable[..., RowT]) -> Results[RowT]:
        """What ``save`` wrote; ``row`` makes a row of its fields.

        Raises:
            ValueError: the file is not of this benchmark.
            OSError: it cannot be read.
        """
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("benchmark") != benchmark:
            raise ValueError(f"{path} is not of benchmarks.{benchmark}")
        return cls(
            benchmark,
            document["environment"],
            document["settings"],
            [row(**entry) for entry in document["rows"]],
            {tuple(key) for key in document["done"]},
            document["failures"],
        )

    def joined(self, other: Results[RowT]) -> Results[RowT]:
        """The rows of both, which are parts of one run.

        Raises:
            ValueError: they were run with different settings or machines, or have a task in common.
        """
        mine, others = (_without_part(one.settings) for one in (self, other))
        if mine != others or self.environment["gpu"] != other.environment["gpu"]:
            raise ValueError("the files are not parts of one run: commit, GPU or settings differ")
        if twice := self.done & other.done:
            raise ValueError(f"both files have {' '.join(min(twice))}")
        return replace(
            self,
            settings={**self.settings, "part": None},
            rows=self.rows + other.rows,
            done=self.done | other.done,
            failures=self.failures + other.failures,
        )


def _without_part(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in OF_A_PART}


@dataclass(frozen=True)
class Sweep(Generic[TaskT, ReadyT, RowT]):
    """What one benchmark is made of.

    Attributes:
        name: the module's, in messages and in the file.
        prepare: makes a task ready, in a worker; pickled, as ``make`` is.
        make: called once in the measuring process; returns what measures a task that is ready.
        row: makes a row of the fields in a file.
        told: rows in a few words, for the progress.
        report: all rows for a reader.
        summary: what all rows say, as values that ``json`` can write.
    """

    name: str
    prepare: Callable[[TaskT], ReadyT]
    make: Callable[[], Work[ReadyT, list[RowT]]]
    row: Callable[..., RowT]
    told: Callable[[Sequence[RowT]], str]
    report: Callable[[Sequence[RowT]], str]
    summary: Callable[[Sequence[RowT]], dict[str, Any]]

    def say(self, line: str) -> None:
        """To standard error, at once."""
        print(f"benchmarks.{self.name}: {line}", file=sys.stderr, flush=True)

    def read(self, options: argparse.Namespace) -> int | None:
        """Do what needs no GPU: ``--report`` and ``--merge``; returns the exit code, None if neither was asked for."""
        if options.merge:
            first, *others = (Results.load(path, self.name, self.row) for path in options.merge)
            for other in others:
                first = first.joined(other)
            first.save(options.json, self.summary(first.rows))
            print(self.report(first.rows))
            return 0
        if options.report:
            print(self.report(Results.load(options.json, self.name, self.row).rows))
            return 0
        return None

    def main(self, tasks: Sequence[TaskT], settings: dict[str, Any], options: argparse.Namespace) -> int:
        """Measure this part of the tasks on the current GPU; returns the exit code: 1 if not all was measured."""
        begin = time.monotonic()
        device = torch.device("cuda", torch.cuda.current_device())
        settings = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit_of_tree(),
            "part": str(options.part),
            **settings,
        }
        results: Results[RowT] = Results(self.name, environment(device), settings)
        if options.resume and options.json.exists():
            results = Results.load(options.json, self.name, self.row)
        waiting = [task for task in options.part.of(tasks) if task.key not in results.done]
        process = MeasuringProcess[ReadyT, list[RowT]](self.make, SILENCE_SECONDS, START_SECONDS)
        process.start()
        workers = options.workers or max(1, (os.cpu_count() or 1) // options.part.count)
        # Spawned, because a forked process must not touch CUDA.
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_as_worker)
        try:
            complete = self.run(
                waiting,
                results,
                partial(prepared, pool, self.prepare),
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
        print(self.report(results.rows), flush=True)
        return 0 if complete and not results.failures else 1

    def run(
        self,
        waiting: Sequence[TaskT],
        results: Results[RowT],
        prepared: Callable[[Sequence[TaskT]], Iterator[tuple[TaskT, Future[ReadyT]]]],
        process: MeasuringProcess[ReadyT, list[RowT]],
        path: Path,
        seconds_left: Callable[[], float],
    ) -> bool:
        """Measure what is ready as it becomes so, until the time is over; returns whether all was. What cannot be
        measured is noted, and the rest goes on."""
        saved, launches, measured = seconds_left(), 0, 0
        try:
            for task, future in prepared(waiting):
                try:
                    ready = future.result()
                    launches += ready.launches
                    rows = self._measured(task, ready, process, results.failures)
                except (BrokenExecutor, NotStartedError):
                    raise  # nothing would be prepared or measured any more
                except Exception as error:  # whatever it is, the other rows are worth having
                    results.failures.append(f"{task}: {_first_line(error)}")
                    self.say(results.failures[-1])
                    rows = []
                results.rows += rows
                results.done.add(task.key)
                measured += 1
                left = seconds_left()
                self.say(
                    f"[{measured}/{len(waiting)}, {left:.0f} s left, {launches} launches prepared] "
                    f"{task}: {self.told(rows)}"
                )
                if saved - left >= SAVE_SECONDS:
                    results.save(path)
                    saved = left
                if left <= 0:
                    break
        except (BrokenExecutor, NotStartedError) as error:
            results.failures.append(_first_line(error))
            self.say(results.failures[-1])
        results.save(path, self.summary(results.rows))
        return measured == len(waiting)

    def _measured(
        self,
        task: TaskT,
        ready: ReadyT,
        process: MeasuringProcess[ReadyT, list[RowT]],
        failures: list[str],
    ) -> list[RowT]:
        """The task's rows; again without what hung or killed the process.

        Raises:
            StoppedError: it was nothing that can be left out.
            NotStartedError: there is no process to measure in.
            TaskError: whatever was raised there.
        """
        while True:
            try:
                return process.run(ready)
            except StoppedError as error:
                fewer = ready.without(error.running, error.how)
                if fewer is None:
                    raise
                failures.append(f"{task}: {error}")
                self.say(failures[-1])
                ready = fewer


def prepared(
    pool: Executor, prepare: Callable[[TaskT], ReadyT], waiting: Sequence[TaskT]
) -> Iterator[tuple[TaskT, Future[ReadyT]]]:
    """The tasks as they become ready, about in their order."""
    pending = {pool.submit(prepare, task): task for task in waiting}
    while pending:
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        # One at a time, in the order in which they were asked for: meanwhile others become ready.
        first = next(future for future in pending if future in done)
        yield pending.pop(first), first


def measuring(
    device: torch.device, measure: Callable[[ReadyT, Callable[[str], None]], list[RowT]]
) -> Work[ReadyT, list[RowT]]:
    """In the measuring process, once: the launcher built and PyTorch at its best."""
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    host.library()

    def work(ready: ReadyT, announce: Callable[[str], None]) -> list[RowT]:
        rows = measure(ready, announce)
        if torch.cuda.memory_reserved(device) > MOST_RESERVED_BYTES:
            torch.cuda.empty_cache()
        return rows

    return work


def shuffled(tasks: Sequence[TaskT], seed: int) -> list[TaskT]:
    """In an order whose every beginning is a sample of the whole; the same for the same seed."""
    found = list(tasks)
    random.Random(seed).shuffle(found)
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """Every ``count``-th task, beginning with the ``index``-th: what one of several GPUs measures."""

    index: int = 0
    count: int = 1

    @classmethod
    def of_text(cls, text: str) -> Part:
        """Of ``"0/2"``.

        Raises:
            ValueError: it is not of that form, or there is no such part.
        """
        index, count = map(int, text.split("/"))
        if not 0 <= index < count:
            raise ValueError(f"no part {text}")
        return cls(index, count)

    def of(self, tasks: Sequence[TaskT]) -> Sequence[TaskT]:
        return tasks[self.index :: self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Those that all sweeps have."""
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="where the results are kept")
    parser.add_argument("--resume", action="store_true", help="go on from what the file holds")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: print what the file says (needs no GPU)"
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: write the rows of these files, the parts of one run, to --json",
    )
    parser.add_argument(
        "--part",
        type=Part.of_text,
        default=Part(),
        metavar="I/N",
        help="measure the I-th of N parts, counted from 0: one for each GPU",
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=seconds,
        metavar="S",
        help="stop after so many (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=positive(int),
        metavar="N",
        help="processes that compile (default: one for each CPU, shared out over the parts)",
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _as_worker() -> None:
    """The process that launches comes first."""
    os.nice(10)
    torch.set_num_threads(1)
