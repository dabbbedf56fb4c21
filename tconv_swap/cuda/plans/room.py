"""The workspace of a plan, dealt out."""

from __future__ import annotations

from tconv_swap.cuda.integers import round_up

#: Bytes.
WORKSPACE_ALIGNMENT = 256


class Room:
    """Pieces one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, size: int) -> int:
        """Where a piece of so many bytes begins."""
        at = self.bytes
        self.bytes += round_up(size, WORKSPACE_ALIGNMENT)
        return at
