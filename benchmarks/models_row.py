"""One row of benchmarks.models: a network in one mode, built twice, compared and timed."""

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

#: Between the outputs of a layer, relative (L2): the rounding of TF32 or float16 on both sides, and not much more.
MOST_DIFFERENCE = 3e-3


class Case(NamedTuple):
    """One row."""

    network: str
    precision: str
    layout: str
    runtime: str

    def __str__(self) -> str:
        return " ".join(self)


class Autocast(nn.Module):
    """A network under float16 autocast, as a training loop runs it; the backward pass is outside, as it must be."""

    def __init__(self, network: nn.Module, device_type: str) -> None:
        super().__init__()
        self.network = network
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, torch.float16):
            return self.network(*args, **kwargs)


class Setting(NamedTuple):
    """What is the same for all rows."""

    device: torch.device
    tiny: bool
    iters: int | None
    budget_s: float = 0.5


def measure(case: Case, setting: Setting) -> dict[str, Any]:
    """One row: both networks built anew, compared, timed interleaved.

    Raises:
        ValueError: the outputs differ by more than rounding explains.
        Exception: whatever the networks raise.
    """
    network = NETWORKS[case.network]
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, network, setting)
        difference = _difference(original, swapped, inputs)
        if not difference <= MOST_DIFFERENCE:
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
    """The forward pass replayed from a CUDA graph, by what the GPU takes for it; None, and a note, where it has none.

    Raises:
        ValueError: what is replayed is not what the network computes.
    """
    graphs: dict[str, Callable[[], None]] = {}
    with cudnn_benchmark():
        for name, network in networks.items():
            try:
                captured = _captured(network.eval(), inputs)
            except RuntimeError as error:  # after which this process's GPU is of no use, as PyTorch leaves it
                notes.append(f"no CUDA graph: {str(error).strip().partition(chr(10))[0]}")
                return None
            difference = captured.difference()
            if not difference <= MOST_DIFFERENCE:
                raise ValueError(f"what is replayed of the {name} differs by {difference:.1e} of its norm")
            graphs[name] = captured.graph.replay
    timed = time_interleaved(
        graphs, device=setting.device, launches="hidden", iters=setting.iters, budget_s=setting.budget_s
    )
    return Comparison("network", "forward", **timed).to_dict()


class Captured(NamedTuple):
    """A forward pass in a CUDA graph, where it leaves its output, and what that should be."""

    graph: torch.cuda.CUDAGraph
    output: Any
    expected: Any

    def difference(self) -> float:
        """Of a replay, relative (L2), of the worst tensor; what the replay does not write is not a number."""
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
    """Of the original's time, 0 to 1, that of its transposed convolutions: forward, backward, and a step's both."""
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
    """Torchvision's detectors give a dict of losses in train mode, the others outputs."""
    return sum_of_squares(output)


def _difference(original: nn.Module, swapped: nn.Module, inputs: Inputs) -> float:
    """Relative L2 between the outputs of PyTorch's layers and of ours, on what reaches them; of the worst layer.

    A guard against timing something else: `tconv_swap.verify` proves more, against float64, in minutes.
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
    """Each stage as `benchmark` will run it: another need of gradients would be another graph."""
    # Dynamo stops compiling a function that it has seen in too many versions: those of the cases before.
    torch.compiler.reset()
    with _switched(case):
        original, swapped, inputs = original_and_swapped(case, NETWORKS[case.network], setting)
        networks = [swapped]
        if case.runtime == "compile":
            networks = [_compiled(original), _compiled(swapped)]
        for network, stage in product(networks, get_args(Stage)):
            variant = network_variant(network.train(stage != "forward"), inputs, stage, summed_loss)
            variant.run(variant.prepare())
