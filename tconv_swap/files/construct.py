"""Makes the objects that a pickle describes, after `schema` has checked its records."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tconv_swap.files.attributes import check_layer
from tconv_swap.files.containers import RefusedError
from tconv_swap.files.known import Kind, Meaning
from tconv_swap.files.records import Call, GlobalName, Items, Record, Reference
from tconv_swap.files.shapes import LISTS
from tconv_swap.files.storages import Storages
from tconv_swap.files.tensors import rebuild

#: Yields the records whose objects it needs, receives these objects, and returns its own.
_Steps: TypeAlias = Generator[Record, Any, Any]


def construct(root: Record, meanings: Mapping[GlobalName, Meaning], storages: Storages) -> Any:
    """Returns the object that the records describe.

    Raises:
        RefusedError: its parts do not fit together.
        Exception: whatever the `__setstate__` of a trusted class raises.
    """
    maker = _Maker(meanings, storages)
    made = maker.make(root)
    for layer in maker.layers:
        check_layer(layer)
    return made


class _Maker:
    def __init__(self, meanings: Mapping[GlobalName, Meaning], storages: Storages) -> None:
        self.meanings = meanings
        self.storages = storages
        self.made: dict[int, Any] = {}
        self.in_work: set[int] = set()
        self.layers: list[nn.Module] = []
        self.of_kind: dict[Kind, Callable[[Call, Meaning], _Steps]] = {
            Kind.VALUE: self.value,
            Kind.CONTAINER: self.container,
            Kind.REBUILD: self.tensor,
            Kind.TENSOR: self.old_parameter,
            Kind.LAZY: self.value,
            Kind.LAYER: self.object,
            Kind.SWAPPED: self.swapped,
            Kind.HOOK: self.object,
            Kind.HANDLE: self.object,
            Kind.OBJECT: self.object,
        }

    def make(self, root: Record) -> Any:
        """Makes an object without recursion, since a file may nest objects to any depth."""
        found, made = self.known(root)
        if found:
            return made
        stack = [(root, self.steps(root))]
        self.in_work.add(id(root))
        value: Any = None
        while stack:
            record, steps = stack[-1]
            try:
                needed = steps.send(value)
            except StopIteration as end:
                value = self.made[id(record)] = end.value
                self.in_work.discard(id(record))
                stack.pop()
                continue
            found, value = self.known(needed)
            if not found:
                if id(needed) in self.in_work:
                    raise RefusedError("an object is needed to make itself")
                self.in_work.add(id(needed))
                stack.append((needed, self.steps(needed)))
        return value

    def known(self, record: Record) -> tuple[bool, Any]:
        """Returns whether the object exists already, and the object. Its state may still be missing."""
        if isinstance(record, GlobalName):
            return True, self.meanings[record].value
        if not isinstance(record, Items | Call | Reference):
            return True, record
        return id(record) in self.made, self.made.get(id(record))

    def steps(self, record: Record) -> _Steps:
        if isinstance(record, Reference):
            return self.storage(record)
        if isinstance(record, Items):
            return self.items(record)
        assert isinstance(record, Call)
        assert isinstance(record.callee, GlobalName)
        meaning = self.meanings[record.callee]
        return self.of_kind[meaning.kind](record, meaning)

    def all(self, records: list[Record]) -> _Steps:
        made = []
        for record in records:
            made.append((yield record))
        return made

    def items(self, record: Items) -> _Steps:
        if record.kind in (tuple, frozenset):
            return record.kind((yield from self.all(record.items)))
        # It exists before its content, because an object inside may refer to it.
        container = self.made[id(record)] = record.kind()
        made = yield from self.all(record.items)
        if record.kind is list:
            container += made
        elif record.kind is set:
            container |= set(made)
        else:
            container.update(zip(made[::2], made[1::2], strict=True))
        return container

    def storage(self, reference: Reference) -> _Steps:
        parts = yield from self.all(getattr(reference.id, "items", []))
        return self.storages.storage(parts)

    def value(self, call: Call, meaning: Meaning) -> _Steps:
        arguments = yield from self.all(call.args.items)
        if meaning.value is bytearray and arguments and isinstance(arguments[0], str):
            return bytearray(arguments[0].encode("latin-1"))
        try:
            return meaning.value(*arguments)
        except (RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise RefusedError(f"an impossible value ({type(error).__name__})") from error

    def container(self, call: Call, meaning: Meaning) -> _Steps:
        if meaning.value is frozenset:
            return frozenset((yield from self.all(call.args.items))[0] if call.args.items else ())
        container = self.made[id(call)] = meaning.value()
        for content in (yield from self.all(call.args.items)):
            container.update(content)
        pairs = yield from self.all(call.pairs)
        # The items are set one by one; the constructor of a Counter would count them.
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            container[key] = value
        for state in (yield from self.all(call.states)):
            vars(container).update(state)
        return container

    def tensor(self, call: Call, meaning: Meaning) -> _Steps:
        if meaning.value == "_rebuild_from_type_v2":
            return (yield from self.typed_tensor(call))
        if meaning.value == "_rebuild_parameter_with_state":
            *arguments, state = yield from self.all(call.args.items)
            return _with_attributes(rebuild("_rebuild_parameter", arguments), state)
        return rebuild(meaning.value, (yield from self.all(call.args.items)))

    def typed_tensor(self, call: Call) -> _Steps:
        function, cls, arguments, state = call.args.items
        assert isinstance(function, GlobalName)
        assert isinstance(cls, GlobalName)
        assert isinstance(arguments, Items)
        made = yield from self.tensor(Call(function, arguments), self.meanings[function])
        kind = self.meanings[cls].value
        if type(made) is not kind:
            made = made.as_subclass(kind)
        return _with_attributes(made, (yield state))

    def old_parameter(self, call: Call, meaning: Meaning) -> _Steps:
        data, *flags = yield from self.all(call.args.items)
        for state in (yield from self.all(call.states)):
            flags = [state[0]]
        return rebuild("_rebuild_parameter", (data, flags[0] if flags else True, None))

    def swapped(self, call: Call, meaning: Meaning) -> _Steps:
        classes = yield from self.all(call.args.items)
        layer = self.made[id(call)] = meaning.value(*classes)
        layer.__setstate__((yield call.states[0]))
        self.layers.append(layer)
        return layer

    def object(self, call: Call, meaning: Meaning) -> _Steps:
        cls = meaning.value
        arguments = yield from self.all(call.args.items)
        keywords = yield call.keywords
        made = cls.__new__(cls, *arguments, **(keywords or {})) if call.new else cls(*arguments)
        if type(made) is not cls and not meaning.trusted:
            raise RefusedError(f"it makes no {cls.__name__}")
        self.made[id(call)] = made
        appended = yield from self.all(call.appended)
        if appended:
            base = next(base for base in LISTS if isinstance(made, base))
            base.extend(made, appended)
        pairs = yield from self.all(call.pairs)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            (OrderedDict if isinstance(made, OrderedDict) else dict).__setitem__(made, key, value)
        for state in (yield from self.all(call.states)):
            _set_state(made, state)
        if meaning.kind is Kind.LAYER:
            self.layers.append(made)
        return made


def _set_state(made: Any, state: Any) -> None:
    set_state = getattr(type(made), "__setstate__", None)
    if set_state is not None:
        # A copy, since PyTorch's layers change their state, and another object of the file may hold the same one.
        set_state(made, copy.copy(state))
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        # This bypasses a __setattr__ of the class, so that no other code of the class runs.
        object.__setattr__(made, name, value)


def _with_attributes(tensor: Tensor, state: Any) -> Tensor:
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, value in (attributes or {}).items():
            torch.Tensor.__setattr__(tensor, name, value)
    return tensor
