"""Files of an attacker: records written as pickles, also random ones, and an observer of everything that loading
does."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tconv_swap import flops
from tconv_swap.files.known import Kind, network_names
from tconv_swap.files.records import Call, GlobalName, Items, Record, Reference
from tconv_swap.memory import within_free_memory
from tconv_swap.surgery import plan_swap

# --- writing ------------------------------------------------------------------------------------------------


def name_of(thing: Any) -> GlobalName:
    return GlobalName(thing.__module__, thing.__qualname__)


def a_tuple(*items: Record) -> Items:
    return Items(tuple, [*items])


def a_dict(**items: Record) -> Items:
    return Items(dict, [part for pair in items.items() for part in pair])


def ordered(*pairs: Record) -> Call:
    return Call(GlobalName("collections", "OrderedDict"), a_tuple(), pairs=[*pairs])


def layer(cls: Any, **changed: Record) -> Call:
    """Returns the record of a layer with the attributes that every layer has, and `changed`."""
    state: dict[str, Record] = {
        "training": True,
        **{field: Items(dict, []) for field in ("_parameters", "_buffers", "_modules")},
        **{
            field: ordered()
            for field in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
        },
    }
    name = cls if isinstance(cls, GlobalName) else name_of(cls)
    return Call(name, a_tuple(), new=True, states=[a_dict(**{**state, **changed})])


def tensor(elements: int = 4, size: tuple[int, ...] = (4,), dtype: str = "Float", **changed: Record) -> Call:
    """Returns a strided tensor on the storage "0", which has room for four numbers of eight bytes."""
    strides = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        strides[i] = strides[i + 1] * size[i + 1]
    parts: dict[str, Record] = {
        "storage": Reference(
            a_tuple("storage", GlobalName("torch", f"{dtype}Storage"), f"{dtype}{elements}", "cpu", elements)
        ),
        "offset": 0,
        "size": a_tuple(*size),
        "stride": a_tuple(*strides),
        "requires_grad": False,
        "hooks": ordered(),
        **changed,
    }
    return Call(GlobalName("torch._utils", "_rebuild_tensor_v2"), a_tuple(*parts.values()))


def rebuilt(function: str, *arguments: Record) -> Call:
    return Call(GlobalName("torch._utils", function), a_tuple(*arguments))


def parameter(data: Record) -> Call:
    return rebuilt("_rebuild_parameter", data, True, ordered())


_MAX_BYTES = 1_000_000


class UnwritableError(Exception):
    """No pickle can express this: a tuple or the arguments of a call contain what they make."""


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[int, int] = {}

    def write(self, root: Record) -> None:
        # A stack of things that are not yet written: records, and bytes of instructions in a bytearray.
        rest: list[Any] = [root]
        while rest:
            record = rest.pop()
            if len(self.out) > _MAX_BYTES:
                raise UnwritableError
            if isinstance(record, bytearray):
                self.out += record
            elif isinstance(record, _Put):
                self.memo[id(record.record)] = len(self.memo)
                self.out += b"r" + struct.pack("<I", len(self.memo) - 1)
            elif isinstance(record, Items | Call) and id(record) in self.memo:
                self.out += b"j" + struct.pack("<I", self.memo[id(record)])
            elif isinstance(record, GlobalName):
                self.out += f"c{record.module}\n{record.name}\n".encode()
            elif isinstance(record, Items | Call | Reference):
                rest += reversed(_instructions(record))
            else:
                self.out += _atom(record)


@dataclass
class _Put:
    record: Record


def _instructions(record: Items | Call | Reference) -> list[Any]:
    if isinstance(record, Reference):
        return [record.id, bytearray(b"Q")]
    if isinstance(record, Call):
        parts = [record.callee, record.args, bytearray(b"\x81" if record.new else b"R"), _Put(record)]
        for content, end in ((record.appended, b"e"), (record.pairs, b"u")):
            if content:
                parts += [bytearray(b"("), *content, bytearray(end)]
        for state in record.states:
            parts += [state, bytearray(b"b")]
        return parts
    if record.kind in (tuple, frozenset):
        end = {tuple: b"t", frozenset: b"\x91"}[record.kind]
        return [bytearray(b"("), *record.items, bytearray(end), _Put(record)]
    start, end = {list: (b"]", b"e"), dict: (b"}", b"u"), set: (b"\x8f", b"\x90")}[record.kind]
    return [bytearray(start), _Put(record), bytearray(b"("), *record.items, bytearray(end)]


def _atom(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(content)) + content


def pickled(record: Record) -> bytes:
    """Returns the pickle that is read as these records."""
    writer = _Writer()
    writer.write(record)
    return bytes(writer.out) + b"."


def save(path: Path, pickle: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """Writes an archive around a pickle, as `torch.save` does."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", "little")
        for key, content in (_STORAGES if storages is None else storages).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


_STORAGES = {
    "Float4": struct.pack("<4f", 1, 2, 3, 4),
    "Long4": struct.pack("<4q", 0, 1, 2, 3),
    "Long2": struct.pack("<2q", 7, -1),
    "QInt84": bytes(4),
    "Bool4": b"\0\1\0\1",
}

# --- watching -----------------------------------------------------------------------------------------------

_seen: list[str] = []
_watching = False
# What the package imports at its first use is not the files' doing.
flops.register()
with within_free_memory():
    pass

_NEVER = ("exec", "compile", "import", "marshal.", "code.", "function.__new__", "subprocess.", "socket.", "ctypes.",
          "shutil.", "pty.", "webbrowser.", "urllib.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork",
          "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.kill", "os.putenv",
          "os.truncate", "os.chdir", "tempfile.", "sys.settrace", "sys.setprofile", "builtins.input",
          "pickle.find_class")  # fmt: skip


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "import" and str(arguments[0]) in sys.modules:
        return
    if event == "open" and (isinstance(arguments[1], str) and not set("wax+") & set(arguments[1])):
        return
    if event == "open" and arguments[1] is None and not int(arguments[2]) & 3:  # os.open for reading
        return
    if event == "open" or event.startswith(_NEVER):
        _seen.append(f"{event} {str(arguments)[:200]}")


sys.addaudithook(_watch)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Records everything inside that has an effect outside of the process or executes code."""
    global _watching
    _seen.clear()
    _watching = True
    try:
        yield _seen
    finally:
        _watching = False


def use(model: nn.Module) -> None:
    """Does what the program does with a network: plans the swap, and runs it, which may fail."""
    plan_swap(model)
    for shape in ((1, 4, 4, 4), (2, 4)):
        with contextlib.suppress(Exception), torch.no_grad():
            model(torch.ones(shape))


# --- at random ----------------------------------------------------------------------------------------------

_NAMES = sorted(network_names())
_CALLABLE = [n for n in _NAMES if network_names()[n].kind not in (Kind.CONSTANT, Kind.STORAGE, Kind.BASE)]
_KEYS = ("forward", "__call__", "__class__", "__dict__", "__getattr__", "__setstate__", "_call_impl", "hook", "name",
         "_compiled_call_impl", "_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks", "dim",
         "_key_to_attr", "compute_weight", "activation", "weight", "training", "stride", "apply_mask", "_tensor_name",
         "module", "with_module", "fn", "extra_repr", "modules", "0", "__defaults__", "__globals__")  # fmt: skip


def anything(chance: random.Random, depth: int = 4) -> Record:
    """Returns a random record of allowed names."""
    kind = chance.randrange(9 if depth else 4)
    if kind == 0:
        return chance.choice([None, True, 0, 1, -1, 2**40, 0.5, "weight", "cpu", "x", b"y"])
    if kind == 1:
        return chance.choice(_NAMES)
    if kind == 2:
        return tensor()
    if kind == 3:
        return chance.choice(_KEYS)
    below = [anything(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 4:
        return Items(chance.choice([tuple, list]), below)
    if kind == 5:
        return a_dict(**{chance.choice(_KEYS): value for value in below})
    if kind == 6:
        cls = chance.choice([name for name in _CALLABLE if network_names()[name].kind is Kind.LAYER])
        return layer(cls, **{chance.choice(_KEYS): value for value in below})
    state = a_dict(**{chance.choice(_KEYS): anything(chance, depth - 1) for _ in range(2)})
    made = Call(chance.choice(_CALLABLE), a_tuple(*below), new=chance.random() < 0.6)
    made.states = [state] if chance.random() < 0.7 else []
    return made


def changed(chance: random.Random, root: Record) -> None:
    """Replaces a random part by something else, or by another part of the same file."""
    parts = _lists(root)
    content = chance.choice([part for part in parts if part])
    place = chance.randrange(len(content))
    if chance.random() < 0.5:
        content[place] = anything(chance, 2)
    else:
        other = chance.choice([part for part in parts if part])
        content[place] = chance.choice(other)


def _lists(root: Record) -> list[list[Record]]:
    found: list[list[Record]] = []
    seen: set[int] = set()
    stack = [root]
    while stack:
        record = stack.pop()
        if not isinstance(record, Items | Call | Reference) or id(record) in seen:
            continue
        seen.add(id(record))
        if isinstance(record, Items):
            lists = [record.items]
        elif isinstance(record, Call):
            lists = [record.args.items, record.states, record.appended, record.pairs]
        else:
            stack.append(record.id)
            continue
        found += lists
        stack += [part for part in lists for part in part]
    return found
