"""Launches of csrc/kernels/common/pad_rows.cu, which copies rows to longer ones that the copy engine can load. Pure
functions of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, input_, struct, workspace

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

    def bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the copy."""
        return self.count * self.padded * dtype.itemsize


def rows_of_images(operand: int, images: int, height: int, width: int, item: int) -> Rows | None:
    """Returns the rows of images in NCHW (``images``: channels of all images), whose elements have ``item`` bytes, that
    have to be copied; None where the copy engine can load them as they lie."""
    padded = round_up(width, TMA_ALIGNMENT // item)
    return Rows(operand, images * height, width, padded) if padded != width else None


def pad_rows(rows: Rows, to: int, dtype: torch.dtype) -> Launch:
    """Returns the launch that copies rows to the workspace at byte ``to``; the elements that are added are zeros."""
    constants = (("Element", ELEMENT_TYPES[dtype]), ("THREADS", _THREADS), ("EACH", _EACH))
    pieces = rows.padded * dtype.itemsize // TMA_ALIGNMENT
    return Launch(
        Kernel("common/pad_rows.cu", "pad_rows", constants),
        grid=ceil_div(rows.count * pieces, _THREADS * _EACH),
        block=_THREADS,
        arguments=(input_(rows.operand), workspace(to), struct(0)),
        structs=((rows.count, rows.width, *divisor(pieces)),),
    )


def copies_fit(copied: Sequence[Rows], dtype: torch.dtype) -> bool:
    """Returns whether the copies take no more memory than copies may."""
    fit = all(rows.count * rows.padded < INT32_LIMIT for rows in copied)
    return fit and sum(rows.bytes(dtype) for rows in copied) <= MAX_COPY_BYTES


def copies_clocks(copied: Sequence[Rows], dtype: torch.dtype) -> float:
    """Returns the expected clocks of the launches that make the copies."""
    moved = sum(rows.count * (rows.width + rows.padded) for rows in copied) * dtype.itemsize
    return copy_clocks(moved, len(copied))
