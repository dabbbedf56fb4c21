"""Launches of csrc/kernels/common/nchw_to_nhwc.cu, which converts tensors from NCHW to channels_last and back. Pure
functions of data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Argument, Kernel, Launch, struct, workspace

_THREADS = 256
#: Bytes of the rows of one block: a line of memory is stored at once.
_LINE_BYTES = 128
_PIECE_BYTES = 16
#: Columns of one block with that many rows: few enough for many blocks on a multiprocessor, which keep memory busy.
_MAX_COLUMNS, _MIN_COLUMNS = 128, 32
_BLOCKS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices [batch, rows, columns], which are transposed to [batch, columns, rows]. The rows of an activation in
    NCHW are channels and its columns are pixels; the rows of a weight are output channels and its columns are taps."""

    batch: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def transposed(self) -> Matrices:
        """The transposed matrices."""
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def bytes(self) -> int:
        return self.batch * self.rows * self.columns * self.dtype.itemsize

    @property
    def piece(self) -> int:
        """The elements of 16 bytes."""
        return _PIECE_BYTES // self.dtype.itemsize

    @property
    def ragged(self) -> bool:
        """Whether rows may begin inside a piece."""
        return self.columns % self.piece > 0

    @property
    def supported(self) -> bool:
        return self.batch > 0 and (self.rows % self.piece == 0 or self.columns % self.piece == 0)


@dataclass(frozen=True, slots=True)
class Block:
    """The part of the matrices that one block transposes."""

    matrices: int
    rows: int
    columns: int

    def row_blocks(self, of: Matrices) -> int:
        return ceil_div(of.rows, self.rows)

    def splits(self, of: Matrices) -> int:
        """Returns how many blocks share their rows."""
        return ceil_div(of.columns, self.columns) * ceil_div(of.batch, self.matrices)

    def shared_bytes(self, of: Matrices) -> int:
        """Returns the shared memory of a block, as common/nchw_to_nhwc.cu uses it."""
        return self.matrices * self.rows * (self.row_pieces(of) * of.piece + 1) * of.dtype.itemsize

    def row_pieces(self, of: Matrices) -> int:
        """Returns how many pieces of 16 bytes hold the block's columns of a row, which may begin inside a piece."""
        elements_before = max(row * of.columns % of.piece for row in range(of.piece))
        return ceil_div(elements_before + self.columns, of.piece)


def _max_columns(of: Matrices, rows: int) -> int:
    """Returns the most columns, of all its matrices, that a block with ``rows`` rows has."""
    return _MAX_COLUMNS * _LINE_BYTES // of.dtype.itemsize // rows


def block_for(of: Matrices, device: Device) -> Block:
    """Returns the block for these matrices: a large one if there is work for all multiprocessors, else a smaller
    one."""
    line = _LINE_BYTES // of.dtype.itemsize
    rows = min(line, max(of.piece, 1 << (of.rows - 1).bit_length()))
    columns, min_columns = _max_columns(of, rows), _MIN_COLUMNS * line // rows
    while True:
        block = _block_of(of, rows, columns)
        blocks = block.splits(of) * block.row_blocks(of)
        if columns == min_columns or blocks >= _BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors:
            return block
        columns //= 2


def _block_of(of: Matrices, rows: int, max_columns: int) -> Block:
    if of.columns <= max_columns:
        one = Block(1, rows, of.columns)
        pieces = ceil_div((of.piece - 1 if of.ragged else 0) + _max_columns(of, rows), of.piece)
        many = min(of.batch, max_columns // of.columns, pieces // one.row_pieces(of))
        return replace(one, matrices=max(1, many))
    blocks = ceil_div(of.columns, max_columns)
    return Block(1, rows, ceil_div(of.columns, blocks * of.piece) * of.piece)


def transpose(of: Matrices, from_: Argument, to: Argument, device: Device, sums: int | None = None) -> Launch:
    """Returns the launch that transposes ``of``. With ``sums`` it leaves partial sums of each row at that offset of the
    workspace, ``row_sums_bytes`` of float32, which ``reduce_row_sums`` adds up.

    It may start while the launch before it runs, if that launch does not write what this one reads. It ends after it,
    so that a launch that waits for this one has waited for both.
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
            ("MAX_POSITIONS", _max_columns(of, block.rows)),
            ("WITH_SUMS", sums is not None),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=block.splits(of) * block.row_blocks(of),
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
    """Returns the bytes of the partial sums of ``transpose``."""
    return block_for(of, device).splits(of) * of.rows * 4


def reduce_row_sums(of: Matrices, sums: int, index: int, device: Device) -> Launch:
    """Returns the launch that adds up the partial sums at ``sums`` into output ``index``, one number for each row."""
    splits = block_for(of, device).splits(of)
    return split_k_reduce(of.dtype, of.rows, splits, sums, index, overlaps_previous=True)


def activation(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Matrices:
    """Returns the matrices of a tensor [batch, channels, height, width] in NCHW."""
    batch, channels, height, width = shape
    return Matrices(batch, channels, height * width, dtype)
