"""Measures one row of benchmarks.models: a network in one mode, built twice, compared and timed."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

import tconv_swap
from benchmarks.networks import NETWORKS, Network
from tconv_swap.explanation import explain
from tconv_swap.inputs import Inputs, named_tensors
from tconv_swap.measurement.bench import BenchmarkReport, Comparison, benchmark
from tconv_swap.measurement.modes import LAYOUTS, MODES, cudnn_benchmark
from tconv_swap.measurement.stages import (
    Stage,
    autocast_of,
    capture_calls,
    network_variant,
    sum_of_squares,
)
from tconv_swap.measurement.timing import time_interleaved

#: The largest relative L2 difference between the outputs of a layer: rounding of TF32 or float16 on both sides.
MAX_DIFFERENCE = 3e-3


class Case(NamedTuple):
    """The case of one row."""

    network: str
    precision: str
    layout: str
    runtime: str

    def __str__(self) -> str:
        return " ".join(self)


class Autocast(nn.Module):
    """A network under float16 autocast, as a training loop runs it; the backward pass is outside of the autocast."""

    def __init__(self, network: nn.Module, device_type: str) -> None:
        super().__init__()
        self.network = network
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.float16):
            return self.network(*args, **kwargs)


class Setting(NamedTuple):
    """The settings that all rows share."""

    device: torch.device
    tiny: bool
    iters: int | None
    budget_s: float = 0.5


def measure(case: Case, setting: Setting) -> dict[str, Any]:
    """Returns one row: both networks are built again, compared, and timed interleaved.

    Raises:
        ValueError: the outputs differ by more than rounding explains.
        Exception: whatever the networks raise.
    """
    network = NETWORKS[case.network]
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, network, setting)
        difference = _difference(original, swapped, inputs)
        if not difference <= MAX_DIFFERENCE:
            raise ValueError(f"the outputs of a layer differ by {difference:.1e} of their norm")
        made = explain(swapped, inputs)
        if case.runtime == "compile":
            original, swapped = _compiled(original), _compiled(swapped)
        timing = benchmark(
            original,
            swapped,
            inputs,
            iters=setting.iters,
            warmup=None if setting.iters is None else min(2, setting.iters - 1),
            budget_s=setting.budget_s,
            per_layer=case.runtime == "eager",
            loss=summed_loss,
        )
        if not timing.network:
            raise ValueError("; ".join(timing.notes))
        replayed = None
        if setting.device.type == "cuda" and not network.no_compile:
            replayed = time_replayed(
                {"original": original, "swapped": swapped}, inputs, setting, timing.notes
            )
    return {
        **case._asdict(),
        "batch": 2 if setting.tiny else network.batch,
        "difference": difference,
        "layers": len({layer.name for layer in made.layers}),
        "families": sorted({stage.family for layer in made.layers for stage in layer.stages}),
        "by_pytorch": list(made.native) if setting.device.type == "cuda" else [],
        "stages": [comparison.to_dict() for comparison in timing.network],
        "cuda_graph": replayed,
        "share": _shares(timing),
        "peak_memory": [peak.to_dict() for peak in timing.peak_memory or ()],
        "notes": timing.notes,
    }


def time_replayed(
    networks: Mapping[str, nn.Module], inputs: Inputs, setting: Setting, notes: list[str]
) -> dict[str, Any] | None:
    """Times the forward pass replayed from a CUDA graph on the GPU; returns None, and adds a note, if there is no
    graph.

    Raises:
        ValueError: the replayed result is not what the network computes.
    """
    graphs: dict[str, Callable[[], None]] = {}
    with cudnn_benchmark():
        for name, network in networks.items():
            try:
                captured = _captured(network.eval(), inputs)
            except RuntimeError as error:  # PyTorch leaves the GPU unusable for this process then
                notes.append(f"no CUDA graph: {str(error).strip().partition(chr(10))[0]}")
                return None
            difference = captured.difference()
            if not difference <= MAX_DIFFERENCE:
                raise ValueError(f"the replayed output of the {name} differs by {difference:.1e} of its norm")
            graphs[name] = captured.graph.replay
    timed = time_interleaved(
        graphs, device=setting.device, launches="hidden", iters=setting.iters, budget_s=setting.budget_s
    )
    return Comparison("network", "forward", **timed).to_dict()


class Captured(NamedTuple):
    """A forward pass in a CUDA graph, its output tensors, and the expected values."""

    graph: torch.cuda.CUDAGraph
    output: Any
    expected: Any

    def difference(self) -> float:
        """Returns the relative L2 difference of a replay, of the worst tensor; tensors that it does not write are
        NaN."""
        floats = [
            (found, wanted)
            for (_, found), (_, wanted) in zip(
                named_tensors(self.output), named_tensors(self.expected), strict=True
            )
            if found.is_floating_point()
        ]
        for found, _ in floats:
            found.fill_(math.nan)
        self.graph.replay()
        return max(_apart(found, wanted) for found, wanted in floats)


def _captured(network: nn.Module, inputs: Inputs) -> Captured:
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(aside):
            for _ in range(3):
                expected = inputs(network)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph):
            output = inputs(network)
    return Captured(graph, output, expected)


def _shares(timing: BenchmarkReport) -> dict[str, float | None]:
    """Returns the share of transposed convolutions in the original's time, 0 to 1: forward, backward, and both in a
    step."""
    found = {"forward": timing.transposed_share("forward"), "backward": timing.transposed_share("backward")}
    step = next((c.original.median_ms for c in timing.network if c.stage == "step"), None)
    layers = sum(layer.original.median_ms * layer.calls for layer in timing.layers)
    whole = step and timing.layers and {layer.stage for layer in timing.layers} == {"forward", "backward"}
    return found | {"step": min(1.0, layers / step) if step and whole else None}


@contextmanager
def _switched(case: Case) -> Iterator[None]:
    """Allows TF32 in every case and silences torch.compile's messages."""
    with MODES["tf32"].switched_on(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def original_and_swapped(
    case: Case, network: Network, setting: Setting
) -> tuple[nn.Module, nn.Module, Inputs]:
    torch.manual_seed(0)
    original = network.build(setting.tiny).to(setting.device)
    inputs = Inputs.of(network.inputs(2 if setting.tiny else network.batch, setting.tiny, setting.device))
    if case.layout == "channels_last":
        original = original.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=LAYOUTS[case.layout])
    if case.precision == "fp16":
        original = Autocast(original, setting.device.type)
    swapped = tconv_swap.swap_layers(copy.deepcopy(original))
    return original, swapped, inputs


def _compiled(network: nn.Module) -> nn.Module:
    found: Any = torch.compile(network, dynamic=False)
    return found  # type: ignore[no-any-return]


def summed_loss(output: Any) -> Tensor:
    """Returns a scalar loss: torchvision's detectors return a dict of losses in train mode, the others outputs."""
    return sum_of_squares(output)


def _difference(original: nn.Module, swapped: nn.Module, inputs: Inputs) -> float:
    """Returns the relative L2 difference between the outputs of PyTorch's layers and ours on the same inputs, of the
    worst layer.

    It prevents timing something else: `tconv_swap.verify` proves more, against float64, in minutes.
    """
    layers = [name for name, m in swapped.named_modules() if isinstance(m, tconv_swap.ConvTranspose2d)]
    if not layers:
        raise ValueError("nothing is swapped")
    original.eval()
    worst = 0.0
    with torch.no_grad():
        for called in capture_calls(original, layers, lambda: inputs.map(torch.clone)(original)):
            with autocast_of(called):
                ours, theirs = (
                    called.inputs(network.get_submodule(called.name)) for network in (swapped, original)
                )
            worst = max(worst, _apart(ours, theirs))
    return worst


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative L2 error; a NaN counts as larger than any number."""
    apart = float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-300))
    return apart if apart == apart else math.inf


def run_once(case: Case, setting: Setting) -> None:
    """Runs each stage as `benchmark` will run it: if other gradients were needed, another graph would be compiled."""
    # Dynamo stops compiling a function after too many versions, so those of earlier cases are removed.
    torch.compiler.reset()
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, NETWORKS[case.network], setting)
        networks = [swapped]
        if case.runtime == "compile":
            networks = [_compiled(original), _compiled(swapped)]
        for network, stage in product(networks, get_args(Stage)):
            variant = network_variant(network.train(stage != "forward"), inputs, stage, summed_loss)
            variant.run(variant.prepare())
