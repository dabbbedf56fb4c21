"""Whether what a test computes for many cases differs from before, without computing the cases after the first
difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def differs(found: Iterable[object], before: Sequence[object]) -> bool:
    """Returns whether any of them differs, or there are more or fewer."""
    return any(one != other for one, other in zip_longest(found, before))
