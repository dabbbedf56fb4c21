"""Tensors that a network computes from its parameters and keeps as plain attributes.

`torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do so, and what is written like them: a hook sets
`weight` before every forward, and autograd made it, so that `copy.deepcopy` refuses the network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_M = TypeVar("_M", bound=nn.Module)

# Of the parameter that `weight` is computed from: without gradients its result looks like any other tensor.
_SUFFIXES = ("_orig", "_g", "_bar", "_raw")


def computed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The computed tensors of this very module, by name."""
    return {name: value for name, value in vars(module).items() if _is_computed(module, name, value)}


def deep_copy(model: _M, memo: dict[int, Any] | None = None, dtype: torch.dtype | None = None) -> _M:
    """`copy.deepcopy` that also copies sparse and nested tensors, and computed ones: as numbers, until the hooks
    compute them anew.

    Args:
        model: the network.
        memo: as in `copy.deepcopy`.
        dtype: of the copies of computed floating-point tensors, which `copy.to(dtype)` leaves as they are;
            None is their own.
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
    """Sparse and nested tensors, of which `copy.deepcopy` knows some only."""
    return tensor.layout != torch.strided or tensor.is_nested


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


class ComputedState:
    """Which computed tensors some modules hold, to be put back after they have run.

    Other plain attributes are left as a run leaves them: a cache and what says that it is filled belong
    together. What autograd made is no such cache, since a second backward pass through it fails.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [(module, dict(vars(module))) for module in modules]

    def put_back(self) -> None:
        """The very same tensors as before; what was not there, or was no tensor, is so again."""
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
