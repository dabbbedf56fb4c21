"""The expected time of the launches that copy a tensor to another layout or to longer rows: memory bounds all of them.
Pure functions of data."""

from __future__ import annotations

#: Clocks of a launch, and of a byte that it reads or writes (538 MB took 131 us on an H200; clocks of 1.7 GHz).
COPY_LAUNCH_CLOCKS, COPIED_BYTE_CLOCKS = 2700, 0.00045


def copy_clocks(moved_bytes: float, launches: float = 1) -> float:
    """Returns the expected clocks of copies that read and write so many bytes together."""
    return COPY_LAUNCH_CLOCKS * launches + COPIED_BYTE_CLOCKS * moved_bytes
