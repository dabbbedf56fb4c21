"""Data whose hash is computed once: that of a problem takes longer than most of what is looked up by it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

_Data = TypeVar("_Data", bound="HashedOnce")


class HashedOnce:
    """A base of frozen dataclasses without slots, which have to name its ``__hash__`` as theirs."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def _replace(self: _Data, **changes: Any) -> _Data:
        """Returns the same with other fields, as named tuples do: several times as fast as ``dataclasses.replace``."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__getstate__(), **changes)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # The fields alone: hashes differ from process to process, and what else was computed once can be again.
        fields: dict[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        return {name: getattr(self, name) for name in fields}
