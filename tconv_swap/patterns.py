"""Matches patterns with dotted names, component by component, as ``plan_swap`` documents."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import TypeAlias

Patterns: TypeAlias = str | Iterable[str] | None


def as_patterns(patterns: Patterns, argument: str) -> tuple[str, ...]:
    """Returns the patterns that were given as ``argument``; a single string is one pattern.

    Raises:
        TypeError: one is not a string.
    """
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: expected patterns as strings, got {pattern!r}")
    return patterns


def matches_any(pattern: str, names: Iterable[str]) -> bool:
    """Returns whether one of the dotted names matches."""
    return any(_matches(_split(name), _split(pattern)) for name in names)


def _split(dotted: str) -> list[str]:
    return dotted.split(".") if dotted else []


def _matches(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
