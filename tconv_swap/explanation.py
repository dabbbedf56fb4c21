"""``explain`` says what computes a layer, with which kernels and tiles, why, and what bounds its time. It launches no
kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.checks import output_memory_format
from tconv_swap.cpu.plan import WHY, choose, choose_backward
from tconv_swap.cuda import call
from tconv_swap.cuda.choice import FORWARD, NATIVE, Mask, Step
from tconv_swap.inputs import Inputs
from tconv_swap.kernels import plan
from tconv_swap.layer_calls import DEVICES, OperatorCall, calls_of, check_architecture, steps_of
from tconv_swap.measurement.ceilings import KnownCeilings, known_ceilings, mode_of
from tconv_swap.measurement.roof import Work, work_of
from tconv_swap.op import SUPPORTED_DTYPES
from tconv_swap.runtime.program import Launch

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
        family: the family of the kernels; on the CPU the formulation.
        why: the reason for this choice, with the tile.
        kernels: in the order of their launches; empty if PyTorch's operator or the CPU computes.
        flops: useful floating-point operations.
        bytes: fewest bytes that must move through memory.
        workspace_bytes: bytes of temporary memory.
        bound: ``"memory"`` or ``"arithmetic"``: which of the two takes longer at the ceilings; ``"unknown"`` without
            them.
        roof_us: the longer of the two, in microseconds: a lower bound for the time of the stage; None where unknown.
        ceilings: the source of the ceilings.
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
    """One layer with inputs of one shape, dtype and layout.

    Attributes:
        name: its dotted name; ``""`` for the network itself.
        geometry: channels and arguments in short form.
        input_shape: the shape of the layer's input: ``[batch, channels, height, width]``; without batch where the input
            has none, and without height for a 1-D layer.
        dtype, layout, precision: of the computation; ``precision`` is set for float32 only: ``"tf32"`` or ``"ieee"``.
        device: the device that computes it.
        stages: the forward pass and, with ``backward``, the gradients.
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
    """Every swapped layer of a network, once for each shape, dtype and layout of the inputs with which it was
    called."""

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
        """Returns the same as plain values that ``json`` can write."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.layers)) or "no swapped layer was called"


def explain(
    module: nn.Module, inputs: Any, *, architecture: str | None = None, backward: bool = True
) -> Explanation:
    """Says what computes a swapped layer, or each swapped layer of a network: kernels, tiles, reason, work and bound.

    A layer is not run. A network is run once, without gradients, to find out what its layers are called with; its state
    is restored afterwards. TF32 is allowed or not as PyTorch's switches say.

    Args:
        module: a layer of ours, or a network.
        inputs: the arguments of the call: a tensor, a tuple or list (positional arguments), a dict (keyword arguments)
            or ``tconv_swap.Inputs``. They lie on ``module``'s device; for a single layer on any device, also ``meta``.
        architecture: plans for a GPU such as ``"sm_90a"``, wherever ``module`` is and whether or not this machine has
            one.
        backward: explains the gradients of input, weight and bias too.

    Raises:
        ValueError: there is no such architecture.
        RuntimeError: the inputs do not fit the layer.
    """
    check_architecture(architecture)
    calls = calls_of(module, Inputs.of(inputs))
    return Explanation(tuple(_explain(called, architecture, backward) for called in calls))


def _explain(called: OperatorCall, architecture: str | None, backward: bool) -> LayerExplanation:
    layer, device, (input, weight, bias, *_) = called.layer, called.device, called.operands
    on_cpu = architecture is None and device.type != "cuda"
    problem = called.problem() if on_cpu else called.problem_on_gpu()
    has_bias = bias is not None
    masks: tuple[Mask, ...] = (FORWARD, (True, True, has_bias)) if backward else (FORWARD,)
    if on_cpu:
        # Only GPUs have TF32.
        problem = problem._replace(precision="ieee")
        where = str(device)
        stages = _on_cpu(problem, input, weight, layer.tconv_backend, masks[1] if backward else None)
    elif problem.dtype not in SUPPORTED_DTYPES:
        where, _, ceilings, _ = _gpu(device, architecture)
        stages = tuple(
            _stage(Step(one, None, _why_native(problem.dtype)), problem, ceilings) for one in masks
        )
    else:
        where, facts, ceilings, index = _gpu(device, architecture)
        common = (facts, layer.tconv_backend, index)
        steps = [step for mask in masks for step in steps_of(problem, mask, has_bias, *common)]
        stages = tuple(_stage(step, problem, ceilings) for step in steps)
    return LayerExplanation(
        called.name,
        str(problem.geometry),
        called.input_shape,
        _name(problem.dtype),
        "channels_last" if problem.channels_last else "contiguous",
        problem.precision if problem.dtype == torch.float32 else "",
        where,
        stages,
    )


def _gpu(
    device: torch.device, architecture: str | None
) -> tuple[str, plan.Device, KnownCeilings | None, int | None]:
    """Returns the GPU's name, what planning must know about it, its ceilings, and its index if this machine has it."""
    if architecture is not None:
        facts = plan.Device(architecture, *DEVICES[architecture])
        return architecture, facts, known_ceilings(None, facts.compute_capability), None
    index = device.index if device.index is not None else torch.cuda.current_device()
    facts, name = call.device_facts(index), torch.cuda.get_device_name(index)
    ceilings = known_ceilings(name, facts.compute_capability)
    return f"{name} ({facts.architecture})", facts, ceilings, index


def _stage(step: Step, problem: plan.Problem, known: KnownCeilings | None) -> StageExplanation:
    names = _names(step.mask)
    parts = [work_of(problem.geometry, name, problem.dtype.itemsize) for name in names]
    work = Work(sum(part.flops for part in parts), sum(part.bytes for part in parts))
    mode = mode_of(problem.dtype, problem.precision)
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
    return f"our kernels do not take {_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(mask: Mask) -> list[str]:
    return (
        [name for name, wanted in zip(GRADIENTS, mask, strict=True) if wanted]
        if mask != FORWARD
        else ["forward"]
    )


def _on_cpu(
    problem: plan.Problem, input: Tensor, weight: Tensor, backend: str, mask: Mask | None
) -> tuple[StageExplanation, ...]:
    """Returns what cpu/plan.py chooses. PyTorch's own call counts as native, also where our plan chose it."""
    memory_format = output_memory_format(input, weight)
    chosen: list[tuple[Mask, str]] = [(FORWARD, choose(problem.geometry, problem.dtype, memory_format))]
    if mask is not None:
        chosen.append((mask, choose_backward(problem.geometry, problem.dtype, memory_format)))
    stages = []
    for which, formulation in chosen:
        supported = problem.dtype in SUPPORTED_DTYPES
        plain = backend == NATIVE or formulation == "plain" or not supported
        why = WHY[formulation] if supported else _why_native(problem.dtype)
        why = "the backend is native" if backend == NATIVE else why
        step = Step(which, None, why)
        stage = _stage(step, problem, None)
        family = NATIVE if plain else formulation
        stages.append(
            replace(
                stage, backend=NATIVE if plain else "kernel", family=family, ceilings="none known for CPUs"
            )
        )
    return tuple(stages)
