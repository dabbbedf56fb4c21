"""What a call costs before the GPU works: Python to launch on a tiny layer, first call, second process.

    python -m benchmarks.overhead

prints microseconds per module call, PyTorch's and ours alternating in one run (median of rounds), ours also with the
node in Python that stands in where csrc/node.cpp does not build; and the seconds that the first call of a new geometry
takes with an empty cache on disk and, in a second process, with a full one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import tconv_swap
from tconv_swap.cuda import route
from tconv_swap.cuda.choice import Backend

CALLS = 300
#: Of the network whose training step is timed: what a layer adds, beside what a step costs at all.
LAYERS = 8
ROUNDS = 15

FIRST_CALL = """
import time, torch, tconv_swap
layer, x = tconv_swap.ConvTranspose2d(64, 32, 4, 2, 1).cuda(), torch.randn(8, 64, 16, 16, device="cuda")
torch.cuda.synchronize()
seconds = []
for work in (lambda: layer(x), lambda: layer(x).sum().backward(), lambda: layer(x).sum().backward()):
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
print(seconds[0], seconds[1] + seconds[2])
"""


def _microseconds(call: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def _alternating(*ways: Callable[[], object], calls: int = CALLS) -> list[float]:
    for _ in range(calls // 6):
        for way in ways:
            way()
    rounds = [[_microseconds(way, calls) for way in ways] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _by_python(call: Callable[[], object]) -> Callable[[], object]:
    """Returns ``call`` with the node in Python."""

    def called() -> object:
        told = route.Route.differentiable
        route.Route.differentiable = _refuse  # type: ignore[method-assign, assignment]
        try:
            return call()
        finally:
            route.Route.differentiable = told  # type: ignore[method-assign]

    return called


def _refuse(*_: object) -> None:
    return None


def _line(name: str, times: Sequence[float]) -> None:
    print(f"{name:34}" + "".join(f"{time:10.1f}" for time in times))


def _steps(autocast: bool, layout: torch.memory_format, backend: Backend) -> list[Callable[[], object]]:
    """A training step of a network of tiny layers: PyTorch's, ours, ours with the node in Python."""
    theirs = nn.Sequential(*(nn.ConvTranspose2d(8, 8, 3, 1, 1) for _ in range(LAYERS))).cuda()
    theirs.to(memory_format=layout)  # type: ignore[call-overload]
    ours = tconv_swap.swap_layers(theirs, inplace=False, backend=backend)
    x = torch.randn(2, 8, 4, 4, device="cuda").contiguous(memory_format=layout)

    def of(network: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=autocast):
                output = network(x)
            output.sum().backward()
            optimizer.step()

        return step

    return [of(theirs), of(ours), _by_python(of(ours))]


def _first_calls(cache: str) -> str:
    environment = {**os.environ, "TCONV_SWAP_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, check=True, capture_output=True, text=True
    )
    return "{:.2f} s, and to train {:.2f} s more".format(*map(float, done.stdout.split()))


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks.overhead needs an NVIDIA GPU", file=sys.stderr)
        return 2
    native = nn.ConvTranspose2d(8, 8, 2, stride=2).cuda()
    ours = tconv_swap.ConvTranspose2d(8, 8, 2, stride=2).cuda()
    x = torch.randn(2, 8, 4, 4, device="cuda")
    print(f"{'us per call':34}{'PyTorch':>10}{'ours':>10}{'by Python':>10}")
    for backend in ("auto", "kernel"):
        ours.tconv_backend = backend
        with torch.no_grad():
            _line(f"{backend}: forward, no gradients", _alternating(lambda: native(x), lambda: ours(x)))
            tconv_swap.freeze(ours.eval())
            _line(f"{backend}: the same, frozen", _alternating(lambda: native(x), lambda: ours(x)))
            tconv_swap.unfreeze(ours)
        with_gradients = (lambda: native(x), lambda: ours(x), _by_python(lambda: ours(x)))
        _line(f"{backend}: forward, gradients", _alternating(*with_gradients))
        # After a call with gradients, for which csrc/node.cpp was built.
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            _line(f"{backend}: served, float16 autocast", _alternating(*with_gradients))
        there_and_back = (lambda: native(x).sum().backward(), lambda: ours(x).sum().backward())
        _line(
            f"{backend}: forward and backward", _alternating(*there_and_back, _by_python(there_and_back[1]))
        )
        for name, autocast, layout in (
            ("NCHW", False, torch.contiguous_format),
            ("channels_last, float16", True, torch.channels_last),
        ):
            times = _alternating(*_steps(autocast, layout, backend), calls=CALLS // LAYERS)
            _line(f"{backend}: step, {LAYERS} layers, {name}", times)
    with tempfile.TemporaryDirectory() as cache:
        print(f"first call, first process, host part built:  {_first_calls(cache)}")
        for kernels in os.listdir(f"{cache}/kernels"):
            os.unlink(f"{cache}/kernels/{kernels}")
        print(f"first call of a new geometry, kernels compiled: {_first_calls(cache)}")
        print(f"first call in a second process, from disk:   {_first_calls(cache)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
