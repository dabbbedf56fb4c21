"""Measures what a call costs before the GPU works: Python to launch on a tiny layer, first call, second process.

    python -m benchmarks.overhead

prints microseconds per module call, PyTorch's and ours alternating in one run (median of rounds), and their ratio; and
the seconds that the first call of a new geometry takes with an empty cache on disk and, in a second process, with a
full one. ``--json FILE`` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tconv_swap
from tconv_swap.cuda.choice import Backend
from tconv_swap.measurement.environment import environment
from tconv_swap.runtime.cache import write_atomically

CALLS = 300
#: The number of layers of the network whose training step is timed: it shows the cost per layer beside that of a step.
LAYERS = 8
ROUNDS = 15
BACKENDS: tuple[Backend, ...] = ("auto", "kernel")

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


#: The printed rows, for ``--json``.
_rows: list[dict[str, Any]] = []


def _line(name: str, times: Sequence[float]) -> None:
    theirs, ours = times
    _rows.append({"row": name, "pytorch_us": theirs, "ours_us": ours})
    print(f"{name:52}{theirs:10.1f}{ours:10.1f}{ours / theirs:8.2f}", flush=True)


def _steps(autocast: bool, layout: torch.memory_format, backend: Backend) -> list[Callable[[], object]]:
    """Returns a training step of a network of tiny layers: PyTorch's, ours."""
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

    return [of(theirs), of(ours)]


NCHW, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


def _layers(layout: torch.memory_format, backend: Backend) -> list[nn.Module]:
    """Returns PyTorch's layer and ours."""
    native = nn.ConvTranspose2d(8, 8, 2, stride=2).cuda().to(memory_format=layout)  # type: ignore[call-overload]
    return [native, tconv_swap.swap_layers(native, inplace=False, backend=backend)]


def _forward_and_backward(
    layer: nn.Module, inputs: Sequence[torch.Tensor], autocast: bool
) -> Callable[[], object]:
    """Returns a call that takes the inputs in turn."""
    turn = iter(range(1 << 60))

    def called() -> None:
        x = inputs[next(turn) % len(inputs)]
        with torch.autocast("cuda", torch.float16) if autocast else nullcontext():
            y = layer(x)
        y.sum().backward()

    return called


def _both_ways(backend: Backend) -> None:
    """Times forward and backward in each layout, after the other one, and with two layouts or two sizes in turn."""
    image = torch.randn(2, 8, 4, 4, device="cuda")
    images = {form: image.contiguous(memory_format=form) for form in (NCHW, CHANNELS_LAST)}
    for autocast in (False, True):
        for form, name in ((NCHW, "NCHW"), (CHANNELS_LAST, "channels_last")):
            words = f"{backend}: forward, backward, {name}{', autocast' if autocast else ''}"
            layers = _layers(form, backend)
            _line(
                words, _alternating(*(_forward_and_backward(one, [images[form]], autocast) for one in layers))
            )
            other = images[CHANNELS_LAST if form == NCHW else NCHW]
            layers = _layers(form, backend)
            for one in layers:
                _forward_and_backward(one, [other], autocast)()
            _line(
                f"{words}, the other ran before",
                _alternating(*(_forward_and_backward(one, [images[form]], autocast) for one in layers)),
            )
    layers = _layers(NCHW, backend)
    sizes = [image, torch.randn(2, 8, 5, 6, device="cuda")]
    _line(
        f"{backend}: forward, backward, sizes alternate",
        _alternating(*(_forward_and_backward(one, sizes, False) for one in layers)),
    )


def _blocks(backend: Backend) -> list[nn.Module]:
    """Returns a layer, a norm and an activation: PyTorch's, ours."""
    native = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU()).cuda()
    return [native, tconv_swap.swap_layers(native, inplace=False, backend=backend, fuse="blocks")]


def _first_calls(cache: str) -> str:
    environment = {**os.environ, "TCONV_SWAP_CACHE": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, check=True, capture_output=True, text=True
    )
    return "{:.2f} s, and to train {:.2f} s more".format(*map(float, done.stdout.split()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.overhead needs an NVIDIA GPU", file=sys.stderr)
        return 2
    x = torch.randn(2, 8, 4, 4, device="cuda")
    print(f"{'us per call':52}{'PyTorch':>10}{'ours':>10}{'ratio':>8}")
    for backend in BACKENDS:
        native, ours = _layers(NCHW, backend)
        called = (lambda: native(x), lambda: ours(x))  # noqa: B023
        with torch.no_grad():
            _line(f"{backend}: forward, no gradients", _alternating(*called))
            tconv_swap.freeze(ours.eval())
            _line(f"{backend}: the same, frozen", _alternating(*called))
            tconv_swap.unfreeze(ours)
        _line(f"{backend}: forward, gradients", _alternating(*called))
        with torch.no_grad(), torch.autocast("cuda", torch.float16):
            _line(f"{backend}: served, float16 autocast", _alternating(*called))
        _both_ways(backend)
        steps = (_forward_and_backward(one, [x], False) for one in _blocks(backend))
        _line(f"{backend}: block, forward, backward", _alternating(*steps))
        for name, autocast, layout in (
            ("NCHW", False, NCHW),
            ("channels_last, float16", True, CHANNELS_LAST),
        ):
            times = _alternating(*_steps(autocast, layout, backend), calls=CALLS // LAYERS)
            _line(f"{backend}: step, {LAYERS} layers, {name}", times)
    if options.json:
        document = {"benchmark": "overhead", "environment": environment("cuda"), "rows": _rows}
        write_atomically(options.json, f"{json.dumps(document, indent=1)}\n".encode())
    with tempfile.TemporaryDirectory() as cache:
        print(f"first call, first process, host part built:  {_first_calls(cache)}")
        for kernels in os.listdir(f"{cache}/kernels"):
            os.unlink(f"{cache}/kernels/{kernels}")
        print(f"first call of a new geometry, kernels compiled: {_first_calls(cache)}")
        print(f"first call in a second process, from disk:   {_first_calls(cache)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
