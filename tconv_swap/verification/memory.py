"""Predicts whether a float64 run of a network fits into memory: a machine without swap would kill the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tconv_swap.computed import computed_tensors
from tconv_swap.inputs import Inputs, named_tensors
from tconv_swap.memory import free_bytes

_FLOAT64_BYTES = 8
# Outputs of modules are about half of what a forward pass keeps; functional calls, which no hook sees, are the rest.
_SEEN = 0.5


@contextmanager
def leaf_outputs(module: nn.Module, elements: list[int]) -> Iterator[None]:
    """Appends the number of elements that each module without children returns: they estimate a run's activations."""

    def hook(_: nn.Module, args: Any, output: Any) -> None:
        elements.append(sum(tensor.numel() for _, tensor in named_tensors(output)))

    handles = [m.register_forward_hook(hook) for m in module.modules() if not any(m.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def float64_does_not_fit(module: nn.Module, inputs: Inputs, activations: int, gradients: bool) -> str:
    """Returns why a float64 copy of `module` will not run; empty if it should run.

    Args:
        activations: the number of elements that `leaf_outputs` counted.
        gradients: whether activations are kept for backward, and gradients of the parameters are computed.
    """
    tensors = [*module.parameters(), *module.buffers()]
    for each in module.modules():
        tensors += computed_tensors(each).values()
    devices = {t.device for t in tensors} | {t.device for _, t in inputs.named_tensors()}
    if unable := sorted({device.type for device in devices} - {"cpu", "cuda"}):
        return f"{unable[0]} is not known to compute in float64"
    # The copies are the network, its saved state, and its gradients.
    state = sum(tensor.numel() for tensor in tensors) * (3 if gradients else 2)
    needed = _FLOAT64_BYTES * (state + (activations / _SEEN if gradients else activations * 0.1))
    for device in devices:
        free = free_bytes(device)
        if free is not None and needed > free:
            return (
                f"float64 needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on {device}"
            )
    return ""
