"""The launch of csrc/kernels/grad_weight/split_k_reduce.cu, which adds up the splits of the implicit GEMM
kernels."""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Argument, Constant, Kernel, Launch, output, struct, workspace

#: Multiplies into the same sums before those are added to the workspace: the tensor cores truncate their sums, so
#: that each further multiply adds to the error.
MAX_MULTIPLIES = 1024
_THREADS = 256
#: Threads that share the rows of a channel of the bias: one alone would be a long chain of loads.
_BIAS_LANES = 32
#: Threads that share four sums of the weight, at most.
_MAX_THREADS_PER_SUM = 8


def flush_of(multiplies: int, tiles: int) -> int:
    """Returns after how many tiles, of ``multiplies`` each, the sums are added to the workspace; 0 where
    ``tiles`` are fewer than twice that."""
    flush = max(1, MAX_MULTIPLIES // multiplies)
    return flush if tiles >= 2 * flush else 0


@dataclass(frozen=True, slots=True)
class Sums:
    """The partial sums in the workspace.
    Attributes:
        copies: of the weight's gradient.
        copy_bytes: of one of them; 0 where there are none.
        bias_rows: rows of the bias's sums behind them, of 4 bytes for each output channel.
    """

    copies: int
    copy_bytes: int
    bias_rows: int

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of all copies of the weight's gradient."""
        return self.copies * self.copy_bytes

    @property
    def bias(self) -> Argument:
        """Returns the address of the bias's sums."""
        return workspace(self.weight_bytes if self.bias_rows else 0)

    def bytes(self, channels: int) -> int:
        """Returns the bytes of all partial sums."""
        return self.weight_bytes + self.bias_rows * channels * 4


def reduction_kernel(constants: tuple[tuple[str, Constant], ...]) -> Kernel:
    """Returns the kernel that adds up what a kernel with these ``constants`` leaves."""
    return Kernel(
        "grad_weight/split_k_reduce.cu",
        "grad_weight_split_k_reduce",
        (*constants, ("REDUCE_THREADS", _THREADS), ("BIAS_LANES", _BIAS_LANES)),
    )


def reduction(kernel: Kernel, channels: int, sums: Sums) -> tuple[Launch, ...]:
    """Returns the launch that adds up the sums into the part's outputs (weight, bias); none where there are no
    partial sums."""
    threads_per_sum = min(_MAX_THREADS_PER_SUM, 1 << sums.copies.bit_length() - 1)
    units = _THREADS // threads_per_sum
    weight_blocks = ceil_div(sums.copy_bytes // 16, units)
    blocks = weight_blocks + (ceil_div(channels, _THREADS // _BIAS_LANES) if sums.bias_rows else 0)
    if blocks == 0:
        return ()
    return (
        Launch(
            kernel,
            grid=blocks,
            block=_THREADS,
            arguments=(
                workspace(0),
                sums.bias,
                output(0),
                output(1) if sums.bias_rows else workspace(0),
                struct(0),
            ),
            overlaps_previous=True,
            structs=((sums.copies, sums.bias_rows, weight_blocks, units.bit_length() - 1),),
        ),
    )
