"""What a plan and planning may take: the layout of a workspace, and how much is remembered."""

from __future__ import annotations

from tconv_swap.runtime.integers import round_up

#: Bytes.
WORKSPACE_ALIGNMENT = 256
#: Bytes that copies of tensors in another layout may take of a workspace, on top of the bound of partial sums
#: (general.WORKSPACE_LIMIT_BYTES): 3 % of the memory of a GPU of 80 GB. Larger tensors are not copied. (The bytes of
#: tensors are often a power of two, which this is not.)
MAX_COPY_BYTES = 5 << 29
#: How many results a function of the sizes of a layer remembers.
MAX_REMEMBERED = 256


class WorkspaceLayout:
    """Buffers in a workspace, one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def reserve(self, size: int) -> int:
        """Reserves a buffer of ``size`` bytes; returns its offset in bytes."""
        at = self.bytes
        self.bytes += round_up(size, WORKSPACE_ALIGNMENT)
        return at
