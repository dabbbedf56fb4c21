"""The expected time of a tile of csrc/kernels/forward/narrow_ffma.cu: a sum of parts, fitted to measurements.

The fit is to 2,762 times of 83 layers on an H200 (docs/kernels/forward/narrow_ffma.md). The standard deviation of the
logarithm is 0.16 to 0.21.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import REGISTERS
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.forward.narrow_ffma_tile import (
    REGISTER_MARGIN,
    Axes,
    Footprint,
    Tile,
    axes,
    columns_of_tiles,
    footprint,
    read_width,
    row_tiles,
    weight_vector,
    window,
)
from tconv_swap.runtime.integers import ceil_div, round_up

# Cycles of a multiprocessor for each instruction of a warp, unless the line says otherwise. Pairs: with few resident
# warps, instructions wait for those before them, which adds the second number times 8 / warps to the first.
MULTIPLY_ADD = (0.185, 0.0138)
SECTOR = (0.0036, 0.903)  # for each sector of 32 bytes of the output that a store touches
STORE = (0.0146, 2.2)
SHARED_SECTOR = 1.22  # how many times more a sector costs that two blocks write
READ_INPUT = 0.646  # for each pass over the banks of shared memory
READ_WEIGHT = 0.458
PARTIAL_SUM = 0.0087  # for each partial sum that is added to a sum
CONVERT = 2.49  # for each element of 16 bits that is converted for shared memory
LOAD_WEIGHT = 22.0
STEP_CYCLES = 744.0  # for each chunk of a tile: barriers and the latency that nothing hides
CYCLES_PER_MICROSECOND = 1755.0
START_MICROSECONDS = 5.07
L2_BYTES_PER_MICROSECOND = 1.47e7
MEMORY_BYTES_PER_MICROSECOND = 1.17e7  # in addition to the loads and stores above, which count the same bytes

# In NCHW, how many times as long a tile takes whose rows of outputs are no longer than a line of memory, with more than
# NEAR_BYTES of input and output, which the L2 does not hold (14 times of an H200: 1.3 to 2.6).
LINE_BYTES, FAR_SHORT_ROWS, NEAR_BYTES = 128, 1.5, 48 << 20

#: The numbers of tiles that a block may compute.
REPEATS = (1, 2, 4, 8, 16, 32)


def microseconds_of_size(
    geometry: Geometry,
    channels_last: bool,
    element_bytes: int,
    multiprocessors: int,
    bank_conflicts: bool = True,
) -> Callable[[Tile, Footprint], tuple[float, int]]:
    """Returns a function of tiles and what their blocks take: it returns the expected time of this size on an H200, and
    the best number of tiles for a block. What tiles have in common is computed once.

    Without ``bank_conflicts`` the time is a lower bound, which takes less time to compute.
    """
    layer, of_layer = of_any_size(geometry), axes(geometry)
    moved_bytes = geometry.elements * element_bytes
    of_memory = START_MICROSECONDS + moved_bytes / MEMORY_BYTES_PER_MICROSECOND
    may_be_scattered = moved_bytes > NEAR_BYTES and not channels_last

    def microseconds(tile: Tile, taken: Footprint) -> tuple[float, int]:
        warps = ceil_div(taken.threads, 32)
        fit = _blocks_per_multiprocessor(taken, warps)
        passes = _bank_passes(layer, tile, channels_last) if bank_conflicts else (1, 1)
        chunks = ceil_div(geometry.in_channels_per_group, tile.chunk)
        reads, multiply_adds, once = _computing(
            of_layer, chunks * tile.chunk, tile, taken, channels_last, element_bytes, warps, passes
        )
        sectors, stores = _storing(geometry, tile, channels_last, element_bytes)
        across, down = columns_of_tiles(geometry, tile), row_tiles(geometry, tile)
        tiles = across * down
        loaded = tiles * _input_bytes(of_layer, chunks, tile, taken, channels_last, element_bytes)
        fixed = of_memory + loaded / L2_BYTES_PER_MICROSECOND
        row_bytes = tile.lanes_w * tile.thread_columns * geometry.stride[1] * element_bytes
        of_sectors, of_stores, of_chunks = warps * sectors, warps * stores, STEP_CYCLES * chunks
        scattered = FAR_SHORT_ROWS if may_be_scattered and row_bytes <= LINE_BYTES else 1.0

        def expected(repeat: int) -> float:
            blocks = across * -(-down // repeat)
            rounds = blocks / (multiprocessors * fit)
            if rounds <= 1:
                uneven = round_up(blocks, multiprocessors) / blocks
            else:
                uneven = 1 + 0.5 * (ceil(rounds) / rounds - 1)
            waiting = 8 / (min(fit, blocks / multiprocessors) * warps)
            per_tile = (reads + multiply_adds * (MULTIPLY_ADD[0] + MULTIPLY_ADD[1] * waiting)) * uneven
            per_tile += of_sectors * (SECTOR[0] + SECTOR[1] * waiting) + of_stores * (
                STORE[0] + STORE[1] * waiting
            )
            cycles = blocks * (repeat * per_tile + once * uneven) / multiprocessors
            cycles += of_chunks * repeat * max(1.0, rounds)
            return scattered * (fixed + cycles / CYCLES_PER_MICROSECOND)

        repeats = [r for r in REPEATS if r == 1 or (r <= down and tiles >= r * multiprocessors)]
        return min((expected(repeat), repeat) for repeat in repeats)

    return microseconds


def _blocks_per_multiprocessor(taken: Footprint, warps: int) -> int:
    needed = max(32, taken.registers - REGISTER_MARGIN)
    by_registers = REGISTERS // (round_up(needed, 8) * 32 * warps)
    by_shared_memory = 227 * 1024 // (taken.shared_bytes + 1024)
    return max(1, min(by_registers, by_shared_memory, 64 // warps, 32))


def _computing(
    of_layer: Axes,
    channels: int,
    tile: Tile,
    taken: Footprint,
    channels_last: bool,
    element_bytes: int,
    warps: int,
    passes: tuple[float, int],
) -> tuple[float, float, float]:
    """Returns (cycles of a tile without its multiply-adds and stores, multiply-adds of a tile, cycles of a block).
    ``channels``: the input channels of all chunks."""
    vertical, horizontal = of_layer
    whole_h, whole_w = tile.phases_h == vertical.stride, tile.phases_w == horizontal.stride
    used = 1.0 if whole_h else vertical.used
    taps_h = vertical.kernel if whole_h else vertical.kernel / vertical.stride
    taps = taps_h * (horizontal.kernel if whole_w else horizontal.taps)
    rows, columns = window(of_layer, tile)
    loaded_taps = (vertical.kernel if whole_h else vertical.taps) * horizontal.kernel
    weight_loads = channels * tile.block_channels * loaded_taps * used / taken.threads

    cycles = channels * rows * columns * used * passes[0] * READ_INPUT
    cycles += channels * taps * ceil_div(tile.thread_channels, weight_vector(tile)) * passes[1] * READ_WEIGHT
    if tile.partial:
        cycles += (
            channels / max(tile.partial, read_width(tile, channels_last)) * tile.sums * used * PARTIAL_SUM
        )
    if element_bytes < 4:
        elements = taken.loads * tile.load
        cycles += channels // tile.chunk * elements * used * CONVERT
    multiply_adds = warps * channels * taps * tile.thread_rows * tile.thread_columns * tile.thread_channels
    if tile.resident:
        return warps * cycles, multiply_adds, warps * weight_loads * LOAD_WEIGHT
    return warps * (cycles + weight_loads * LOAD_WEIGHT), multiply_adds, 0.0


def _input_bytes(
    of_layer: Axes, chunks: int, tile: Tile, taken: Footprint, channels_last: bool, element_bytes: int
) -> float:
    """Returns the bytes that a tile's loads read from the L2 cache, in sectors of 32 bytes."""
    vertical, _ = of_layer
    channels, rows, columns = taken.input_tile
    used = 1.0 if tile.phases_h == vertical.stride else vertical.used
    segments, length = (columns, channels) if channels_last else (channels, columns)
    return chunks * used * tile.block_images * rows * segments * round_up(length * element_bytes, 32)


def _storing(geometry: Geometry, tile: Tile, channels_last: bool, element_bytes: int) -> tuple[float, float]:
    """Returns (sectors of 32 bytes that a warp's stores touch, stores of a thread) of a tile, whose segments and their
    widths csrc/kernels/forward/narrow_ffma_access.cuh defines."""
    stride = geometry.stride[1]
    segment = 1
    whole_pixels = not channels_last or tile.thread_channels == geometry.out_channels
    if tile.phases_w == stride and whole_pixels:
        segment = (tile.thread_columns if tile.adjacent else 1) * stride
    pitch = tile.out_row_multiple
    if channels_last:
        pitch = pitch * geometry.out_channels if segment > 1 else geometry.out_channels_per_group
        segment *= tile.thread_channels
    width = 1
    while 2 * width * element_bytes <= 16 and segment % (2 * width) == 0 and pitch % (2 * width) == 0:
        width *= 2
    # Consecutive lanes whose segments begin `apart` elements from each other.
    apart = segment
    if channels_last and not whole_pixels:
        lanes = min(32, tile.lanes_c)
        if tile.block_channels == geometry.out_channels and tile.phases_w != stride:
            lanes = 32
    else:
        lanes = min(32, stride // tile.phases_w * tile.lanes_w)
        if tile.phases_w != stride:
            apart = tile.thread_channels if channels_last else 1
            if tile.adjacent and tile.thread_columns > 1:
                lanes = min(lanes, stride)
    touched = min(lanes, ceil_div(lanes * apart * element_bytes, 32)) * (32 / lanes)
    stores = tile.sums / width
    sectors = stores * max(touched, width * element_bytes)
    if channels_last and tile.block_channels < geometry.out_channels:
        pieces = (tile.block_channels * element_bytes, geometry.out_channels * element_bytes)
        if any(piece % 32 for piece in pieces):
            sectors *= 1 + SHARED_SECTOR
    return sectors, stores


@lru_cache(maxsize=4096)
def _bank_passes(layer: Geometry, tile: Tile, channels_last: bool) -> tuple[float, int]:
    """Returns the passes over the banks of shared memory in which a warp reads one input channel, and one vector of
    weights. ``layer``: ``of_any_size``."""
    layout = footprint(layer, tile, channels_last).layout
    stride, padding = layer.stride[1], layer.padding[1]
    columns_owned_apart = stride // tile.phases_w
    step = tile.thread_columns if tile.adjacent else 1
    inputs, weights = [], []
    for thread in range(32):
        rest, lane_c = divmod(thread, tile.lanes_c)
        rest, phase = divmod(rest, columns_owned_apart)
        rest, lane_w = divmod(rest, tile.lanes_w)
        rest, slice_c = divmod(rest, tile.slices_c)
        image, lane_h = divmod(rest, tile.lanes_h)
        channel_slice = slice_c * tile.lanes_c + lane_c
        group = 0
        if tile.block_groups > 1:
            group = channel_slice * tile.thread_channels // layer.out_channels_per_group
        shift = (phase + padding) // stride if columns_owned_apart > 1 else 0
        inputs.append(
            image % tile.block_images * layout.image
            + group * layer.in_channels_per_group * layout.channel
            + lane_h * tile.thread_rows * layout.row
            + (lane_w * step + shift) * layout.pixel
        )
        weights.append(channel_slice * layout.slice + (phase * layout.tap if columns_owned_apart > 1 else 0))
    read = read_width(tile, channels_last)
    return _passes(inputs, read) / read, _passes(weights, weight_vector(tile))


def _passes(words: Sequence[int], width: int) -> int:
    """Returns the passes in which 32 threads read ``width`` words each, which begin at ``words``. A pass reads at
    most one word of each of the 32 banks."""
    passes = 0
    for first in range(0, 32, 32 // width):
        banks: dict[int, set[int]] = {}
        for word in set(words[first : first + 32 // width]):
            for w in range(word, word + width):
                banks.setdefault(w % 32, set()).add(w)
        passes += max(len(bank) for bank in banks.values())
    return passes
