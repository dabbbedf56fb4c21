"""Formats numbers for the reader, in the same way for every form of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence

EQUAL_WITHIN = 0.05


def verdict_of(speedup: float, interval: Sequence[float]) -> str:
    """Returns `faster`, `slower`, `same` or `noisy`, by the speedup and its 95 % confidence interval."""
    noise_explains_it = interval[0] <= 1 <= interval[1]
    if f"{speedup:.2f}" == "1.00" or (noise_explains_it and abs(speedup - 1) <= EQUAL_WITHIN):
        return "same"
    if noise_explains_it:
        return "noisy"
    return "faster" if speedup > 1 else "slower"


def times_as_fast(speedup: float, verdict: str) -> str:
    """Returns `1.93x faster`, `0.90x slower`, `1.00x`, or `1.31x noisy` if noise may be all of the difference."""
    places = 2 if speedup < 10 else 1 if speedup < 100 else 0
    return "1.00x" if verdict == "same" else f"{speedup:.{places}f}x {verdict}"


def milliseconds(value: float) -> str:
    """Returns three significant digits, at most four decimal places: `0.0412`, `12.3`."""
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 2
    return f"{value:.{min(digits, 4)}f}"


def error_text(value: float) -> str:
    """Returns the error as `2.1e-07`; `0` if it is exact."""
    return "0" if value == 0 else f"{value:.1e}"


def size_text(count: int) -> str:
    """Returns the bytes in MiB or GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
