"""Integer arithmetic for planning."""

from __future__ import annotations

#: Kernels and the copy engine count in 32 bits: their numbers must be smaller than this.
INT32_LIMIT = 2**31


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, to: int) -> int:
    """Returns the smallest multiple of ``to`` that is not less than ``a``."""
    return -(-a // to) * to
