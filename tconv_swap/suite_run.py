"""The layer suite on the machine at hand: every layer checked against float64, then timed beside PyTorch's.

Gives the same `Result` as the swap of a network, so that the same reports show it.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tconv_swap.cuda.choice import Backend
from tconv_swap.explanation import Explanation, LayerExplanation, explain
from tconv_swap.files.fileformat import first_line
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.bench import BenchmarkReport, LayerComparison
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.measured_ceilings import measure_ceilings
from tconv_swap.measurement.modes import LAYOUTS, MODES, Mode, cudnn_benchmark
from tconv_swap.measurement.stages import LayerCall, Stage, layer_variant
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import time_interleaved
from tconv_swap.memory import is_out_of_memory
from tconv_swap.report import Facts
from tconv_swap.request import Progress, Result
from tconv_swap.surgery import plan_swap, swap_layers
from tconv_swap.verification import VerifyReport, verify


@dataclass(frozen=True)
class SuiteRequest:
    """What is to be measured.

    Attributes:
        layers: of the suite; on the CPU their batches are cut, and those that are too much for one left out.
        mode: of the arithmetic, one of `MODES`.
        layout: one of `LAYOUTS`.
        budget_s: seconds of timing for each layer and stage; `iters` exactly so many samples instead.
    """

    layers: tuple[Layer, ...]
    mode: str
    layout: str
    device: torch.device
    backward: bool = True
    verify: bool = True
    backend: Backend | None = None
    budget_s: float = 0.5
    iters: int | None = None


def run_suite(request: SuiteRequest, progress: Progress) -> Result:
    """Check and time the layers; what does not fit into memory is noted, and the rest goes on.

    Raises:
        Exception: whatever our layers raise where PyTorch's do not.
    """
    layers, notes = _fitting(request)
    plan = plan_swap(
        nn.ModuleDict({layer.name: _module(layer, torch.device("meta"), request) for layer in layers})
    )
    timing = BenchmarkReport(
        environment=environment(request.device),
        method={"budget_s": request.budget_s, "iters": request.iters, "statistic": "median, quartiles"},
    )
    verification = VerifyReport() if request.verify else None
    explained: list[LayerExplanation] = []
    with cudnn_benchmark(), MODES[request.mode].switched_on():
        for done, layer in enumerate(layers):
            progress(f"measuring {layer.name}", done, len(layers))
            try:
                explained.append(_measure(layer, request, timing, verification))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                notes.append(f"{layer.name} not measured: {first_line(error)}")
            if request.device.type == "cuda":
                # A layer's buffers are gigabytes, and no two layers want the same sizes.
                torch.cuda.empty_cache()
        ceilings = None
        if request.device.type == "cuda":
            progress("measuring the ceilings of this GPU")
            ceilings = measure_ceilings(request.device, iters=10, modes=[request.mode])
    facts = Facts(
        model=f"the layer suite, {len(layers)} layers",
        inputs=f"{request.mode} {request.layout}",
        inputs_origin="random, the same at every run",
        device=str(request.device),
        warnings=(*_means(timing.layers), *notes),
    )
    return Result(plan, facts, verification, timing, Explanation(tuple(explained)), ceilings)


def _fitting(request: SuiteRequest) -> tuple[list[Layer], list[str]]:
    if request.device.type != "cpu":
        return list(request.layers), []
    fitting = [(layer, layer.for_cpu()) for layer in request.layers]
    notes = ["batches are cut to what a CPU gets through"]
    if left := [layer.name for layer, cut in fitting if cut is None]:
        notes.append(f"left out, too large for a CPU: {', '.join(left)}")
    return [cut for _, cut in fitting if cut is not None], notes


def _module(layer: Layer, device: torch.device, request: SuiteRequest) -> nn.ConvTranspose2d:
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
        dtype=MODES[request.mode].dtype,
    )
    return module.to(memory_format=LAYOUTS[request.layout])  # type: ignore[call-overload,no-any-return]


def _measure(
    layer: Layer, request: SuiteRequest, timing: BenchmarkReport, verification: VerifyReport | None
) -> LayerExplanation:
    """One layer into the reports; returns its explanation."""
    mode = MODES[request.mode]
    with torch.random.fork_rng(devices=[request.device] if request.device.type == "cuda" else []):
        torch.manual_seed(zlib.crc32(layer.name.encode()))
        original = _module(layer, request.device, request)
        x = _input(layer, mode, request)
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
        timings = time_interleaved(
            variants, device=request.device, budget_s=request.budget_s, iters=request.iters
        )
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


def _input(layer: Layer, mode: Mode, request: SuiteRequest) -> Tensor:
    x = torch.randn(layer.geometry.input_shape, device=request.device).to(mode.dtype)
    return x.contiguous(memory_format=LAYOUTS[request.layout])


def _verify(
    layer: Layer, original: nn.Module, swapped: nn.Module, x: Tensor, backward: bool, into: VerifyReport
) -> None:
    found = verify(original, swapped, x, modes=("eval",), backward=backward)
    # A layer that is the whole network is compared as both: once is enough.
    into.checks += [replace(one, name=layer.name) for one in found.checks if one.kind.startswith("layer_")]
    into.failures += [f"{layer.name}: {line}" for line in found.failures]
    into.notes += [f"{layer.name}: {line}" for line in found.notes]
    if found.reference != "float64":
        into.notes.append(f"{layer.name}: the reference is {found.reference}")
    if found.first_divergence and into.first_divergence is None:
        into.first_divergence = f"{layer.name}: {found.first_divergence}"


def _means(rows: Sequence[LayerComparison]) -> Iterator[str]:
    """Geometric mean and least speedup of each stage."""
    for stage in dict.fromkeys(row.stage for row in rows):
        found = [row for row in rows if row.stage == stage]
        mean = math.exp(math.fsum(math.log(row.speedup) for row in found) / len(found))
        least = min(found, key=lambda row: row.speedup)
        slower = sum(row.interval[1] < 1 for row in found)
        yield (
            f"{stage}: {mean:.2f}x on geometric mean over {len(found)} layers, at least {least.speedup:.2f}x "
            f"({least.name}); {slower or 'none'} slower than PyTorch"
        )
