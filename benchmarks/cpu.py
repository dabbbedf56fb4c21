"""Times transposed convolutions on the CPU, PyTorch's and ours, paired in one run: ``python -m benchmarks.cpu``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from tconv_swap import conv_transpose2d
from tconv_swap.cpu import plan as plan_cpu
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.environment import environment, machine_name
from tconv_swap.measurement.suite import load_suite
from tconv_swap.measurement.timing import Timing, speedup_interval, time_interleaved


@dataclass(frozen=True)
class Layer:
    name: str
    geometry: Geometry
    bias: bool

    @property
    def strided(self) -> bool:
        return self.geometry.stride != (1, 1)


@dataclass(frozen=True)
class Result:
    layer: Layer
    stage: str
    formulation: str
    original: Timing
    ours: Timing

    @property
    def speedup(self) -> float:
        return self.original.median_ms / self.ours.median_ms

    def to_dict(self) -> dict[str, Any]:
        low, high = speedup_interval(self.original, self.ours)
        return {
            "layer": self.layer.name,
            "geometry": f"{list(self.layer.geometry.input_shape)} {self.layer.geometry}",
            "strided": self.layer.strided,
            "stage": self.stage,
            "formulation": self.formulation,
            "pytorch": self.original.to_dict(),
            "ours": self.ours.to_dict(),
            "speedup": self.speedup,
            "speedup_95": [low, high],
        }


def layers() -> Iterator[Layer]:
    """Returns the baseline layers of the suite, with batches that a CPU computes in reasonable time."""
    for layer in load_suite().layers:
        cut = layer.for_cpu()
        if layer.baseline and cut is not None:
            yield Layer(layer.name, cut.geometry, layer.bias)


def measure(layer: Layer, backward: bool, channels_last: bool, budget_s: float) -> Result:
    """Measures one layer, forward or backward (all gradients), in float32."""
    g = layer.geometry
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(g.input_shape, generator=generator).contiguous(memory_format=memory_format)
    weight = torch.randn(g.weight_shape, generator=generator) / math.sqrt(g.in_channels * g.taps)
    bias = torch.randn(g.out_channels, generator=generator) if layer.bias else None
    arguments = (bias, g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    if backward:
        leaves = [x.requires_grad_(), weight.requires_grad_()] + (
            [] if bias is None else [bias.requires_grad_()]
        )
        outputs = {
            "pytorch": F.conv_transpose2d(x, weight, *arguments),
            "ours": conv_transpose2d(x, weight, *arguments),
        }
        grad = torch.randn(g.output_shape, generator=generator).contiguous(memory_format=memory_format)

        def gradients(name: str) -> object:
            return torch.autograd.grad(outputs[name], leaves, grad, retain_graph=True)

        timings = time_interleaved(
            {"pytorch": lambda: gradients("pytorch"), "ours": lambda: gradients("ours")}, budget_s=budget_s
        )
        formulation: str = plan_cpu.choose_backward(g, x.dtype, memory_format)
        return Result(layer, "backward", formulation, timings["pytorch"], timings["ours"])
    with torch.no_grad():
        timings = time_interleaved(
            {
                "pytorch": lambda: F.conv_transpose2d(x, weight, *arguments),
                "ours": lambda: conv_transpose2d(x, weight, *arguments),
            },
            budget_s=budget_s,
        )
    formulation = plan_cpu.choose(g, x.dtype, memory_format)
    return Result(layer, "forward", formulation, timings["pytorch"], timings["ours"])


def summary(results: list[Result]) -> dict[str, float]:
    """Returns the geometric mean and the minimum of the speedups over the strided layers."""
    speedups = [result.speedup for result in results if result.layer.strided]
    return {
        "geometric_mean": math.exp(math.fsum(map(math.log, speedups)) / len(speedups)),
        "minimum": min(speedups),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    parser.add_argument("--backward", action="store_true", help="time the gradients instead")
    parser.add_argument(
        "--channels-last", action="store_true", help="inputs in channels_last instead of NCHW"
    )
    parser.add_argument("--budget", type=float, default=4.0, metavar="S", help="seconds for each layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    facts = environment("cpu")
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        title=f"{machine_name(facts)}, {'backward' if options.backward else 'forward'}, float32, median ms"
    )
    for heading in ("layer", "batch", "geometry", "PyTorch", "ours", "speedup", "95 %", "formulation"):
        table.add_column(
            heading, justify="left" if heading in ("layer", "geometry", "formulation") else "right"
        )
    results = []
    for layer in layers():
        result = measure(layer, options.backward, options.channels_last, options.budget)
        results.append(result)
        g = layer.geometry
        low, high = speedup_interval(result.original, result.ours)
        table.add_row(
            layer.name,
            str(g.batch),
            f"{g} {g.height}x{g.width}",
            f"{result.original.median_ms:.2f}",
            f"{result.ours.median_ms:.2f}",
            f"{result.speedup:.2f}x",
            f"{low:.2f}-{high:.2f}",
            result.formulation,
        )
    console.print(table)
    over_strided = summary(results)
    console.print(
        f"strided layers: geometric mean {over_strided['geometric_mean']:.2f}x, "
        f"minimum {over_strided['minimum']:.2f}x"
    )
    if options.json:
        document = {
            "environment": facts,
            "dtype": "float32",
            "memory_format": "channels_last" if options.channels_last else "contiguous",
            "strided_layers": over_strided,
            "layers": [result.to_dict() for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
