"""Reads a pickle into plain records: its instructions are recorded, and nothing in it is imported or called.

A pickle is a program for a small stack machine. Each instruction that would import, call or change something leaves a
record instead; `schema` checks the records, and `construct` executes them if they are harmless.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass, field
from pickletools import genops
from typing import IO, Any, NamedTuple, TypeAlias

#: Enough for a checkpoint with a vocabulary of a million words; reading this many takes seconds.
MAX_OPCODES = 8_000_000
#: Python's own limit on the digits of a number in text is about this.
MAX_BITS = 4096


class MalformedError(ValueError):
    """The bytes are not a pickle that any version of `pickle` or `torch.save` writes, or a limit is exceeded."""


class GlobalName(NamedTuple):
    """A name that a pickle imports: `module` and the dotted `name` in it."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def option(self) -> str:
        """Returns the name as an argument of `--trust`."""
        return f"{self.module}:{self.name}"


@dataclass(eq=False, slots=True)
class Items:
    """A tuple, list, dict, set or frozenset; the items of a dict are keys and values in turn."""

    kind: type
    items: list[Record]


@dataclass(eq=False, slots=True)
class Call:
    """An object that the pickle makes by calling `callee` (a `GlobalName` in every harmless file).

    Attributes:
        new: whether it calls `callee.__new__(callee, *args)` instead of `callee(*args)`.
        states: the states that BUILD gives it, in order.
        appended: its items.
        pairs: its keys and values in turn.
    """

    callee: Record
    args: Items
    new: bool = False
    keywords: Record = None
    states: list[Record] = field(default_factory=list)
    appended: list[Record] = field(default_factory=list)
    pairs: list[Record] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Reference:
    """A persistent id: it refers to something elsewhere in the file, such as a storage."""

    id: Record


#: None, bool, int, float, str and bytes are their own records.
Atom: TypeAlias = bool | int | float | str | bytes | None
Record: TypeAlias = Atom | GlobalName | Items | Call | Reference


@dataclass(frozen=True)
class Pickle:
    """One pickle: the record of its object, and every name that it imports."""

    root: Record
    names: frozenset[GlobalName]


def read_pickle(stream: IO[bytes], persistent: Callable[[Record], Record] = Reference) -> Pickle:
    """Returns the records of the next pickle in a stream; the stream is then at its end.

    Args:
        stream: a stream of bytes.
        persistent: returns the record for a persistent id.

    Raises:
        MalformedError, ValueError, EOFError, MemoryError: the pickle is damaged, or exceeds a limit.
    """
    machine = _Machine(persistent)
    for count, (opcode, argument, _) in enumerate(genops(stream)):
        if count > MAX_OPCODES:
            raise MalformedError(f"it has more than {MAX_OPCODES} instructions")
        try:
            machine.step(opcode.name, argument)
        except IndexError:
            raise MalformedError(f"{opcode.name} finds an empty stack") from None
    return Pickle(machine.result, frozenset(machine.names))


def modern(module: str, name: str) -> GlobalName:
    """Returns the name as the unpickler resolves it: protocol 2, torch.save's default, writes the names of Python 2."""
    if (module, name) in NAME_MAPPING:
        return GlobalName(*NAME_MAPPING[(module, name)])
    if module == "torch.tensor":  # the name of torch._tensor until 1.8
        module = "torch._tensor"
    return GlobalName(IMPORT_MAPPING.get(module, module), name)


class _Machine:
    """The stack machine of `pickle`. The methods below are named after the instructions, such as `do_REDUCE`."""

    def __init__(self, persistent: Callable[[Record], Record]) -> None:
        self.persistent = persistent
        self.stack: list[Record] = []
        self.marks: list[list[Record]] = []
        self.memo: dict[int, Record] = {}
        self.names: set[GlobalName] = set()
        self.result: Record = None

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(_LITERALS[name](argument))
        elif name in _EMPTY:
            self.stack.append(Items(_EMPTY[name], []))
        elif name in _CLOSING:
            items = self.stack
            self.stack = self.marks.pop()
            self.stack.append(_whole(_CLOSING[name], items))
        elif name.endswith("PUT"):
            self.memo[argument] = self.stack[-1]
        elif name.endswith("GET"):
            if argument not in self.memo:
                raise MalformedError(f"it refers to an object {argument} that it does not have")
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            instruction: Callable[[Any], None] | None = getattr(self, f"do_{name}", None)
            if instruction is None:
                raise MalformedError(f"its instruction {name} is not supported")
            instruction(argument)

    def pop_mark(self) -> list[Record]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def do_MARK(self, _: None) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def do_STOP(self, _: None) -> None:
        self.result = self.stack.pop()

    def do_POP(self, _: None) -> None:
        # As in pickle, it pops a mark if nothing lies on it.
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def do_POP_MARK(self, _: None) -> None:
        self.pop_mark()

    def do_DUP(self, _: None) -> None:
        self.stack.append(self.stack[-1])

    def do_MEMOIZE(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def do_TUPLE1(self, _: None) -> None:
        self.stack[-1:] = [Items(tuple, [self.stack[-1]])]

    def do_TUPLE2(self, _: None) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.stack.append(Items(tuple, [first, second]))

    def do_TUPLE3(self, _: None) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Items(tuple, [first, second, third]))

    def do_APPEND(self, _: None) -> None:
        value = self.stack.pop()
        self.append([value])

    def do_APPENDS(self, _: None) -> None:
        self.append(self.pop_mark())

    def do_ADDITEMS(self, _: None) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if not (isinstance(target, Items) and target.kind is set):
            raise MalformedError("it adds items to something that is not a set")
        target.items += items

    def append(self, items: list[Record]) -> None:
        target = self.stack[-1]
        if isinstance(target, Items) and target.kind is list:
            target.items += items
        elif isinstance(target, Call):
            target.appended += items
        else:
            raise MalformedError("it appends to something that is not a list")

    def do_SETITEM(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def do_SETITEMS(self, _: None) -> None:
        self.set_items(self.pop_mark())

    def set_items(self, pairs: list[Record]) -> None:
        target = self.stack[-1]
        if len(pairs) % 2:
            raise MalformedError("a key has no value")
        if isinstance(target, Items) and target.kind is dict:
            target.items += pairs
        elif isinstance(target, Call):
            target.pairs += pairs
        else:
            raise MalformedError("it sets items of something that is not a dict")

    def do_GLOBAL(self, argument: str) -> None:
        self.stack.append(self.named(*argument.split(" ", 1)))

    def do_STACK_GLOBAL(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(module, str) and isinstance(name, str)):
            raise MalformedError("a name that it imports is not text")
        self.stack.append(self.named(module, name))

    def named(self, module: str, name: str) -> GlobalName:
        found = modern(module, name)
        if found.module != "copyreg" or found.name not in _RECONSTRUCTORS:
            # Functions of copyreg call a class that is named beside them, and are recorded as that call.
            self.names.add(found)
        return found

    def do_REDUCE(self, _: None) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        self.stack.append(_reduced(callee, _a_tuple(args)))

    def do_NEWOBJ(self, _: None) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        self.stack.append(Call(callee, _a_tuple(args), new=True))

    def do_NEWOBJ_EX(self, _: None) -> None:
        keywords, args, callee = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.append(Call(callee, _a_tuple(args), new=True, keywords=keywords))

    def do_OBJ(self, _: None) -> None:
        callee, *args = self.pop_mark() or [None]
        self.stack.append(Call(callee, Items(tuple, args), new=True))

    def do_INST(self, argument: str) -> None:
        args = self.pop_mark()
        self.stack.append(Call(self.named(*argument.split(" ", 1)), Items(tuple, args), new=True))

    def do_BUILD(self, _: None) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Call):
            raise MalformedError("it gives a state to something that is not an object")
        target.states.append(state)

    def do_BINPERSID(self, _: None) -> None:
        self.stack[-1] = self.persistent(self.stack[-1])

    def do_PERSID(self, argument: str) -> None:
        self.stack.append(self.persistent(argument))


_RECONSTRUCTORS = ("_reconstructor", "__newobj__", "__newobj_ex__")


def _reduced(callee: Record, args: Items) -> Call:
    if not (isinstance(callee, GlobalName) and callee.module == "copyreg" and callee.name in _RECONSTRUCTORS):
        return Call(callee, args)
    if callee.name == "__newobj__" and args.items:
        return Call(args.items[0], Items(tuple, args.items[1:]), new=True)
    if callee.name == "__newobj_ex__" and len(args.items) == 3:
        return Call(args.items[0], _a_tuple(args.items[1]), new=True, keywords=args.items[2])
    # Protocols 0 and 1 give the class, its base that is not written in Python, and the state of that base.
    if callee.name == "_reconstructor" and args.items[1:] == [GlobalName("builtins", "object"), None]:
        return Call(args.items[0], Items(tuple, []), new=True)
    raise MalformedError(f"it calls {callee.dotted} in another way than pickle does")


def _a_tuple(record: Record) -> Items:
    if not (isinstance(record, Items) and record.kind is tuple):
        raise MalformedError("the arguments of a call are not a tuple")
    return record


def _whole(kind: type, items: list[Record]) -> Items:
    if kind is dict and len(items) % 2:
        raise MalformedError("a key has no value")
    return Items(kind, items)


def _integer(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise MalformedError(f"it holds a number of more than {MAX_BITS} bits")
    return value


def _python2_text(value: str) -> str:
    """Returns a string of Python 2: bytes, of which pickletools makes one character each."""
    return value.encode("latin-1").decode("utf-8")


def _unchanged(value: Any) -> Any:
    return value


def _bytearray(value: bytes) -> Record:
    return Call(GlobalName("builtins", "bytearray"), Items(tuple, [bytes(value)]))


_LITERALS: dict[str, Callable[[Any], Record]] = {
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _integer),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), _unchanged),
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _unchanged),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _unchanged),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _python2_text),
    "BYTEARRAY8": _bytearray,
}
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_CLOSING = {"TUPLE": tuple, "LIST": list, "DICT": dict, "FROZENSET": frozenset}
