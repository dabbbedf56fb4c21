"""The expected time of the tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu. The functions are pure.

The constants are fitted to 4,982 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.08 to 0.12 (docs/selection.md).
"""

from __future__ import annotations

from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import ROW_BYTES, TmaTile, box_pixels
from tconv_swap.kernels.grad_input.implicit_gemm_tma_tile import chunks, phase_count, work_count
from tconv_swap.runtime.integers import ceil_div

#: Clocks of the launch; of a byte of grad_output and grad_input, of the weights, and of partial sums; of a tile.
LAUNCH_CLOCKS, BYTE_CLOCKS, WEIGHT_BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS = 14500, 0.00029, 0.0002, 0.001
TILE_CLOCKS = 700
#: Clocks of a multiply of 64 positions by 256 channels, for one tap of one chunk.
MULTIPLY_CLOCKS = 460
#: Clocks of a byte of a stage's input, and how many times as long it takes whose pixels are no whole sectors of memory;
#: of a byte of a stage's weights, with one consumer and with two, which load at the same time; and how
#: many times as long weights of more than LARGE_WEIGHTS bytes take, which the L2 has not always.
INPUT_BYTE_CLOCKS, RAGGED_PIXELS = 0.004, 13.0
STAGE_WEIGHT_BYTE_CLOCKS, STAGE_WEIGHT_BYTE_CLOCKS_TWO = 0.017, 0.0241
LARGE_WEIGHTS, FAR_WEIGHTS = 16 << 20, 1.4
#: Clocks of a byte that a tile stores in NCHW and in channels_last. Of two consumers one multiplies while the other
#: stores (ping-pong): in channels_last stores take no time then, in NCHW this share.
STORED_BYTE_CLOCKS, STORED_BYTE_CLOCKS_NHWC, PING_PONG = 0.19, 0.0256, 0.6


def tile_clocks(problem: StridedProblem, tile: TmaTile, of_several: bool = True) -> float:
    """Returns the expected clocks of a tile. ``of_several``: it is not the only one of its block."""
    geometry = problem.geometry
    steps = ceil_div(chunks(problem), tile.splits)
    multiply = MULTIPLY_CLOCKS * geometry.taps * tile.positions / 64 * tile.channels / 256
    takes_turns = tile.consumers > 1 and of_several
    weight_byte = STAGE_WEIGHT_BYTE_CLOCKS_TWO if takes_turns else STAGE_WEIGHT_BYTE_CLOCKS
    if _weight_bytes(problem) > LARGE_WEIGHTS:
        weight_byte *= FAR_WEIGHTS
    ragged = geometry.in_channels * problem.item % SECTOR_BYTES
    input_byte = INPUT_BYTE_CLOCKS * (RAGGED_PIXELS if ragged else 1.0)
    pixels = phase_count(problem, tile) * box_pixels(problem, tile)
    load = (weight_byte * geometry.taps * tile.channels + input_byte * pixels) * ROW_BYTES
    item = 4 if tile.splits > 1 else problem.item
    stored = tile.positions * min(tile.channels, geometry.out_channels_per_group) * item
    if problem.output_channels_last:
        store = 0.0 if takes_turns else STORED_BYTE_CLOCKS_NHWC
    else:
        store = STORED_BYTE_CLOCKS * (PING_PONG if takes_turns else 1.0)
    return TILE_CLOCKS + steps * max(multiply, load) + store * stored


def clocks(problem: StridedProblem, tile: TmaTile, multiprocessors: int) -> float:
    """Returns the expected clocks of all launches but those that copy tensors to channels_last."""
    rounds = ceil_div(work_count(problem, tile), multiprocessors)
    partial = 4 * problem.grad_input_elements * tile.splits if tile.splits > 1 else 0
    return (
        LAUNCH_CLOCKS
        + rounds * tile_clocks(problem, tile, of_several=rounds > 1)
        + BYTE_CLOCKS * problem.moved_bytes
        + WEIGHT_BYTE_CLOCKS * _weight_bytes(problem)
        + PARTIAL_BYTE_CLOCKS * partial
    )


def _weight_bytes(problem: StridedProblem) -> int:
    geometry = problem.geometry
    return geometry.in_channels_per_group * geometry.out_channels * geometry.taps * problem.item
