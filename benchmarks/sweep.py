"""Runs a benchmark of many small tasks: processes plan and compile ahead, one process measures, a file keeps the rows.

A task is prepared by a pool of processes, which need no GPU, and is then measured by the one process that has it. The
file is written every half minute. A run that ends because of its time limit keeps its rows: the tasks are in an order
in which every prefix is a sample of the whole, and another run continues from the file.
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

from benchmarks import sweep_prepared
from benchmarks.layers import commit_of_tree
from benchmarks.measuring_process import MeasuringProcess, NotStartedError, StoppedError, Work
from tconv_swap.kernels.problem import Device
from tconv_swap.measurement.environment import environment
from tconv_swap.runtime import host
from tconv_swap.runtime.cache import write_atomically

SAVE_SECONDS = 30.0
#: The measuring process counts as hung after so long without an announcement: cuDNN tries ten algorithms of a large
#: layer.
SILENCE_SECONDS, START_SECONDS = 45.0, 240.0
#: If the allocator holds more bytes of the GPU's memory than this, they are released between tasks.
MAX_RESERVED_BYTES = 48 << 30
#: The settings in which the parts of one run may differ.
OF_A_PART = ("created", "part")


class Task(Protocol):
    """The unit that is prepared and measured at once. Its text names it in messages."""

    @property
    def key(self) -> tuple[str, ...]:
        """Returns a key that no other task has."""


class Ready(Protocol):
    """A task whose kernels are in the cache on disk."""

    @property
    def launches(self) -> int:
        """Returns the number of launches of all plans."""

    def without(self, running: str, how: str) -> Any:
        """Returns the same without what was announced as ``running`` when the process stopped; None if that cannot be
        left out."""


TaskT = TypeVar("TaskT", bound=Task)
ReadyT = TypeVar("ReadyT", bound=Ready)
RowT = TypeVar("RowT")


@dataclass
class Results(Generic[RowT]):
    """The rows, which are dataclasses. ``done``: the tasks that were measured, or that failed. ``failures``: a line for
    each measurement that failed."""

    benchmark: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[RowT] = field(default_factory=list)
    done: set[tuple[str, ...]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def save(self, path: Path, summary: dict[str, Any] | None = None) -> None:
        """Writes everything, and a summary, with one row on a line."""
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
        """Reads what ``save`` wrote; ``row`` makes a row from its fields.

        Raises:
            ValueError: the file is not of this benchmark.
            OSError: the file cannot be read.
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
        """Returns the rows of both, which are parts of one run.

        Raises:
            ValueError: their settings or machines differ, or they have a task in common.
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
    """The parts of one benchmark.

    Attributes:
        name: the module's name, in messages and in the file.
        prepare: prepares a task in a worker; pickled, like ``make``.
        make: called once in the measuring process; returns the function that measures a prepared task.
        row: makes a row from the fields in a file.
        progress_words: describes rows in a few words, for the progress.
        report: returns all rows for the reader.
        summary: returns what follows from all rows, as values that ``json`` can write.
    """

    name: str
    prepare: Callable[[TaskT], ReadyT]
    make: Callable[[], Work[ReadyT, list[RowT]]]
    row: Callable[..., RowT]
    progress_words: Callable[[Sequence[RowT]], str]
    report: Callable[[Sequence[RowT]], str]
    summary: Callable[[Sequence[RowT]], dict[str, Any]]

    def say(self, line: str) -> None:
        """Prints to standard error at once."""
        print(f"benchmarks.{self.name}: {line}", file=sys.stderr, flush=True)

    def read(self, options: argparse.Namespace) -> int | None:
        """Does what needs no GPU: ``--report`` and ``--merge``; returns the exit code, or None if neither is given."""
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

    def command(
        self,
        facts: Device | None,
        tasks: Callable[[], Sequence[TaskT]],
        settings: dict[str, Any],
        options: argparse.Namespace,
    ) -> int:
        """Carries out a command line; returns the exit code.

        Args:
            facts: those of the GPU to measure on, or to prepare for; None if there is none.
            tasks: returns all tasks; called only if something is measured.
            settings: what the file has to say about this run.
            options: those of ``make_parser``.
        """
        code = self.read(options)
        if code is not None:
            return code
        if options.prepare:
            with _workers(options) as pool:
                count = sweep_prepared.write(
                    options.prepare, self.name, prepared(pool, self.prepare, tasks())
                )
            self.say(f"{count} tasks prepared in {options.prepare}")
            return 0
        if facts is None:
            self.say("torch.cuda.is_available() is False: no GPU")
            return 2
        return self.main(tasks(), settings, options)

    def main(self, tasks: Sequence[TaskT], settings: dict[str, Any], options: argparse.Namespace) -> int:
        """Measures this part of the tasks on the current GPU; returns the exit code: 1 if something was not
        measured."""
        begin = time.monotonic()
        device = torch.device("cuda", torch.cuda.current_device())
        ready = sweep_prepared.read(options.prepared, self.name) if options.prepared else None
        settings = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit_of_tree() if ready is None else ready.commit,
            "part": str(options.part),
            **settings,
        }
        results: Results[RowT] = Results(self.name, environment(device), settings)
        if options.resume and options.json.exists():
            results = Results.load(options.json, self.name, self.row)
        waiting = [task for task in options.part.of(tasks) if task.key not in results.done]
        process = MeasuringProcess[ReadyT, list[RowT]](self.make, SILENCE_SECONDS, START_SECONDS)
        process.start()
        pool = _workers(options)
        try:
            complete = self.run(
                waiting,
                results,
                partial(prepared, pool, self.prepare) if ready is None else ready.of,
                process,
                options.json,
                lambda: options.seconds - (time.monotonic() - begin),
            )
        finally:
            process.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            # Workers may be in the middle of a task whose result nobody needs.
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
        """Measures tasks as they become ready, until the time is over; returns whether all were measured. Notes tasks
        that cannot be measured."""
        saved, launches, measured = seconds_left(), 0, 0
        try:
            for task, future in prepared(waiting):
                try:
                    ready = future.result()
                    launches += ready.launches
                    rows = self._measured(task, ready, process, results.failures)
                except (BrokenExecutor, NotStartedError):
                    raise  # nothing could be prepared or measured any more
                except Exception as error:  # whatever it is, the other rows are useful
                    results.failures.append(f"{task}: {_first_line(error)}")
                    self.say(results.failures[-1])
                    rows = []
                results.rows += rows
                results.done.add(task.key)
                measured += 1
                left = seconds_left()
                self.say(
                    f"[{measured}/{len(waiting)}, {left:.0f} s left, {launches} launches prepared] "
                    f"{task}: {self.progress_words(rows)}"
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
        """Returns the task's rows, if necessary without what hung or killed the process.

        Raises:
            StoppedError: it cannot be left out.
            NotStartedError: no process can be started.
            TaskError: the work raised an exception.
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
    """Yields the tasks as they become ready, roughly in their order."""
    pending = {pool.submit(prepare, task): task for task in waiting}
    while pending:
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        # One at a time, in the order of submission: meanwhile others become ready.
        first = next(future for future in pending if future in done)
        yield pending.pop(first), first


def measuring(
    device: torch.device, measure: Callable[[ReadyT, Callable[[str], None]], list[RowT]]
) -> Work[ReadyT, list[RowT]]:
    """Returns the work of the measuring process, after building the launcher and setting PyTorch to its best."""
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    host.library()

    def work(ready: ReadyT, announce: Callable[[str], None]) -> list[RowT]:
        rows = measure(ready, announce)
        if torch.cuda.memory_reserved(device) > MAX_RESERVED_BYTES:
            torch.cuda.empty_cache()
        return rows

    return work


def shuffled(tasks: Sequence[TaskT], seed: int) -> list[TaskT]:
    """Returns the tasks in an order in which every prefix is a sample of the whole; the same for the same seed."""
    found = list(tasks)
    random.Random(seed).shuffle(found)
    return found


def _workers(options: argparse.Namespace) -> ProcessPoolExecutor:
    count = options.workers or max(1, (os.cpu_count() or 1) // options.part.count)
    # Spawned, because a forked process must not touch CUDA.
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_as_worker)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _as_worker() -> None:
    """Lowers the priority of a worker, since the process that launches comes first."""
    os.nice(10)
    torch.set_num_threads(1)
