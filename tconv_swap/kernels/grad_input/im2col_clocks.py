"""The expected time of the tiles of csrc/kernels/grad_input/im2col.cu (grad_input/im2col_tile.py), and the conflicts of
their loads from shared memory. The functions are pure.

The constants are fitted to 2,335 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.13 (docs/selection.md). What blocks of fewer than 64 channels take less is near 16 times of an H200.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import gcd

from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.grad_input.im2col_tile import (
    STEP_WORDS,
    Im2colKernel,
    Im2colShape,
    alignment_columns,
    box_h,
    halves,
    input_bytes,
    offset,
    rounds,
    word,
)
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.gradients.grad_output_tile import max_of_a_bank

#: Clocks of the launch; of a byte of grad_output and grad_input; further ones of a byte of grad_input whose rows are no
#: whole sectors of memory, and of an element of rows of an odd number of columns; of a byte of the weights, and of
#: partial sums.
LAUNCH_CLOCKS = 13000
BYTE_CLOCKS, RAGGED_BYTE_CLOCKS, ODD_ROW_CLOCKS = 0.00018, 0.0004, 0.0018
WEIGHT_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 0.0006, 0.0015
#: Clocks of a tile beside its steps, and further ones, all of them for this many channels or more; of an element that
#: it stores with 4 bytes, and with 2 where neighbouring positions are not paired (in NCHW).
TILE_CLOCKS, CHANNELS_CLOCKS, MANY_CHANNELS = 1000, 2500, 64
STORE_CLOCKS, UNPAIRED_STORE_CLOCKS = 0.045, 0.56
#: Clocks that a row of a box takes for each line of shared memory (of LINE_BYTES) that it touches, and for each byte;
#: of a byte of the weights in a stage.
LINE_BYTES, LINE_CLOCKS, ROW_BYTE_CLOCKS, STAGE_WEIGHT_BYTE_CLOCKS = 128, 3.8, 0.029, 0.017
#: Clocks of a multiply over the multiplier's rate, of a load from shared memory for each pass over its banks, and of
#: four channels of the weights that a multiply reads.
MULTIPLY_CLOCKS, LOAD_CLOCKS, OPERAND_CLOCKS = 0.93, 0.76, 1.34


def conflicts(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> float:
    """Returns how many passes over the banks of shared memory a load of the im2col operand takes, on average."""
    size, channel = word(problem), box_h(problem, shape) * shape.box_w

    def element(k: int) -> int:
        channels, rows, cols = offset(problem, k)
        return channels * channel + rows * shape.box_w + cols

    quads = 2 * kernel.steps
    # Words that are equally far apart have equal conflicts.
    words = Counter(
        tuple(element((4 * quad + t) * size) - element(4 * quad * size) for t in range(4))
        for quad in range(0, quads, max(1, quads // 4))
    )
    # Neither the order of loads nor the word at which one begins matters, so equal ones are counted once.
    loads = Counter(_loads(problem, kernel, shape))
    passes = sum(
        count * equal * max_of_a_bank({(first + at) // size for first in lanes for at in quad})
        for lanes, count in loads.items()
        for quad, equal in words.items()
    )
    return passes / (loads.total() * words.total())


def _loads(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> Iterator[tuple[int, ...]]:
    """Yields the first element that each lane reads in some of the loads, from the word of the first lane."""
    (step_h, step_w), size = problem.step, word(problem)
    image = kernel.stage_channels * box_h(problem, shape) * shape.box_w
    before = alignment_columns(problem, shape.wide)
    rows = range(before, before + shape.rows * step_h * shape.box_w, step_h * shape.box_w)
    cols = range(0, shape.cols * step_w, step_w)
    first = [one * image + row + col for one in range(shape.images) for row in rows for col in cols]
    first += [before] * (kernel.positions - len(first))
    for warp in range(0, len(first), 3 * 16):
        lanes = first[warp : warp + 16]
        for half in (lanes[::2], lanes[1::2]) if shape.paired else (lanes[:8], lanes[8:]):
            begin = half[0] // size * size
            yield tuple(one - begin for one in half)


def step_clocks(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, passes: float) -> float:
    """Returns the expected clocks of a step of k, which are the same for all sizes of a layer. ``passes``: over the
    banks of shared memory, for each load."""
    multiplies = kernel.multiplies
    row = shape.box_w * problem.item
    rows = input_bytes(problem, kernel, shape) / row / kernel.steps
    weights = 4 * STEP_WORDS * kernel.channels
    # Rows follow one another in shared memory without gaps, so a row may begin anywhere in a line.
    lines = (row + LINE_BYTES - gcd(row, LINE_BYTES)) / LINE_BYTES
    load = STAGE_WEIGHT_BYTE_CLOCKS * weights + rows * max(LINE_CLOCKS * lines, ROW_BYTE_CLOCKS * row)
    loads = 16 * passes * (2 if halves(problem) else 1)
    operands = multiplies * (LOAD_CLOCKS * loads + OPERAND_CLOCKS * kernel.channels / 4)
    return max(MULTIPLY_CLOCKS * multiplies * kernel.channels / 2, operands, load)


def step_count(problem: StridedProblem, kernel: Im2colKernel, splits: int) -> float:
    """Returns how many steps of k a work tile has."""
    return rounds(problem, kernel) * kernel.round_stages * kernel.steps / splits


def store_clocks(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> float:
    """Returns the expected clocks that a work tile takes beside its steps, which are the same for all sizes."""
    if kernel.partial or problem.item == 4:
        of_element = STORE_CLOCKS
    else:
        of_element = 0.0 if shape.paired or problem.output_channels_last else UNPAIRED_STORE_CLOCKS
    of_channels = CHANNELS_CLOCKS * min(1.0, kernel.channels / MANY_CHANNELS)
    return TILE_CLOCKS + of_channels + of_element * kernel.positions * kernel.channels


def clocks(problem: StridedProblem, of_tiles: float, splits: int) -> float:
    """Returns the expected clocks of all launches but one that copies grad_output. ``of_tiles``: those of the
    tiles."""
    g, outputs = problem.geometry, problem.grad_input_elements
    row = g.out_channels if problem.output_channels_last else problem.positions[1]
    ragged = row * problem.item % SECTOR_BYTES
    weights = g.in_channels_per_group * g.out_channels * g.taps
    return (
        LAUNCH_CLOCKS
        + of_tiles
        + BYTE_CLOCKS * problem.moved_bytes
        + (RAGGED_BYTE_CLOCKS * outputs * problem.item if ragged else 0)
        + (ODD_ROW_CLOCKS * outputs if row % 2 else 0)
        + WEIGHT_BYTE_CLOCKS * weights * problem.item
        + (PARTIAL_BYTE_CLOCKS * 4 * outputs * splits if splits > 1 else 0)
    )
