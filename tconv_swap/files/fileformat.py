"""Recognises the format of a file from its bytes. Nothing here unpickles anything.

`loading` reads two formats: the zip archives of `torch.save`, and its format before PyTorch 1.6 (pickles one after the
other, then the storages). Other formats that users pass by mistake are recognised and named.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch

from tconv_swap.files.legacy import MAGIC
from tconv_swap.files.records import read_pickle
from tconv_swap.memory import within_free_memory

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"


class LoadError(Exception):
    """A file that cannot be loaded; the message is one line that says which file and why."""


@dataclass(frozen=True)
class TorchFile:
    """A recognised file whose content has not been read.

    `format`: what `torch.save` writes now ("zip") and wrote before PyTorch 1.6 ("legacy"), a safetensors file, or what
    `torch.export.save` writes ("pt2"; nobody can know what reading it imports).
    """

    path: Path
    format: Literal["zip", "legacy", "safetensors", "pt2"]


def printable(text: object) -> str:
    """Returns `text` with every character escaped that could move a terminal's cursor: the file's author chose the
    names."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def first_line(error: BaseException) -> str:
    """Returns the class and the first line of an exception's message, printable."""
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def examine(path: Path) -> TorchFile:
    """Recognises a file without executing anything in it.

    Raises:
        LoadError: the file does not exist, is not readable, or was not written by `torch.save`.
    """
    shown = printable(path)
    try:
        # Check the type first: opening a FIFO for reading would wait for a writer.
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
            f"{shown} is truncated or damaged, or not an archive of PyTorch ({reason(error)})"
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
    return TorchFile(path, "zip")


def needs_more_memory(path: Path) -> str:
    return f"{printable(path)} cannot be loaded: it needs more memory than is free"


def _examine_pickles(path: Path, stream: IO[bytes]) -> TorchFile:
    shown = printable(path)
    try:
        first = read_pickle(stream)
    except (ValueError, EOFError, OverflowError, MemoryError) as error:
        raise LoadError(f"{shown} is truncated or damaged, or not a pickle ({first_line(error)})") from None
    if first.root != MAGIC:
        names = sorted(name.dotted for name in first.names)
        would = f"; loading it would import {printable(', '.join(names))}" if names else ""
        raise LoadError(f"{shown} is a plain pickle, not a file written by torch.save{would}")
    return TorchFile(path, "legacy")


def reason(error: BaseException) -> str:
    """Returns one line with what an error says, also one of torch's zip reader."""
    # "PytorchStreamReader failed reading zip archive: <the reason>. <advice>", then a C++ stack trace.
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = re.sub(r"^PytorchStreamReader |^\[enforce fail at [^]]*\] \. ", "", lines[0])
    return printable(text.partition(". ")[0])
