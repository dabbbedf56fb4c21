"""Whole numbers, as planning counts with them."""

from __future__ import annotations

#: What is counted in 32 bits by a kernel, or by the copy engine, is below this.
INT32_LIMIT = 2**31


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, to: int) -> int:
    """The multiple of ``to`` that is next to ``a``, or ``a``."""
    return -(-a // to) * to
