"""Counts and classifies what the containers of a pickle hold, before any of them is made.

Shared containers make a small file huge: a tuple that holds the same tuple twice, nested forty times, has 2^40 items
for code that visits all of them. Each item is therefore counted every time it is reached, and a container that contains
itself is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from tconv_swap.files.records import Call, Items, Record

#: The largest number of items of one object, each counted every time it is reached.
MAX_ITEMS = 10_000_000
#: The deepest nesting of containers. Code that visits an object recurses once for each level.
MAX_DEPTH = 100


class RefusedError(Exception):
    """A file contains something that no harmless file contains; the message says what, in a few words."""


class Sort(Enum):
    """The kind of object that a record becomes; it decides where the record is allowed."""

    ATOM = auto()
    VALUE = auto()
    CONTAINER = auto()
    TENSOR = auto()
    PARAMETER = auto()
    LAYER = auto()
    OBJECT = auto()
    HANDLE = auto()
    CLASS = auto()
    FUNCTION = auto()
    HOOK = auto()
    STORAGE = auto()
    NAME = auto()
    """A name that is only called."""


@dataclass(frozen=True)
class Held:
    """The content of a container at any depth: the sorts, the number of items, and the depth."""

    sorts: frozenset[Sort]
    items: int
    depth: int


class Containers:
    """Summarises containers, each once.

    Args:
        children: returns the content of a container, and None for anything else.
        sort: returns the sort of anything else.
    """

    def __init__(
        self,
        children: Callable[[Record], Collection[Record] | None],
        sort: Callable[[Record], Sort],
    ) -> None:
        self._children = children
        self._sort = sort
        self._held: dict[int, Held] = {}

    def held(self, record: Record) -> Held:
        """Raises RefusedError if it contains itself or exceeds the limits."""
        children = self._children(record)
        if children is None:
            return Held(frozenset([self._sort(record)]), 1, 0)
        if id(record) in self._held:
            return self._held[id(record)]
        # Without recursion, since the file would decide its depth.
        open_records = {id(record)}
        stack: list[tuple[Record, Collection[Record], Iterator[Record]]] = [
            (record, children, iter(children))
        ]
        while stack:
            current, content, rest = stack[-1]
            for child in rest:
                inner = self._children(child) if isinstance(child, Items | Call) else None
                if inner is None or id(child) in self._held:
                    continue
                if id(child) in open_records:
                    raise RefusedError("a container contains itself")
                open_records.add(id(child))
                stack.append((child, inner, iter(inner)))
                break
            else:
                self._held[id(current)] = self._sum(content)
                open_records.discard(id(current))
                stack.pop()
        return self._held[id(record)]

    def _sum(self, content: Collection[Record]) -> Held:
        sorts: set[Sort] = set()
        items, depth = 1, 0
        for child in content:
            if isinstance(child, Items | Call) and id(child) in self._held:
                held = self._held[id(child)]
                sorts |= held.sorts
                items += held.items
                depth = max(depth, held.depth)
            else:
                sorts.add(self._sort(child))
                items += 1
        if items > MAX_ITEMS:
            raise RefusedError(f"its containers hold more than {MAX_ITEMS} items")
        if depth >= MAX_DEPTH:
            raise RefusedError(f"its containers are nested more than {MAX_DEPTH} deep")
        return Held(frozenset(sorts), items, depth + 1)
