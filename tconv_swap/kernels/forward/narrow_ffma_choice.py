"""The tiles of csrc/kernels/forward/narrow_ffma.cu that a layer has, whatever its sizes, and which of them computes one
size. Pure functions of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd, log2, sqrt

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS, RESIDENT_THREADS
from tconv_swap.kernels.common.layer_sizes import of_any_size, out_row_multiple
from tconv_swap.kernels.forward.narrow_ffma_cost import microseconds_of_size
from tconv_swap.kernels.forward.narrow_ffma_tile import (
    MAX_SUMS,
    MAX_THREADS,
    MIN_SUMS,
    UNROLLED_MULTIPLY_ADDS,
    Footprint,
    Tile,
    axes,
    columns_of_tiles,
    footprint_of,
    loading,
    registers,
    row_tiles,
    threads,
    unrolled,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Batch, rows and columns of the nominal maps, and of those of layers whose maps have one row.
SIZES = ((16, 64, 64), (128, 8, 8))
SIZES_OF_ONE_ROW = ((8, 1, 512), (64, 1, 64))
#: How many of the best tiles for each nominal map are candidates of a layer.
COMPETITORS = 8
#: How many tiles, the best by a lower bound of their time, are ranked by their expected time.
FINALISTS = 40
#: The most bytes of a block's shared memory. With more, too few blocks fit a multiprocessor to hide each other's
#: waits.
SHARED_BYTES = 72 * 1024
#: The fewest bytes of a row (NCHW) and of a pixel (channels_last) of the output that a tile writes, unless it writes
#: whole ones.
ROW_BYTES = 256
PIXEL_BYTES = 64
#: A block of fewer threads computes several images.
SMALL_BLOCK = 32
#: The most loads of a thread for a chunk, because each takes registers; the second limit where no tile is within the
#: first.
MAX_LOADS = (10, 28)
#: A sum of at most so many terms is equally accurate in any order.
SHORT_SUM = 8


def terms(geometry: Geometry) -> int:
    """Returns the most products that are summed for an output."""
    vertical, horizontal = axes(geometry)
    return vertical.taps * horizontal.taps * geometry.in_channels_per_group


def computes(problem: Problem, tile: Tile) -> bool:
    """Returns whether the tile's kernel computes this size."""
    geometry = problem.geometry
    if not problem.channels_last and geometry.width % tile.load:
        return False
    if geometry.out_width % tile.out_row_multiple:
        return False
    return columns_of_tiles(geometry, tile) * row_tiles(geometry, tile) < INT32_LIMIT // 2


def pool_of(layer: Problem, device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that ``layer``, which ``of_any_size`` made, may have: the best for each nominal map, for rows
    of any length and for rows of a multiple of 16 bytes."""
    found: dict[Tile, None] = {}
    for batch, height, width in SIZES_OF_ONE_ROW if layer.geometry.one_row else SIZES:
        sized = layer._replace(geometry=layer.geometry._replace(batch=batch, height=height, width=width))
        if min(sized.geometry.out_height, sized.geometry.out_width) > 0:
            for multiples in _row_multiples(layer):
                found.update(dict.fromkeys(rank(sized, device, multiples)[:COMPETITORS]))
    return tuple(found)


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles for this size, for every multiple that its rows have."""
    geometry = problem.geometry
    return [
        tile
        for multiples in _row_multiples(problem._replace(geometry=of_any_size(geometry)))
        if geometry.width % multiples[0] == 0 == geometry.out_width % multiples[1]
        for tile in rank(problem, device, multiples)
    ]


def _row_multiples(layer: Problem) -> tuple[tuple[int, int], ...]:
    """Returns pairs of numbers that divide the rows of the input (in NCHW) and of the output: a pair for all
    sizes, and one for some sizes that are faster."""
    limit = 16 // layer.dtype.itemsize
    if layer.channels_last:
        limit //= gcd(limit, layer.geometry.out_channels)  # which divide the rows, too
    of_any, of_some = (out_row_multiple(layer.geometry, multiple, limit) for multiple in (1, limit))
    if layer.channels_last:
        return tuple(dict.fromkeys(((1, of_any), (1, of_some))))
    return ((1, of_any), (limit, of_some))


def rank(problem: Problem, device: Device, multiples: tuple[int, int]) -> list[Tile]:
    """Returns the best tiles for this size if its rows are of such multiples, the one that is expected to be the
    fastest first; none where no tile is legal."""
    item, channels_last = problem.dtype.itemsize, problem.channels_last
    asynchronous = problem.dtype == torch.float32 and device.compute_capability >= 80
    limit = min(SHARED_BYTES, device.shared_memory_per_block)
    expected, least = (expected_time(problem, device, bank_conflicts) for bank_conflicts in (True, False))
    for max_loads in MAX_LOADS:
        tiles = candidates(problem.geometry, channels_last, item, asynchronous, limit, max_loads, multiples)
        ranked = sorted(tiles, key=lambda one: least(*one)[0])
        if ranked:
            finalists = [(_with_min_blocks(*one), one[1]) for one in ranked[:FINALISTS]]
            finalists.sort(key=lambda one: expected(*one)[0])
            return [tile for tile, _ in finalists]
    return []


def _with_min_blocks(tile: Tile, taken: Footprint) -> Tile:
    """Returns the tile with the blocks of a multiprocessor that its registers and threads allow."""
    blocks = min(REGISTERS // (taken.registers * taken.threads), RESIDENT_THREADS // taken.threads)
    return tile._replace(min_blocks=max(1, blocks))


def expected_time(
    problem: Problem, device: Device, bank_conflicts: bool = True
) -> Callable[[Tile, Footprint], tuple[float, int]]:
    """Returns ``microseconds_of_size`` of a problem."""
    return microseconds_of_size(
        problem.geometry,
        problem.channels_last,
        problem.dtype.itemsize,
        device.multiprocessors,
        bank_conflicts,
    )


def candidates(
    geometry: Geometry,
    channels_last: bool,
    element_bytes: int,
    asynchronous: bool,
    shared_limit: int,
    max_loads: int,
    multiples: tuple[int, int],
) -> Iterator[tuple[Tile, Footprint]]:
    """Yields the tiles that are worth comparing, for rows of such multiples, without their ``min_blocks``, and what
    their blocks take."""
    vertical, horizontal = axes(geometry)
    # 16-bit outputs round away what the order of a sum in float32 changes.
    partial = _partial(geometry) if element_bytes == 4 else 0
    for phases_h, phases_w in _phases(geometry):
        for thread_channels, lanes_c, slices_c, block_groups in _channels(
            geometry, channels_last, element_bytes
        ):
            for rows, columns, adjacent in _thread_positions(geometry, phases_h, phases_w, thread_channels):
                lanes = lanes_c * slices_c * (horizontal.stride // phases_w)
                for lanes_w in _powers(horizontal.positions, columns):
                    written = lanes_w * columns * horizontal.stride * (1 if not channels_last else lanes_c)
                    if written * element_bytes < ROW_BYTES and lanes_w * columns < horizontal.positions:
                        continue
                    for block in (128, 256):
                        lanes_h = min(block // (lanes * lanes_w), ceil_div(vertical.positions, rows))
                        if lanes_h == 0:
                            continue
                        shape = Tile(
                            phases_h=phases_h,
                            phases_w=phases_w,
                            thread_rows=rows,
                            thread_columns=columns,
                            thread_channels=thread_channels,
                            adjacent=adjacent,
                            lanes_c=lanes_c,
                            lanes_w=lanes_w,
                            slices_c=slices_c,
                            lanes_h=lanes_h,
                            block_images=1,
                            block_groups=block_groups,
                            chunk=1,
                            load=1,
                            resident=True,
                            async_=asynchronous,
                            partial=partial,
                            min_blocks=1,
                            out_row_multiple=multiples[1],
                        )
                        yield from _staged(
                            geometry,
                            shape,
                            channels_last,
                            element_bytes,
                            shared_limit,
                            max_loads,
                            multiples[0],
                        )


def _partial(geometry: Geometry) -> int:
    """Returns the input channels of a partial sum, so that a partial sum has about as many terms as there are
    partial sums; 0: all terms are summed at one level."""
    products, channels = terms(geometry), geometry.in_channels_per_group
    if channels == 1 or products <= SHORT_SUM:
        return 0
    return 1 << max(0, round(log2(channels / sqrt(products))))


def _phases(geometry: Geometry) -> list[tuple[int, int]]:
    """Returns the rows and columns of phases that a thread may compute: all of a small stride, or one."""
    options = [sorted({1, stride}) if stride <= 4 else [1] for stride in geometry.stride]
    return [(h, w) for h in options[0] for w in options[1]]


def _channels(geometry: Geometry, channels_last: bool, element_bytes: int) -> list[tuple[int, int, int, int]]:
    """Returns choices of (thread_channels, lanes_c, slices_c, block_groups): the output channels of a thread and a
    block."""
    channels, groups = geometry.out_channels_per_group, geometry.groups
    widths = sorted({min(channels, width) for width in (4, 8, 16)} | ({7} if channels % 7 == 0 else set()))
    options = []
    if not channels_last:
        for width in widths:
            slices = ceil_div(channels, width)
            options += [(width, 1, count, 1) for count in sorted({1, min(2, slices), min(4, slices)})]
        return options
    if channels * element_bytes < PIXEL_BYTES and groups > 1:
        # A block computes whole groups side by side, until its part of a pixel is long enough.
        enough = ceil_div(PIXEL_BYTES, channels * element_bytes)
        counts = [count for count in range(enough, groups) if groups % count == 0][:3]
        for count in counts or [groups]:
            for width in sorted({1, channels}):
                lanes = count * channels // width
                if lanes <= 128:
                    options.append((width, lanes, 1, count))
        if options:
            return options
    for width in widths:
        lanes = ceil_div(channels, width)
        options += [(width, count, 1, 1) for count in sorted({lanes, ceil_div(lanes, 2), 1})]
    return [option for option in options if option[1] <= 64]


def _thread_positions(
    geometry: Geometry, phases_h: int, phases_w: int, channels: int
) -> Iterator[tuple[int, int, bool]]:
    """Yields (thread_rows, thread_columns, adjacent): the positions of a thread."""
    for rows in (1, 2, 4, 8):
        for columns in (1, 2, 4, 8, 16):
            sums = phases_h * phases_w * rows * columns * channels
            if sums > MAX_SUMS or sums < MIN_SUMS:
                continue
            yield rows, columns, False
            if 1 < columns <= 4 and phases_w == geometry.stride[1]:
                yield rows, columns, True


def _powers(positions: int, columns: int) -> Iterator[int]:
    """Yields numbers of threads side by side: powers of two, up to the first that covers a row of positions."""
    lanes = 1
    while lanes <= 128:
        yield lanes
        if lanes * columns >= positions:
            return
        lanes *= 2


def _staged(
    geometry: Geometry,
    shape: Tile,
    channels_last: bool,
    element_bytes: int,
    shared_limit: int,
    max_loads: int,
    row_multiple: int,
) -> Iterator[tuple[Tile, Footprint]]:
    """Yields the tile with at most two of the largest chunks that fit, and the widest loads."""
    channels, of_layer = geometry.in_channels_per_group, axes(geometry)
    block = threads(geometry, shape)
    if block > MAX_THREADS:
        return
    if block < SMALL_BLOCK and row_tiles(geometry, shape) == geometry.batch:
        # A block computes several small images.
        shape = shape._replace(block_images=min(SMALL_BLOCK // block, geometry.batch))
        block = threads(geometry, shape)
    chunks = (
        {channels} if shape.block_groups > 1 else {c for c in (1, 2, 4, 8, 16, channels) if c <= channels}
    )
    most_registers = min(MAX_REGISTERS, REGISTERS // block)
    found = 0
    for chunk in sorted(chunks, reverse=True):
        load = _load(geometry, shape, chunk, channels_last, element_bytes, row_multiple)
        tile = shape._replace(chunk=chunk, load=load)
        if unrolled(of_layer, tile, channels_last) > UNROLLED_MULTIPLY_ADDS:
            continue
        loaded = loading(geometry, tile, channels_last)
        if loaded.loads > max_loads:
            continue
        needed = registers(of_layer, tile, channels_last, loaded.loads)
        if needed > most_registers:
            continue
        taken = footprint_of(geometry, tile, channels_last, loaded, needed)
        if taken.shared_bytes > shared_limit and chunk < channels:
            tile = tile._replace(resident=False)
            taken = footprint_of(geometry, tile, channels_last, loaded, needed)
        if taken.shared_bytes <= shared_limit:
            found += 1
            yield tile, taken
        if found == 2:
            return


def _load(
    geometry: Geometry, tile: Tile, chunk: int, channels_last: bool, element_bytes: int, row_multiple: int
) -> int:
    """Returns the elements of one load: as many as the alignment of the tensor and of the tile with this chunk allow,
    up to 16 bytes."""
    if channels_last:
        sizes = (
            geometry.in_channels,
            geometry.in_channels_per_group * tile.block_groups,
            tile.block_groups * chunk,
        )
        most = 16 // element_bytes
        if tile.block_groups == 1 and tile.partial:
            # Channels that are loaded together belong to one partial sum.
            most = min(most, max(2, tile.partial))
        return gcd(most, *sizes)
    return gcd(16 // element_bytes, row_multiple, tile.lanes_w * tile.thread_columns)
