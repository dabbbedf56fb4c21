"""Reads networks saved before PyTorch 1.6: pickles one after the other, then the storages.

Such a pickle refers to the class of a layer by a persistent id, `("module", class, source file, source)`. Only the
class is used, under its name in the pickle; the source code is ignored.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tconv_swap.files.containers import RefusedError
from tconv_swap.files.records import Items, MalformedError, Pickle, Record, Reference, read_pickle
from tconv_swap.files.storages import Placing, Storages, storage_of

#: torch.serialization.MAGIC_NUMBER, the first object of such a file.
MAGIC = 0x1950A86A20F9469CFC6C
# The magic number, the protocol version, byte order and word sizes. The keys of the storages follow the object.
_PICKLES_BEFORE_OBJECT = 3
_HEADER_BYTES = 8


@dataclass(frozen=True)
class LegacyContent:
    """The object of a legacy file, and the keys of its storages in the order in which they lie from `offset` on."""

    pickle: Pickle
    keys: tuple[str, ...]
    offset: int


def read_legacy(stream: IO[bytes]) -> LegacyContent:
    """Raises MalformedError, ValueError or EOFError if the file is damaged."""
    before = [read_pickle(stream) for _ in range(_PICKLES_BEFORE_OBJECT)]
    pickle = read_pickle(stream, _class_of_layer)
    last = read_pickle(stream)
    keys = last.root.items if isinstance(last.root, Items) and last.root.kind is list else None
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise MalformedError("it has no list of its storages")
    names = pickle.names.union(last.names, *(other.names for other in before))
    return LegacyContent(Pickle(pickle.root, names), tuple(map(str, keys)), stream.tell())


def _class_of_layer(identity: Record) -> Record:
    if isinstance(identity, Items) and len(identity.items) == 4 and identity.items[0] == "module":
        return identity.items[1]
    return Reference(identity)


class LegacyStorages(Storages):
    """The storages of a legacy file: each is its number of elements in eight bytes, followed by the elements.

    Args:
        element_bytes: the size of one element, for each key.
    """

    def __init__(
        self, path: Path, content: LegacyContent, element_bytes: dict[str, int], place: Placing
    ) -> None:
        super().__init__(place)
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        offset, end = content.offset, os.stat(path).st_size
        with open(path, "rb") as stream:
            for key in content.keys:
                if key not in element_bytes:
                    raise RefusedError(f"nothing refers to a storage ({key!r:.40})")
                stream.seek(offset)
                elements = int.from_bytes(stream.read(_HEADER_BYTES), "little", signed=True)
                nbytes = elements * element_bytes[key]
                offset += _HEADER_BYTES
                if elements < 0 or offset + nbytes > end:
                    raise RefusedError("a storage lies beyond the end of the file")
                self._places[key] = (offset, nbytes)
                offset += nbytes

    def read(self, key: str, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        offset, found = self._places.get(key, (0, -1))
        if found != nbytes:
            raise RefusedError("a storage is missing, or has another size than the file says")
        with open(self._path, "rb") as stream:
            stream.seek(offset)
            content = stream.read(nbytes)
        if len(content) != nbytes:
            raise RefusedError("a storage lies beyond the end of the file")
        return storage_of(content)
