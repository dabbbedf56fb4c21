"""Checks the attributes that every layer has besides its own, and the hooks that PyTorch's utilities add to a layer.

A hook is called with its layer in each forward pass. Its class must therefore be known, it may hold only the attributes
of this class, and its layer must have the tensors on which the hook works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm

from tconv_swap.files.attributes import may_set
from tconv_swap.files.containers import RefusedError, Sort
from tconv_swap.files.known import PRUNING
from tconv_swap.files.records import Call, Items, Record

_ATOM = frozenset({Sort.ATOM})
_TENSORS = frozenset({Sort.ATOM, Sort.TENSOR, Sort.PARAMETER})
#: The dictionaries of a layer. A computed parameter is a plain tensor.
_HELD = {
    "_parameters": frozenset({Sort.PARAMETER}),
    "_buffers": frozenset({Sort.TENSOR, Sort.PARAMETER}),
    "_modules": frozenset({Sort.LAYER}),
}
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
#: The forward pass and the state_dict call these with the layer.
_HOOKS: dict[str, tuple[type, ...]] = {
    "_forward_pre_hooks": (WeightNorm, SpectralNorm, *PRUNING, nn.Module),
    "_forward_hooks": (nn.Module,),
    "_state_dict_hooks": (SpectralNormStateDictHook,),
    "_load_state_dict_pre_hooks": (_WrappedHook, SpectralNormLoadStateDictPreHook),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
    "_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
_NEEDED = ("training", *_HELD, "_forward_hooks", "_backward_hooks")
#: The attributes of every layer.
FIELDS = frozenset(
    {
        "training",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        *_HELD,
        *_FLAGS,
        *_HOOKS,
    }
)


@dataclass(frozen=True)
class View:
    """Functions of `schema` that describe a record.

    Attributes:
        dictionary: yields the items of a dict; if it is not a dict, raises a refusal with the given words.
        sort: returns what it becomes.
        constant: returns the value of a name, or of the name that a call calls.
        check_content: raises if the record is or holds a sort that is not allowed.
    """

    dictionary: Callable[[Record, str], Iterator[tuple[Record, Record]]]
    sort: Callable[[Record], Sort]
    constant: Callable[[Record], Any]
    check_content: Callable[[Record, frozenset[Sort]], None]


def check_fields(fields: dict[str, Record], view: View) -> None:
    """Raises RefusedError if an attribute of every layer is missing or of another type."""
    for name in _NEEDED:
        if name not in fields:
            raise RefusedError(f"{name} is missing")
    if not isinstance(fields["training"], bool):
        raise RefusedError("training is not a bool")
    if not isinstance(fields.get("_is_full_backward_hook"), bool | None):
        raise RefusedError("_is_full_backward_hook is not a bool")
    for field, allowed in _HELD.items():
        for key, value in view.dictionary(fields[field], field):
            if not (isinstance(key, str) and key and key.isprintable() and "." not in key):
                raise RefusedError(f"{field} holds a {key!r:.80}")
            if value is not None and (isinstance(value, Items) or view.sort(value) not in allowed):
                raise RefusedError(f"{key} in {field} is something else")
    for field in _FLAGS:
        for number, flag in view.dictionary(fields.get(field, Items(dict, [])), field):
            if not (type(number) is int and isinstance(flag, bool)):
                raise RefusedError(f"{field} holds something other than flags")
    if "_non_persistent_buffers_set" in fields:
        view.check_content(fields["_non_persistent_buffers_set"], _ATOM)
        if not (_names(fields["_non_persistent_buffers_set"], view)):
            raise RefusedError("_non_persistent_buffers_set is not a set of names")


def _names(record: Record, view: View) -> bool:
    if isinstance(record, Call) and view.constant(record) is set:
        record = record.args.items[0] if record.args.items else Items(set, [])
        return isinstance(record, Items) and all(isinstance(name, str) for name in record.items)
    return isinstance(record, Items) and record.kind is set and all(isinstance(n, str) for n in record.items)


def check_hooks(fields: dict[str, Record], layer: Call, cls: type, view: View, trusted: bool) -> None:
    """Raises RefusedError if a hook is of another class, or does not fit this layer."""
    for field, classes in _HOOKS.items():
        for number, hook in view.dictionary(fields.get(field, Items(dict, [])), field):
            if type(number) is not int:
                raise RefusedError(f"{field} of a {cls.__name__} holds something other than hooks")
            kind = view.constant(hook) if isinstance(hook, Call) else None
            if isinstance(hook, Call) and view.sort(hook) is Sort.LAYER and nn.Module in classes:
                continue
            if not isinstance(hook, Call) or view.sort(hook) is not Sort.HOOK or kind not in classes:
                raise RefusedError(f"{field} of a {cls.__name__} holds a hook of another kind")
            state = _state(hook, view)
            if kind is _WrappedHook:
                if state.get("with_module") and state.get("module") is not layer:
                    raise RefusedError(f"a hook of a {cls.__name__} belongs to another layer")
                wrapped = state.get("hook")
                if not isinstance(wrapped, Call):
                    raise RefusedError(f"{field} of a {cls.__name__} wraps no hook")
                kind, state = SpectralNormLoadStateDictPreHook, _state(wrapped, view)
            if kind in (SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook):
                computes = state.get("fn")
                own = fields.get("_forward_pre_hooks", Items(dict, []))
                if not isinstance(computes, Call) or not any(
                    other is computes for _, other in view.dictionary(own, "_forward_pre_hooks")
                ):
                    raise RefusedError(
                        f"{field} of a {cls.__name__} holds a hook without a weight of its own"
                    )
                kind, state = SpectralNorm, _state(computes, view)
            _check_worked_on(kind, state, fields, cls, view, trusted)


def _check_worked_on(
    kind: Any, state: dict[str, Record], fields: dict[str, Record], cls: type, view: View, trusted: bool
) -> None:
    """Checks that the layer has what the hook computes a weight from, and that the weight may be set."""
    name = state.get("_tensor_name" if kind in PRUNING else "name")
    if not isinstance(name, str):
        raise RefusedError(f"a hook of a {cls.__name__} works on nothing")
    parameters = {key for key, _ in view.dictionary(fields["_parameters"], "_parameters")}
    buffers = {key for key, _ in view.dictionary(fields["_buffers"], "_buffers")}
    if kind is WeightNorm:
        present = {f"{name}_g", f"{name}_v"} <= parameters
    elif kind is SpectralNorm:
        present = f"{name}_orig" in parameters and f"{name}_u" in buffers
    else:
        present = f"{name}_orig" in parameters and f"{name}_mask" in buffers
    if not present or name in FIELDS or not may_set(cls, name, trusted):
        raise RefusedError(f"a hook of a {cls.__name__} works on {name!r:.80}, which the layer does not have")


def _state(hook: Call, view: View) -> dict[str, Record]:
    state = hook.states[0] if hook.states else None
    return {str(key): value for key, value in view.dictionary(state, "the state of a hook")}


def check_state(cls: type, record: Record, view: View) -> None:
    """Raises RefusedError if a hook of `cls` would get attributes that this class does not have."""
    state = {
        key: value for key, value in view.dictionary(record, "the state of a hook") if isinstance(key, str)
    }
    if cls in PRUNING:
        _check_pruning(cls, state, view)
        return
    forms: dict[str, Callable[[Record], bool]]
    if cls is WeightNorm:
        forms = {"name": _is_text, "dim": _is_integer}
    elif cls is SpectralNorm:
        forms = {"name": _is_text, "dim": _is_integer, "n_power_iterations": _is_small, "eps": _is_number}
    elif cls in (SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook):
        forms = {"fn": lambda value: isinstance(value, Call) and view.constant(value) is SpectralNorm}
    else:
        forms = {
            "hook": lambda value: (
                isinstance(value, Call) and view.constant(value) is SpectralNormLoadStateDictPreHook
            ),
            "with_module": lambda value: isinstance(value, bool),
        }
        if state.get("with_module"):
            forms["module"] = lambda value: isinstance(value, Call) and view.sort(value) is Sort.LAYER
    if state.keys() != forms.keys() or not all(fits(state[name]) for name, fits in forms.items()):
        raise RefusedError(f"a {cls.__name__} has other attributes than that class")


def _check_pruning(cls: type, state: dict[str, Record], view: View) -> None:
    if not _is_text(state.get("_tensor_name")):
        raise RefusedError(f"a {cls.__name__} prunes no parameter")
    for key, value in state.items():
        if not may_set(cls, key):
            raise RefusedError(f"it would replace {key!r:.80} of a {cls.__name__}")
        if cls is prune.PruningContainer and key == "_pruning_methods":
            methods = value.items if isinstance(value, Items) else []
            if not all(isinstance(m, Call) and view.constant(m) in PRUNING for m in methods):
                raise RefusedError("a PruningContainer holds something other than pruning methods")
        else:
            view.check_content(value, _TENSORS)


def _is_text(value: Record) -> bool:
    return isinstance(value, str)


def _is_integer(value: Record) -> bool:
    return type(value) is int


def _is_small(value: Record) -> bool:
    return type(value) is int and 0 <= value <= 1000


def _is_number(value: Record) -> bool:
    return type(value) in (int, float)
