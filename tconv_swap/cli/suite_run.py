"""Runs the layer suite on this machine: checks every layer against float64, then times it beside PyTorch's.

The result is the same `Result` as that of a network's swap, so that the same reports show it.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tconv_swap.cli import options
from tconv_swap.cli.device import device_of
from tconv_swap.cli.request import Progress, RequestError, Result
from tconv_swap.explanation import Explanation, LayerExplanation, explain
from tconv_swap.files.fileformat import first_line
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.bench import BenchmarkReport, LayerComparison
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.modes import LAYOUTS, MODES, Mode, cudnn_benchmark
from tconv_swap.measurement.stages import LayerCall, Stage, layer_variant
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.measurement.timing import time_interleaved
from tconv_swap.memory import is_out_of_memory
from tconv_swap.report import Facts
from tconv_swap.surgery import plan_swap, swap_layers
from tconv_swap.verification import VerifyReport, verify


@dataclass(frozen=True)
class SuiteRequest:
    """What to measure.

    Attributes:
        only: names of layers, separated by commas; empty: every layer. On a CPU their batches are reduced, and layers
            that are too large for a CPU are left out.
        mode: the arithmetic, one of `MODES`.
        seconds: how long each layer is timed in each stage; `iters` is the exact number of samples instead.
    """

    only: options.Only = ()
    device: options.Device = None
    mode: options.ModeName = None
    channels_last: options.ChannelsLast = False
    backend: options.ChosenBackend = None
    backward: options.Backward = True
    verify: options.Verify = True
    seconds: options.LayerSeconds = 0.5
    iters: options.Iters = None


@dataclass(frozen=True)
class _Run:
    """A request whose names and defaults are resolved."""

    layers: tuple[Layer, ...]
    mode: Mode
    layout: str
    device: torch.device
    request: SuiteRequest


def run_suite(request: SuiteRequest, progress: Progress) -> Result:
    """Checks and times the layers. A layer that does not fit into memory is noted, and the others are run.

    Raises:
        RequestError: there is no such device, mode or layer.
        Exception: whatever our layers raise and PyTorch's do not.
    """
    run, notes = _resolved(request)
    plan = plan_swap(
        nn.ModuleDict({layer.name: _module(layer, torch.device("meta"), run) for layer in run.layers})
    )
    timing = BenchmarkReport(
        environment=environment(run.device),
        method={"budget_s": request.seconds, "iters": request.iters, "statistic": "median, quartiles"},
    )
    verification = VerifyReport() if request.verify else None
    explained: list[LayerExplanation] = []
    with cudnn_benchmark(), run.mode.switched_on():
        for done, layer in enumerate(run.layers):
            progress(f"measuring {layer.name}", done, len(run.layers))
            try:
                explained.append(_measure(layer, run, timing, verification))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                notes.append(f"{layer.name} not measured: {first_line(error)}")
            if run.device.type == "cuda":
                # The buffers of a layer take gigabytes, and no two layers have the same sizes.
                torch.cuda.empty_cache()
        ceilings = None
        if run.device.type == "cuda":
            progress("measuring the ceilings of this GPU")
            ceilings = measure_ceilings(run.device, iters=10, modes=[run.mode.name])
    facts = Facts(
        model=f"the layer suite, {len(run.layers)} layers",
        inputs=f"{run.mode.name} {run.layout}",
        inputs_origin="random, the same in every run",
        device=str(run.device),
        warnings=(*_means(timing.layers), *notes),
    )
    return Result(plan, facts, verification, timing, Explanation(tuple(explained)), ceilings)


def _resolved(request: SuiteRequest) -> tuple[_Run, list[str]]:
    """Returns the layers, reduced to what the device can run, and notes on what was reduced."""
    device = device_of(request.device)
    mode = request.mode or ("tf32" if device.type == "cuda" else "fp32")
    if mode not in MODES:
        raise RequestError(f"--dtype {mode}: expected one of {', '.join(MODES)}")
    layout = "channels_last" if request.channels_last else "nchw"
    suite = load_suite()
    names = [name for entry in request.only for name in entry.split(",")]
    try:
        layers = suite.select(names) if names else suite.layers
    except ValueError as error:
        raise RequestError(f"--only: {error}") from None
    if device.type != "cpu":
        return _Run(layers, MODES[mode], layout, device, request), []
    fitting = [(layer, layer.for_cpu()) for layer in layers]
    notes = ["batches are reduced for the CPU"]
    if left := [layer.name for layer, cut in fitting if cut is None]:
        notes.append(f"left out, too large for a CPU: {', '.join(left)}")
    layers = tuple(cut for _, cut in fitting if cut is not None)
    return _Run(layers, MODES[mode], layout, device, request), notes


def _module(layer: Layer, device: torch.device, run: _Run) -> nn.ConvTranspose2d:
    g = layer.geometry
    module = nn.ConvTranspose2d(
        g.in_channels,
        g.out_channels,
        g.kernel,
        g.stride,
        g.padding,
        g.output_padding,
        g.groups,
        layer.bias,
        g.dilation,
        device=device,
        dtype=run.mode.dtype,
    )
    return module.to(memory_format=LAYOUTS[run.layout])  # type: ignore[call-overload,no-any-return]


def _measure(
    layer: Layer, run: _Run, timing: BenchmarkReport, verification: VerifyReport | None
) -> LayerExplanation:
    """Adds one layer to the reports; returns its explanation."""
    request, device = run.request, run.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(layer.name.encode()))
        original = _module(layer, device, run)
        x = _input(layer, run)
    swapped = swap_layers(copy.deepcopy(original), backend=request.backend)
    if verification is not None:
        _verify(layer, original, swapped, x, request.backward, verification)
    call = LayerCall(layer.name, Inputs.of(x), None)
    stages: tuple[Stage, ...] = ("forward", "backward") if request.backward else ("forward",)
    for stage in stages:
        for module in (original, swapped):
            module.train(stage != "forward")
        variants = {
            "original": layer_variant(original, call, stage),
            "swapped": layer_variant(swapped, call, stage),
        }
        timings = time_interleaved(variants, device=device, budget_s=request.seconds, iters=request.iters)
        timing.layers.append(
            LayerComparison(
                layer.name,
                stage,
                timings["original"],
                timings["swapped"],
                tuple(x.shape),
                call.dtype,
                call.memory_format,
            )
        )
    (explained,) = explain(swapped, x, backward=request.backward).layers
    return replace(explained, name=layer.name)


def _input(layer: Layer, run: _Run) -> Tensor:
    x = torch.randn(layer.geometry.input_shape, device=run.device).to(run.mode.dtype)
    return x.contiguous(memory_format=LAYOUTS[run.layout])


def _verify(
    layer: Layer, original: nn.Module, swapped: nn.Module, x: Tensor, backward: bool, into: VerifyReport
) -> None:
    found = verify(original, swapped, x, modes=("eval",), backward=backward)
    # This layer is the whole network, and would be compared as both; one comparison is enough.
    into.checks += [replace(one, name=layer.name) for one in found.checks if one.kind.startswith("layer_")]
    into.failures += [f"{layer.name}: {line}" for line in found.failures]
    into.notes += [f"{layer.name}: {line}" for line in found.notes]
    if found.reference != "float64":
        into.notes.append(f"{layer.name}: the reference is {found.reference}")
    if found.first_divergence and into.first_divergence is None:
        into.first_divergence = f"{layer.name}: {found.first_divergence}"


def _means(rows: Sequence[LayerComparison]) -> Iterator[str]:
    """Yields the geometric mean and the smallest speedup of each stage."""
    for stage in dict.fromkeys(row.stage for row in rows):
        found = [row for row in rows if row.stage == stage]
        mean = math.exp(math.fsum(math.log(row.speedup) for row in found) / len(found))
        least = min(found, key=lambda row: row.speedup)
        slower = sum(row.interval[1] < 1 for row in found)
        yield (
            f"{stage}: {mean:.2f}x on geometric mean over {len(found)} layers, at least {least.speedup:.2f}x "
            f"({least.name}); {slower or 'none'} slower than PyTorch"
        )
