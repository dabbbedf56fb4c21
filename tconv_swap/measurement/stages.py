"""Defines one run of a stage (forward, backward or training step) of a network or of one of its layers.

It turns modules and inputs into `timing.Variant`s, and decides what is prepared beforehand and what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs, named_tensors
from tconv_swap.measurement.timing import Variant

Stage = Literal["forward", "backward", "step"]
Loss = Callable[[Any], Tensor]


class NothingToDifferentiateError(RuntimeError):
    """No gradient reaches the loss, so there is no backward pass."""


def sum_of_squares(output: Any) -> Tensor:
    """Returns a scalar float32 loss of every floating-point tensor in a network's output, at any nesting.

    Each tensor's sum of squares is divided by the root of its size: the gradients of a mean would underflow
    in float16 on a large output, and those of a plain sum would overflow in the weights.

    Raises:
        NothingToDifferentiateError: the output contains no floating-point tensor.
    """
    terms = [
        tensor.float().square().sum() / max(tensor.numel(), 1) ** 0.5
        for _, tensor in named_tensors(output)
        if tensor.is_floating_point()
    ]
    if not terms:
        raise NothingToDifferentiateError("the output contains no floating-point tensor to take a loss of")
    return torch.stack(terms).sum()


def network_variant(model: nn.Module, inputs: Inputs, stage: Stage, loss: Loss) -> Variant:
    """Returns one run of `stage`, on a fresh copy of `inputs` every time: networks may write to their inputs.

    The caller has put `model` into eval mode for "forward" and into train mode for the others.

    Raises, when run:
        NothingToDifferentiateError: for "backward" and "step", no gradient reaches the loss.
    """
    if stage == "forward":
        return Variant(_without_gradients(model), lambda: inputs.map(_copy))
    if stage == "backward":
        return _backward(model, inputs, loss)
    return _step(model, inputs, loss)


def _without_gradients(model: nn.Module) -> Callable[[Inputs], object]:
    def run(arguments: Inputs) -> object:
        with torch.no_grad():
            return arguments(model)

    return run


def _backward(model: nn.Module, inputs: Inputs, loss: Loss) -> Variant:
    def prepare() -> tuple[Tensor, Inputs]:
        model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            arguments = inputs.map(_leaf)
            value = _differentiable(loss(arguments(model)))
        return value, arguments

    def run(state: tuple[Tensor, Inputs]) -> None:
        state[0].backward()

    return Variant(run, prepare)


def _step(model: nn.Module, inputs: Inputs, loss: Loss) -> Variant:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise NothingToDifferentiateError("no parameter requires a gradient")
    # A learning rate of 0 does all the work. The weights neither explode nor decay to denormals, which are slow on a
    # CPU, however many steps are timed.
    optimizer = torch.optim.SGD(trained, lr=0.0)

    def run(arguments: Inputs) -> None:
        with torch.enable_grad():
            optimizer.zero_grad(set_to_none=True)
            _differentiable(loss(arguments(model))).backward()
            optimizer.step()

    return Variant(run, lambda: inputs.map(_copy))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _leaf(tensor: Tensor) -> Tensor:
    copy = _copy(tensor)
    return copy.requires_grad_() if copy.is_floating_point() else copy


def _differentiable(loss: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise NothingToDifferentiateError("no gradient reaches the loss")
    return loss


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer, recorded inside the network."""

    name: str
    inputs: Inputs
    autocast: torch.dtype | None
    """The dtype of autocast if the call ran under it."""
    calls: int = 1
    """How often the layer was called with inputs of these shapes, strides and dtypes in one forward pass."""

    @property
    def input(self) -> Tensor:
        return self.inputs.named_tensors()[0][1]

    @property
    def dtype(self) -> str:
        """Returns the dtype of the computation."""
        dtype = self.input.dtype if self.autocast is None else self.autocast
        return str(dtype).removeprefix("torch.")

    @property
    def memory_format(self) -> str:
        """Returns "contiguous", "channels_last" or, if neither, "strided"."""
        if self.input.is_contiguous():
            return "contiguous"
        if self.input.dim() == 4 and self.input.is_contiguous(memory_format=torch.channels_last):
            return "channels_last"
        return "strided"


def capture_calls(model: nn.Module, names: list[str], run: Callable[[], object]) -> list[LayerCall]:
    """Returns the calls of the layers `names` of `model` while `run` runs it; equal calls are counted.

    The tensors are kept, not copied: their values are those that reach the layer unless the network later overwrites
    them in place.

    Raises:
        AttributeError: `model` has no module of such a name.
        Exception: whatever `run` raises.
    """
    found: dict[object, tuple[LayerCall, int]] = {}

    def hook_for(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = Inputs(args, kwargs).map(torch.Tensor.detach)
            if not (tensors := inputs.named_tensors()):
                return
            device = tensors[0][1].device.type
            # Some devices, such as meta, have no autocast.
            enabled = torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(
                device
            )
            autocast = torch.get_autocast_dtype(device) if enabled else None
            key = (name, autocast, *((path, t.shape, t.stride(), t.dtype) for path, t in tensors))
            call, count = found.get(key, (LayerCall(name, inputs, autocast), 0))
            found[key] = call, count + 1

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name in names
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [LayerCall(call.name, call.inputs, call.autocast, count) for call, count in found.values()]


def layer_variant(layer: nn.Module, call: LayerCall, stage: Stage) -> Variant:
    """Returns one run of `layer` alone on the inputs of a call; the backward pass is to the input and all parameters.

    The caller has put `layer` into the mode of the stage, as for `network_variant`. Runs must happen under
    `autocast_of(call)`.

    Raises:
        ValueError: `stage` is "step": a layer alone has no training step.
    """
    if stage == "step":
        raise ValueError('stage="step" exists for whole networks only: expected "forward" or "backward"')
    if stage == "forward":
        forward = _without_gradients(layer)
        return Variant(lambda _: forward(call.inputs))
    gradient: list[Tensor] = []

    def prepare() -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            arguments = call.inputs.map(_leaf)
            output = _differentiable(arguments(layer))
        if not gradient:
            gradient.append(torch.randn_like(output))
        leaves = [tensor for _, tensor in arguments.named_tensors() if tensor.requires_grad]
        return output, leaves + [p for p in layer.parameters() if p.requires_grad]

    def run(state: tuple[Tensor, list[Tensor]]) -> object:
        output, leaves = state
        return torch.autograd.grad(output, leaves, gradient, allow_unused=True)

    return Variant(run, prepare)


def autocast_of(call: LayerCall) -> torch.autocast:
    """Restores the call's autocast state, without its cache: a network casts a weight once per forward pass."""
    device = call.input.device.type
    if call.autocast is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=call.autocast, cache_enabled=False)
