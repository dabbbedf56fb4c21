"""Tensors that a network computes from its parameters and keeps as plain attributes.

`torch.nn.utils.weight_norm`, `spectral_norm`, `prune` and similar code do so: a hook sets `weight` before every
forward pass. Autograd made this tensor, so `copy.deepcopy` refuses the network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_M = TypeVar("_M", bound=nn.Module)

# Suffixes of the parameter that `weight` is computed from: without gradients, the computed tensor looks like any
# other.
_SUFFIXES = ("_orig", "_g", "_bar", "_raw")


def computed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the computed tensors of this module, not of its children, by name."""
    return {name: value for name, value in vars(module).items() if _is_computed(module, name, value)}


def deep_copy(model: _M, memo: dict[int, Any] | None = None, dtype: torch.dtype | None = None) -> _M:
    """Returns `copy.deepcopy` of a network, including sparse, nested and computed tensors. Computed tensors are
    copied as plain values, until the hooks compute them again.

    Args:
        model: the network.
        memo: as in `copy.deepcopy`.
        dtype: the dtype of the copies of computed floating-point tensors, which `copy.to(dtype)` leaves as they are;
            None keeps their own.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for value in computed_tensors(module).values():
            if dtype is not None and value.is_floating_point():
                memo[id(value)] = value.detach().to(dtype, copy=True)
            elif not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor) and tensor.is_leaf and _has_no_storage(tensor):
                memo.setdefault(id(tensor), _copy(tensor))
    return copy.deepcopy(model, memo)


def _has_no_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor is sparse or nested: `copy.deepcopy` supports only some of these."""
    return tensor.layout != torch.strided or tensor.is_nested


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


class ComputedState:
    """The computed tensors that some modules hold, which can be put back after the modules have run.

    Other plain attributes stay as a run leaves them, since a cache and the flag that says it is filled belong
    together. A tensor that autograd made is not such a cache: a second backward pass through it fails.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [(module, dict(vars(module))) for module in modules]

    def put_back(self) -> None:
        """Puts the same tensor objects back; an attribute that was missing, or was not a tensor, is so again."""
        for module, before in self._held:
            names = computed_tensors(module).keys() | {
                name for name, value in before.items() if _is_computed(module, name, value)
            }
            # Through `__setattr__`, as the hooks set them: an LSTM keeps a list of its weights as well.
            for name in names:
                if name not in before:
                    delattr(module, name)
                elif vars(module).get(name) is not before[name]:
                    setattr(module, name, before[name])


def _is_computed(module: nn.Module, name: str, value: object) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return not value.is_leaf or any(name + suffix in module._parameters for suffix in _SUFFIXES)
