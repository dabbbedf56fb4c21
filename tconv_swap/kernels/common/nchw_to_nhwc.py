"""Launches of csrc/kernels/common/nchw_to_nhwc.cu: tensors from NCHW to channels_last and back. Pure functions of
data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Argument, Kernel, Launch, struct, workspace

_THREADS = 256
#: Of rows, what one block takes: a line of memory leaves at once.
_LINE_BYTES = 128
_PIECE_BYTES = 16
#: Columns of one block with so many rows: few enough for many blocks on a multiprocessor, which keep memory busy.
_MOST_COLUMNS, _LEAST_COLUMNS = 128, 32
_BLOCKS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Matrices:
    """[batch, rows, columns], which becomes [batch, columns, rows]. Of an activation in NCHW rows are channels and
    columns pixels, of a weight rows are the output's channels and columns taps."""

    batch: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def transposed(self) -> Matrices:
        """What it becomes, to be brought back."""
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def bytes(self) -> int:
        return self.batch * self.rows * self.columns * self.dtype.itemsize

    @property
    def piece(self) -> int:
        """Elements of 16 bytes."""
        return _PIECE_BYTES // self.dtype.itemsize

    @property
    def ragged(self) -> bool:
        """Whether rows begin between two pieces."""
        return self.columns % self.piece > 0

    @property
    def claimed(self) -> bool:
        return self.batch > 0 and (self.rows % self.piece == 0 or self.columns % self.piece == 0)


@dataclass(frozen=True, slots=True)
class Block:
    """What one block arranges: so many rows by so many columns of so many matrices."""

    matrices: int
    rows: int
    columns: int

    def row_blocks(self, of: Matrices) -> int:
        return ceil_div(of.rows, self.rows)

    def slices(self, of: Matrices) -> int:
        """Blocks that share their rows."""
        return ceil_div(of.columns, self.columns) * ceil_div(of.batch, self.matrices)

    def shared_bytes(self, of: Matrices) -> int:
        """Mirrors common/nchw_to_nhwc.cu, which asserts that they agree."""
        return self.matrices * self.rows * (self.row_pieces(of) * of.piece + 1) * of.dtype.itemsize

    def row_pieces(self, of: Matrices) -> int:
        """Pieces of 16 bytes that hold the block's columns of a row, whose first element may lie within one."""
        lead = max(row * of.columns % of.piece for row in range(of.piece))
        return ceil_div(lead + self.columns, of.piece)


def _most_columns(of: Matrices, rows: int) -> int:
    """Columns of a block with so many rows: of all its matrices."""
    return _MOST_COLUMNS * _LINE_BYTES // of.dtype.itemsize // rows


def block_for(of: Matrices, device: Device) -> Block:
    """Large where there is work for all multiprocessors, else small."""
    line = _LINE_BYTES // of.dtype.itemsize
    rows = min(line, max(of.piece, 1 << (of.rows - 1).bit_length()))
    most, least = _most_columns(of, rows), _LEAST_COLUMNS * line // rows
    while True:
        block = _block_of(of, rows, most)
        blocks = block.slices(of) * block.row_blocks(of)
        if most == least or blocks >= _BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors:
            return block
        most //= 2


def _block_of(of: Matrices, rows: int, most: int) -> Block:
    if of.columns <= most:
        one = Block(1, rows, of.columns)
        pieces = ceil_div((of.piece - 1 if of.ragged else 0) + _most_columns(of, rows), of.piece)
        many = min(of.batch, most // of.columns, pieces // one.row_pieces(of))
        return replace(one, matrices=max(1, many))
    strips = ceil_div(of.columns, most)
    return Block(1, rows, ceil_div(of.columns, strips * of.piece) * of.piece)


def transpose(of: Matrices, from_: Argument, to: Argument, device: Device, sums: int | None = None) -> Launch:
    """The launch that transposes ``of``; with ``sums`` it leaves each row's sum there in the workspace, as
    ``row_sums_bytes`` of float32 that ``reduce_row_sums`` adds up.

    It may start while the launch before it runs, if that does not write what this one reads, and ends after it: who
    waits for this one has waited for both.
    """
    block = block_for(of, device)
    kernel = Kernel(
        "common/nchw_to_nhwc.cu",
        "nchw_to_nhwc",
        (
            ("Element", ELEMENT_TYPES[of.dtype]),
            ("ROWS", of.rows),
            ("RAGGED", of.ragged),
            ("BLOCK_ROWS", block.rows),
            ("MAX_POSITIONS", _most_columns(of, block.rows)),
            ("WITH_SUMS", sums is not None),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=block.slices(of) * block.row_blocks(of),
        block=_THREADS,
        arguments=(from_, to, to if sums is None else workspace(sums), struct(0)),
        structs=(
            (
                *(of.batch, of.columns, block.matrices, block.matrices * block.columns),
                *divisor(block.columns),
                *divisor(ceil_div(of.columns, block.columns)),
                *divisor(block.row_pieces(of)),
            ),
        ),
        shared_bytes=block.shared_bytes(of),
        overlaps_previous=True,
    )


def row_sums_bytes(of: Matrices, device: Device) -> int:
    return block_for(of, device).slices(of) * of.rows * 4


def reduce_row_sums(of: Matrices, sums: int, index: int, device: Device) -> Launch:
    """The launch that adds up what ``transpose`` left at ``sums`` into output ``index``: of each row one number."""
    slices = block_for(of, device).slices(of)
    return split_k_reduce(of.dtype, of.rows, slices, sums, index, overlaps_previous=True)


def activation(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Matrices:
    """Of a tensor [batch, channels, height, width] in NCHW."""
    batch, channels, height, width = shape
    return Matrices(batch, channels, height * width, dtype)
