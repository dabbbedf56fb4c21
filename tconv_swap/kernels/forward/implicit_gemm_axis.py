"""The taps of one axis of a layer, as the forward implicit GEMM sees them. Pure functions of data."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def shift_bounds(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """Returns the smallest and the largest distance from a position to the input pixel that a tap reads."""
    shifts = [((k * dilation - padding) % stride + padding - k * dilation) // stride for k in range(kernel)]
    return min(shifts), max(shifts)


@lru_cache(maxsize=1024)
def axis_taps(kernel: int, stride: int, padding: int, dilation: int, phases: int) -> tuple[int, ...]:
    """Returns the number of taps along one axis of each group of ``phases``."""
    count = [0] * (stride // phases)
    for k in range(kernel):
        count[(k * dilation - padding) % stride // phases] += 1
    return tuple(count)
