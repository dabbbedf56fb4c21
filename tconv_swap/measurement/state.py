"""Networks that come out of an experiment exactly as they went in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.computed import ComputedState
from tconv_swap.memory import free_bytes

_T = TypeVar("_T", bound=Tensor | None)


@contextmanager
def preserved(*models: nn.Module) -> Iterator[None]:
    """Whatever the block does to the networks, they are as before afterwards, also when it raises.

    Covers parameters and buffers (the same objects with the same values), what is computed from them and kept
    as an attribute (`weight` of `torch.nn.utils.weight_norm`; the same objects), gradients, `requires_grad`,
    training flags, and the random state of Python, of PyTorch's CPU generator and of that of every GPU the
    networks lie on. Inside, every gradient starts as None, so that gradients a user has accumulated are
    neither added to nor freed. Costs one copy of all parameters and buffers: on their own device, or on the CPU
    where they would take more than half of what a GPU has left.

    Not covered: uninitialised (lazy) parameters, and all other attributes that are neither parameters nor
    buffers.
    """
    modules = list({id(m): m for model in models for m in model.modules()}.values())
    flags = [(module, module.training) for module in modules]
    registered = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    computed = ComputedState(modules)
    tensors = _unique_tensors(modules)
    values = _copies([tensor for tensor in tensors if _writable(tensor)])
    gradients = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]
    python_random = random.getstate()
    gpus = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices=gpus):
        try:
            for tensor, _, _ in gradients:
                tensor.grad = None
            yield
        finally:
            random.setstate(python_random)
            for module, parameters, buffers in registered:
                _restore(module._parameters, parameters)
                _restore(module._buffers, buffers)
            computed.put_back()
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            for tensor, requires_grad, gradient in gradients:
                tensor.requires_grad_(requires_grad)
                tensor.grad = gradient


def _unique_tensors(modules: list[nn.Module]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not is_lazy(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


def _copies(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Every tensor with a copy of its values."""
    needed = Counter[torch.device]()
    for tensor in tensors:
        needed[tensor.device] += tensor.numel() * tensor.element_size()
    crowded = {
        device for device, size in needed.items() if device.type == "cuda" and _is_crowded(device, size)
    }
    return [(t, t.detach().cpu() if t.device in crowded else t.detach().clone()) for t in tensors]


def _is_crowded(device: torch.device, size: int) -> bool:
    free = free_bytes(device)
    return free is not None and size > free / 2


def _writable(tensor: Tensor) -> bool:
    """Expanded tensors share elements: PyTorch refuses to write to them, so they cannot have changed."""
    return not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _restore(current: dict[str, _T], saved: dict[str, _T]) -> None:
    # In place and only where something differs: the dict may be one that others hold on to.
    if current.keys() != saved.keys() or any(current[name] is not saved[name] for name in saved):
        current.clear()
        current.update(saved)
