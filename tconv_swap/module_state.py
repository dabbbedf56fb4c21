"""Keeps the parameters and buffers of some modules, so that they can be restored after the modules have run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.bits import same_bits
from tconv_swap.memory import free_bytes

_T = TypeVar("_T", bound=Tensor | None)


class ModuleState:
    """Parameters and buffers as they were: the same objects under the same names, with the same values in the same
    memory.

    Costs one copy of all parameters and buffers, on their own device; on the CPU if they would take more than half of
    the GPU's free memory. Uninitialised (lazy) parameters are not covered.
    """

    def __init__(self, modules: Iterable[nn.Module], beside: ModuleState | None = None) -> None:
        """
        Args:
            beside: another state, made just before; tensors that are in both share its copies.
        """
        modules = list(modules)
        self._registered = [_Registered(module) for module in modules]
        tensors = unique_tensors(modules)
        shared = {id(saved.tensor): saved for saved in beside._saved} if beside else {}
        self._saved: list[_Saved] = [shared[id(tensor)] for tensor in tensors if id(tensor) in shared]
        self._saved += save([t for t in tensors if _writable(t) and id(t) not in shared])
        self._values = {id(tensor): tensor.detach() for tensor in tensors}
        self._values |= {id(saved.tensor): saved.value for saved in self._saved}

    def put_back(self) -> None:
        for names in self._registered:
            names.put_back()
        for saved in self._saved:
            saved.put_back()

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the saved values of a tensor; None if it was not there."""
        return self._values.get(id(tensor))


def unique_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns all parameters and buffers, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not is_lazy(tensor):
                found[id(tensor)] = tensor
    return list(found.values())


class _Registered:
    """The parameters and buffers that a module has, with their names."""

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
    """A tensor, and everything that is needed to restore its values."""

    tensor: Tensor
    memory: Tensor
    """Another tensor in the same memory, needed if the network assigns `tensor.data`."""
    value: Tensor
    version: int | None
    """Autograd's counter of writes; None for tensors made in inference mode, which have none."""

    def put_back(self) -> None:
        tensor = self.tensor
        if _place(tensor) != _place(self.memory):
            tensor.data = self.memory
        if not _unchanged(tensor, self.value):
            # The order matters: `inference_mode(False)` enables gradients.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(self.value)
        # Values that nobody changed are not written: a graph built on them is still valid, but its backward pass would
        # fail after any write. A step of an optimizer with learning rate 0 is such a case.
        if self.version is not None and tensor._version != self.version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))


def _unchanged(tensor: Tensor, value: Tensor) -> bool:
    # Subclasses may have no bits to compare.
    return tensor.is_meta or (type(tensor) in (Tensor, nn.Parameter) and same_bits(tensor, value))


def _place(tensor: Tensor) -> tuple[object, ...]:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except RuntimeError:  # sparse and nested tensors and some subclasses have no memory of their own
        return ()


def save(tensors: list[Tensor]) -> list[_Saved]:
    """Returns every tensor with a copy of its values."""
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
    """Returns whether a tensor can be written: PyTorch refuses this for expanded tensors, whose elements share memory,
    so they cannot have changed either."""
    return (
        tensor.layout != torch.strided
        or tensor.is_nested
        or not any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _restore(current: dict[str, _T], saved: dict[str, _T]) -> None:
    # The dict is changed in place and only where something differs, because other objects may hold it. That of
    # TorchScript is not a dict and cannot be cleared.
    if list(current.keys()) != list(saved.keys()) or any(current[name] is not saved[name] for name in saved):
        current.clear()
        current.update(saved)
