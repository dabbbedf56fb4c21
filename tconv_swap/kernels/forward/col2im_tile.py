"""The tile of csrc/kernels/forward/col2im.cu, and the shared memory and registers that it takes. Pure functions of
data.

The layer is computed in two steps: a product of every pixel with all weights, and col2im, which adds up the
products of each output. A position stands for STRIDE_H x STRIDE_W outputs, one of each phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS, RESERVED_BYTES
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: The most row tiles of an image.
MAX_ROW_TILES = 64
#: Pixels that a warp multiplies, the rows of its part of a wgmma.
WARP_PIXELS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes. The comment at the top of csrc/kernels/forward/col2im.cu explains each field."""

    panel_pixels: int
    step_panels: int
    step_rows: int
    buffers: int
    stages: int
    blocks_per_multiprocessor: int

    @property
    def columns(self) -> int:
        """The pixels of a row of a step."""
        return self.panel_pixels * self.step_panels

    @property
    def warps(self) -> int:
        """The warps of a block."""
        return self.step_rows * self.columns // WARP_PIXELS

    def __str__(self) -> str:
        return f"{self.step_rows}x{self.columns} pixels at a time"


def products(geometry: Geometry) -> int:
    """Returns the products of one input pixel: one for each tap and output channel."""
    return geometry.out_channels * geometry.taps


def product_columns(geometry: Geometry) -> int:
    """Returns the columns of the product of matrices, padded as wgmma requires."""
    return max(16, round_up(products(geometry), 8))


def parts(problem: Problem) -> int:
    """Returns the number of 16-bit parts as which an element is multiplied."""
    return 1 if problem.dtype.itemsize == 2 else 3


def _reach(geometry: Geometry, axis: int) -> int:
    """Returns the positions that one input pixel contributes to along an axis."""
    extent = (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1
    return ceil_div(extent, geometry.stride[axis])


def position_rows(geometry: Geometry) -> int:
    """Returns the rows of positions that have outputs."""
    stride, padding = geometry.stride[0], geometry.padding[0]
    return (geometry.out_height - 1 + padding) // stride + 1 - padding // stride


def column_tiles(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Returns (groups of neighbouring outputs in a column tile, column tiles of a row), or (0, 0) where a column
    tile is narrower than its halo."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    stride, padding = geometry.stride[1], geometry.padding[1]
    positions = ceil_div(4, item * stride)
    groups = ceil_div(geometry.out_width, stride * positions)
    if geometry.width <= tile.columns:
        return groups, 1
    reach, shift = _reach(geometry, 1), padding // stride
    step = positions if problem.channels_last else 16 // item
    left_pad = (shift - reach + 1) % step
    in_tile = (tile.columns - left_pad - reach + shift - (padding - 1) // stride) // step * step // positions
    return (in_tile, ceil_div(groups, in_tile)) if in_tile > 0 else (0, 0)


@lru_cache(maxsize=4096)
def _max_groups_of_layer(layer: Problem, tile: Tile) -> int:
    geometry, item = layer.geometry, layer.dtype.itemsize
    step = geometry.stride[1] * ceil_div(4, item * geometry.stride[1])
    whole = geometry._replace(width=tile.columns).out_width
    long = layer._replace(geometry=geometry._replace(width=2 * tile.columns))
    return max(ceil_div(whole, step), column_tiles(long, tile)[0], 1)


def max_groups(problem: Problem, tile: Tile) -> int:
    """Returns the most groups of neighbouring outputs in a column tile, over all sizes of the layer."""
    return _max_groups_of_layer(layer_of(problem), tile)


def row_tiles(problem: Problem, tile: Tile, device: Device) -> int:
    """Returns the row tiles of an image, which balance the work of the blocks: those with the fewest steps of the
    busiest block, where all blocks are resident and a row tile also computes the rows that its first outputs need."""
    images = problem.geometry.batch * column_tiles(problem, tile)[1]
    blocks = device.multiprocessors * tile.blocks_per_multiprocessor
    found, fewest = 1, INT32_LIMIT
    rows = _rows_of_row_tiles(problem.geometry)
    least = max(1, ceil_div(rows[-1], tile.step_rows))
    for count, in_tile in enumerate(rows, 1):
        rounds = -(-images * count // blocks)
        # Of more row tiles none has fewer rows than the last, nor fewer rounds.
        if rounds * least >= fewest:
            break
        steps = rounds * max(1, -(-in_tile // tile.step_rows))
        if steps < fewest:
            found, fewest = count, steps
    return found


@lru_cache(maxsize=256)
def _rows_of_row_tiles(geometry: Geometry) -> tuple[int, ...]:
    """Returns ``input_rows`` of each number of row tiles that an image may have."""
    most = max(1, min(MAX_ROW_TILES, position_rows(geometry) // 4))
    return tuple(input_rows(geometry, count) for count in range(1, most + 1))


def input_rows(geometry: Geometry, row_tiles: int) -> int:
    """Returns the rows of the input that one of so many row tiles of an image multiplies."""
    return min(geometry.height, ceil_div(position_rows(geometry), row_tiles) + _reach(geometry, 0) - 1)


def output_rounds(problem: Problem, tile: Tile) -> int:
    """Returns the rounds in which the threads of a block add up the outputs of a step."""
    geometry = problem.geometry
    groups, _ = column_tiles(problem, tile)
    items = groups * geometry.stride[0] * (1 if problem.channels_last else geometry.out_channels)
    return ceil_div(items, 32 * tile.warps) * tile.step_rows


def box(problem: Problem, tile: Tile) -> tuple[int, int]:
    """Returns (bytes of a line of a box, elements of all channels of a pixel), as forward/col2im_input.cuh has them."""
    item = problem.dtype.itemsize
    k = round_up(problem.geometry.in_channels, 16)
    if not problem.channels_last:
        return tile.panel_pixels * item, k
    line = next((power for power in (32, 64) if k * item <= power), 128)
    return line, round_up(k * item, line) // item


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Returns the bytes of shared memory of a block, as csrc/kernels/forward/col2im.cu lays it out; the kernel
    asserts that both agree."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    m, k = products(geometry), round_up(geometry.in_channels, 16)
    stage = box(problem, tile)[1] * tile.columns * tile.step_rows * item
    weights = parts(problem) * k * product_columns(geometry) * 2
    stride, padding = geometry.stride[1], geometry.padding[1]
    left = max(0, round_up(_reach(geometry, 1) - 1 - padding // stride, 2))
    last = max_groups(problem, tile) * ceil_div(4, item * stride) + (padding - 1) // stride
    right = max(0, last - tile.columns + 1)
    pitch = round_up(left + tile.columns + right - 4, 16) + 4
    return tile.stages * (stage + 8) + weights + tile.buffers * tile.step_rows * m * pitch * 4


def _registers(problem: Problem, tile: Tile, partial_sums: int = 1) -> int:
    """Estimates the registers that a thread needs so that nothing spills: never too few for a measured kernel."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    columns = product_columns(geometry) // 2
    channels = 1 if problem.channels_last else geometry.out_channels
    items = max_groups(problem, tile) * geometry.stride[0] * channels
    segment = geometry.stride[1] * ceil_div(4, item * geometry.stride[1]) * geometry.out_channels // channels
    carried = ceil_div(items, 32 * tile.warps) * (_reach(geometry, 0) - 1) * segment
    if parts(problem) == 1:
        return 44 + carried + segment + columns + ceil_div(geometry.in_channels, 16) * 4
    return 72 + carried + segment + (1 + partial_sums) * columns


def partial_sums(problem: Problem, tile: Tile) -> int:
    """Returns the partial sums of a thread: two where it has registers for both."""
    threads = tile.blocks_per_multiprocessor * tile.warps * 32
    room = min(MAX_REGISTERS, REGISTERS // threads)
    return 2 if parts(problem) > 1 and _registers(problem, tile, 2) <= room else 1


def fits(problem: Problem, tile: Tile, device: Device) -> bool:
    """Whether the kernel computes the problem with this tile, and the device has room for its blocks."""
    return column_tiles(problem, tile)[1] > 0 and fits_device(layer_of(problem), tile, device)


def layer_of(problem: Problem) -> Problem:
    """Returns a problem that is the same for all sizes of a layer."""
    return problem._replace(geometry=of_any_size(problem.geometry))


@lru_cache(maxsize=4096)
def fits_device(layer: Problem, tile: Tile, device: Device) -> bool:
    """Whether the device has room for the tile's blocks, whatever the size of the layer."""
    if tile.warps % 4 or not 4 <= tile.warps <= 16:
        return False
    blocks = tile.blocks_per_multiprocessor
    if blocks * tile.warps * 32 * _registers(layer, tile) > REGISTERS:
        return False
    shared = shared_bytes(layer, tile) + RESERVED_BYTES
    return blocks * shared <= device.shared_memory_per_block + RESERVED_BYTES
