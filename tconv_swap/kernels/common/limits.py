"""The workspace of a plan, dealt out."""

from __future__ import annotations

from tconv_swap.runtime.integers import round_up

#: Bytes.
WORKSPACE_ALIGNMENT = 256
#: Bytes that copies of the tensors, arranged anew, may take of a workspace, on top of what partial sums are bounded to
#: (plan_general.WORKSPACE_LIMIT_BYTES): larger ones stay as they lie.
MAX_COPY_BYTES = 1 << 30


class WorkspaceLayout:
    """Pieces one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def reserve(self, size: int) -> int:
        """Where a piece of so many bytes begins."""
        at = self.bytes
        self.bytes += round_up(size, WORKSPACE_ALIGNMENT)
        return at
