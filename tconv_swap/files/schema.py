"""Checks the records of a pickle before anything is made of them: each object, its arguments and its state.

An object of a layer's class gets data only: tensors, numbers, text, containers of these, other layers. So its methods
call none of its attributes, except an activation where exactly this class keeps one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from tconv_swap.files import hooks, shapes
from tconv_swap.files.attributes import function_attributes, may_set
from tconv_swap.files.containers import Containers, RefusedError, Sort
from tconv_swap.files.known import Kind, Meaning
from tconv_swap.files.records import Call, GlobalName, Items, Record, Reference

_KEYS = frozenset({Sort.ATOM, Sort.VALUE, Sort.CLASS})
_DATA = frozenset({Sort.ATOM, Sort.VALUE, Sort.TENSOR, Sort.PARAMETER, Sort.LAYER, Sort.OBJECT, Sort.HANDLE})
_TRUSTED = _DATA | {Sort.CLASS, Sort.FUNCTION}
_OF_RESULT = {
    Kind.VALUE: Sort.VALUE,
    Kind.REBUILD: Sort.TENSOR,
    Kind.TENSOR: Sort.PARAMETER,
    Kind.LAZY: Sort.PARAMETER,
    Kind.CONTAINER: Sort.CONTAINER,
    Kind.LAYER: Sort.LAYER,
    Kind.SWAPPED: Sort.LAYER,
    Kind.HOOK: Sort.HOOK,
    Kind.HANDLE: Sort.HANDLE,
    Kind.OBJECT: Sort.OBJECT,
}
_OF_NAME = {
    Kind.CONSTANT: Sort.VALUE,
    Kind.FUNCTION: Sort.FUNCTION,
    Kind.LAYER: Sort.CLASS,
    Kind.TENSOR: Sort.CLASS,
    Kind.OBJECT: Sort.CLASS,
    Kind.CONTAINER: Sort.CLASS,
}


def check(root: Record, meanings: Mapping[GlobalName, Meaning]) -> None:
    """Raises RefusedError for the first record that is not allowed, or not allowed in its place."""
    _Schema(meanings).check(root)


class _Schema:
    def __init__(self, meanings: Mapping[GlobalName, Meaning]) -> None:
        self.meanings = meanings
        self.containers = Containers(self.children, self.sort)
        self.view = hooks.View(self.dictionary, self.sort, self.constant, self.check_content)
        self.of_kind: dict[Kind, Callable[[Call, Meaning], None]] = {
            Kind.VALUE: self.check_value,
            Kind.CONTAINER: self.check_container,
            Kind.REBUILD: self.check_rebuild,
            Kind.TENSOR: self.check_old_parameter,
            Kind.LAZY: self.check_lazy,
            Kind.LAYER: self.check_layer,
            Kind.SWAPPED: self.check_swapped,
            Kind.HOOK: self.check_hook,
            Kind.HANDLE: self.check_handle,
            Kind.OBJECT: self.check_object,
        }

    def check(self, root: Record) -> None:
        self.check_content(root, _TRUSTED)
        for record in reachable(root):
            if isinstance(record, Call):
                meaning = self.meaning(record)
                if record.keywords is not None and not meaning.trusted:
                    raise RefusedError(f"it calls {_shown(record)} with keywords")
                self.of_kind[meaning.kind](record, meaning)
            elif isinstance(record, Items):
                self.check_items(record)

    # --- what a record is ------------------------------------------------------------------------------------

    def meaning(self, call: Call) -> Meaning:
        meaning = self.meanings.get(call.callee) if isinstance(call.callee, GlobalName) else None
        if meaning is None or meaning.kind not in self.of_kind:
            raise RefusedError(f"it calls {_shown(call)}")
        return meaning

    def sort(self, record: Record) -> Sort:
        if isinstance(record, Reference):
            return Sort.STORAGE
        if isinstance(record, GlobalName):
            meaning = self.meanings.get(record)
            return Sort.NAME if meaning is None else _OF_NAME.get(meaning.kind, Sort.NAME)
        if isinstance(record, Call):
            meaning = self.meaning(record)
            if meaning.kind is Kind.REBUILD and self._rebuilds_parameter(record, meaning):
                return Sort.PARAMETER
            return _OF_RESULT[meaning.kind]
        return Sort.CONTAINER if isinstance(record, Items) else Sort.ATOM

    def _rebuilds_parameter(self, call: Call, meaning: Meaning) -> bool:
        function = meaning.value
        if function == "_rebuild_from_type_v2" and call.args.items:
            function = self.constant(call.args.items[0])
        return function in ("_rebuild_parameter", "_rebuild_parameter_with_state")

    def children(self, record: Record) -> list[Record] | None:
        if isinstance(record, Items):
            return record.items
        if isinstance(record, Call) and self.meaning(record).kind is Kind.CONTAINER:
            return [*record.args.items, *record.pairs]
        return None

    def check_content(self, record: Record, allowed: frozenset[Sort]) -> None:
        """Raises RefusedError if `record` is, or holds at any depth, a sort that is not allowed."""
        if wrong := self.containers.held(record).sorts - allowed:
            names = ", ".join(sorted(sort.name.lower() for sort in wrong))
            raise RefusedError(f"there is a {names} where only data is allowed")

    def dictionary(self, record: Record, what: str) -> Iterator[tuple[Record, Record]]:
        """Yields the items of a dict or an OrderedDict."""
        if isinstance(record, Items) and record.kind is dict:
            flat = record.items
        elif isinstance(record, Call) and self.meaning(record).value in (OrderedDict,):
            flat = record.pairs
            if record.args.items:  # Python 2 writes an OrderedDict as a list of pairs
                flat = [*self._old_pairs(record), *flat]
        else:
            raise RefusedError(f"{what} is not a dict")
        return zip(flat[::2], flat[1::2], strict=True)

    def _old_pairs(self, record: Call) -> Iterator[Record]:
        for pair in getattr(record.args.items[0], "items", ()):
            yield from pair.items if isinstance(pair, Items) else ()

    # --- containers and values -------------------------------------------------------------------------------

    def check_items(self, record: Items) -> None:
        keys: list[Record] = []
        if record.kind is dict:
            keys = record.items[::2]
        elif record.kind in (set, frozenset):
            keys = record.items
        for key in keys:
            self.check_key(key)

    def check_key(self, key: Record) -> None:
        # Python calls __hash__ of every key, and __eq__ of keys whose hashes are equal.
        if isinstance(key, Items) and key.kind in (list, dict, set):
            raise RefusedError("a key can be changed")
        if isinstance(key, Call) and self.meaning(key).kind is Kind.OBJECT:
            if issubclass(self.meaning(key).value, Enum):
                return
            raise RefusedError(f"an object of {_shown(key)} is a key")
        self.check_content(key, _KEYS)

    def check_container(self, call: Call, meaning: Meaning) -> None:
        if call.new or call.appended:
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")
        if len(call.args.items) > 1:
            raise RefusedError(f"it calls {_shown(call)} with several arguments")
        sets = meaning.value in (set, frozenset)
        for argument in call.args.items:
            if not (isinstance(argument, Items) and argument.kind in (list, tuple, dict)):
                raise RefusedError(f"it calls {_shown(call)} with something other than items")
            if sets:
                self.check_items(Items(frozenset, argument.items))
            elif argument.kind is not dict:
                for pair in argument.items:
                    if not (isinstance(pair, Items) and pair.kind in (list, tuple) and len(pair.items) == 2):
                        raise RefusedError(f"it calls {_shown(call)} with something other than pairs")
                    self.check_key(pair.items[0])
        if sets and (call.pairs or call.states):
            raise RefusedError(f"it sets items of {_shown(call)}")
        for key in call.pairs[::2]:
            self.check_key(key)
        for state in call.states:
            # The state_dict of a network keeps its versions in an attribute.
            for key, _ in self.dictionary(state, f"the state of {_shown(call)}"):
                if key != "_metadata":
                    raise RefusedError(f"it gives {_shown(call)} the attribute {key!r:.80}")
            self.check_content(state, _DATA)

    def check_value(self, call: Call, meaning: Meaning) -> None:
        if call.new or call.states or call.appended or call.pairs:
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")
        if not shapes.are_arguments_of(meaning.value, call.args.items, self.constant):
            raise RefusedError(f"it calls {_shown(call)} with something unusual")

    def constant(self, record: Record) -> Any:
        """Returns the value of a name, or of the name that a call calls; None for anything else."""
        name = record.callee if isinstance(record, Call) else record
        meaning = self.meanings.get(name) if isinstance(name, GlobalName) else None
        return None if meaning is None else meaning.value

    # --- tensors ---------------------------------------------------------------------------------------------

    def check_rebuild(self, call: Call, meaning: Meaning) -> None:
        if call.new or call.states or call.appended or call.pairs:
            raise RefusedError(f"it makes a tensor by {_shown(call)} in an unusual way")
        arguments = call.args.items
        if meaning.value == "_rebuild_from_type_v2":
            self.check_typed_tensor(call)
        elif meaning.value == "_rebuild_parameter_with_state":
            if len(arguments) != 4:
                raise RefusedError(f"it calls {_shown(call)} with something unusual")
            self.check_tensor_state(
                arguments[3], self.constant(GlobalName("torch.nn.parameter", "Parameter"))
            )
            arguments = arguments[:3]
        if not shapes.are_arguments_of(meaning.value, arguments, self.constant):
            raise RefusedError(f"it calls {_shown(call)} with something unusual")

    def check_typed_tensor(self, call: Call) -> None:
        if len(call.args.items) != 4:
            raise RefusedError(f"it calls {_shown(call)} with something unusual")
        function, cls, arguments, state = call.args.items
        inner = self.meanings.get(function) if isinstance(function, GlobalName) else None
        kind = self.meanings.get(cls) if isinstance(cls, GlobalName) else None
        if inner is None or inner.kind is not Kind.REBUILD or inner.value == "_rebuild_from_type_v2":
            raise RefusedError("it makes a tensor with a function that makes none")
        if kind is None or kind.kind is not Kind.TENSOR:
            raise RefusedError("it makes a tensor of a class that is not a tensor class")
        if not isinstance(arguments, Items) or arguments.kind is not tuple:
            raise RefusedError(f"it calls {_shown(call)} with something unusual")
        self.check_rebuild(Call(function, arguments), inner)
        self.check_tensor_state(state, kind.value)

    def check_tensor_state(self, state: Record, cls: type) -> None:
        if isinstance(state, Items) and state.kind is tuple and state.items[1:] == [None]:
            state = state.items[0]
        if state is None:
            return
        for key, _ in self.dictionary(state, "the state of a tensor"):
            if not (isinstance(key, str) and (may_set(cls, key) or key in ("persistent", "_is_buffer"))):
                raise RefusedError(f"it gives a tensor the attribute {key!r:.80}")
        self.check_content(state, _DATA)

    def check_old_parameter(self, call: Call, meaning: Meaning) -> None:
        """Checks a parameter of PyTorch 0.3: Parameter(tensor), then (requires_grad, volatile, no hooks)."""
        states = call.states[0].items if call.states and isinstance(call.states[0], Items) else []
        fits = (
            meaning.value is self.constant(GlobalName("torch.nn.parameter", "Parameter"))
            and not (call.appended or call.pairs)
            and len(call.args.items) in (1, 2)
            and self.sort(call.args.items[0]) is Sort.TENSOR
            and all(isinstance(flag, bool) for flag in call.args.items[1:])
            and len(call.states) <= 1
            and len(states) == (3 if call.states else 0)
            and all(isinstance(flag, bool) for flag in states[:2])
        )
        if not fits:
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")

    def check_lazy(self, call: Call, _: Meaning) -> None:
        plain = not (call.new or call.states or call.appended or call.pairs)
        if not plain or [type(argument) for argument in call.args.items] != [bool]:
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")

    # --- layers ----------------------------------------------------------------------------------------------

    def check_layer(self, call: Call, meaning: Meaning) -> None:
        self.check_making(call, meaning)
        if len(call.states) != 1 or call.appended or call.pairs:
            raise RefusedError(f"the state of a {meaning.value.__name__} is missing, or there are several")
        self.check_layer_state(call, meaning.value, meaning.trusted)

    def check_swapped(self, call: Call, maker: Meaning) -> None:
        if call.new or not call.args.items or len(call.states) != 1 or call.appended or call.pairs:
            raise RefusedError("it makes one of our layers in an unusual way")
        given = [self.meanings.get(n) if isinstance(n, GlobalName) else None for n in call.args.items]
        classes = [one for one in given if one is not None and one.kind is Kind.LAYER]
        if len(classes) < len(given) or not shapes.has_swapped_form(
            maker.value, [one.value for one in classes]
        ):
            raise RefusedError("it makes one of our layers from a class that has none")
        self.check_layer_state(call, classes[0].value, classes[0].trusted, swapped=True)

    def check_layer_state(self, call: Call, cls: type, trusted: bool, swapped: bool = False) -> None:
        state = call.states[0]
        if trusted and shapes.has_own(cls, "__setstate__") and not self.is_dictionary(state):
            self.check_content(state, _TRUSTED)
            return
        fields: dict[str, Record] = {}
        for key, value in self.dictionary(state, f"the state of a {cls.__name__}"):
            if not isinstance(key, str):
                raise RefusedError(f"an attribute of a {cls.__name__} has no name")
            fields[key] = value
        try:
            hooks.check_fields(fields, self.view)
        except RefusedError as error:
            raise RefusedError(f"in a {cls.__name__}: {error}") from None
        hooks.check_hooks(fields, call, cls, self.view, trusted)
        functions = function_attributes(cls)
        for key, value in fields.items():
            if key in hooks.FIELDS:
                continue
            if not may_set(cls, key, trusted, swapped):
                raise RefusedError(f"it would replace {key!r:.80} of a {cls.__name__}")
            allowed = _TRUSTED if trusted else _DATA
            if key in functions:
                allowed = frozenset({Sort.FUNCTION, Sort.LAYER})
            self.check_content(value, allowed)

    def is_dictionary(self, record: Record) -> bool:
        return isinstance(record, Items) and record.kind is dict

    def check_hook(self, call: Call, meaning: Meaning) -> None:
        if not call.new or call.args.items or len(call.states) != 1 or call.appended or call.pairs:
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")
        hooks.check_state(meaning.value, call.states[0], self.view)

    def check_handle(self, call: Call, _: Meaning) -> None:
        state = call.states[0] if len(call.states) == 1 else None
        items = state.items if isinstance(state, Items) and state.kind is tuple else []
        if not call.new or call.args.items or call.appended or call.pairs or len(items) not in (2, 3):
            raise RefusedError(f"it makes {_shown(call)} in an unusual way")
        extra = items[2].items if len(items) == 3 and isinstance(items[2], Items) else []
        if not isinstance(items[1], int) or not 0 <= items[1] < 1 << 40:
            raise RefusedError("the id of a hook is not an integer")
        for hooked in [items[0], *extra] if items[0] is not None else extra:
            if self.constant(hooked) is not OrderedDict or not isinstance(hooked, Call):
                raise RefusedError("a handle does not belong to any hooks")

    # --- what the user trusts --------------------------------------------------------------------------------

    def check_making(self, call: Call, meaning: Meaning) -> None:
        """Checks a call of `__new__`, or of the class itself if its `__reduce__` returns that."""
        cls = meaning.value
        if not call.new and not (meaning.trusted and shapes.reduces_itself(cls)):
            raise RefusedError(f"it calls {_shown(call)}")
        given = bool(call.args.items) or call.keywords is not None
        if given and not meaning.trusted:
            raise RefusedError(f"it makes {_shown(call)} with arguments")
        if given and call.new and cls.__new__ is object.__new__:
            raise RefusedError(f"it makes {_shown(call)} with arguments")
        self.check_content(call.args, _TRUSTED)
        self.check_content(call.keywords, _TRUSTED)

    def check_object(self, call: Call, meaning: Meaning) -> None:
        cls = meaning.value
        self.check_making(call, meaning)
        if len(call.states) > 1:
            raise RefusedError(f"a {cls.__name__} has several states")
        if call.appended and not issubclass(cls, shapes.LISTS):
            raise RefusedError(f"it appends to a {cls.__name__}")
        if call.pairs and not issubclass(cls, dict):
            raise RefusedError(f"it sets items of a {cls.__name__}")
        for key in call.pairs[::2]:
            self.check_key(key)
        for record in (*call.appended, *call.pairs, *call.states):
            self.check_content(record, _TRUSTED)
        if call.states and not shapes.has_own(cls, "__setstate__"):
            self.check_object_state(call.states[0], cls)

    def check_object_state(self, state: Record, cls: type) -> None:
        parts = [state]
        if isinstance(state, Items) and state.kind is tuple and len(state.items) == 2:
            parts = state.items
        for part in parts:
            for key, _ in self.dictionary(part, f"the state of a {cls.__name__}") if part is not None else ():
                if not (isinstance(key, str) and may_set(cls, key, trusted=True)):
                    raise RefusedError(f"it would replace {key!r:.80} of a {cls.__name__}")


def reachable(root: Record) -> Iterator[Record]:
    """Yields every record once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        record = stack.pop()
        if not isinstance(record, Items | Call | Reference) or id(record) in seen:
            continue
        seen.add(id(record))
        yield record
        if isinstance(record, Items):
            stack += record.items
        elif isinstance(record, Reference):
            stack.append(record.id)
        else:
            stack += [record.callee, record.args, record.keywords]
            stack += record.states + record.appended + record.pairs


def _shown(call: Call) -> str:
    return call.callee.dotted if isinstance(call.callee, GlobalName) else "the result of another call"
