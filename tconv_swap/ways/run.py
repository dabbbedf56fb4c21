"""Runs a network in one way: a module with the same parameters, buffers and layers under the same names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.inputs import Inputs, map_tensors
from tconv_swap.measurement.modes import cudnn_benchmark
from tconv_swap.measurement.stages import Loss, sum_of_squares
from tconv_swap.preserving import preserved
from tconv_swap.ways.capture import Captured, compiled_nodes, own_gradients, own_output
from tconv_swap.ways.way import Way, in_layout, inputs_in_layout

#: The number of versions of one piece of code that Dynamo keeps. The ways of one network are such versions. PyTorch's
#: own limit is 8.
MAX_VERSIONS = 64
#: The number of calls after which a compiled graph has warmed up, recorded and replayed.
COMPILED_RUNS = 3


class WayWarning(UserWarning):
    """A way was not built for this call, which therefore runs eagerly."""


class Running(nn.Module):
    """Calls the network in a way, for inputs like those it was built with; other calls run eagerly, with one warning.

    If built for serving, it computes in eval mode and without gradients; if built for training, it is called,
    differentiated and optimised like the network itself. Its results belong to the caller, as in eager mode.

    Attributes:
        network: the network that it runs; the modes of the network are those of this module.
        way: the way in which it runs.
        for_training: whether it was built for training.
        warned: whether it has already warned of a call that it was not built for.
        calls: the number of calls that have run in the way, and not eagerly.
    """

    network: nn.Module

    def __init__(self, network: nn.Module, way: Way, *, for_training: bool) -> None:
        # The network is not a submodule: the names of its layers would get a prefix.
        object.__setattr__(self, "network", network)
        super().__init__()
        for names in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, names, getattr(network, names))
        self.way = way
        self.for_training = for_training
        self.calls = 0
        self.built: Callable[[Inputs], Any] | None = None
        self._built_for: dict[str, object] = {}
        self._built_modules: tuple[nn.Module, ...] = ()
        self.warned = False

    @property
    def training(self) -> bool:
        return self.network.training

    @training.setter
    def training(self, value: bool) -> None:
        self.network.training = value

    def train(self, mode: bool = True) -> Running:
        self.network.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        if self.for_training:
            return self._run(inputs)
        if self.way.compiled and torch.is_inference_mode_enabled():
            # What was compiled without gradients would be compiled anew for inference mode.
            with torch.inference_mode(False), torch.no_grad():
                return self._run(inputs.map(_not_for_inference))
        with torch.no_grad():
            return self._run(inputs)

    def _run(self, inputs: Inputs) -> Any:
        if self.built is not None:
            found = self._circumstances(inputs)
            differing = [what for what, value in found.items() if not _same(value, self._built_for[what])]
            if differing:
                self._warn(differing)
                return self._eagerly(inputs)
        self.calls += 1
        return (self.built or self._eagerly)(inputs)

    def _eagerly(self, inputs: Inputs) -> Any:
        return self._laid_out(inputs)(self.network)

    def _laid_out(self, inputs: Inputs) -> Inputs:
        return inputs_in_layout(inputs, self.way.layout)

    def _circumstances(self, inputs: Inputs) -> dict[str, object]:
        """Returns everything that a compiled or captured call depends on, with readable names."""
        tensors = [tensor for _, tensor in inputs.named_tensors()]
        kinds = sorted({tensor.device.type for tensor in tensors})
        # Walking through the network takes as long as a small network on a GPU. Children that are not those of before
        # show in the second list.
        modules = self._built_modules
        found: dict[str, object] = {
            "the inputs' shapes": [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors],
            "which inputs require gradients": [tensor.requires_grad for tensor in tensors],
            "arguments that are not tensors": inputs.map(_no_tensor),
            "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
            "whether gradients are wanted": torch.is_grad_enabled(),
            "the network's modes": [module.training for module in modules],
            "the network's modules": [child for module in modules for child in module._modules.values()],
        }
        if self.way.runtime == "graph":  # a compiled graph has its own guards
            found["the addresses of the parameters"] = [
                None if tensor is None else tensor.data_ptr()
                for module in modules
                for held in (module._parameters, module._buffers)
                for tensor in held.values()
            ]
        return found

    def _warn(self, differing: list[str]) -> None:
        if self.warned:
            return
        self.warned = True
        warnings.warn(
            f"this call runs eagerly: it differs in {' and '.join(differing)} from what {self.way} was built for",
            WayWarning,
            stacklevel=6,
        )

    def built_for(self, inputs: Inputs, build: Callable[[Inputs], Callable[[Inputs], Any]]) -> None:
        """Calls `build` with the inputs in the way's layout, and uses the function that it returns for calls like this
        one."""
        self._built_modules = tuple(self.network.modules())
        self._built_for = self._circumstances(inputs)
        self.built = build(self._laid_out(inputs))

    def compiled(self, inputs: Inputs) -> Callable[[Inputs], Any]:
        """Compiles the network with torch.compile, with PyTorch's own random numbers, and with CUDA graphs if the
        way has them."""
        from torch._inductor import list_mode_options

        mode = "reduce-overhead" if self.way.graph else "default"
        options = {**list_mode_options(mode), "fallback_random": True}
        network: Callable[..., Any] = torch.compile(self.network, dynamic=False, options=options)

        def run(arguments: Inputs) -> Any:
            output = self._laid_out(arguments)(network)
            if not self.way.graph:
                return output
            for node in compiled_nodes(output):
                node.register_hook(own_gradients)
            return map_tensors(own_output, output)

        return run

    def captured(self, inputs: Inputs) -> Callable[[Inputs], Any]:
        """Captures the network in CUDA graphs. Inputs of any layout are copied into them."""
        return Captured(self.network, inputs, training=self.for_training)


def build(
    network: nn.Module, way: Way, inputs: Inputs, *, training: bool, loss: Loss | None = None
) -> Running:
    """Returns the network, running in a way. It must already have the way's layers and layout.

    Args:
        network: the network with the layers of the way. It is put into train or eval mode and into the way's layout,
            and run; its parameters, buffers, gradients and random states are restored.
        way: how to run it.
        inputs: inputs like those of later calls: shapes, dtypes, device, which of them require gradients, autocast.
        training: with a backward pass; False: eval mode without gradients.
        loss: the loss of the runs that compile the backward pass; `sum_of_squares` if None.

    Raises:
        Exception: whatever the compiler or the capture raises.
    """
    running = Running(in_layout(network, way.layout), way, for_training=training)
    running.train(training)
    if way.runtime == "eager":
        return running
    with cudnn_benchmark(), torch.set_grad_enabled(training):
        if not way.compiled:
            running.built_for(inputs, running.captured)
            return running
        from torch._dynamo import config  # takes seconds, and is only needed here

        with preserved(running), config.patch(recompile_limit=MAX_VERSIONS):
            running.built_for(inputs, running.compiled)
            for _ in range(COMPILED_RUNS):
                output = inputs.map(_copy)(running)
                if training:
                    (loss or sum_of_squares)(output).backward()
                    running.zero_grad(set_to_none=True)
    running.calls = 0
    return running


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _not_for_inference(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _no_tensor(_: Tensor) -> None:
    return None


def _same(value: object, other: object) -> bool:
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):  # comparing arrays gives no single truth value
        return False
