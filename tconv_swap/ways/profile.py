"""Says in one line what bounds a network: the CPU that launches its kernels, or certain kinds of kernels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import autograd
from torch.profiler import ProfilerActivity, profile

#: Kinds of work, by the names of kernels (or, on a CPU, of operators). The first match counts.
COPIES = "copies between layouts and dtypes"
KINDS = (
    (COPIES, r"nchwtonhwc|nhwctonchw"),
    ("normalisation", r"norm|welford|bn_(fw|bw)|moments"),
    (
        "convolutions and matrix products",
        r"conv(?!ert)|gemm|cudnn|wgmma|cutlass|xmma|winograd|dgrad|wgrad|forward_|grad_(input|weight|bias)|"
        r"addmm|matmul|\bbmm\b|\bmm\b|attention|flash",
    ),
    (COPIES, r"copy|transpose|permute|memcpy|cast|_to_|convert"),
    (
        "passes over memory",
        r"elementwise|vectorized|memset|fill|pad|cat|upsample|interpol|pool|reduce|softmax|triton|index|"
        r"multi_tensor|foreach|dropout|bernoulli|relu|tanh|sigmoid|add|mul|sub|div|sum|mean|zero",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)
OTHER = "other work"
#: The largest number of shares that the line names, and the smallest share that it names.
MAX_NAMED, MIN_SHARE = 3, 0.05
#: A GPU that works for less than this share of the time waits for the CPU.
BUSY = 0.75
RUNS = 5


def kind_of(name: str) -> str:
    """Returns the kind of work that a kernel or an operator does, by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def bound_of(run: Callable[[], object], device: torch.device) -> str:
    """Returns one line that says what bounds `run` on the device; `""` if the profile shows nothing.

    On CUDA the time of the kernels is compared with the total time; on a CPU the total is divided among the
    operators.
    """
    run()
    cuda = device.type == "cuda"
    begin = _now(device)
    for _ in range(RUNS):
        run()
    whole_us = (_now(device) - begin) * 1e6
    # Without a GPU, Kineto would print on stderr that it finds none.
    profiler: Any = (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
        if cuda
        else autograd.profiler.profile(use_kineto=False)
    )
    with profiler:
        for _ in range(RUNS):
            run()
        _now(device)
    rows = profiler.key_averages()
    if cuda:
        # The row of an operator repeats the time of its kernels.
        kernels = [row for row in rows if row.device_type.name != "CPU"]
        return describe(((row.key, row.self_device_time_total) for row in kernels), whole_us)
    return describe((row.key, row.self_cpu_time_total) for row in rows)


def describe(work: Iterable[tuple[str, float]], whole_us: float | None = None) -> str:
    """Returns the line.

    Args:
        work: names of kernels or operators, and the total microseconds of each.
        whole_us: the total time, if the work is a GPU's; None if it is the CPU's own.
    """
    shares: dict[str, float] = {}
    for name, us in work:
        shares[kind_of(name)] = shares.get(kind_of(name), 0.0) + us
    busy = sum(shares.values())
    if busy <= 0:
        return ""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:MAX_NAMED]
    parts = ", ".join(f"{kind} {us / busy:.0%}" for kind, us in largest if us / busy >= MIN_SHARE)
    if whole_us is None:
        return f"bound by {largest[0][0]}; of the operators' time: {parts}"
    used = min(1.0, busy / whole_us) if whole_us > 0 else 1.0
    if used < BUSY:
        return f"bound by the CPU, which launches: the GPU works {used:.0%} of the time; of that: {parts}"
    return f"bound by {largest[0][0]}; the GPU works {used:.0%} of the time; of that: {parts}"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
