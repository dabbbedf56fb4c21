"""Ranks the parts of several families that could compute the same gradient by their expected time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from tconv_swap.runtime.program import Part

#: Expected clocks are of 1.7 GHz.
CLOCKS_OF_MICROSECOND = 1700

_T = TypeVar("_T")


class Ranked(NamedTuple):
    """A part that could be made, and its expected clocks: making those that are not taken would take time."""

    clocks: float
    make: Callable[[], Part]


def in_turn(*families: list[_T]) -> list[_T]:
    """Returns the best of each family, then the second best of each, and so on."""
    return [one for best in zip_longest(*families) for one in best if one is not None]
