"""The registers of threads of csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu. The
functions are pure."""

from __future__ import annotations

from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS
from tconv_swap.kernels.forward.implicit_gemm_layout import PRODUCER_THREADS, Tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    consumer_threads,
    copied_box,
    copy_elements,
    copy_slots,
)
from tconv_swap.runtime.integers import ceil_div

#: Registers of a producer thread of grad_input/implicit_gemm_wgmma.cu that hold no input.
PRODUCER_OVERHEAD = 64
#: The most registers that hold input where addresses take registers as well: with more the compiler spills.
MAX_COPY_REGISTERS = 64
#: Registers of a consumer thread that are no accumulators.
CONSUMER_OVERHEAD = 48


def producer_registers(tile: Tile) -> int:
    """Returns how many registers a producer thread of grad_input/implicit_gemm_wgmma.cu has: those that the consumers
    do not need."""
    multiplying = consumer_threads(tile)
    registers = REGISTERS // tile.blocks_per_multiprocessor
    spare = registers - multiplying * (4 * tile.warp_fragments * tile.m_parts + CONSUMER_OVERHEAD)
    return (
        min(MAX_REGISTERS, registers // (PRODUCER_THREADS + multiplying), max(24, spare // PRODUCER_THREADS))
        // 8
        * 8
    )


def max_copy_registers(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many registers of a producer thread may hold addresses and elements on their way to a stage."""
    plain = problem.flat and len(problem.phase_taps) <= 4
    return min(producer_registers(tile) - PRODUCER_OVERHEAD, 104 if plain else MAX_COPY_REGISTERS)


def phases_ahead(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many phases grad_input/implicit_gemm_wgmma.cu loads ahead: as many as registers hold, and as divide
    the number of phases."""
    phases, room = len(problem.phase_taps), max_copy_registers(problem, tile)
    return max(
        ahead
        for ahead in (1, 2, 3, 4)
        if ahead == 1 or (phases % ahead == 0 and copy_registers(problem, tile, ahead) <= room)
    )


def copy_registers(problem: StridedProblem, tile: Tile, ahead: int) -> int:
    """Returns about how many registers a producer thread needs for its addresses and for the elements of ``ahead``
    phases on their way to a stage."""
    carried = 4
    if not problem.input_channels_last:
        carried *= max(copy_elements(problem, tile), 4 // problem.item)
    return copy_slots(problem, tile) * (4 + ahead * carried)


def tile_registers(problem: StridedProblem, tile: Tile) -> int:
    """Returns about how many registers of a thread of grad_input/implicit_gemm_mma.cu hold accumulators, fragments of
    the input, addresses, and elements on their way to a stage."""
    rows, cols, _ = copied_box(problem, tile)
    copy = copy_elements(problem, tile)
    places, sharers = tile.images * rows * cols, 1
    if problem.input_channels_last:
        places = places * tile.chunk_words * 4 // (copy * problem.item)
        staged = 0
    else:
        places //= copy
        while sharers < tile.chunk_words and 2 * sharers * places <= tile.threads:
            sharers *= 2
        staged = tile.chunk_words // sharers * 2 * ceil_div(copy, 2) if problem.item == 2 else 0
    slots = ceil_div(places, tile.threads // sharers)
    reach = tile.fragment[1] * (tile.warp_rows - 1) + problem.max_shift[0] + 1
    fragments = 2 * tile.warp_images * reach * tile.warp_cols * problem.parts
    return 4 * tile.warp_fragments + fragments + slots * (3 + staged)
