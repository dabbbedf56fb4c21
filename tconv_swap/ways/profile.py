"""One line on what bounds a network: the CPU that launches its kernels, or the kernels of which kind."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import autograd
from torch.profiler import ProfilerActivity, profile

#: By what their kernels (or, on a CPU, operators) are called; the first that matches.
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
#: Shares of the time that a line names at most, and the least that it names.
NAMED, LEAST = 3, 0.05
#: Of the time: a GPU that works less than this waits for the CPU.
BUSY = 0.75
RUNS = 5


def kind_of(name: str) -> str:
    """Which kind of work a kernel or an operator does, by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def bound_of(run: Callable[[], object], device: torch.device) -> str:
    """What bounds `run` on the device, in one line; `""` where a profile shows nothing.

    On CUDA the kernels' time is set beside the time of the whole; on a CPU the operators' own times are shared out.
    """
    run()
    cuda = device.type == "cuda"
    begin = _now(device)
    for _ in range(RUNS):
        run()
    whole_us = (_now(device) - begin) * 1e6
    # Without a GPU, Kineto says on stderr that it finds none.
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
        # A row of an operator repeats what its kernels take.
        kernels = [row for row in rows if row.device_type.name != "CPU"]
        return describe(((row.key, row.self_device_time_total) for row in kernels), whole_us)
    return describe((row.key, row.self_cpu_time_total) for row in rows)


def describe(work: Iterable[tuple[str, float]], whole_us: float | None = None) -> str:
    """The line.

    Args:
        work: names of kernels or operators, and the microseconds that each takes in all.
        whole_us: of the whole, where the work is a GPU's; None where it is the CPU's own.
    """
    shares: dict[str, float] = {}
    for name, us in work:
        shares[kind_of(name)] = shares.get(kind_of(name), 0.0) + us
    busy = sum(shares.values())
    if busy <= 0:
        return ""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:NAMED]
    parts = ", ".join(f"{kind} {us / busy:.0%}" for kind, us in largest if us / busy >= LEAST)
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
