"""What a call costs before the GPU works: Python to launch on a tiny layer, first call, second process.

    python -m benchmarks.overhead

prints microseconds per module call, PyTorch's and ours alternating in one run (median of rounds), and the seconds
that the first call of a new geometry takes with an empty cache on disk and, in a second process, with a full one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import tconv_swap

CALLS = 300
ROUNDS = 15

FIRST_CALL = """
import time, torch, tconv_swap
layer, x = tconv_swap.ConvTranspose2d(64, 32, 4, 2, 1).cuda(), torch.randn(8, 64, 16, 16, device="cuda")
torch.cuda.synchronize()
begin = time.perf_counter()
layer(x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def _microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def _alternating(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    for _ in range(50):
        first()
        second()
    rounds = [(_microseconds(first), _microseconds(second)) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in rounds), statistics.median(b for _, b in rounds)


def _first_call_seconds(cache: str) -> float:
    environment = {**os.environ, "TCONV_SWAP_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks.overhead needs an NVIDIA GPU", file=sys.stderr)
        return 2
    native = nn.ConvTranspose2d(8, 8, 2, stride=2).cuda()
    ours = tconv_swap.ConvTranspose2d(8, 8, 2, stride=2).cuda()
    x = torch.randn(2, 8, 4, 4, device="cuda")
    print(f"{'us per call':34}{'PyTorch':>10}{'ours':>10}")
    for backend in ("auto", "kernel"):
        ours.tconv_backend = backend
        with torch.no_grad():
            without = _alternating(lambda: native(x), lambda: ours(x))
            tconv_swap.freeze(ours.eval())
            frozen = _alternating(lambda: native(x), lambda: ours(x))
            tconv_swap.unfreeze(ours)
        with_gradients = _alternating(lambda: native(x), lambda: ours(x))
        step = _alternating(lambda: native(x).sum().backward(), lambda: ours(x).sum().backward())
        for name, (theirs, mine) in {
            "forward, no gradients": without,
            "the same, frozen": frozen,
            "forward, gradients": with_gradients,
            "forward and backward": step,
        }.items():
            print(f"{backend + ': ' + name:34}{theirs:10.1f}{mine:10.1f}")
    with tempfile.TemporaryDirectory() as cache:
        print(f"first call, first process, host part built:  {_first_call_seconds(cache):.2f} s")
        for kernels in os.listdir(f"{cache}/kernels"):
            os.unlink(f"{cache}/kernels/{kernels}")
        print(f"first call of a new geometry, kernels compiled: {_first_call_seconds(cache):.2f} s")
        print(f"first call in a second process, from disk:   {_first_call_seconds(cache):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
