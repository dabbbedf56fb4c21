"""Checks, right after loading, that a network from a file can be processed at all."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tconv_swap.files.fileformat import LoadError, first_line, printable
from tconv_swap.memory import CPU, MIN_FREE_BYTES, free_bytes

#: The largest number of names of layers, parameters and buffers, counted each time they are reached: 30 layers that
#: each hold the next one twice have 2^30 names.
MAX_NAMES = 1_000_000
#: The deepest nesting of layers. Copying a network takes seven nested calls for each level.
MAX_DEPTH = 100


def check_whole(path: Path, model: nn.Module) -> None:
    """Raises LoadError if layers lack their state or contain themselves, are too many, or if tensors are too large."""
    try:
        _count_names(model, [], {})
        for name, module in model.named_modules():
            if not name.isprintable():
                raise ValueError(f"a layer has the name {name!r}")
            if not isinstance(module.training, bool):
                raise TypeError("training is not a bool")
            list(module.named_parameters(recurse=False))
            list(module.named_buffers(recurse=False))
        _check_size(model)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{printable(path)} holds a damaged network ({first_line(error)})") from None


def _count_names(
    layer: nn.Module, around: list[nn.Module], counted: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """Returns how many names are in a layer, and the depth of its layers."""
    if id(layer) in counted:
        return counted[id(layer)]
    if any(layer is outer for outer in around):
        raise ValueError("a layer contains itself")
    names, depth = 1 + len(layer._parameters) + len(layer._buffers), 0
    for child in layer._modules.values():
        if child is not None and len(around) < MAX_DEPTH:
            more, below = _count_names(child, [*around, layer], counted)
            names, depth = names + more, max(depth, below)
    if len(around) + depth >= MAX_DEPTH:
        raise ValueError(f"its layers are nested more than {MAX_DEPTH} deep")
    if names > MAX_NAMES:
        raise ValueError(f"its layers have more than {MAX_NAMES} names")
    counted[id(layer)] = names, depth + 1
    return counted[id(layer)]


def _check_size(model: nn.Module) -> None:
    # A tensor of stride 0 may have any size on a storage of a few bytes; a copy of it needs memory for the whole size.
    held = [
        t
        for t in (*model.parameters(), *model.buffers())
        if not nn.parameter.is_lazy(t) and not t.is_meta and t.layout is torch.strided and not t.is_nested
    ]
    expanded = [
        t for t in held if 0 in t.stride() and t.numel() * t.element_size() > t.untyped_storage().nbytes()
    ]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in expanded)
    free = free_bytes(CPU)
    if free is not None and needed > max(free, MIN_FREE_BYTES):
        raise ValueError(f"its tensors would need {needed / 2**30:.0f} GiB")
