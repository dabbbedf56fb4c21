"""A report with everything in it, for the tests of its forms: a network on a GPU that is not here.

Times, errors and plans are made up, the same on every machine; bytes and FLOPs are those of the layers.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tconv_swap.explanation import Explanation, KernelExplanation, LayerExplanation, StageExplanation
from tconv_swap.geometry import check_geometry
from tconv_swap.measurement.bench import BenchmarkReport, Comparison, LayerComparison, PeakMemory
from tconv_swap.measurement.roof import Ceilings, work_of
from tconv_swap.measurement.timing import Timing
from tconv_swap.report import Facts
from tconv_swap.surgery import plan_swap
from tconv_swap.verification.report import Check, VerifyReport
from tconv_swap.ways.report import StageWays, WaysReport
from tconv_swap.ways.search import WayRow
from tconv_swap.ways.way import TODAY, Way

MACHINE = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "580.65.06",
    "cuda": "13.0",
    "cudnn": "9.19.0",
    "torch": "2.11.0+cu130",
}
CEILINGS = Ceilings(4256.0, {"tf32": 417.0, "fp32": 50.3})


def steady(ms: float, spread: float = 0.01) -> Timing:
    """Eleven samples around `ms`."""
    return Timing.of([ms * (1 + spread * (i - 5) / 5) for i in range(11)])


def check(kind: Any, name: str, original: float, swapped: float, limit: float, mode: str = "eval") -> Check:
    return Check(mode, kind, name, original, swapped, limit, swapped <= limit, norm="max")


def ways_report() -> WaysReport:
    """Of both stages: faster, slower, failed, not tried, and one that computes something else."""
    stages = []
    for stage in ("forward", "step"):
        rows = [
            WayRow(TODAY, steady(2.0), steady(2.0)),
            WayRow(Way("ours"), steady(2.01), steady(1.5)),
            WayRow(Way("pytorch", "channels_last"), steady(2.02), steady(2.5)),
            WayRow(
                Way("ours", "channels_last"),
                steady(2.0),
                steady(0.5),
                failure="eval: output 0: error 7.7e-02",
            ),
            WayRow(Way("pytorch", runtime="graph"), steady(2.0), steady(1.2)),
            WayRow(Way("ours", runtime="graph"), steady(2.0), steady(1.0), verified=True),
            WayRow(Way("pytorch", runtime="compile+graph"), why_not="RuntimeError: no compiler"),
        ]
        finals = {"pytorch": steady(2.0), "pytorch+graph": steady(1.2), "ours+graph": steady(1.0)}
        stages.append(
            StageWays(
                stage,  # type: ignore[arg-type]
                rows,
                Way("ours", runtime="graph"),
                finals,
                VerifyReport(checks=[check("output", "0", 3.1e-7, 2.9e-7, 2.5e-6)]),
                "bound by normalisation; the GPU works 96% of the time; of that: normalisation 78%",
                ["ours+channels_last is not chosen: eval: output 0: error 7.7e-02"],
            )
        )
    return WaysReport(stages, MACHINE, {"order": "interleaved"})


class Decoder(nn.Module):
    """Layers of every kind: for tensor cores, narrow, grouped; one that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose2d(100, 512, 4, bias=False),
                nn.ConvTranspose2d(512, 256, 4, 2, 1, bias=False),
                nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False),
                nn.ConvTranspose2d(128, 128, 4, 2, 1, groups=128),
            ]
        )
        self.head = nn.ConvTranspose2d(128, 3, 4, 2, 1)
        self.audio = nn.ConvTranspose1d(8, 8, 2)


def explained(name: str, layer: nn.ConvTranspose2d, shape: tuple[int, ...]) -> LayerExplanation:
    """As `tconv_swap.explain` says it: forward by a kernel, backward by PyTorch."""
    geometry = check_geometry(
        shape,
        tuple(layer.weight.shape),
        None if layer.bias is None else tuple(layer.bias.shape),
        layer.stride,
        layer.padding,
        layer.output_padding,
        layer.groups,
        layer.dilation,
    )
    narrow = layer.groups > 1 or layer.out_channels < 8
    family, why = (
        ("narrow_ffma", "float32 FFMA")
        if narrow
        else ("implicit_gemm", "TF32 tensor cores, 64 x 8x4x4 positions")
    )
    entry = "forward_narrow_ffma" if narrow else "forward_implicit_gemm_wgmma"
    kernel = KernelExplanation(
        entry, f"forward/{entry.removeprefix('forward_')}.cu", 128, 256, 205056, {"THREADS": 256}
    )
    work = work_of(geometry, "forward", 4)
    gradients = "grad_input, grad_weight" + (", grad_bias" if layer.bias is not None else "")
    source = "measured on an H200"
    stages = (
        StageExplanation(
            "forward", "kernel", family, why, (kernel,), work.flops, work.bytes, 0, "memory", 1.0, source
        ),
        StageExplanation(
            gradients,
            "native",
            "native",
            "of ours only the general kernels claim it",
            (),
            2 * work.flops,
            2 * work.bytes,
            0,
            "unknown",
            None,
            "none known for this GPU and dtype",
        ),
    )
    return LayerExplanation(
        name, str(geometry), geometry.input_shape, "float32", "contiguous", "tf32", "NVIDIA H200", stages
    )


def full_case() -> dict[str, Any]:
    """The arguments of `to_json_dict`: swapped, verified, timed, explained, on a GPU with known ceilings."""
    torch.manual_seed(0)
    network = Decoder()
    plan = plan_swap(network)
    shapes = [(128, 100, 1, 1), (128, 512, 4, 4), (128, 256, 8, 8), (128, 128, 16, 16), (128, 128, 32, 32)]
    names = [f"up.{i}" for i in range(4)] + ["head"]
    layers = [
        explained(name, network.get_submodule(name), shape)  # type: ignore[arg-type]
        for name, shape in zip(names, shapes, strict=True)
    ]
    forward = [(0.042, 0.031), (0.080, 0.051), (0.066, 0.040), (0.430, 0.031), (0.0931, 0.0333)]
    backward = [(0.052, 0.056), (0.133, 0.090), (0.138, 0.070), (0.187, 0.060), (0.111, 0.0502)]
    timings = [
        LayerComparison(name, stage, steady(original), steady(ours), shape, "float32", "contiguous")
        for name, shape, *pairs in zip(names, shapes, forward, backward, strict=True)
        for stage, (original, ours) in zip(("forward", "backward"), pairs, strict=True)
    ]
    kinds = ("layer_output", "layer_grad_input", "layer_grad_weight")
    checks = [
        check("output", "", 4.1e-4, 3.9e-4, 3.3e-3),
        check("grad_parameter", "up.1.weight", 4.6e-4, 4.7e-4, 3.7e-3, "train"),
        *(
            check(kind, name, 3.2e-4 / place, 3.0e-4 / place, 2.5e-3 / place, "train")
            for place, (name, kind) in enumerate(itertools.product(names, kinds), start=1)
        ),
    ]
    return {
        "plan": plan,
        "verification": VerifyReport(checks=checks),
        "benchmark": BenchmarkReport(
            network=[
                Comparison("network", "forward", steady(0.81), steady(0.39)),
                Comparison("network", "backward", steady(1.31), steady(0.83)),
                Comparison("network", "step", steady(2.30), steady(1.52)),
            ],
            layers=timings,
            peak_memory=[
                PeakMemory("forward", 300 << 20, 280 << 20),
                PeakMemory("step", 3 << 30, 700 << 20),
            ],
            environment=MACHINE,
            method={"order": "interleaved"},
        ),
        "facts": Facts(
            model="decoder.pt",
            inputs="128x100x1x1 float32",
            inputs_origin="--input-shape, random with seed 0",
            device="cuda:0",
            output="fast.pt",
            load_snippet="import torch, tconv_swap\nmodel = torch.load('fast.pt', weights_only=False)",
        ),
        "explanation": Explanation(tuple(layers)),
        "ceilings": CEILINGS,
        "ways": ways_report(),
    }
