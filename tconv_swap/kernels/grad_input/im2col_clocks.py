"""The expected time of the tiles of csrc/kernels/grad_input/im2col.cu (grad_input/im2col_tile.py), and the conflicts of
their loads from shared memory. The functions are pure."""

from __future__ import annotations

from itertools import product
from math import gcd

from tconv_swap.kernels.grad_input.im2col_tile import (
    STEP_WORDS,
    Im2colKernel,
    Im2colShape,
    alignment_columns,
    box_h,
    halves,
    input_bytes,
    offset,
    regular,
    round_stages,
    rounds,
    steps,
    word,
)
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.gradients.grad_output_tile import max_of_a_bank

#: Bytes that a multiprocessor loads from the L2 in a clock; multiply-adds in a clock for each element of a word; bytes
#: of a line of shared memory, clocks that a row of a box takes for each line that it touches, and its fewest clocks
#: (fitted, docs/kernels/grad_input/im2col.md); bytes that a multiprocessor stores in a clock, and those of 16-bit
#: positions that are not paired, which are half a sector each time (fitted); bytes that the memory moves; clocks that a
#: tile takes beside its multiplies, and that a launch takes.
LOAD_BYTES = 36
MULTIPLY_MACS = 1024
LINE_BYTES, LINE_CLOCKS, ROW_CLOCKS = 128, 3.3, 4
STORE_BYTES, STORE_BYTES_UNPAIRED = 14, 4
MEMORY_BYTES = 2300
TILE_CLOCKS = 1500
LAUNCH_CLOCKS = 5000
#: Measured over expected clocks of the tiles; clocks of a byte of grad_output and grad_input where the memory takes
#: longer than the tiles, of a byte that is read or written to pad grad_output's rows, and of the launch (fitted to 280
#: times of an H100, in clocks of 1.7 GHz).
MEASURED, BYTE_CLOCKS, PADDED_BYTE_CLOCKS, STAGE_CLOCKS = 0.88, 0.0007, 0.0009, 10000


def conflicts(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> float:
    """Returns how many passes over the banks of shared memory a load of the im2col operand takes, on average."""
    width, size, (step_h, step_w) = shape.cols, word(problem), problem.step
    channel = box_h(problem, shape) * shape.box_w
    existing = shape.images * shape.rows * width
    before = alignment_columns(problem, shape.wide)

    def first_element(position: int) -> int:
        if position >= existing:
            return before
        image = position // (width * shape.rows) * kernel.stage_channels * channel
        return (
            before + image + position // width % shape.rows * step_h * shape.box_w + position % width * step_w
        )

    def element(k: int) -> int:
        channels, rows, cols = offset(problem, k)
        return channels * channel + rows * shape.box_w + cols

    passes = []
    quads = 1 if regular(problem, kernel.stage_channels) else 2 * steps(problem, kernel)
    read = range(0, quads, max(1, quads // 4))
    words = [[element((4 * quad + t) * size) for t in range(4)] for quad in read]
    for warp, half in product(range(0, 4 * kernel.multiplies, 3), range(2)):
        lanes = range(half, 16, 2) if shape.paired else range(8 * half, 8 * half + 8)
        positions = [first_element(warp * 16 + lane) for lane in lanes]
        for quad in words:
            passes.append(max_of_a_bank({(first + at) // size for first in positions for at in quad}))
    return sum(passes) / len(passes)


def step_clocks(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, passes: float) -> float:
    """Returns the expected clocks of a step of k, which are the same for all sizes of a layer. ``passes``: over the
    banks of shared memory, for each load."""
    multiplies = kernel.multiplies
    row = shape.box_w * problem.item
    rows = input_bytes(problem, kernel, shape) / row / steps(problem, kernel)
    weights = 4 * STEP_WORDS * kernel.channels
    # Rows follow one another in shared memory without gaps, so a row may begin anywhere in a line.
    lines = (row + LINE_BYTES - gcd(row, LINE_BYTES)) / LINE_BYTES
    load = weights / LOAD_BYTES + rows * max(ROW_CLOCKS, LINE_CLOCKS * lines, row / LOAD_BYTES)
    loads = 16 * passes * (2 if halves(problem) else 1)
    memory = multiplies * (loads + kernel.channels / 4) + (weights + rows * row) / 128
    return max(1.05 * multiplies * kernel.channels / 2, memory, load)


def step_count(problem: StridedProblem, kernel: Im2colKernel, splits: int) -> float:
    """Returns how many steps of k a work tile has."""
    stage_steps = steps(problem, kernel)
    return rounds(problem, kernel) * round_stages(stage_steps) * stage_steps / splits


def store_clocks(problem: StridedProblem, kernel: Im2colKernel, shape: Im2colShape) -> float:
    """Returns the expected clocks that a work tile takes beside its steps, which are the same for all sizes."""
    item = 4 if kernel.partial else problem.item
    store_bytes = STORE_BYTES if shape.paired or item == 4 else STORE_BYTES_UNPAIRED
    return kernel.positions * kernel.channels * item / store_bytes + TILE_CLOCKS


def stage_clocks(problem: StridedProblem, of_tiles: float, padded_bytes: int) -> float:
    """Returns the expected clocks of the stage. ``of_tiles``: the expected clocks of its tiles and of adding up their
    partial sums. ``padded_bytes``: of a copy of grad_output with longer rows, if there is one."""
    memory = BYTE_CLOCKS * problem.moved_bytes
    return STAGE_CLOCKS + max(MEASURED * of_tiles, memory) + PADDED_BYTE_CLOCKS * 2 * padded_bytes


def reduce_clocks(problem: StridedProblem, splits: int) -> float:
    """Returns the expected clocks that adding up the partial sums takes."""
    if splits == 1:
        return 0.0
    return LAUNCH_CLOCKS + 2 * 4 * problem.grad_input_elements * splits / MEMORY_BYTES
