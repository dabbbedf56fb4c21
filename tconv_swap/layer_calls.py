"""Finds the calls of a network's layers, and what computes these calls, for ``explain`` and ``prepare``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tconv_swap.cuda import call, choice, first_use, tuned
from tconv_swap.cuda.choice import NATIVE, Mask, Step
from tconv_swap.inputs import Inputs
from tconv_swap.kernels import plan
from tconv_swap.layer_state import LayerState, Operands
from tconv_swap.measurement.stages import LayerCall, capture_calls
from tconv_swap.preserving import preserved

#: Of one GPU of each architecture: its multiprocessors, and the bytes of shared memory that a block may request.
DEVICES = {
    "sm_75": (40, 64 << 10),  # T4
    "sm_80": (108, 163 << 10),  # A100
    "sm_86": (72, 99 << 10),  # A10
    "sm_89": (142, 99 << 10),  # L40S
    "sm_90a": (132, 227 << 10),  # H100, H200
    "sm_100": (148, 227 << 10),  # B200
    "sm_120": (170, 99 << 10),  # RTX 5090
}


def check_architecture(architecture: str | None) -> None:
    """Raises ValueError if there is no such architecture."""
    if architecture is not None and architecture not in DEVICES:
        raise ValueError(f"architecture: expected one of {', '.join(DEVICES)}, got {architecture!r}")


class OperatorCall(NamedTuple):
    """One call of a layer. The tensors among the operands have no data; they have the layout of tensors on ``device``.

    Attributes:
        operands: as an autocast casts them; the input has a batch.
        parameters: the dtype of the weight before an autocast casts it.
    """

    layer: LayerState
    name: str
    input_shape: tuple[int, ...]
    device: torch.device
    operands: Operands
    parameters: torch.dtype

    def problem(self) -> plan.Problem:
        """Returns the problem that the call computes.

        Raises:
            RuntimeError: the operands do not fit together.
        """
        input, weight, bias, *arguments = self.operands
        return call.problem_of(input, weight, bias, tuple(arguments))

    def problem_on_gpu(self) -> plan.Problem:
        """Returns the same problem as our kernels compute it; raises the same errors."""
        problem = self.problem()
        return problem._replace(channels_last=False) if problem.dtype == torch.float64 else problem

    @property
    def has_bias(self) -> bool:
        return self.operands[2] is not None


def calls_of(module: nn.Module, inputs: Inputs) -> list[OperatorCall]:
    """Returns every call of a swapped layer, once for each shape, dtype and layout of its operands. A single layer is
    not run; a network is run once, without gradients, and PyTorch's operator computes its layers."""
    if isinstance(module, LayerState):
        return [_called(module, LayerCall("", inputs, None))]
    layers = {name: m for name, m in module.named_modules() if isinstance(m, LayerState)}
    with preserved(module), torch.no_grad(), _by_pytorch(*layers.values()):
        found = capture_calls(module, list(layers), lambda: inputs.map(Tensor.clone)(module))
        # Inside the run: a weight that a hook computes has the network's dtype and layout only after the hook has run.
        return [_called(layers[captured.name], captured) for captured in found]


@contextmanager
def _by_pytorch(*layers: LayerState) -> Iterator[None]:
    """Makes PyTorch's operator compute these layers inside; no kernel of ours is compiled or run."""
    before = [
        {name: vars(layer).pop(name) for name in _OUR_ATTRIBUTES if name in vars(layer)} for layer in layers
    ]
    for layer in layers:
        vars(layer)["tconv_backend"] = NATIVE
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            vars(layer).pop("tconv_backend", None)
            vars(layer).update(state)


_OUR_ATTRIBUTES = ("tconv_backend", "_tconv_packed")


def _called(layer: LayerState, captured: LayerCall) -> OperatorCall:
    with torch.no_grad():
        input, weight, bias, *arguments = layer.tconv_operands(
            *captured.inputs.args, **captured.inputs.kwargs
        )
    # A tensor without data belongs to the layer's own device, or to this machine's CPU where the layer has no data
    # either.
    device = next((one.device for one in (input, weight) if not one.is_meta), torch.device("cpu"))
    if input.dim() == 3:
        input = input.unsqueeze(0)
    forms = (form_of(tensor, captured.autocast) for tensor in (input, weight, bias))
    shape = tuple(captured.input.shape)
    return OperatorCall(layer, captured.name, shape, device, (*forms, *arguments), weight.dtype)


def form_of(tensor: Tensor | None, autocast: torch.dtype | None = None) -> Any:
    """Returns a tensor without data that has the layout of ``tensor``, cast as autocast casts it."""
    if tensor is None:
        return None
    casts = autocast is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    dtype = autocast if casts else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def empty_form(
    shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Returns a tensor without data."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta", memory_format=memory_format)


def in_format(tensor: Tensor | None, memory_format: torch.memory_format | None) -> Any:
    """Returns a tensor without data in this memory format, if it has four dimensions; else ``tensor``."""
    if tensor is None or tensor.dim() != 4 or memory_format is None:
        return tensor
    return empty_form(tensor.shape, tensor.dtype, memory_format)


def steps_of(
    problem: plan.Problem,
    mask: Mask,
    has_bias: bool,
    device: plan.Device,
    backend: str,
    index: int | None,
) -> tuple[Step, ...]:
    """Returns what computes the gradients of ``mask``, or the forward pass where ``mask`` is empty.

    Args:
        index: the index of the GPU, whose measured winners are used; None: this machine does not have it.
    """
    winners = tuned.NONE
    if mask:
        problem = plan.with_weight_layout(problem, problem.channels_last)
    if index is not None:
        winners = first_use.winners(problem, mask, has_bias and not mask, index, device, "known")
    if mask:
        return choice.choose_backward(problem, mask, device, backend, winners)
    return (choice.choose_forward(problem, has_bias, device, backend, winners),)
