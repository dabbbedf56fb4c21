"""Decides which attributes an object of a class may be given, and which a layer of PyTorch's must have.

The attributes that a layer needs are read from its class: the names in its `__constants__` and its annotations.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.weight_norm import WeightNorm

from tconv_swap import layer as layers
from tconv_swap.cuda.choice import check_backend
from tconv_swap.files.containers import RefusedError

_DATA = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    list,
    dict,
    set,
    frozenset,
    torch.dtype,
    torch.device,
    Tensor,
)
#: Data descriptors hide what an object holds under their name. A cached_property keeps its value there.
_PROPERTIES = (property, functools.cached_property, types.MemberDescriptorType, types.GetSetDescriptorType)
_ACTIVATION = frozenset({"activation"})
#: These annotations describe an argument, not an attribute.
_NO_ATTRIBUTES = frozenset({"freeze"})
_MAX_IN_GEOMETRY = 1 << 31


def may_set(cls: type, key: str, trusted: bool = False, swapped: bool = False) -> bool:
    """Returns whether a file may give an object of `cls` the attribute `key`: not if it would replace a part of the
    class. In a class that the user trusts, data may replace data.
    """
    if key.startswith("__") and key.endswith("__"):
        return False
    if key == "tconv_backend" and (swapped or issubclass(cls, layers.SWAPPED)):
        return True
    found = next((vars(base)[key] for base in cls.__mro__ if key in vars(base)), cls)
    if found is cls:
        return True
    # None is a common default in a class, also for attributes that Module.__call__ calls.
    plain = found is None and key not in vars(nn.Module)
    return trusted and (plain or isinstance(found, (*_DATA, *_PROPERTIES, type)))


def function_attributes(cls: type) -> frozenset[str]:
    """Returns the names under which an object of exactly this class keeps a function of tensors."""
    keeps = cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return _ACTIVATION if keeps else frozenset()


def check_layer(layer: nn.Module) -> None:
    """Raises RefusedError if an attribute that the class of a layer needs is missing or of another type."""
    cls = type(layer)
    for name, hint in _needed(cls).items():  # type: ignore[arg-type]  # mypy compares the hash of the instances
        if not hasattr(layer, name):
            raise RefusedError(f"a {cls.__name__} has no {name}")
        if not _fits(getattr(layer, name), hint):
            raise RefusedError(f"{name} of a {cls.__name__} is a {type(getattr(layer, name)).__name__}")
    if isinstance(layer, _ConvTransposeNd):
        _check_geometry(layer)
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            _check_normed(layer, hook)
    if isinstance(layer, layers.SWAPPED):
        try:
            check_backend(layer.tconv_backend)
        except (TypeError, ValueError) as error:
            raise RefusedError(str(error)) from None


def _check_normed(layer: nn.Module, hook: WeightNorm) -> None:
    """Checks `dim`: the operator reads a norm for each of its indices, without checking that there is one."""
    norm, direction = (layer._parameters.get(f"{hook.name}_{end}") for end in ("g", "v"))
    plain = isinstance(norm, Tensor) and isinstance(direction, Tensor) and norm.dtype == direction.dtype
    if plain and norm is not None and direction is not None and -1 <= hook.dim < direction.dim():
        sizes = [size if i == hook.dim else 1 for i, size in enumerate(direction.shape)]
        if (
            list(norm.shape) == (sizes if hook.dim >= 0 else [])
            and norm.layout == direction.layout == torch.strided
        ):
            return
    raise RefusedError(f"the norm of a {type(layer).__name__} does not fit its weight")


def _check_geometry(layer: _ConvTransposeNd) -> None:
    """Checks the numbers that planning uses."""
    dimensions = next((n for n in (1, 2, 3) if isinstance(layer, getattr(nn, f"ConvTranspose{n}d"))), None)
    least = {"kernel_size": 1, "stride": 1, "dilation": 1, "padding": 0, "output_padding": 0}
    for name, smallest in least.items():
        value: Any = getattr(layer, name, None)
        whole = isinstance(value, tuple) and all(type(number) is int for number in value)
        if not whole or len(value) != dimensions or not all(smallest <= n < _MAX_IN_GEOMETRY for n in value):
            raise RefusedError(f"{name} of a {type(layer).__name__} is {value!s:.40}")
    for name in ("groups", "in_channels", "out_channels"):
        number: Any = getattr(layer, name, None)
        if type(number) is not int or not (name != "groups") <= number + 1 <= _MAX_IN_GEOMETRY:
            raise RefusedError(f"{name} of a {type(layer).__name__} is {number!s:.40}")
    for name in ("weight", "bias"):
        tensor: Any = getattr(layer, name, None)
        if not isinstance(tensor, Tensor) and (name == "weight" or tensor is not None):
            raise RefusedError(f"{name} of a {type(layer).__name__} is a {type(tensor).__name__}")


@functools.cache
def _needed(cls: type[nn.Module]) -> dict[str, Any]:
    """Returns attribute names and their annotations; `Any` if there is none."""
    needed: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("torch.nn.modules.") and base is not nn.Module:
            needed |= dict.fromkeys(vars(base).get("__constants__", ()), Any)
            needed |= _hints(base)
    return {name: hint for name, hint in needed.items() if name not in _NO_ATTRIBUTES}


def _hints(cls: type) -> dict[str, Any]:
    # Annotations are not evaluated: one that is text accepts every value.
    return {name: hint for name, hint in inspect.get_annotations(cls).items() if name not in vars(cls)}


def _fits(value: object, hint: Any) -> bool:
    """Returns whether a value fits the annotation. An int is accepted as a float and the reverse, and a number as a
    tuple of equal numbers."""
    return any(_fits_one(value, alternative) for alternative in _alternatives(hint))


def _alternatives(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        for alternative in typing.get_args(hint):
            yield from _alternatives(alternative)
    else:
        yield hint


def _fits_one(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is None or origin is type(None):
        return value is None
    if origin in (int, float, bool):
        return isinstance(value, int | float)
    if origin is str:
        return isinstance(value, str)
    if origin is Literal:
        return isinstance(value, type(typing.get_args(hint)[0]))
    if origin in (tuple, list, Sequence):
        return isinstance(value, int | float | tuple | list)
    if isinstance(origin, type) and issubclass(origin, Tensor):
        return value is None or isinstance(value, Tensor)
    if isinstance(origin, type) and issubclass(origin, nn.Module):
        return value is None or isinstance(value, nn.Module)
    return True
