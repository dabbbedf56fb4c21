"""The expected time of the gradient of the input by csrc/kernels/grad_input/implicit_gemm_{wgmma,mma}.cu
(grad_input/implicit_gemm.py). The functions are pure.

The constants are fitted to 340 times of an H100 in NCHW (docs/kernels/grad_input/nchw_to_nhwc.md), in clocks of 1.7
GHz.
"""

from __future__ import annotations

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, block_count
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    copied_box,
    copy_elements,
    phase_taps,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Clocks of both launches, of a copy to shared memory and of each of its elements, of a byte of grad_output and
#: grad_input, of a byte of the weights that is read or written to pack them, and of a byte of partial sums.
LAUNCH_CLOCKS, COPY_CLOCKS, ELEMENT_CLOCKS = 12000, 0.18, 0.03
BYTE_CLOCKS, PACKED_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.0004, 0.0008, 0.001
#: Multiply-adds of a multiprocessor in a clock for each element of a word of 32 bits, and the clocks that a multiply
#: takes over those, by wgmma and by mma.sync.
MULTIPLY_MACS = 1024
WGMMA_CLOCKS, MMA_CLOCKS = 0.92, 3.0


def clocks(problem: StridedProblem, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of a problem in NCHW with this tile."""
    geometry, elements_of_word = problem.geometry, 4 // problem.item
    resident = device.multiprocessors * tile.blocks_per_multiprocessor
    # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
    rounds = ceil_div(block_count(problem, tile), resident) * tile.blocks_per_multiprocessor
    summed = round_up(problem.words, tile.chunk_words) * elements_of_word / tile.splits
    images = 1 if problem.flat else tile.images
    rows, columns, _ = copied_box(problem, tile)
    copied = len(phase_taps(problem)) * images * rows * columns * summed
    positions = tile.cols if problem.flat else tile.images * tile.rows * tile.cols
    macs = positions * problem.block_channels(tile) * summed * geometry.taps
    multiply = (WGMMA_CLOCKS if tile.wgmma else MMA_CLOCKS) * macs / (MULTIPLY_MACS * elements_of_word)
    of_tile = copied * (COPY_CLOCKS / copy_elements(problem, tile) + ELEMENT_CLOCKS) + multiply
    weights = geometry.in_channels_per_group * geometry.out_channels * geometry.taps * problem.item
    partial = 4 * problem.grad_input_elements * tile.splits if tile.splits > 1 else 0
    return (
        LAUNCH_CLOCKS
        + rounds * of_tile
        + BYTE_CLOCKS * problem.moved_bytes
        + PACKED_BYTE_CLOCKS * 2 * weights
        + PARTIAL_BYTE_CLOCKS * partial
    )
