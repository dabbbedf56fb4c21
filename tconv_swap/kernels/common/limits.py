"""The layout of the workspace of a plan."""

from __future__ import annotations

from tconv_swap.runtime.integers import round_up

#: Bytes.
WORKSPACE_ALIGNMENT = 256
#: Bytes that copies of tensors in another layout may take of a workspace, on top of the bound of partial sums
#: (general.WORKSPACE_LIMIT_BYTES). Larger tensors are not copied.
MAX_COPY_BYTES = 1 << 30


class WorkspaceLayout:
    """Buffers in a workspace, one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def reserve(self, size: int) -> int:
        """Reserves a buffer of ``size`` bytes; returns its offset in bytes."""
        at = self.bytes
        self.bytes += round_up(size, WORKSPACE_ALIGNMENT)
        return at
