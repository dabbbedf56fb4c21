"""Measures one layer in one mode and layout: random data, the check against float64, PyTorch and ours interleaved."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from benchmarks.kernels import steps_of
from benchmarks.results import Row
from benchmarks.truth import GRADIENTS, Data, Error, errors
from tconv_swap import ConvTranspose2d, conv_transpose2d, freeze
from tconv_swap.cuda.choice import Backend
from tconv_swap.cuda.tuned import Winners
from tconv_swap.kernels import plan
from tconv_swap.measurement.modes import LAYOUTS, Mode
from tconv_swap.measurement.roof import Ceilings, work_of
from tconv_swap.measurement.suite import Layer
from tconv_swap.measurement.timing import Timing, speedup_interval, time_interleaved

PYTORCH, OURS = "pytorch", "ours"

Call = Callable[[], tuple[Tensor, ...]]
Functions = Mapping[str, Callable[..., Tensor]]


@dataclass(frozen=True, slots=True)
class Stage:
    """The unit that is timed; ``tensors`` names the results of both calls, in their order."""

    name: str
    tensors: tuple[str, ...]
    calls: Mapping[str, Call]


@dataclass(frozen=True, slots=True)
class Machine:
    """``facts``: what planning knows about the GPU. ``backend``: that of our calls. ``winners``: the results of
    `tune`."""

    device: torch.device
    facts: plan.Device
    ceilings: Ceilings
    backend: Backend = "auto"
    winners: Winners = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Effort:
    """``seconds`` for the samples of all stages of a layer in one mode and layout, or ``iters`` samples of each."""

    seconds: float
    iters: int | None


def measure(
    layer: Layer, mode: Mode, layout: str, direction: str, machine: Machine, effort: Effort
) -> list[Row]:
    """Returns the rows of ``direction``: ``forward``, ``frozen`` (forward with ``tconv_swap.freeze``), or ``backward``
    with all gradients together and each alone.

    Raises:
        ValueError: a result has the wrong shape or memory format.
        Exception: whatever PyTorch or the library raises.
    """
    with mode.switched_on():
        data = make_data(layer, mode, layout, machine.device)
        functions = {PYTORCH: F.conv_transpose2d, OURS: _ours(layer, data, direction, machine.backend)}
        stages = (
            _backward(layer, data, functions)
            if direction == "backward"
            else _forward(layer, data, functions, direction)
        )
        checked = check(stages, layer, layout, data)
        timings = time_interleaved(
            {f"{stage.name} {whose}": call for stage in stages for whose, call in stage.calls.items()},
            device=machine.device,
            iters=effort.iters,
            budget_s=effort.seconds,
        )
    return [
        _row(layer, mode, layout, stage, check_of_stage, timings, machine)
        for stage, check_of_stage in zip(stages, checked, strict=True)
    ]


def make_data(layer: Layer, mode: Mode, layout: str, device: torch.device) -> Data:
    """Returns random tensors, the same for every layout and, up to rounding, every mode. Weights are scaled so that the
    outputs are about 1."""
    g = layer.geometry
    generator = torch.Generator(device).manual_seed(zlib.crc32(layer.name.encode()))

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).mul_(scale).to(mode.dtype)
        return values.contiguous(memory_format=LAYOUTS[layout]) if len(shape) == 4 else values

    terms = g.in_channels_per_group * max(1.0, g.taps / (g.stride[0] * g.stride[1]))
    return Data(
        input=random(*g.input_shape),
        weight=random(*g.weight_shape, scale=1 / math.sqrt(terms)),
        bias=random(g.out_channels) if layer.bias else None,
        grad_output=random(*g.output_shape),
    )


def _ours(layer: Layer, data: Data, direction: str, backend: Backend) -> Callable[..., Tensor]:
    if direction != "frozen":
        return conv_transpose2d if backend == "auto" else partial(conv_transpose2d, backend=backend)
    g = layer.geometry
    module = ConvTranspose2d(
        g.in_channels,
        g.out_channels,
        g.kernel,
        g.stride,
        g.padding,
        g.output_padding,
        g.groups,
        data.bias is not None,
        g.dilation,
        device="meta",
    ).eval()
    module.weight = Parameter(data.weight, requires_grad=False)
    module.bias = None if data.bias is None else Parameter(data.bias, requires_grad=False)
    module.tconv_backend = backend
    freeze(module)
    return lambda input, *_: module(input)


def _forward(layer: Layer, data: Data, functions: Functions, name: str) -> list[Stage]:
    def call(function: Callable[..., Tensor]) -> Call:
        return lambda: (_apply(function, layer, data.input, data.weight, data.bias),)

    return [Stage(name, ("output",), {whose: call(f) for whose, f in functions.items()})]


def _backward(layer: Layer, data: Data, functions: Functions) -> list[Stage]:
    def stage(name: str, wanted: tuple[str, ...]) -> Stage:
        calls = {whose: _gradients(f, layer, data, wanted) for whose, f in functions.items()}
        return Stage(name, wanted, calls)

    gradients = GRADIENTS if layer.bias else GRADIENTS[:2]
    return [stage("backward", gradients), *(stage(name, (name,)) for name in gradients)]


def _apply(
    function: Callable[..., Tensor], layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    g = layer.geometry
    return function(input, weight, bias, g.stride, g.padding, g.output_padding, g.groups, g.dilation)


def _gradients(function: Callable[..., Tensor], layer: Layer, data: Data, wanted: tuple[str, ...]) -> Call:
    """Returns the backward pass of a graph in which only the wanted tensors need a gradient."""
    leaves = {
        name: None if tensor is None else tensor.detach().requires_grad_(name in wanted)
        for name, tensor in zip(GRADIENTS, data[:3], strict=True)
    }
    output = _apply(function, layer, *leaves.values())  # type: ignore[arg-type]
    # The edge, unlike the output, does not keep the memory of the output.
    edge = torch.autograd.graph.get_gradient_edge(output)
    inputs = [leaves[name] for name in wanted]
    return lambda: torch.autograd.grad([edge], inputs, [data.grad_output], retain_graph=True)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Check:
    """For PyTorch's or our side: the errors of every tensor, and whether a second call gave the same bits."""

    errors: dict[str, dict[str, Error]]
    repeatable: dict[str, bool]


def check(stages: Sequence[Stage], layer: Layer, layout: str, data: Data) -> list[Check]:
    """Runs all twice, into memory that held NaN before; compares the bits of the two runs, and the first with float64.

    The truth of a tensor is computed once for all stages that return it: this takes longer than they do.

    Raises:
        ValueError: a result has the wrong shape, or our output does not have the layout of the input.
    """
    results: dict[str, dict[tuple[int, str], Tensor]] = {}
    checks = [Check({whose: {} for whose in stage.calls}, {}) for stage in stages]
    for index, stage in enumerate(stages):
        for whose, call in stage.calls.items():
            call()  # cuDNN searches, and kernels are compiled
            _poison(call())
            given = call()
            checks[index].repeatable[whose] = all(map(torch.equal, given, call()))
            for name, tensor in zip(stage.tensors, given, strict=True):
                results.setdefault(name, {})[index, whose] = tensor
                if (name, whose) == ("output", OURS) and not tensor.is_contiguous(
                    memory_format=LAYOUTS[layout]
                ):
                    raise ValueError(f"our output is not {layout}: strides {tensor.stride()}")
    for name, tensors in results.items():
        for (index, whose), error in errors(name, tensors, layer.geometry, data).items():
            checks[index].errors[whose][name] = error
    return checks


def _poison(tensors: tuple[Tensor, ...]) -> None:
    """Fills memory that is freed here with NaN. The allocator gives it to the next call, so unwritten results show."""
    for tensor in tensors:
        tensor.fill_(math.nan)


def _row(
    layer: Layer,
    mode: Mode,
    layout: str,
    stage: Stage,
    checked: Check,
    timings: Mapping[str, Timing],
    machine: Machine,
) -> Row:
    steps = steps_of(layer, mode, layout, stage.name, machine.facts, machine.backend, machine.winners)
    work = work_of(layer.geometry, stage.name, mode.dtype.itemsize)
    pytorch, ours = (timings[f"{stage.name} {whose}"] for whose in (PYTORCH, OURS))
    return Row(
        layer=layer.name,
        geometry=str(layer),
        mode=mode.name,
        layout=layout,
        stage=stage.name,
        family=", ".join(dict.fromkeys(step.family for step in steps)),
        why="; ".join(dict.fromkeys(step.why for step in steps)),
        work=work,
        roof_ms=work.roof_ms(machine.ceilings, mode.name),
        roundoff=mode.roundoff,
        pytorch=pytorch,
        ours=ours,
        speedup_95=speedup_interval(pytorch, ours),
        errors_pytorch=checked.errors[PYTORCH],
        errors_ours=checked.errors[OURS],
        repeatable_pytorch=checked.repeatable[PYTORCH],
        repeatable_ours=checked.repeatable[OURS],
    )
