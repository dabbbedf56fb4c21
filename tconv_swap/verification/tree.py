"""The tensors in whatever a network returns, each with its path, and the containers they lie in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)


@dataclass
class Tree:
    """A flattened value.

    Attributes:
        leaves: tensors and everything that is no container, by path (`""` if the value itself is a leaf).
        containers: the class of every container, and its length where that is part of it, by path.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Tensor)}


def flatten(value: Any) -> Tree:
    """Tuples, named tuples, lists, sets of plain values, mappings, dataclasses and objects with attributes.

    Sparse, quantized and nested tensors become the dense tensors of their values; a Python float becomes a
    float64 scalar, since it may carry rounding as a tensor does.
    """
    tree = Tree()
    _flatten(value, "", tree, set())
    return tree


def _flatten(value: Any, path: str, tree: Tree, above: set[int]) -> None:
    if isinstance(value, Tensor):
        _flatten_tensor(value, path, tree)
        return
    if isinstance(value, float):
        tree.leaves[path] = torch.tensor(value, dtype=torch.float64)
        return
    children = None if id(value) in above else _children(value)
    if children is None:
        tree.leaves[path] = value
        return
    children = list(children)
    tree.containers[path] = f"{type(value).__qualname__} of {len(children)}"
    for key, child in children:
        _flatten(child, f"{path}.{key}" if path else str(key), tree, above | {id(value)})


def _flatten_tensor(tensor: Tensor, path: str, tree: Tree) -> None:
    if tensor.is_nested:
        parts = tensor.unbind()
        tree.containers[path] = f"nested tensor of {len(parts)}"
        for index, part in enumerate(parts):
            _flatten_tensor(part, f"{path}.{index}" if path else str(index), tree)
        return
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tree.leaves[path] = tensor if tensor.layout == torch.strided else tensor.to_dense()


def _children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Key and value of what a container holds; None if it is none."""
    if isinstance(value, _ATOMS) or callable(value):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)
    return attributes.items() if attributes else None
