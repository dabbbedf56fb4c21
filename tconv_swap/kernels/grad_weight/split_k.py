"""The launch of csrc/kernels/grad_weight/split_k_reduce.cu, which adds up what the other grad_weight kernels leave."""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Argument, Constant, Kernel, Launch, output, struct, workspace

#: Multiplies that follow one another into the same sums: the multiplier truncates, so more would add to the error.
MOST_MULTIPLIES = 1024
_THREADS = 256
#: Threads that share the rows of a channel of the bias: each is a chain of loads.
_BIAS_LANES = 32
#: Threads that share a unit of the weight's, at most.
_MOST_SHARERS = 8


def flush_of(multiplies: int, tiles: int) -> int:
    """Tiles of so many multiplies after which sums go to the workspace, or 0: there are not twice as many."""
    flush = max(1, MOST_MULTIPLIES // multiplies)
    return flush if tiles >= 2 * flush else 0


@dataclass(frozen=True, slots=True)
class Sums:
    """Partial sums in the workspace: ``copies`` of the weight's, of ``copy_bytes`` each (0: there are none), then
    ``bias_rows`` of the bias's, 4 bytes for each output channel."""

    copies: int
    copy_bytes: int
    bias_rows: int

    @property
    def weight_bytes(self) -> int:
        return self.copies * self.copy_bytes

    @property
    def bias(self) -> Argument:
        """Where the bias's begin."""
        return workspace(self.weight_bytes if self.bias_rows else 0)

    def bytes(self, channels: int) -> int:
        return self.weight_bytes + self.bias_rows * channels * 4


def reduction_kernel(constants: tuple[tuple[str, Constant], ...]) -> Kernel:
    """``constants``: of the kernel that leaves the sums."""
    return Kernel(
        "grad_weight/split_k_reduce.cu",
        "grad_weight_split_k_reduce",
        (*constants, ("REDUCE_THREADS", _THREADS), ("BIAS_LANES", _BIAS_LANES)),
    )


def reduction(kernel: Kernel, channels: int, sums: Sums) -> tuple[Launch, ...]:
    """Into the part's outputs, weight and bias; no launch where nothing is left to add up."""
    sharers = min(_MOST_SHARERS, 1 << sums.copies.bit_length() - 1)
    units = _THREADS // sharers
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
