"""The expected time of the gradient of the input by csrc/kernels/grad_input/implicit_gemm_{wgmma,mma}.cu
(grad_input/implicit_gemm.py). The functions are pure.

The constants are fitted to 18,911 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.17 (docs/selection.md).
"""

from __future__ import annotations

from tconv_swap.kernels.forward.implicit_gemm_layout import PRODUCER_THREADS, Tile, block_count
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    copied_box,
    copy_elements,
    copy_slots,
)
from tconv_swap.kernels.grad_input.implicit_gemm_registers import phases_ahead, tile_registers
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Clocks of both launches; of a byte of grad_output and grad_input; further ones of an element of an NCHW grad_input of
#: an odd number of columns, which is stored one element at a time; of a byte of the weights that is read or written to
#: pack them; of a byte of partial sums.
LAUNCH_CLOCKS, BYTE_CLOCKS, ODD_ROW_CLOCKS = 17300, 0.00039, 0.001
PACKED_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.00176, 0.00094
#: Multiply-adds of a multiprocessor in a clock for each element of a word of 32 bits; the clocks that a multiply takes
#: over those, by wgmma and by mma.sync, and how many times as long the three products of float32 take.
MULTIPLY_MACS = 1024
WGMMA_CLOCKS, MMA_CLOCKS = 0.4, 1.55
IEEE_WGMMA, IEEE_MMA = 6.3, 3.9
#: Clocks of a byte of a stage's weights, by wgmma and by mma.sync.
WEIGHT_BYTE_CLOCKS, WEIGHT_BYTE_CLOCKS_MMA = 0.0124, 0.0136
#: By wgmma: clocks of a tile; in NCHW of a stage, of a copy of a thread, and of a byte that is copied or stored. In
#: channels_last a stage takes the latency of its loads, over the stages that are loaded ahead.
TILE_CLOCKS, STAGE_CLOCKS, COPY_CLOCKS, COPIED_BYTE_CLOCKS, STORED_BYTE_CLOCKS = (
    700,
    20,
    0.465,
    0.0187,
    0.0236,
)
LATENCY_CLOCKS, IEEE_LATENCY = 1100, 1.56
#: By wgmma: how many times as long the sum takes with two stages, and with one phase loaded ahead; and in channels_last
#: with tiles of more than 8 columns, of several images, and where no tap is shifted (flat).
TWO_STAGES, ONE_AHEAD = 1.36, 1.2
WIDE_TILE, SEVERAL_IMAGES, FLAT = 1.22, 1.12, 0.91
#: By mma.sync: clocks of a copy in NCHW and in channels_last, and of a byte that is copied.
MMA_COPY_CLOCKS, MMA_COPY_CLOCKS_NHWC, MMA_COPIED_BYTE_CLOCKS = 0.072, 0.237, 0.0177
#: Of tiles with more than so many registers (tile_registers), all of a tile takes so many times as long.
MANY_REGISTERS, CROWDED = 90, 1.1
#: In channels_last, the pixels of a phase are a stride of columns apart: for each above 2, the share by which loads
#: take longer by wgmma and by mma.sync.
FAR, FAR_MMA = 0.23, 1.0


def clocks(problem: StridedProblem, tile: Tile, device: Device) -> float:
    """Returns the expected clocks of a problem with this tile."""
    blocks, of_block = block_count(problem, tile), block_clocks(problem, tile)
    return clocks_of_blocks(problem, tile, device, tile.splits, blocks, of_block)


def clocks_of_blocks(
    problem: StridedProblem, tile: Tile, device: Device, splits: int, blocks: int, of_block: float
) -> float:
    """Returns the same with so many splits, for so many blocks, of which each takes so many clocks."""
    multiprocessors, resident = device.multiprocessors, tile.blocks_per_multiprocessor
    # Blocks of a multiprocessor share it, so they take as long as if one followed the other.
    whole, rest = divmod(blocks, multiprocessors * resident)
    rounds = whole * resident - (-rest // multiprocessors)
    outputs = problem.grad_input_elements
    odd = not problem.output_channels_last and problem.positions[1] % 2
    return (
        LAUNCH_CLOCKS
        + rounds * of_block
        + BYTE_CLOCKS * problem.moved_bytes
        + (ODD_ROW_CLOCKS * outputs if odd else 0)
        + PACKED_BYTE_CLOCKS * 2 * problem.weight_elements * problem.item * problem.parts
        + (PARTIAL_BYTE_CLOCKS * 4 * outputs * splits if splits > 1 else 0)
    )


def block_clocks(problem: StridedProblem, tile: Tile) -> float:
    """Returns the clocks in which a block computes a tile, which are the same for all sizes of a layer."""
    return _wgmma_clocks(problem, tile) if tile.wgmma else _mma_clocks(problem, tile)


def _wgmma_clocks(problem: StridedProblem, tile: Tile) -> float:
    """Returns the clocks in which a block computes a tile by implicit_gemm_wgmma.cu."""
    multiply, weight_bytes, chunks = _work(problem, tile)
    ieee = problem.precision == "IEEE"
    ahead = phases_ahead(problem, tile)
    stages = chunks * len(problem.phase_taps)
    if problem.input_channels_last:
        loads = stages * LATENCY_CLOCKS * (IEEE_LATENCY if ieee else 1.0) / ahead * _distance(problem, FAR)
    else:
        copies = stages * copy_slots(problem, tile) * PRODUCER_THREADS
        copied = _copied_elements(problem, tile) * stages * problem.item
        loads = STAGE_CLOCKS * stages + COPY_CLOCKS * copies + COPIED_BYTE_CLOCKS * copied
    loop = WGMMA_CLOCKS * (IEEE_WGMMA if ieee else 1.0) * multiply + WEIGHT_BYTE_CLOCKS * weight_bytes + loads
    loop *= (TWO_STAGES if tile.stages < 3 else 1.0) * (ONE_AHEAD if ahead == 1 else 1.0)
    if problem.output_channels_last:
        wide = tile.cols > 8 and not problem.flat
        shape = (WIDE_TILE if wide else 1.0) * (SEVERAL_IMAGES if tile.images > 1 else 1.0)
        return TILE_CLOCKS + loop * shape * (FLAT if problem.flat else 1.0)
    channels = min(problem.block_channels(tile), problem.geometry.out_channels_per_group)
    return TILE_CLOCKS + loop + STORED_BYTE_CLOCKS * _positions(problem, tile) * channels * problem.item


def _mma_clocks(problem: StridedProblem, tile: Tile) -> float:
    """Returns the same by implicit_gemm_mma.cu."""
    multiply, weight_bytes, chunks = _work(problem, tile)
    copied = _copied_elements(problem, tile) * chunks * len(problem.phase_taps)
    of_copy = MMA_COPY_CLOCKS_NHWC if problem.input_channels_last else MMA_COPY_CLOCKS
    loads = of_copy * copied / copy_elements(problem, tile) + MMA_COPIED_BYTE_CLOCKS * copied * problem.item
    loads *= _distance(problem, FAR_MMA) if problem.input_channels_last else 1.0
    multiplies = MMA_CLOCKS * (IEEE_MMA if problem.precision == "IEEE" else 1.0) * multiply
    crowded = CROWDED if tile_registers(problem, tile) > MANY_REGISTERS else 1.0
    return crowded * (multiplies + WEIGHT_BYTE_CLOCKS_MMA * weight_bytes + loads)


def _work(problem: StridedProblem, tile: Tile) -> tuple[float, float, float]:
    """Returns the clocks of a tile's multiplies at the multiplier's rate, the bytes of its weights, and its chunks."""
    of_word, taps = 4 // problem.item, problem.geometry.taps
    summed = round_up(problem.words, tile.chunk_words) * of_word / tile.splits
    channels = problem.block_channels(tile)
    multiply = _positions(problem, tile) * channels * summed * taps / (MULTIPLY_MACS * of_word)
    weight_bytes = channels * summed * taps * problem.item * problem.parts
    return multiply, weight_bytes, ceil_div(problem.words, tile.chunk_words) / tile.splits


def _positions(problem: StridedProblem, tile: Tile) -> int:
    return tile.cols if problem.flat else tile.images * tile.rows * tile.cols


def _copied_elements(problem: StridedProblem, tile: Tile) -> int:
    """Returns the elements that a tile copies to a stage."""
    rows, columns, _ = copied_box(problem, tile)
    images = 1 if problem.flat else tile.images
    return images * rows * columns * tile.chunk_words * (4 // problem.item)


def _distance(problem: StridedProblem, far: float) -> float:
    return 1 + far * max(0, problem.step[1] - 2)
