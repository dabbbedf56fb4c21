"""The parameters and buffers of some modules, kept so that they can be put back after the modules have run."""

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

    Costs one copy of all parameters and buffers: on their own device, or on the CPU where they would take more than
    half of what a GPU has left. Uninitialised (lazy) parameters are not covered.
    """

    def __init__(self, modules: Iterable[nn.Module], beside: ModuleState | None = None) -> None:
        """
        Args:
            beside: another state, made just before; its copies are used for the tensors that are in both.
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
    """A tensor, and everything that is needed to restore its values."""

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
    # Subclasses may have no bits that could be compared.
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
    """Expanded tensors share elements: PyTorch refuses to write to them, so they cannot have changed."""
    return (
        tensor.layout != torch.strided
        or tensor.is_nested
        or not any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _restore(current: dict[str, _T], saved: dict[str, _T]) -> None:
    # In place and only where something differs: the dict may be one that others hold on to. TorchScript's is none,
    # and cannot be cleared.
    if list(current.keys()) != list(saved.keys()) or any(current[name] is not saved[name] for name in saved):
        current.clear()
        current.update(saved)
