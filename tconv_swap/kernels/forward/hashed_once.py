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
        """Returns the same with other fields, as named tuples do, in less time than ``dataclasses.replace``.

        Raises:
            ValueError: there is no such field.
        """
        fields = self.__getstate__()
        if not fields.keys() >= changes.keys():
            raise ValueError(f"{type(self).__name__} has no {', '.join(changes.keys() - fields.keys())}")
        made = object.__new__(type(self))
        made.__dict__.update(fields, **changes)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # The fields alone: hashes differ from process to process, and what else was computed once can be again.
        fields: dict[str, Any] = self.__dataclass_fields__  # type: ignore[attr-defined]
        return {name: getattr(self, name) for name in fields}
