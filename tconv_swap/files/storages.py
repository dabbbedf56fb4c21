"""Reads the bytes of tensors from a file, and moves them to their device."""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tconv_swap.files.containers import RefusedError

#: Moves a storage that was saved from a device, as `map_location` of `torch.load` does.
Placing: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
_DEVICE = re.compile(r"cpu|meta|(cuda|xpu|mps)(:\d{1,4})?")


def on_cpu(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """A `Placing` for tensors that are only read."""
    return storage


def is_device(location: str) -> bool:
    """Returns whether PyTorch itself has devices of this name. Other names come from packages that a file must not
    import."""
    return _DEVICE.fullmatch(location) is not None


class Storages:
    """The storages of one file; each is read once."""

    def __init__(self, place: Placing) -> None:
        self._place = place
        self._read: dict[str, torch.UntypedStorage] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    @abstractmethod
    def read(self, key: str, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """Returns the bytes under a key, on the CPU.

        Raises:
            RefusedError: there are no bytes, or another number of them.
        """

    def storage(self, parts: list[Any]) -> tuple[torch.UntypedStorage, torch.dtype]:
        """Returns the storage for a persistent id: `("storage", dtype, key, device, number of elements, part or
        None)`."""
        types = [type(part) for part in parts]
        if (
            types[:5] != [str, torch.dtype, str, str, int]
            or len(parts) not in (5, 6)
            or parts[0] != "storage"
        ):
            raise RefusedError("a persistent id does not refer to a storage")
        _, dtype, key, location, elements, *view = parts
        nbytes = elements * dtype.itemsize
        if not 0 <= nbytes < 1 << 62:
            raise RefusedError("a storage has an impossible size")
        if key not in self._read:
            read = self.read(key, nbytes, dtype)
            self._read[key] = self._placed(read, location)
        storage = self._read[key]
        if storage.nbytes() != nbytes:
            raise RefusedError("the parts of a file do not agree on the size of a storage")
        if view and view[0] is not None:
            storage = self._part(storage, view[0], dtype)
        return storage, dtype

    def _placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        placed = self._place(storage, location)
        if placed is None:
            placed = torch.serialization.default_restore_location(storage, location)
        return placed

    @staticmethod
    def _part(storage: torch.UntypedStorage, view: Any, dtype: torch.dtype) -> torch.UntypedStorage:
        if not isinstance(view, tuple) or [type(part) for part in view[1:]] != [int, int]:
            raise RefusedError("a part of a storage is malformed")
        start, end = view[1] * dtype.itemsize, (view[1] + view[2]) * dtype.itemsize
        if not 0 <= start <= end <= storage.nbytes():
            raise RefusedError("a part of a storage lies outside it")
        part: torch.UntypedStorage = storage[start:end]
        return part


class ZipStorages(Storages):
    """The storages of a zip archive; each is a separate entry."""

    def __init__(self, reader: Any, place: Placing) -> None:
        super().__init__(place)
        self._reader = reader
        order = bytes(reader.get_record("byteorder")) if reader.has_record("byteorder") else b"little"
        if order not in (b"little", b"big"):
            raise RefusedError("its byte order is neither little nor big")
        self._swapped = order.decode() != sys.byteorder

    def read(self, key: str, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        name = f"data/{key}"
        if not self._reader.has_record(name):
            raise RefusedError(f"a storage is missing ({key!r:.40})")
        content = self._reader.get_record(name)
        if len(content) != nbytes:
            raise RefusedError("a storage has another size than the file says")
        storage = storage_of(content)
        if self._swapped:
            storage.byteswap(dtype)
        return storage


def storage_of(content: bytes | bytearray) -> torch.UntypedStorage:
    """Returns a copy of these bytes with the alignment of PyTorch's allocations."""
    storage = torch.UntypedStorage(len(content))
    if content:
        target = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (len(content),), (1,))
        target.copy_(torch.frombuffer(content, dtype=torch.uint8))
    return storage
