"""Launches of csrc/kernels/common/pad_rows.cu, and problems in channels_last with an odd number of channels in 16 bits.

A pixel of such a tensor may begin at an odd multiple of 2 bytes, where no copy of 4 or more bytes may begin. The tensor
is therefore copied to one with more channels, which are zero, so that each pixel is a whole number of pieces of 16
bytes. Pure functions of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES, WorkspaceLayout
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    Kernel,
    Launch,
    input_,
    struct,
    with_operands,
    workspace,
)

#: The fewest channels: with fewer, most of a copy and of a tile would be zeros.
MIN_CHANNELS = 8
#: Clocks of the launch of a copy, and of a byte that it reads or writes: those of the copies that
#: forward/implicit_gemm_clocks.py knows.
COPY_LAUNCH_CLOCKS, COPIED_BYTE_CLOCKS = 2570, 0.000684
_PIECE_BYTES = 16
_THREADS = 256
#: Pieces that a thread copies.
_EACH = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of ``width`` elements of the input ``operand``, which are copied to rows of ``padded`` elements, whole
    pieces of 16 bytes."""

    operand: int
    count: int
    width: int
    padded: int


def pad_rows(rows: Rows, to: int, dtype: torch.dtype) -> Launch:
    """Returns the launch that copies rows to the workspace at byte ``to``; the elements that are added are zeros."""
    constants = (("Element", ELEMENT_TYPES[dtype]), ("THREADS", _THREADS), ("EACH", _EACH))
    pieces = rows.padded * dtype.itemsize // _PIECE_BYTES
    return Launch(
        Kernel("common/pad_rows.cu", "pad_rows", constants),
        grid=ceil_div(rows.count * pieces, _THREADS * _EACH),
        block=_THREADS,
        arguments=(input_(rows.operand), workspace(to), struct(0)),
        structs=((rows.count, rows.width, *divisor(pieces)),),
    )


def padded_channels(problem: Problem, channels: int) -> int | None:
    """Returns the number of channels of copies that the kernels can read; None where they read the tensors as they are,
    or not at all."""
    if not problem.channels_last or problem.dtype.itemsize != 2 or problem.geometry.groups > 1:
        return None
    if channels % 2 == 0 or channels < MIN_CHANNELS:
        return None
    return round_up(channels, _PIECE_BYTES // problem.dtype.itemsize)


def copies_fit(copied: Sequence[Rows], dtype: torch.dtype) -> bool:
    """Returns whether the copies take no more memory than copies may."""
    elements = [rows.count * rows.padded for rows in copied]
    return sum(elements) * dtype.itemsize <= MAX_COPY_BYTES and all(one < INT32_LIMIT for one in elements)


def copies_clocks(copied: Sequence[Rows], dtype: torch.dtype) -> float:
    """Returns the expected clocks of the launches that make the copies."""
    moved = sum(rows.count * (rows.width + rows.padded) for rows in copied) * dtype.itemsize
    return COPY_LAUNCH_CLOCKS * len(copied) + COPIED_BYTE_CLOCKS * moved


def reading_copies(
    launches: tuple[Launch, ...], workspace_bytes: int, copied: Sequence[Rows], dtype: torch.dtype
) -> tuple[tuple[Launch, ...], int]:
    """Returns launches that read copies of some inputs, those that make the copies before them, and the bytes of their
    workspace."""
    memory = WorkspaceLayout()
    memory.reserve(workspace_bytes)
    places = {rows.operand: memory.reserve(rows.count * rows.padded * dtype.itemsize) for rows in copied}

    def placed(argument: Argument) -> Argument:
        found = next((at for operand, at in places.items() if argument == input_(operand)), None)
        return argument if found is None else workspace(found)

    first, *rest = (with_operands(launch, placed) for launch in launches)
    pads = [pad_rows(rows, places[rows.operand], dtype) for rows in copied]
    # The launch after the copies waits until they have ended, so the later ones may read them at once.
    return (*pads, replace(first, overlaps_previous=False), *rest), memory.bytes
