"""Measures the best ways of several networks at a time: each in a separate process, which take turns on the GPU.

Most of the time of such a row is Dynamo and Inductor, which need no GPU. A process loads its libraries, holds the GPU
from then on, releases it while it compiles, and waits for its turn before the compiled code runs: cuDNN's search,
captures and timings are alone on the GPU. While the times of a row are measured, the other processes are stopped: with
compilers on all cores, a training step that waits for the CPU takes a third longer.
"""

from __future__ import annotations

import fcntl
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import IO, Any

import torch
from torch import nn

from benchmarks.measuring_process import MeasuringProcess, Work
from benchmarks.models_row import Case, Setting
from benchmarks.models_ways import measure_best
from benchmarks.stopped_processes import continue_descendants, others_stopped
from tconv_swap.runtime import host

#: A row takes minutes; after this time the process counts as hung.
SILENCE_SECONDS, START_SECONDS = 600.0, 240.0
#: Rows that have started when the time is over may continue for this long.
GRACE_SECONDS = 60.0
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"

Row = dict[str, Any]
#: Measures a case in a setting; the third argument is called with the next step, and what is timed for the row runs
#: inside the fourth.
Measure = Callable[[Case, Setting, Callable[[str], None], Callable[[], AbstractContextManager[None]]], Row]


class Turn:
    """Inside, this process alone uses the GPU, except while PyTorch compiles: then another may.

    The lock is on a file, so the system releases it however the process ends.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._file: IO[bytes] | None = None
        self._taken_at: float | None = None
        self._held_before_s = 0.0

    @property
    def held_s(self) -> float:
        """Returns the seconds that it has been held until now."""
        return self._held_before_s + (0.0 if self._taken_at is None else time.monotonic() - self._taken_at)

    def __enter__(self) -> Turn:
        from torch._dynamo.callback import callback_handler

        self._file = self._path.open("ab")
        self._take()
        callback_handler.register_start_callback(self._compilation_begins)
        callback_handler.register_end_callback(self._compilation_ends)
        return self

    def __exit__(self, *_: object) -> None:
        from torch._dynamo.callback import callback_handler

        with suppress(ValueError):  # torch.compiler.reset has removed them already
            callback_handler.remove_start_callback(self._compilation_begins)
            callback_handler.remove_end_callback(self._compilation_ends)
        assert self._file is not None
        with suppress(torch.AcceleratorError):  # the row reports it
            self._let_go()
        self._file.close()

    def _compilation_begins(self, arguments: Any) -> None:
        if _is_for_the_cpu(arguments):
            self._let_go()

    def _compilation_ends(self, arguments: Any) -> None:
        if _is_for_the_cpu(arguments):
            self._take()

    def _take(self) -> None:
        fcntl.flock(self._open, fcntl.LOCK_EX)
        self._taken_at = time.monotonic()

    def _let_go(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what the allocator keeps for later, the other processes need now
        self._held_before_s, self._taken_at = self.held_s, None
        fcntl.flock(self._open, fcntl.LOCK_UN)

    @property
    def _open(self) -> IO[bytes]:
        assert self._file is not None
        return self._file


def _is_for_the_cpu(arguments: Any) -> bool:
    """Returns whether this is a compilation: the recording of a CUDA graph is announced too."""
    from torch._dynamo.callback import CallbackTrigger

    return arguments.callback_trigger in (CallbackTrigger.DYNAMO, CallbackTrigger.LAZY_BACKWARD)


def rows_by_turns(
    cases: Sequence[Case],
    setting: Setting,
    at_once: int,
    threads: int,
    seconds_left: Callable[[], float],
    measure: Measure = measure_best,
) -> Iterator[tuple[Case, Row | Exception]]:
    """Yields the rows as they are done, or why one is not; those that had not started when the time was over are
    missing.

    Args:
        cases: the cases, in the order in which they start.
        at_once: the number of processes.
        threads: the number of Inductor's threads in each process.
        measure: measures one row in its process; pickled.
    """
    processes: set[MeasuringProcess[Case, Row]] = set()
    starting = Lock()
    is_over = False
    with TemporaryDirectory(prefix="tconv-swap-turn-") as directory:
        make = partial(_make, measure, setting, Path(directory) / "turn")
        before = os.environ.get(_COMPILE_THREADS)
        os.environ[_COMPILE_THREADS] = str(threads)  # the processes inherit it

        def row_of(case: Case) -> Row:
            process = MeasuringProcess[Case, Row](make, SILENCE_SECONDS, START_SECONDS)
            with starting:
                if is_over:
                    raise CancelledError
                process.start()
                processes.add(process)
            try:
                return process.run(case)
            finally:
                with starting:
                    process.stop()
                    processes.discard(process)
                    continue_descendants()

        pool = ThreadPoolExecutor(at_once)
        waiting: dict[Future[Row], Case] = {pool.submit(row_of, case): case for case in cases}
        try:
            while waiting:
                left = seconds_left()
                if left <= 0:
                    for future in [future for future in waiting if future.cancel()]:
                        del waiting[future]
                done, _ = wait(
                    waiting,
                    timeout=None if left == math.inf else left if left > 0 else GRACE_SECONDS,
                    return_when=FIRST_COMPLETED,
                )
                if not done and left <= 0:
                    return
                for future in done:
                    error = future.exception()
                    assert error is None or isinstance(error, Exception)
                    yield waiting.pop(future), future.result() if error is None else error
        finally:
            for future in waiting:
                future.cancel()
            with starting:
                is_over = True
                for process in processes:
                    process.stop()
            pool.shutdown()
            del os.environ[_COMPILE_THREADS]
            if before is not None:
                os.environ[_COMPILE_THREADS] = before


def _make(measure: Measure, setting: Setting, path: Path) -> Work[Case, Row]:
    """Returns the work of a process that measures rows."""

    def work(case: Case, announce: Callable[[str], None]) -> Row:
        begin = time.monotonic()
        if setting.device.type == "cuda":
            _load_libraries(setting.device)
        with Turn(path, setting.device) as turn:

            def show(step: str) -> None:
                spent = f"{time.monotonic() - begin:.0f} s, {turn.held_s:.0f} s of them on the GPU"
                print(f"{case} ({spent}): {step.partition(' (needs ')[0]}", file=sys.stderr, flush=True)
                announce(step)

            row = measure(case, setting, show, others_stopped)
        return {**row, "seconds": {"gpu": turn.held_s, "whole": time.monotonic() - begin}}

    return work


def _load_libraries(device: torch.device) -> None:
    """Loads what the first calls on a GPU load: CUDA's context, cuDNN, cuBLAS, Inductor, our host part. This takes many
    seconds and hardly uses the GPU, so a process needs no turn for it."""
    import torch._inductor.compile_fx

    host.library()
    layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 8)).to(device)
    for dtype in (torch.float32, torch.float16):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            layers(torch.ones(8, 8, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(device)
