"""Finds the tensors in whatever a network returns, each with its path, and the containers that hold them."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import Counter, UserString, deque
from collections.abc import ItemsView, Iterable, KeysView, Mapping, MappingView, Sequence, Set, ValuesView
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

# The parts of these are not examined: `equal` says whether two of them are the same.
_ATOMS = (
    *(str, UserString, bytes, bytearray, memoryview, int, range, type(None), type, nn.Module),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
# Each value of these is a single object, and they define no `==`.
_SINGLETONS = (type, torch.dtype, torch.layout, torch.memory_format)
# Numbers that may carry rounding.
_ROUNDED = (float, complex, Decimal, Fraction)

_Children = list[tuple[Any, Any]]


@dataclass
class Tree:
    """A flattened value.

    Attributes:
        leaves: tensors and everything that is not a container, by path (`""` if the value itself is a leaf).
        containers: the class of every container, with its length if that is fixed by the class, by path.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Tensor)}


def flatten(value: Any) -> Tree:
    """Flattens sequences, mappings, sets of plain values, NumPy arrays, dataclasses and objects with attributes.

    Sparse, quantized and nested tensors become the dense tensors of their values, NumPy arrays and scalars
    tensors; a Python float becomes a float64 scalar, since it may carry rounding as a tensor does.
    """
    tree = Tree()
    _flatten(value, "", tree, {})
    return tree


def lack_of_numbers(tree: Tree) -> str:
    """Returns what a network returns if nothing of it can be compared, and what to do then; empty if something can."""
    if any(bool(tensor.isfinite().any()) for tensor in tree.tensors.values()):
        return ""
    if any(tensor.numel() for tensor in tree.tensors.values()):
        return "returns no finite number: give other inputs, or another --dtype"
    if tree.tensors:
        return "returns empty tensors: give inputs with at least one sample in which it finds something"
    kinds = dict.fromkeys(type(leaf).__name__ for leaf in tree.leaves.values() if not isinstance(leaf, str))
    what = ", ".join(kinds) or "no tensor"
    return f"returns {what}: let its forward return tensors, or a list, tuple or dict of them"


def dense(tensor: Tensor) -> Tensor:
    """Returns the values of a sparse, quantized or nested tensor as a dense one, with zeros where a part of a nested
    tensor is shorter than another; any other tensor unchanged."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_nested:
        padded: Tensor = torch.nested.to_padded_tensor(tensor, 0.0)
        return padded
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def equal(value: Any, other: Any) -> bool | None:
    """Returns whether two leaves that are not tensors are the same; None if that cannot be known."""
    if type(value) is not type(other):
        return False
    if value is other:
        return True
    if isinstance(value, _SINGLETONS):
        return False
    # The `==` of a method compares the bound object, and most others compare identity, which always differs between the
    # original and its copy.
    own = any("__eq__" in cls.__dict__ for cls in type(value).__mro__ if cls is not object)
    if not own or callable(value) or (isinstance(value, Set) and not (_is_plain(value) and _is_plain(other))):
        return None
    try:
        same = value == other
    except Exception:  # a user's `==` may raise anything
        return None
    return same if isinstance(same, bool) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | Set):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bytes | int | float | complex)


def _flatten(value: Any, path: str, tree: Tree, above: dict[int, str]) -> None:
    if isinstance(value, Tensor):
        _flatten_tensor(value, path, tree)
    elif _is_numpy(value):
        _flatten_numpy(value, path, tree, above)
    elif isinstance(value, _ROUNDED):
        number = value if isinstance(value, complex) else float(value)
        wide = torch.complex128 if isinstance(value, complex) else torch.float64
        _put(tree.leaves, path, torch.tensor(number, dtype=wide))
    elif id(value) in above:
        _put(tree.leaves, path, f"<the same as {above[id(value)] or '(whole)'}>")
    elif children := _children(value):
        _put(tree.containers, path, f"{type(value).__qualname__} of {len(children)}")
        if _hides_something(value):
            _put(tree.leaves, path, value)
        _flatten_children(children, path, tree, {**above, id(value): path})
    elif children is None:
        _put(tree.leaves, path, value)
    else:
        _put(tree.containers, path, f"{type(value).__qualname__} of 0")


def _flatten_children(children: _Children, path: str, tree: Tree, above: dict[int, str]) -> None:
    for name, (_, child) in zip(_paths(path, [key for key, _ in children]), children, strict=True):
        _flatten(child, name, tree, above)


def _paths(path: str, keys: list[Any]) -> list[str]:
    """Returns paths such as `a.0.b`; a key that could be mistaken for another, or for a deeper one, is in brackets."""
    names = [str(key) for key in keys]
    often = Counter(names)

    def ambiguous(name: str) -> bool:
        inside = any(char == "." and name[:at] in often for at, char in enumerate(name))
        return not name or often[name] > 1 or inside

    return [
        f"{path}[{key!r}]" if ambiguous(name) else f"{path}.{name}" if path else name
        for key, name in zip(keys, names, strict=True)
    ]


def _put(where: dict[str, Any], path: str, value: Any) -> None:
    """Stores a value; two keys may still have the same text, and the second value must not replace the first."""
    unique, number = path, 1
    while unique in where:
        number += 1
        unique = f"{path}#{number}"
    where[unique] = value


def _flatten_tensor(tensor: Tensor, path: str, tree: Tree) -> None:
    if tensor.is_nested:
        parts = tensor.unbind()
        _put(tree.containers, path, f"nested tensor of {len(parts)}")
        for index, part in enumerate(parts):
            _flatten_tensor(part, f"{path}.{index}" if path else str(index), tree)
        return
    _put(tree.leaves, path, dense(tensor))


def _is_numpy(value: Any) -> bool:
    # NumPy is not a dependency: if nobody has imported it, no value is an array.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _flatten_numpy(value: Any, path: str, tree: Tree, above: dict[int, str]) -> None:
    numpy = sys.modules["numpy"]
    kind, size = value.dtype.kind, value.dtype.itemsize
    name = type(value).__qualname__
    if isinstance(value, numpy.ma.MaskedArray):
        _put(tree.containers, path, name)
        masked = [("data", value.filled(0)), ("mask", numpy.ma.getmaskarray(value))]
        _flatten_children(masked, path, tree, above)
    elif kind in "biufc":
        # torch has no wider floating-point numbers, and no other byte order.
        wide = {"f": numpy.float64, "c": numpy.complex128}.get(kind)
        too_wide = wide is not None and size > numpy.dtype(wide).itemsize
        dtype = wide if too_wide else value.dtype.newbyteorder("=")
        _put(tree.containers, path, f"{name} of {value.dtype}")
        # A copy, since the network may write to the array again in its next run.
        _put(tree.leaves, path, torch.from_numpy(numpy.array(value, dtype=dtype, order="C", copy=True)))
    else:
        _put(tree.containers, path, f"{name} of {value.dtype}")
        content = value.tolist()
        if isinstance(content, list | tuple):
            _flatten_children(list(enumerate(content)), path, tree, {**above, id(value): path})
        else:
            _flatten(content, path, tree, {**above, id(value): path})


def _children(value: Any) -> _Children | None:
    """Returns keys and values of a container; None for anything else."""
    if isinstance(value, _ATOMS):
        return None
    children: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        children = zip(value._fields, value, strict=True)
    elif isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, Sequence | KeysView | ItemsView | ValuesView):
        children = enumerate(value)
    elif isinstance(value, Set):
        # A set has no order, and rounding may change its items, so only sets that can be sorted are compared.
        if not value or not all(isinstance(item, int | float) for item in value):
            return None
        children = enumerate(sorted(value))
    held = None if children is None else list(children)
    # An object of a class that is not built in holds its parts in attributes.
    if held is not None and not isinstance(value, list | tuple | dict | deque | set | frozenset):
        return held
    attributes = _attributes(value)
    if held is None:
        return attributes or ([] if dataclasses.is_dataclass(value) else None)
    known = dict(held) if isinstance(value, Mapping) else {}
    return held + [(name, item) for name, item in attributes if known.get(name, known) is not item]


def _attributes(value: Any) -> _Children:
    """Returns fields, the entries of `__dict__` and the values of slots."""
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    found = {name: getattr(value, name) for name in fields if hasattr(value, name)}
    found |= {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in found}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__", *found) and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(found.items())


def _hides_something(value: Any) -> bool:
    """Returns whether a base that is not written in Python may hold something that no attribute shows."""
    if isinstance(value, Mapping | Sequence | MappingView | Set):
        return False
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return any(not cls.__flags__ & heap_type for cls in type(value).__mro__ if cls is not object)
