"""Networks that come out of an experiment exactly as they went in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.bits import same_bits
from tconv_swap.computed import ComputedState
from tconv_swap.freezing import FrozenState
from tconv_swap.memory import free_bytes

_T = TypeVar("_T", bound=Tensor | None)


@contextmanager
def preserved(*models: nn.Module) -> Iterator[None]:
    """Whatever the block does to the networks, they are as before afterwards, also when it raises.

    Covers parameters and buffers (the same objects with the same values in the same memory, so that a loss
    computed before can still be differentiated), what is computed from them and kept as an attribute
    (`weight` of `torch.nn.utils.weight_norm`; the same objects), which layers are frozen
    (`tconv_swap.freeze`), gradients, `requires_grad`, training flags, and the random state of Python, of
    PyTorch's CPU generator and of that of every GPU the networks lie on. Inside, every gradient starts as
    None, so that gradients a user has accumulated are neither added to nor freed. Costs one copy of all
    parameters and buffers: on their own device, or on the CPU where they would take more than half of what a
    GPU has left.

    Not covered: uninitialised (lazy) parameters, and all other attributes that are neither parameters nor
    buffers.
    """
    modules = list({id(m): m for model in models for m in model.modules()}.values())
    flags = [(module, module.training) for module in modules]
    registered = [_Registered(module) for module in modules]
    computed = ComputedState(modules)
    tensors = _unique_tensors(modules)
    frozen = FrozenState(modules)
    values = _saved([tensor for tensor in tensors if _writable(tensor)])
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
            for names in registered:
                names.put_back()
            computed.put_back()
            for module, training in flags:
                module.training = training
            for saved in values:
                saved.put_back()
            for tensor, requires_grad, gradient in gradients:
                # Tensors made in inference mode refuse even what changes nothing.
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
            frozen.put_back()


def _unique_tensors(modules: list[nn.Module]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not is_lazy(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


class _Registered:
    """Which parameters and buffers a module has, under which names."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)
        self._non_persistent = set(module._non_persistent_buffers_set)

    def put_back(self) -> None:
        _restore(self._module._parameters, self._parameters)
        _restore(self._module._buffers, self._buffers)
        self._module._non_persistent_buffers_set.intersection_update(self._non_persistent)
        self._module._non_persistent_buffers_set.update(self._non_persistent)


@dataclass(frozen=True)
class _Saved:
    """A tensor, with all that is needed to put back what it holds."""

    tensor: Tensor
    memory: Tensor
    """Another tensor in the same memory, for when the network sets `tensor.data` to something else."""
    value: Tensor
    version: int | None
    """What autograd recognises writes by; None for tensors made in inference mode, which have none."""

    def put_back(self) -> None:
        tensor = self.tensor
        if _place(tensor) != _place(self.memory):
            tensor.data = self.memory
        if not _unchanged(tensor, self.value):
            # In this order: `inference_mode(False)` switches gradients on.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(self.value)
        # A graph that was built on these values is as good as before, but would refuse its backward pass after
        # any write: a step of an optimizer with learning rate 0 is one.
        if self.version is not None and tensor._version != self.version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))


def _unchanged(tensor: Tensor, value: Tensor) -> bool:
    # Subclasses need not have bits to look at.
    return tensor.is_meta or (type(tensor) in (Tensor, nn.Parameter) and same_bits(tensor, value))


def _place(tensor: Tensor) -> tuple[object, ...]:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse tensors and some subclasses have no memory of their own
        return ()
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _saved(tensors: list[Tensor]) -> list[_Saved]:
    """Every tensor with a copy of its values."""
    needed = Counter[torch.device]()
    for tensor in tensors:
        needed[tensor.device] += tensor.numel() * tensor.element_size()
    crowded = {
        device for device, size in needed.items() if device.type == "cuda" and _is_crowded(device, size)
    }
    return [
        _Saved(
            tensor,
            tensor.detach(),
            tensor.detach().cpu() if tensor.device in crowded else tensor.detach().clone(),
            None if tensor.is_inference() else tensor._version,
        )
        for tensor in tensors
    ]


def _is_crowded(device: torch.device, size: int) -> bool:
    free = free_bytes(device)
    return free is not None and size > free / 2


def _writable(tensor: Tensor) -> bool:
    """Expanded tensors share elements: PyTorch refuses to write to them, so they cannot have changed."""
    return tensor.layout != torch.strided or not any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _restore(current: dict[str, _T], saved: dict[str, _T]) -> None:
    # In place and only where something differs: the dict may be one that others hold on to. TorchScript's is none,
    # and cannot be cleared.
    if list(current.keys()) != list(saved.keys()) or any(current[name] is not saved[name] for name in saved):
        current.clear()
        current.update(saved)
