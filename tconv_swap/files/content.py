"""Reads the records in a file of `torch.save`, and makes objects of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch

from tconv_swap.files import schema
from tconv_swap.files.construct import construct
from tconv_swap.files.containers import RefusedError
from tconv_swap.files.fileformat import LoadError, TorchFile, needs_more_memory, printable, reason
from tconv_swap.files.known import Kind, Meaning
from tconv_swap.files.legacy import LegacyStorages, read_legacy
from tconv_swap.files.records import GlobalName, Items, Pickle, Record, Reference, read_pickle
from tconv_swap.files.storages import Placing, Storages, ZipStorages
from tconv_swap.memory import is_out_of_memory, within_free_memory


@dataclass(frozen=True)
class Content:
    """The content of a file as records; `open_storages` is called with the element size of each storage."""

    pickle: Pickle
    open_storages: Callable[[dict[str, int], Placing], Storages]


def read_content(file: TorchFile) -> Content:
    """Returns the records of a zip or legacy file. Nothing in the file is executed.

    Raises:
        LoadError: the file is damaged, or exceeds a limit.
    """
    try:
        with within_free_memory():
            return _read_zip(file) if file.format == "zip" else _read_legacy(file)
    except (RuntimeError, ValueError, EOFError, OverflowError, MemoryError) as error:
        if is_out_of_memory(error):
            raise LoadError(needs_more_memory(file.path)) from None
        raise LoadError(f"{printable(file.path)} is truncated or damaged ({reason(error)})") from None


def _read_zip(file: TorchFile) -> Content:
    # The reader that torch.load itself uses, so that both see the same archive.
    reader = torch._C.PyTorchFileReader(str(file.path))
    pickle = read_pickle(BytesIO(reader.get_record("data.pkl")))
    return Content(pickle, lambda _, place: ZipStorages(reader, place))


def _read_legacy(file: TorchFile) -> Content:
    with open(file.path, "rb") as stream:
        legacy = read_legacy(stream)
    return Content(legacy.pickle, lambda sizes, place: LegacyStorages(file.path, legacy, sizes, place))


def make(content: Content, meanings: Mapping[GlobalName, Meaning], place: Placing) -> Any:
    """Returns the object that the records describe. All their names have a meaning.

    Raises:
        RefusedError: no harmless file has such records.
        Exception: anything that the code of a trusted class raises.
    """
    schema.check(content.pickle.root, meanings)
    sizes = dict(_element_bytes(content.pickle.root, meanings))
    return construct(content.pickle.root, meanings, content.open_storages(sizes, place))


def _element_bytes(root: Record, meanings: Mapping[GlobalName, Meaning]) -> list[tuple[str, int]]:
    """Returns the key and the element size, in bytes, of each storage that the records refer to."""
    found = []
    for record in schema.reachable(root):
        if not isinstance(record, Reference):
            continue
        parts = record.id.items if isinstance(record.id, Items) else []
        dtype = meanings.get(parts[1]) if len(parts) > 2 and isinstance(parts[1], GlobalName) else None
        if dtype is None or dtype.kind is not Kind.STORAGE or not isinstance(parts[2], str):
            raise RefusedError("a persistent id does not refer to a storage")
        found.append((parts[2], dtype.value.itemsize))
    return found
