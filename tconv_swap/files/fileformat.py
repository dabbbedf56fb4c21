"""What a file is and which names it would import, told from its bytes: nothing here unpickles anything.

Two formats go on to `loading`: the zip archives of `torch.save`, and what it wrote before PyTorch 1.6
(pickles one after the other, then the storages). Anything else given by mistake is recognised and named.
"""

from __future__ import annotations

import os
import re
import stat
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickletools import genops
from typing import IO, Literal, NamedTuple

import torch

from tconv_swap.memory import is_out_of_memory, within_free_memory

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
# torch.serialization.MAGIC_NUMBER, the first object of a legacy file.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# After the magic number: the protocol version, byte order and word sizes, the object, its storage keys.
LEGACY_PICKLES = 4


class LoadError(Exception):
    """A file that cannot be loaded; the message is one line that says which file and why."""


class GlobalName(NamedTuple):
    """Something that a pickle imports: `module` and the dotted `name` in it."""

    module: str
    name: str

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def option(self) -> str:
        """As `--trust` takes it."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class TorchFile:
    """A file, unread so far, and everything that reading it would import.

    `format`: what `torch.save` writes now and wrote before PyTorch 1.6, a safetensors file, or what
    `torch.export.save` writes (of which nobody can say what reading it imports).
    """

    path: Path
    format: Literal["zip", "legacy", "safetensors", "pt2"]
    globals: frozenset[GlobalName] = frozenset()


def printable(text: object) -> str:
    """`text` with everything escaped that could move a terminal's cursor: names come out of foreign files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def first_line(error: BaseException) -> str:
    """Class and first line of an exception's message, printable."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def examine(path: Path) -> TorchFile:
    """Recognise a file without executing anything in it.

    Raises:
        LoadError: it is not there, not readable, or not something that `torch.save` wrote.
    """
    shown = printable(path)
    try:
        # Opening a FIFO for reading would wait for a writer: look at what it is first.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise LoadError(f"{shown} is a directory, not a file")
        if not stat.S_ISREG(mode):
            raise LoadError(f"{shown} is not a regular file")
        with open(path, "rb") as stream, within_free_memory():
            return _examine_stream(path, stream)
    except FileNotFoundError:
        raise LoadError(f"{shown}: no such file") from None
    except PermissionError:
        raise LoadError(f"{shown}: no permission to read it") from None
    except OSError as error:
        raise LoadError(f"{shown} cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # a null byte in the name
        raise LoadError(f"{shown} cannot be read ({error})") from None


def _examine_stream(path: Path, stream: IO[bytes]) -> TorchFile:
    head = stream.read(16)
    stream.seek(0)
    if not head:
        raise LoadError(f"{printable(path)} is empty")
    if head.startswith(ZIP_MAGIC):
        return _examine_zip(path)
    if head.startswith(PICKLE_MAGIC):
        return _examine_pickles(path, stream)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return TorchFile(path, "safetensors")
    raise LoadError(f"{printable(path)} is {_guess(head)}, not a network saved with torch.save(model, path)")


def _guess(head: bytes) -> str:
    if head.startswith(b"\x89HDF"):
        return "an HDF5 file"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.startswith(b"\x1f\x8b"):
        return "gzip-compressed (decompress it first)"
    return "of an unknown format"


def _examine_zip(path: Path) -> TorchFile:
    shown = printable(path)
    try:
        # The reader that torch.load itself uses, so that both see the same archive.
        reader = torch._C.PyTorchFileReader(str(path))
        records = set(reader.get_all_records())
    except RuntimeError as error:
        raise LoadError(
            f"{shown} is truncated or damaged, or no archive of PyTorch ({_reason(error)})"
        ) from None
    if "constants.pkl" in records:
        raise LoadError(
            f"{shown} is a TorchScript archive: its layers are compiled code that cannot be swapped; "
            "save the network itself with torch.save(model, path)"
        )
    if "archive_format" in records or any(name.endswith("exported_program.json") for name in records):
        return TorchFile(path, "pt2")
    if "data.pkl" not in records:
        raise LoadError(f"{shown} is a zip archive, but not one that torch.save wrote")
    try:
        pickle = bytes(reader.get_record("data.pkl"))
        return TorchFile(path, "zip", frozenset(_globals_of(BytesIO(pickle))))
    except (RuntimeError, ValueError, EOFError, OverflowError, MemoryError) as error:
        if is_out_of_memory(error):
            raise LoadError(needs_more_memory(path)) from None
        raise LoadError(f"{shown} is truncated or damaged ({_reason(error)})") from None


def needs_more_memory(path: Path) -> str:
    return f"{printable(path)} cannot be loaded: it needs more memory than is free"


def _examine_pickles(path: Path, stream: IO[bytes]) -> TorchFile:
    shown = printable(path)
    try:
        first = list(genops(stream))
        if not any(argument == LEGACY_MAGIC for _, argument, _ in first):
            stream.seek(0)
            names = sorted(name.dotted for name in _globals_of(stream))
            would = f"; loading it would import {printable(', '.join(names))}" if names else ""
            raise LoadError(f"{shown} is a plain pickle, not a file written by torch.save{would}")
        names_in_order = [name for _ in range(LEGACY_PICKLES) for name in _globals_of(stream)]
    except (ValueError, EOFError, IndexError, OverflowError, MemoryError) as error:
        raise LoadError(f"{shown} is truncated or damaged, or not a pickle ({first_line(error)})") from None
    return TorchFile(path, "legacy", frozenset(names_in_order))


def _reason(error: BaseException) -> str:
    # "PytorchStreamReader failed reading zip archive: <the reason>. <advice>", then a C++ stack trace.
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = re.sub(r"^PytorchStreamReader |^\[enforce fail at [^]]*\] \. ", "", lines[0])
    return printable(text.partition(". ")[0])


def _globals_of(stream: IO[bytes]) -> Iterator[GlobalName]:
    """Every name that one pickle imports; leaves the stream behind it.

    `torch.serialization.get_unsafe_globals_in_checkpoint` stops at the opcodes of newer pickle protocols and
    does not read legacy files; both should be refused with the names in them.
    """
    memo: dict[int, str | None] = {}
    # STACK_GLOBAL takes the two strings that were pushed last, directly or out of the memo.
    pushed: deque[str | None] = deque([None, None], maxlen=2)
    for opcode, argument, _ in genops(stream):
        if opcode.name in ("GLOBAL", "INST"):
            module, _, name = str(argument).partition(" ")
            yield _modern(module, name)
        elif opcode.name == "STACK_GLOBAL":
            yield _modern(pushed[0] or "(computed)", pushed[1] or "(computed)")
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
            continue
        elif "PUT" in opcode.name and isinstance(argument, int):
            memo[argument] = pushed[-1]
            continue
        elif "GET" in opcode.name and isinstance(argument, int):
            pushed.append(memo.get(argument))
            continue
        pushed.append(argument if isinstance(argument, str) else None)


def _modern(module: str, name: str) -> GlobalName:
    """The name as the unpickler looks it up: protocol 2, torch.save's default, writes those of Python 2."""
    if (module, name) in NAME_MAPPING:
        return GlobalName(*NAME_MAPPING[(module, name)])
    return GlobalName(IMPORT_MAPPING.get(module, module), name)
