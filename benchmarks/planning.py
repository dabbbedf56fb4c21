"""Times the planning of a new size of a known layer: ``python -m benchmarks.planning``.

Needs no GPU: planning is a pure function. Prints microseconds for each layer of the suite, the median over random
sizes, of the forward pass and of the backward pass with all gradients, for an H200 with what "auto" chooses.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.kernels import H200
from tconv_swap.cuda import choice
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.problem import Problem
from tconv_swap.measurement.suite import load_suite

DTYPES = (torch.float32, torch.float16)
#: The number of first sizes of a layer that are not timed: they plan its kernels.
KNOWN = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--only", help="names of layers of the suite, separated by commas")
    parser.add_argument("--sizes", type=int, default=40, help="number of sizes of each layer (default 40)")
    parser.add_argument("--backward", action="store_true", help="also time the backward pass")
    options = parser.parse_args(arguments)
    suite = load_suite()
    layers = suite.select(options.only.split(",")) if options.only else suite.layers
    stages = ("forward", "backward")[: 1 + options.backward]
    seen: dict[str, list[float]] = {stage: [] for stage in stages}
    print(f"{'layer':18}" + "".join(f"{stage + ' us':>14}" for stage in stages))
    for layer in layers:
        medians = []
        for stage in stages:
            times = _microseconds(layer.geometry, layer.bias, stage, options.sizes)
            seen[stage] += times
            medians.append(statistics.median(times))
        print(f"{layer.name:18}" + "".join(f"{median:>14.0f}" for median in medians), flush=True)
    print(f"{'median of all':18}" + "".join(f"{statistics.median(seen[stage]):>14.0f}" for stage in stages))
    return 0


def _microseconds(layer: Geometry, bias: bool, stage: str, sizes: int) -> list[float]:
    found = []
    for dtype in DTYPES:
        for channels_last in (False, True):
            rng = random.Random(0)
            for i in range(KNOWN + sizes):
                geometry = layer._replace(
                    batch=rng.randint(1, 16),
                    height=1 if layer.height == 1 else rng.randint(5, 100),
                    width=rng.randint(5, 100),
                )
                problem = Problem(geometry, dtype, "tf32", channels_last, channels_last)
                begin = time.perf_counter()
                _planner(stage, bias)(problem)
                if i >= KNOWN:
                    found.append((time.perf_counter() - begin) * 1e6)
    return found


def _planner(stage: str, bias: bool) -> Callable[[Problem], object]:
    if stage == "forward":
        return lambda problem: choice.choose_forward(problem, bias, H200, "auto")
    return lambda problem: choice.choose_backward(problem, (True, True, bias), H200, "auto")


if __name__ == "__main__":
    sys.exit(main())
