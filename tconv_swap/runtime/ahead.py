"""Plans and compiles in the background what a network will need soon: the layers behind a new one, and the gradients of
a layer, while its forward pass and the layers behind it run; then the kernels that its other sizes need.

Only the time of the first calls depends on it. A plan that is needed before its job has begun is made by the caller.
"""

from __future__ import annotations

import heapq
import logging
import os
import random
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import TypeAlias

from tconv_swap.runtime import cores, disk_cache, host, jit, launch, worker_pool
from tconv_swap.runtime.program import Kernel, Plan

logger = logging.getLogger("tconv_swap")

#: A pure function of data, which keeps its results.
MakePlans: TypeAlias = Callable[[], Iterable[Plan]]

#: What is needed soon is compiled before what may be needed later.
SOON, LATER = 0, 1
#: What is added to the niceness of the threads that compile.
NICENESS = 10
#: The most threads that compile, and that plan. Each waits for a process that does (``worker_pool``). One core is left
#: to the caller.
MAX_THREADS = 16
#: The ranks of a distributed run begin together. Each compiles so many kernels in an order of its own, so that it finds
#: those of others on disk.
_SHUFFLED = 4

_lock = threading.Lock()
#: The jobs that have not ended.
_jobs: dict[Hashable, Future[None]] = {}
#: The last of those that have ended, in the order of their ends: they are not begun again.
_ended: dict[Hashable, None] = {}
_MAX_ENDED = 4096
#: The kernels that wait, a heap: what decides their order, then the kernel and its architecture.
_waiting: list[tuple[tuple[int, int, float, int], Kernel, str]] = []
_numbers = count()


@lru_cache(maxsize=1)
def _planner() -> ThreadPoolExecutor:
    return _planners(_threads())


def _planners(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "tconv_swap-planner", disk_cache.search_by, (worker_pool.call,))


@lru_cache(maxsize=1)
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "tconv_swap-compiler", _be_nice)


def _threads() -> int:
    return max(1, min(MAX_THREADS, cores.share() - 1))


def _be_nice() -> None:
    """Leaves the cores to other threads, where the system has a priority for each thread."""
    with suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, before + NICENESS))


def read_sources() -> None:
    """Reads what the first call on a GPU needs, so that this call need not: the sources, and the host part if it is
    built."""
    jit.sources_digest()
    disk_cache.sources_digest()
    if host.is_built():
        host.is_available()


def begin(
    key: Hashable,
    make_plans: MakePlans,
    architecture: str,
    make_others: MakePlans | None = None,
    urgency: int = SOON,
) -> None:
    """Makes plans in the background, unless it has done so before, and compiles those of their kernels that are neither
    loaded nor on disk.

    Args:
        key: what ``settle`` is called with before the same plans are made.
        make_plans: yields those that are needed first before the others. What it raises is logged: the call that needs
            the plans raises it again.
        make_others: further plans, which are made the same way later if a kernel of the first ones was missing.
        urgency: ``SOON`` or ``LATER``.
    """

    def job() -> None:
        if _interpreter_ends():
            return
        requested: dict[Kernel, None] = {}
        try:
            for made in make_plans():
                for kernel in launch.missing_kernels(made, architecture):
                    if kernel not in requested and not jit.is_on_disk(kernel, architecture):
                        _compile_in_background(kernel, architecture, urgency, len(requested))
                        requested[kernel] = None
        except Exception as error:
            logger.info("not planned ahead: %s", error)
            return
        finally:
            with _lock:
                _jobs.pop(key, None)
                _ended[key] = None
                if len(_ended) > _MAX_ENDED:
                    del _ended[next(iter(_ended))]
        if requested and make_others is not None:
            begin_others(key, make_others, architecture)

    jit.sources_digest()  # otherwise both threads would read the sources
    with _lock, suppress(RuntimeError):  # the interpreter ends
        if key not in _jobs and key not in _ended:
            _jobs[key] = _planner().submit(job)


def begin_others(key: Hashable, make_others: MakePlans, architecture: str) -> None:
    """Makes plans that may be needed later than those of ``key``, and compiles their kernels the same way, with less
    priority."""
    begin((key, "others"), make_others, architecture, urgency=LATER)


def make_all(jobs: Iterable[MakePlans]) -> list[Plan]:
    """Returns the plans of all jobs, which are made at a time."""
    with _planners(min(MAX_THREADS, cores.share())) as pool:
        made = pool.map(lambda make_plans: list(make_plans()), jobs)
        return [one for of_job in made for one in of_job]


def settle(key: Hashable) -> None:
    """Waits until the job of ``begin`` has made its plans, so that they are not made twice; cancels it where it has not
    begun."""
    with _lock:
        job = _jobs.pop(key, None)
    if job is not None and not job.cancel():
        wait([job])


def _interpreter_ends() -> bool:
    """Returns whether the interpreter is about to end: it then takes no more work, but waits for what is queued, which
    is no longer needed."""
    try:
        _planner().submit(int)
    except RuntimeError:
        return True
    return False


def _compile_in_background(kernel: Kernel, architecture: str, urgency: int, place: int) -> None:
    """Lets a thread compile the kernel, the ``place``-th of its job."""
    order = urgency, place // _SHUFFLED, random.Random(f"{os.getpid()} {place}").random(), next(_numbers)
    with _lock:
        heapq.heappush(_waiting, (order, kernel, architecture))
    with suppress(RuntimeError):  # the interpreter ends
        _compilers().submit(_compile_next)


def _compile_next() -> None:
    with _lock:
        _, kernel, architecture = heapq.heappop(_waiting)
    if _interpreter_ends():
        return
    try:
        jit.compile_kernel(kernel, architecture)
    except Exception as error:
        logger.info("not compiled ahead: %s", error)


def _forget_threads() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    _jobs.clear()
    _ended.clear()
    _waiting.clear()
    _planner.cache_clear()
    _compilers.cache_clear()


# The threads of the parent do not run in a forked process.
os.register_at_fork(after_in_child=_forget_threads)
