"""Problems in channels_last with an odd number of channels in 16 bits.

A pixel of such a tensor may begin at an odd multiple of 2 bytes, where no copy of 4 or more bytes may begin. The tensor
is therefore copied to one with more channels, which are zero, so that each pixel is a whole number of pieces of 16
bytes. Pure functions of data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.pad_rows import Rows, pad_rows
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import round_up
from tconv_swap.runtime.program import Argument, Launch, input_, with_operands, workspace

#: The fewest channels: with fewer, most of a copy and of a tile would be zeros.
MIN_CHANNELS = 8


def padded_channels(problem: Problem, channels: int) -> int | None:
    """Returns the number of channels of copies that the kernels can read; None where they read the tensors as they are,
    or not at all."""
    if not problem.channels_last or problem.dtype.itemsize != 2 or problem.geometry.groups > 1:
        return None
    if channels % 2 == 0 or channels < MIN_CHANNELS:
        return None
    return round_up(channels, TMA_ALIGNMENT // problem.dtype.itemsize)


def reading_copies(
    launches: tuple[Launch, ...], workspace_bytes: int, copied: Sequence[Rows], dtype: torch.dtype
) -> tuple[tuple[Launch, ...], int]:
    """Returns launches that read copies of some inputs, those that make the copies before them, and the bytes of their
    workspace."""
    memory = WorkspaceLayout()
    memory.reserve(workspace_bytes)
    places = {rows.operand: memory.reserve(rows.bytes(dtype)) for rows in copied}

    def placed(argument: Argument) -> Argument:
        found = next((at for operand, at in places.items() if argument == input_(operand)), None)
        return argument if found is None else workspace(found)

    first, *rest = (with_operands(launch, placed) for launch in launches)
    pads = [pad_rows(rows, places[rows.operand], dtype) for rows in copied]
    # The launch after the copies waits until they have ended, so the later ones may read them at once.
    return (*pads, first._replace(overlaps_previous=False), *rest), memory.bytes
