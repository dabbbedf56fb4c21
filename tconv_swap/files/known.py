"""Lists the names that a file may use without trust: PyTorch's layers and ours, tensors, hooks, Python's containers."""

from __future__ import annotations

import functools
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from tconv_swap import layer
from tconv_swap.blocks import modules as blocks
from tconv_swap.files.records import GlobalName
from tconv_swap.files.shapes import MAKERS


class Kind(Enum):
    """The kind of object that a name refers to, which decides what may be done with it."""

    CONSTANT = auto()  # a dtype or a quantisation scheme: used as it is
    VALUE = auto()  # called with atoms, it makes a value that cannot be changed: a device, a size, a slice
    CONTAINER = auto()  # called with nothing or with items, it makes a container
    STORAGE = auto()  # the dtype of a storage
    REBUILD = auto()  # called, it makes a tensor
    TENSOR = auto()  # a class of tensors
    LAZY = auto()  # a tensor without a shape
    LAYER = auto()
    SWAPPED = auto()  # called with the class of a layer, it makes our layer instead
    HOOK = auto()
    HANDLE = auto()  # removes a hook
    FUNCTION = auto()  # a function of tensors only: an activation
    OBJECT = auto()  # an object of a class that the user trusts
    BASE = auto()  # named where a pickle makes an object; not a value


@dataclass(frozen=True)
class Meaning:
    """What a name refers to. `trusted`: whether it is a class that the user has named."""

    kind: Kind
    value: Any
    trusted: bool = False


# Functions of a tensor only, which PyTorch's own transformer layers and many networks keep as attributes.
_ACTIVATIONS = (
    F.celu, F.elu, F.gelu, F.glu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish,
    F.relu, F.relu6, F.selu, F.sigmoid, F.silu, F.softplus, F.softsign, F.tanh, F.tanhshrink,
)  # fmt: skip
# torchvision's detectors keep this function; it is imported with the classes of torchvision that the user trusts.
BOX_IOU = GlobalName("torchvision.ops.boxes", "box_iou")
_STORAGES = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Double": torch.float64, "Float": torch.float32,
    "Half": torch.float16, "Int": torch.int32, "Long": torch.int64, "QInt32": torch.qint32, "QInt8": torch.qint8,
    "QUInt8": torch.quint8, "Short": torch.int16,
}  # fmt: skip
_REBUILDERS = (
    "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_parameter", "_rebuild_parameter_with_state",
    "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
)  # fmt: skip
PRUNING = tuple(
    value for value in vars(prune).values() if isinstance(value, type) and value.__module__ == prune.__name__
)
HOOKS = (
    nn.modules.module._WrappedHook,
    WeightNorm,
    SpectralNorm,
    SpectralNormStateDictHook,
    SpectralNormLoadStateDictPreHook,
    *PRUNING,
)


@functools.cache
def plain_names() -> Mapping[GlobalName, Meaning]:
    """Returns the names of tensors and of Python's containers."""
    found = {
        **_values(Kind.VALUE, slice, bytearray, complex, torch.Size, torch.device, torch.serialization._get_layout),
        **_values(Kind.CONTAINER, OrderedDict, Counter, set, frozenset),
        **_values(Kind.LAZY, nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer),
        **_values(Kind.TENSOR, nn.parameter.Parameter, nn.parameter.Buffer),
        GlobalName("torch", "Tensor"): Meaning(Kind.TENSOR, torch.Tensor),
        GlobalName("torch", "Size"): Meaning(Kind.VALUE, torch.Size),
        GlobalName("torch", "device"): Meaning(Kind.VALUE, torch.device),
        GlobalName("_codecs", "encode"): Meaning(Kind.VALUE, str.encode),
        GlobalName("builtins", "object"): Meaning(Kind.BASE, object),
        GlobalName("torch._tensor", "_rebuild_from_type_v2"): Meaning(Kind.REBUILD, "_rebuild_from_type_v2"),
    }  # fmt: skip
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype | torch.qscheme):
            found[GlobalName("torch", name)] = Meaning(Kind.CONSTANT, value)
    for name, dtype in _STORAGES.items():
        found[GlobalName("torch", f"{name}Storage")] = Meaning(Kind.STORAGE, dtype)
    for module in ("torch", "torch.storage"):
        found[GlobalName(module, "UntypedStorage")] = Meaning(Kind.STORAGE, torch.uint8)
    for name in _REBUILDERS:
        found[GlobalName("torch._utils", name)] = Meaning(Kind.REBUILD, name)
    return MappingProxyType(found)


@functools.cache
def network_names() -> Mapping[GlobalName, Meaning]:
    """Returns the names of PyTorch's layers, of ours and of their attributes, and all `plain_names`."""
    layers = [
        value
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.nn.modules.")
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module_name
    ]
    found = {
        **plain_names(),
        **_values(Kind.LAYER, *layers, DataParallel, *layer.SWAPPED, *blocks.CLASSES),
        **_values(Kind.SWAPPED, *MAKERS),
        **_values(Kind.HOOK, *HOOKS),
        **_values(Kind.HANDLE, RemovableHandle),
    }
    # gelu, logsigmoid and softplus are C functions: pickles refer to them as functions of torch._C._nn.
    for function in _ACTIVATIONS:
        found[GlobalName(function.__module__, function.__name__)] = Meaning(Kind.FUNCTION, function)
    return MappingProxyType(found)


def _values(kind: Kind, *values: Any) -> dict[GlobalName, Meaning]:
    return {GlobalName(value.__module__, value.__qualname__): Meaning(kind, value) for value in values}
