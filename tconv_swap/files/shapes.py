"""Checks, on records, the arguments of functions that make values and tensors, and which methods a class overrides."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from tconv_swap.blocks import handed, modules
from tconv_swap.files.records import Call, GlobalName, Items, Record, Reference
from tconv_swap.layer import SWAPPED, _new_swapped_layer

LISTS = (list, deque)
#: Returns the value of a name, or of the name that a call calls.
Constant: TypeAlias = Callable[[Record], Any]
_Predicate: TypeAlias = Callable[[Record, Constant], bool]
_MAX_DIMENSIONS = 64


def are_arguments_of(function: object, arguments: list[Record], constant: Constant) -> bool:
    """Returns whether a harmless file calls `function`, a class or the name of a function of torch, with these
    arguments."""
    return any(
        len(form) == len(arguments)
        and all(fits(argument, constant) for fits, argument in zip(form, arguments, strict=True))
        for form in _FORMS[function]
    )


def has_own(cls: type, method: str) -> bool:
    """Returns whether a class has a method that it inherits neither from `object` nor from nn.Module."""
    found = next(base for base in (*cls.__mro__, None) if base is None or method in vars(base))
    return found not in (None, object, nn.Module)


def reduces_itself(cls: type) -> bool:
    """Returns whether pickles of a class call the class, because it defines a `__reduce__`."""
    return has_own(cls, "__reduce__") or has_own(cls, "__reduce_ex__") or issubclass(cls, enum.Enum)


#: Functions that pickles of our layers name: each takes classes and returns one of our layers without state.
MAKERS = (_new_swapped_layer, modules._new_container, handed._new_handing)


def has_swapped_form(maker: Callable[..., nn.Module], classes: list[type]) -> bool:
    """Returns whether one of ``MAKERS`` makes one of our layers from these classes."""
    if maker is modules._new_container:
        return (
            len(classes) == 2
            and classes[1] in (modules.Blocks, modules.AllBlocks)
            and issubclass(classes[0], nn.Sequential)
            and not issubclass(classes[0], modules.Blocks)
            and classes[0].forward is nn.Sequential.forward
        )
    if len(classes) != 1:
        return False
    if maker is handed._new_handing:
        return not issubclass(classes[0], handed.Handing)
    return issubclass(classes[0], nn.ConvTranspose2d | nn.ConvTranspose1d) and not issubclass(
        classes[0], SWAPPED
    )


def is_integer(record: Record) -> bool:
    return type(record) is int


def _integer(record: Record, _: Constant) -> bool:
    return is_integer(record)


def _number(record: Record, _: Constant) -> bool:
    return type(record) in (int, float)


def _flag(record: Record, _: Constant) -> bool:
    return type(record) is bool


def _flag_or_none(record: Record, _: Constant) -> bool:
    return record is None or type(record) is bool


def _text(record: Record, _: Constant) -> bool:
    return type(record) is str


def _index(record: Record, _: Constant) -> bool:
    return record is None or type(record) is int


def _latin1(record: Record, _: Constant) -> bool:
    return record in ("latin1", "latin-1")


def _bytes(record: Record, constant: Constant) -> bool:
    # Protocols before 3 have no bytes: they call _codecs.encode.
    return type(record) is bytes or (isinstance(record, Call) and constant(record) is str.encode)


def _integers(record: Record, constant: Constant) -> bool:
    if isinstance(record, Call) and constant(record) is torch.Size and len(record.args.items) == 1:
        record = record.args.items[0]
    return (
        isinstance(record, Items)
        and record.kind in (tuple, list)
        and len(record.items) <= _MAX_DIMENSIONS
        and all(map(is_integer, record.items))
    )


def _storage(record: Record, _: Constant) -> bool:
    return isinstance(record, Reference)


def _tensor(record: Record, constant: Constant) -> bool:
    return isinstance(record, Call) and str(constant(record)).startswith("_rebuild")


def _scales(record: Record, constant: Constant) -> bool:
    if isinstance(record, Items) and record.kind is list:
        return all(type(value) in (int, float) for value in record.items)
    return _tensor(record, constant)


def _no_hooks(record: Record, constant: Constant) -> bool:
    if isinstance(record, Call):
        content = [*record.args.items, *record.pairs, *record.states]
        return constant(record) is OrderedDict and not content
    return record is None or (isinstance(record, Items) and record.kind is dict and not record.items)


def _dtype(record: Record, constant: Constant) -> bool:
    return isinstance(record, GlobalName) and isinstance(constant(record), torch.dtype)


def _layout(record: Record, constant: Constant) -> bool:
    return isinstance(record, Call) and constant(record) is torch.serialization._get_layout


def _bits(record: Record, _: Constant) -> bool:
    """Returns whether the record holds the conjugate and the negative bit of a tensor."""
    if not (isinstance(record, Items) and record.kind is dict):
        return record is None
    keys, values = record.items[::2], record.items[1::2]
    return all(key in ("conj", "neg") for key in keys) and all(type(value) is bool for value in values)


def _quantizer(record: Record, constant: Constant) -> bool:
    items = record.items if isinstance(record, Items) and record.kind is tuple else []
    scheme = constant(items[0]) if items and isinstance(items[0], GlobalName) else None
    if scheme == torch.per_tensor_affine:
        forms: tuple[_Predicate, ...] = (_number, _integer)
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        forms = (_scales, _scales, _integer)
    else:
        return False
    rest = items[1:]
    return len(rest) == len(forms) and all(fits(r, constant) for fits, r in zip(forms, rest, strict=True))


def _sparse(record: Record, constant: Constant) -> bool:
    """Checks for COO: indices, values, size and, since PyTorch 2.1, whether it is coalesced; the others have one tensor
    more."""
    items = record.items if isinstance(record, Items) and record.kind is tuple else []
    forms: tuple[tuple[_Predicate, ...], ...] = (
        (_tensor, _tensor, _integers),
        (_tensor, _tensor, _integers, _flag_or_none),
        (_tensor, _tensor, _tensor, _integers),
    )
    return any(
        len(form) == len(items) and all(fits(i, constant) for fits, i in zip(form, items, strict=True))
        for form in forms
    )


def _anything(_: Record, __: Constant) -> bool:
    return True


_STRIDED: tuple[_Predicate, ...] = (_storage, _integer, _integers, _integers)
_FORMS: dict[Any, tuple[tuple[_Predicate, ...], ...]] = {
    torch.Size: ((_integers,),),
    torch.device: ((_text,), (_text, _integer)),
    torch.serialization._get_layout: ((_text,),),
    str.encode: ((_text, _latin1),),
    bytearray: ((), (_bytes,), (_text, _latin1)),
    complex: ((_number, _number),),
    slice: ((_index, _index, _index),),
    "_rebuild_tensor": (_STRIDED,),
    "_rebuild_tensor_v2": ((*_STRIDED, _flag, _no_hooks), (*_STRIDED, _flag, _no_hooks, _bits)),
    "_rebuild_tensor_v3": ((*_STRIDED, _flag, _no_hooks, _dtype), (*_STRIDED, _flag, _no_hooks, _dtype, _bits)),
    "_rebuild_parameter": ((_tensor, _flag, _no_hooks),),
    "_rebuild_parameter_with_state": ((_tensor, _flag, _no_hooks),),
    "_rebuild_qtensor": ((*_STRIDED, _quantizer, _flag, _no_hooks),),
    "_rebuild_sparse_tensor": ((_layout, _sparse),),
    "_rebuild_meta_tensor_no_storage": ((_dtype, _integers, _integers, _flag),),
    "_rebuild_nested_tensor": ((_tensor, _tensor, _tensor, _tensor),),
    "_rebuild_from_type_v2": ((_anything, _anything, _anything, _anything),),
}  # fmt: skip
