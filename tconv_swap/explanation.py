"""``explain`` says what computes a layer, with which kernels and tiles, why, and what bounds it. It runs no
kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tconv_swap.checks import output_memory_format
from tconv_swap.cpu.plan import WHY, choose, choose_backward
from tconv_swap.cuda import call, choice, first_use, plan, tuned
from tconv_swap.cuda.choice import FORWARD, NATIVE, Mask, Step
from tconv_swap.cuda.program import Launch
from tconv_swap.inputs import Inputs
from tconv_swap.layer_state import LayerState, Operands
from tconv_swap.measurement.ceilings import KnownCeilings, known_ceilings, mode_of
from tconv_swap.measurement.roof import Work, work_of
from tconv_swap.measurement.stages import LayerCall, capture_calls
from tconv_swap.op import SUPPORTED_DTYPES
from tconv_swap.preserving import preserved

#: For one GPU of each architecture: its multiprocessors, and the bytes of shared memory that a block may request.
DEVICES = {
    "sm_75": (40, 64 << 10),  # T4
    "sm_80": (108, 163 << 10),  # A100
    "sm_86": (72, 99 << 10),  # A10
    "sm_89": (142, 99 << 10),  # L40S
    "sm_90a": (132, 227 << 10),  # H100, H200
    "sm_100": (148, 227 << 10),  # B200
    "sm_120": (170, 99 << 10),  # RTX 5090
}
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


@dataclass(frozen=True)
class KernelExplanation:
    """One launch: the kernel, its grid and block, bytes of dynamic shared memory, and the constants that make its
    tile."""

    entry: str
    source: str
    grid: int
    block: int
    shared_bytes: int
    constants: dict[str, int | bool | str]

    @classmethod
    def of(cls, launch: Launch) -> KernelExplanation:
        kernel = launch.kernel
        return cls(
            kernel.entry,
            kernel.source,
            launch.grid,
            launch.block,
            launch.shared_bytes,
            dict(kernel.constants),
        )

    def __str__(self) -> str:
        return f"{self.entry}: {self.grid} blocks of {self.block} threads, {self.shared_bytes} bytes shared"


@dataclass(frozen=True)
class StageExplanation:
    """What computes one stage, or some gradients of the backward pass.

    Attributes:
        stage: ``"forward"`` or the gradients, such as ``"grad_input, grad_weight"``.
        backend: ``"kernel"``, ours, or ``"native"``, PyTorch's operator.
        family: of the kernels; on the CPU the formulation.
        why: the reason for this choice, with the tile.
        kernels: in the order of their launches; empty if PyTorch's operator or the CPU computes.
        flops: useful floating-point operations.
        bytes: fewest bytes that must move through memory.
        workspace_bytes: bytes of temporary memory.
        bound: ``"memory"`` or ``"arithmetic"``: which of the two takes longer at the ceilings; ``"unknown"``.
        roof_us: the longer of the two, in microseconds: the least that the stage can take; None where unknown.
        ceilings: where the ceilings are from.
    """

    stage: str
    backend: str
    family: str
    why: str
    kernels: tuple[KernelExplanation, ...]
    flops: int
    bytes: int
    workspace_bytes: int
    bound: str
    roof_us: float | None
    ceilings: str

    def __str__(self) -> str:
        who = "PyTorch" if self.backend == NATIVE else self.family
        roof = "" if self.roof_us is None else f", at least {self.roof_us:.1f} us"
        lines = [
            f"{self.stage}: {who} ({self.why})",
            f"  {self.flops / 1e9:.3g} GFLOP, {self.bytes / 1e6:.3g} MB, bound by {self.bound}{roof}"
            f" (ceilings: {self.ceilings})",
        ]
        lines += [f"  {kernel}" for kernel in self.kernels]
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerExplanation:
    """One layer with inputs of one form.

    Attributes:
        name: its dotted name; ``""`` for the network itself.
        geometry: channels and arguments in short.
        input_shape: of what the layer is called with: ``[batch, channels, height, width]``, without batch or, of a
            1-D layer, height where that has none.
        dtype, layout, precision: of the computation; ``precision`` of float32 alone: ``"tf32"`` or ``"ieee"``.
        device: where it is computed.
        stages: the forward pass and, where asked for, the gradients.
    """

    name: str
    geometry: str
    input_shape: tuple[int, ...]
    dtype: str
    layout: str
    precision: str
    device: str
    stages: tuple[StageExplanation, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        dtype = self.precision if self.precision == "tf32" else self.dtype
        head = f"{self.name or '(the model itself)'}: {shape}, {self.geometry}, {dtype} {self.layout}, {self.device}"
        stages = "\n".join(map(str, self.stages)).replace("\n", "\n  ")
        return f"{head}\n  {stages}"


@dataclass(frozen=True)
class Explanation:
    """Every swapped layer of a network, once for each form of inputs with which it was called."""

    layers: tuple[LayerExplanation, ...]

    @property
    def native(self) -> tuple[str, ...]:
        """Returns one line for each layer and stage that PyTorch's operator computes, with the reason."""
        return tuple(
            f"{layer.name or '(the model itself)'}: PyTorch computes {stage.stage} ({stage.why})"
            for layer in self.layers
            for stage in layer.stages
            if stage.backend == NATIVE
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that ``json`` can write."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.layers)) or "no swapped layer was called"


def explain(
    module: nn.Module, inputs: Any, *, architecture: str | None = None, backward: bool = True
) -> Explanation:
    """Say what computes a swapped layer, or every one of a network: kernels, tiles, why, work and bound.

    A layer is not run. A network is, once and without gradients, to learn what reaches its layers; it is afterwards
    as it was. TF32 is taken as PyTorch's switches have it.

    Args:
        module: a layer of ours, or a network.
        inputs: what it is called with: a tensor, a tuple or list (positional arguments), a dict (keyword arguments)
            or ``tconv_swap.Inputs``. On ``module``'s device, or, for a layer alone, any, ``meta`` too.
        architecture: plan for a GPU such as ``"sm_90a"``, wherever ``module`` is and whether or not there is one.
        backward: explain the gradients of input, weight and bias too.

    Raises:
        ValueError: there is no such architecture.
        RuntimeError: the inputs do not fit the layer.
    """
    if architecture is not None and architecture not in DEVICES:
        raise ValueError(f"architecture: expected one of {', '.join(DEVICES)}, got {architecture!r}")
    calls = _calls(module, Inputs.of(inputs))
    return Explanation(tuple(_explain(called, architecture, backward) for called in calls))


class _Called(NamedTuple):
    """A call of a layer; the tensors among the operands have no numbers, and stand for some on `device`."""

    layer: LayerState
    name: str
    input_shape: tuple[int, ...]
    device: torch.device
    operands: Operands


def _calls(module: nn.Module, inputs: Inputs) -> list[_Called]:
    if isinstance(module, LayerState):
        return [_called(module, LayerCall("", inputs, None))]
    layers = {name: m for name, m in module.named_modules() if isinstance(m, LayerState)}
    with preserved(module), torch.no_grad():
        found = capture_calls(module, list(layers), lambda: inputs.map(Tensor.clone)(module))
        # Inside the run: a weight that a hook computes has the network's dtype and layout only after the hook has
        # run.
        return [_called(layers[captured.name], captured) for captured in found]


def _called(layer: LayerState, captured: LayerCall) -> _Called:
    with torch.no_grad():
        input, weight, bias, *arguments = layer.tconv_operands(
            *captured.inputs.args, **captured.inputs.kwargs
        )
    # What has no numbers stands for the layer's own device, and for this machine's CPU where that has none either.
    device = next((one.device for one in (input, weight) if not one.is_meta), torch.device("cpu"))
    forms = (_form(tensor, captured.autocast) for tensor in (input, weight, bias))
    return _Called(layer, captured.name, tuple(captured.input.shape), device, (*forms, *arguments))


def _explain(called: _Called, architecture: str | None, backward: bool) -> LayerExplanation:
    layer, name, input_shape, device, (input, weight, bias, *arguments) = called
    if input.dim() == 3:
        input = input.unsqueeze(0)
    posed = call.problem_of(input, weight, bias, tuple(arguments))
    on_cpu = architecture is None and device.type != "cuda"
    if not on_cpu and posed.dtype == torch.float64:
        posed = replace(posed, channels_last=False)
    mask = (True, True, bias is not None) if backward else None
    if on_cpu:
        # Only GPUs have TF32.
        posed = replace(posed, precision="ieee")
        where = str(device)
        stages = _on_cpu(posed, input, weight, layer.tconv_backend, mask)
    elif posed.dtype not in SUPPORTED_DTYPES:
        where, _, ceilings, _ = _gpu(device, architecture)
        masks = (FORWARD,) if mask is None else (FORWARD, mask)
        stages = tuple(_stage(Step(one, None, _why_native(posed.dtype)), posed, ceilings) for one in masks)
    else:
        where, facts, ceilings, index = _gpu(device, architecture)
        steps = _steps(posed, mask, bias is not None, facts, layer.tconv_backend, index)
        stages = tuple(_stage(step, posed, ceilings) for step in steps)
    return LayerExplanation(
        name,
        str(posed.geometry),
        input_shape,
        _name(posed.dtype),
        "channels_last" if posed.channels_last else "contiguous",
        posed.precision if posed.dtype == torch.float32 else "",
        where,
        stages,
    )


def _form(tensor: Tensor | None, autocast: torch.dtype | None) -> Any:
    """Returns a tensor without data that has the layout of ``tensor``, cast as autocast casts it."""
    if tensor is None:
        return None
    casts = autocast is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    dtype = autocast if casts else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _steps(
    problem: plan.Problem,
    mask: Mask | None,
    has_bias: bool,
    device: plan.Device,
    backend: str,
    index: int | None,
) -> list[Step]:
    """``index``: the GPU, whose winners are used; None: it is not here. ``mask``: the gradients, if any."""

    def winners(of: plan.Problem, mask: Mask, with_bias: bool) -> tuned.Winners:
        if index is None:
            return tuned.NONE
        return first_use.winners(of, mask, with_bias, index, device, "known")

    steps = [choice.choose_forward(problem, has_bias, device, backend, winners(problem, FORWARD, has_bias))]
    if mask is not None:
        problem = plan.with_weight_layout(problem, problem.channels_last)
        steps += choice.choose_backward(problem, mask, device, backend, winners(problem, mask, False))
    return steps


def _gpu(
    device: torch.device, architecture: str | None
) -> tuple[str, plan.Device, KnownCeilings | None, int | None]:
    """Returns its name, what planning must know about it, its ceilings, and its number where it is here."""
    if architecture is not None:
        facts = plan.Device(architecture, *DEVICES[architecture])
        return architecture, facts, known_ceilings(None, facts.compute_capability), None
    index = device.index if device.index is not None else torch.cuda.current_device()
    facts, name = call.device_facts(index), torch.cuda.get_device_name(index)
    ceilings = known_ceilings(name, facts.compute_capability)
    return f"{name} ({facts.architecture})", facts, ceilings, index


def _stage(step: Step, posed: plan.Problem, known: KnownCeilings | None) -> StageExplanation:
    names = _names(step.mask)
    parts = [work_of(posed.geometry, name, posed.dtype.itemsize) for name in names]
    work = Work(sum(part.flops for part in parts), sum(part.bytes for part in parts))
    mode = mode_of(posed.dtype, posed.precision)
    bound, roof_us = "unknown", None
    if known is not None and mode is not None:
        memory_ms, compute_ms = work.memory_ms(known.ceilings), work.compute_ms(known.ceilings, mode)
        bound = "memory" if memory_ms >= compute_ms else "arithmetic"
        roof_us = max(memory_ms, compute_ms) * 1e3
    made = step.plan
    return StageExplanation(
        ", ".join(names),
        NATIVE if made is None else "kernel",
        step.family,
        step.why,
        () if made is None else tuple(map(KernelExplanation.of, made.launches)),
        work.flops,
        work.bytes,
        0 if made is None else made.workspace_bytes,
        bound,
        roof_us,
        "none known for this GPU and dtype" if roof_us is None or known is None else known.source,
    )


def _why_native(dtype: torch.dtype) -> str:
    return f"of {_name(dtype)} nothing is ours"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(mask: Mask) -> list[str]:
    return (
        [name for name, wanted in zip(GRADIENTS, mask, strict=True) if wanted]
        if mask != FORWARD
        else ["forward"]
    )


def _on_cpu(
    posed: plan.Problem, input: Tensor, weight: Tensor, backend: str, mask: Mask | None
) -> tuple[StageExplanation, ...]:
    """What cpu/plan.py chooses; PyTorch's own call is native, whoever chose it."""
    memory_format = output_memory_format(input, weight)
    chosen: list[tuple[Mask, str]] = [(FORWARD, choose(posed.geometry, posed.dtype, memory_format))]
    if mask is not None:
        chosen.append((mask, choose_backward(posed.geometry, posed.dtype, memory_format)))
    stages = []
    for which, formulation in chosen:
        supported = posed.dtype in SUPPORTED_DTYPES
        plain = backend == NATIVE or formulation == "plain" or not supported
        why = WHY[formulation] if supported else _why_native(posed.dtype)
        why = "the backend is native" if backend == NATIVE else why
        step = Step(which, None, why)
        stage = _stage(step, posed, None)
        family = NATIVE if plain else formulation
        stages.append(
            replace(
                stage, backend=NATIVE if plain else "kernel", family=family, ceilings="none known for CPUs"
            )
        )
    return tuple(stages)
