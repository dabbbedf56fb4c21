"""The launch of csrc/kernels/grad_weight_reduce.cu, which adds up what the other grad_weight kernels leave."""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.cuda.integers import ceil_div
from tconv_swap.cuda.problem import Problem
from tconv_swap.cuda.program import Argument, Constant, Kernel, Launch, output, workspace

#: Multiplies that follow one another into the same sums: the multiplier truncates, so more would add to the error.
MOST_MULTIPLIES = 1024
_THREADS = 256
#: Threads that share the rows of a channel of the bias: each is a chain of loads.
_BIAS_LANES = 32


@dataclass(frozen=True, slots=True)
class Sums:
    """Partial sums in the workspace: ``copies`` of the weight's, of ``copy_bytes`` each (0: there are none), then the
    bias's (0: none)."""

    copies: int
    copy_bytes: int
    bias_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.copies * self.copy_bytes

    @property
    def bias(self) -> Argument:
        """Where the bias's begin."""
        return workspace(self.weight_bytes if self.bias_bytes else 0)

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.bias_bytes


def reduction(
    problem: Problem, constants: tuple[tuple[str, Constant], ...], sums: Sums
) -> tuple[Launch, ...]:
    """Into the part's outputs, weight and bias; no launch where nothing is left to add up. ``constants``: of the launch
    before it."""
    sharers = min(8, 1 << sums.copies.bit_length() - 1)
    units = _THREADS // sharers
    blocks = ceil_div(sums.copy_bytes // 16, units)
    if sums.bias_bytes:
        blocks += ceil_div(problem.geometry.out_channels, _THREADS // _BIAS_LANES)
    if blocks == 0:
        return ()
    kernel = Kernel(
        "grad_weight_reduce.cu",
        "grad_weight_reduce",
        (*constants, ("REDUCE_THREADS", _THREADS), ("SHARERS", sharers), ("BIAS_LANES", _BIAS_LANES)),
    )
    return (
        Launch(
            kernel,
            grid=blocks,
            block=_THREADS,
            arguments=(
                workspace(0),
                sums.bias,
                output(0),
                output(1) if sums.bias_bytes else workspace(0),
            ),
            overlaps_previous=True,
        ),
    )
