"""How a tile of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu fits the map, the channels and the
device. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator

from tconv_swap.kernels.common.hardware import MAX_BOX
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    box_shape,
    producer_registers,
    shared_bytes,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Registers of a producer thread of forward/implicit_gemm_wgmma.cu, and how many of them may hold offsets and
#: elements that are being copied. A consumer thread gets what the producers leave, and needs 168 for 128 sums.
PRODUCER_REGISTERS = 96
STAGING_REGISTERS = 40
#: Bytes of a multiprocessor's memory that are left to its L1 cache where producers load through registers. With one
#: more stage instead, the kernel was slower (measured on an H200).
L1_BYTES = 6144
#: The most sums that a thread keeps where four producer warps serve eight consumer warps.
MAX_SUMS = 156

#: Images, rows and columns of positions of a tile; images, rows and columns of fragments of one warp.
Shape = tuple[int, int, int, int, int, int]


def fits_device(problem: TileProblem, tile: Tile, device: Device) -> bool:
    """Whether the device has room for the tile's stages and registers, and its boxes are legal."""
    if tile.tma and not tile.dense and max(box_shape(problem, tile)) > MAX_BOX:
        return False
    room = device.shared_memory_per_block + 1024
    if tile.wgmma and not tile.tma:
        if producer_registers(problem, tile) > STAGING_REGISTERS:
            return False
        if tile.nchw_stages == 0:
            room -= L1_BYTES
    return tile.blocks_per_multiprocessor * (shared_bytes(problem, tile) + 1024) <= room


def split_k(problem: TileProblem, tile: Tile, multiprocessors: int) -> int:
    """Returns over how many blocks the sum over input channels of a tile is split: several if there are few tiles."""
    chunks = ceil_div(problem.words, tile.chunk_words)
    blocks = block_count(problem, tile) // tile.splits
    splits = 1
    if 4 * blocks < 3 * multiprocessors:
        room = multiprocessors * tile.blocks_per_multiprocessor
        while splits < 8 and 2 * splits * blocks <= room and chunks >= 16 * splits:
            splits *= 2
    return splits


def power_above(n: int) -> int:
    """Returns the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def tile_fragments(problem: TileProblem, fragments: int, warps: int, max_rows: int) -> Shape:
    """Returns how the fragments of ``warps`` warps (or warpgroups) tile the map: images, rows and columns of
    positions of the tile; images, rows and columns of fragments of one warp, at most ``max_rows`` rows."""
    if problem.flat:
        return 1, 1, 8 * fragments * warps, 1, 1, fragments
    height, width = (power_above(positions) for positions in problem.positions)
    cols = min(8, width)
    rows = min(8 // cols, height)
    images = 8 // (cols * rows)
    high, wide = height // rows, width // cols
    warp_rows = min(high, fragments, max_rows)
    warp_cols = min(wide, fragments // warp_rows)
    warp_images = fragments // (warp_rows * warp_cols)
    across = min(warps, wide // warp_cols)
    down = min(warps // across, high // warp_rows)
    deep = warps // (across * down)
    return (
        images * warp_images * deep,
        rows * warp_rows * down,
        cols * warp_cols * across,
        warp_images,
        warp_rows,
        warp_cols,
    )


def multiplied_fragments(shape: Shape) -> int:
    """Returns the fragments of one multiply of a warpgroup: those of a row if it has one row, else those of a
    column."""
    _, _, _, _, warp_rows, warp_cols = shape
    return warp_cols if warp_rows == 1 else warp_rows


def rows_of_16(height: int) -> int:
    """Returns the rows of a tile that has room for 16: fewer where 16 rows waste a sixteenth of the positions of a map
    of this height or more."""

    def covered(rows: int) -> int:
        return round_up(height, rows)

    rows = min(range(15, 7, -1), key=covered)
    return rows if height > 16 and 16 * covered(rows) <= 15 * covered(16) else 16


def fit_rows(problem: TileProblem, tile: Tile) -> Iterator[Tile]:
    """Yields the tile, and before it the tile with the rows that fit the map (``rows_of_16``)."""
    rows = rows_of_16(problem.positions[0])
    if tile.warp_rows == tile.rows == 16 > rows:
        lower = tile._replace(rows=rows, warp_rows=rows)
        # The registers that are left may hold another column, if the producers give some of theirs.
        phases = problem.phases[0] * problem.phases[1]
        if problem.input_channels_last and tile.warps_m == 8 and rows * 12 * phases <= MAX_SUMS:
            cols = tile.cols // tile.warp_cols * 3
            yield lower._replace(cols=cols, warp_cols=3)
        yield lower
    yield tile
