"""Plans of csrc/kernels/forward/col2im.cu: layers with few output channels, whose products are multiplied once and then
added up (col2im). Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tconv_swap.kernels.common.dtypes import ELEMENT_KINDS, PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.common.pad_rows import Rows, copies_clocks, copies_fit, pad_rows, rows_of_images
from tconv_swap.kernels.common.schedules import EVERY
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.forward.col2im_choice import of_size as tiles_of_size
from tconv_swap.kernels.forward.col2im_clocks import expected_clocks
from tconv_swap.kernels.forward.col2im_tile import (
    MAX_ROW_TILES,
    Tile,
    box,
    column_tiles,
    max_groups,
    partial_sums,
    parts,
    position_rows,
    products,
    row_tiles,
    shared_bytes,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

#: The fewest and the most input channels: fewer leave most of a multiply of 16 empty, more do not fit one box.
CHANNELS = (8, 256)
#: The most products of a pixel that a thread's registers hold, and the most output channels.
MAX_PRODUCTS, MAX_OUT_CHANNELS = 96, 8


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem: pixels or copied rows that the copy engine can load, and offsets
    of 32 bits."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    if problem.dtype not in PRECISIONS or device.architecture != "sm_90a" or geometry.groups != 1:
        return False
    if not CHANNELS[0] <= geometry.in_channels <= CHANNELS[1] or geometry.out_channels > MAX_OUT_CHANNELS:
        return False
    if problem.channels_last and geometry.in_channels * item % TMA_ALIGNMENT:
        return False
    if products(geometry) > MAX_PRODUCTS or geometry.batch == 0:
        return False
    rows = copied_rows(problem)
    if rows is not None and not copies_fit([rows], problem.dtype):
        return False
    image = geometry.out_channels * geometry.out_height * geometry.out_width
    tiles = geometry.batch * geometry.out_height * geometry.out_width
    return max(image, tiles, MAX_ROW_TILES * geometry.out_height) < INT32_LIMIT // 2


def copied_rows(problem: Problem) -> Rows | None:
    """Returns the rows of an input in NCHW that are copied to longer ones, or None where the copy engine can load the
    input as it lies."""
    g = problem.geometry
    if problem.channels_last:
        return None
    return rows_of_images(0, g.batch * g.in_channels, g.height, g.width, problem.dtype.itemsize)


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that a layer of these sizes may have."""
    return tuple(dict.fromkeys(tile for size in sizes[::EVERY] for tile in of_size(size, device)))


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that suit this size, also those that its layer does not have."""
    return tiles_of_size(problem, device) if supports(problem, device) else []


def clocks(sizes: Sequence[Problem], tiles: Iterable[Tile], device: Device) -> Iterator[list[float]]:
    """Yields the expected clocks of each size of a layer with each tile; infinitely many if the tile's kernel does not
    compute it."""
    copies = [_copying(size) if supports(size, device) else math.inf for size in sizes]
    for tile in tiles:
        yield [
            expected_clocks(size, tile, device) + copying
            if copying < math.inf and column_tiles(size, tile)[1] > 0
            else math.inf
            for size, copying in zip(sizes, copies, strict=True)
        ]


def _copying(problem: Problem) -> float:
    """Returns the expected clocks in which the rows are copied."""
    rows = copied_rows(problem)
    return 0.0 if rows is None else copies_clocks([rows], problem.dtype)


def lower(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Part:
    """Returns the part that computes the problem with this tile.

    Inputs: input, weight (both 16-byte aligned), bias. Output: the output. Workspace: a copy of the input with longer
    rows, if the copy engine cannot load it as it lies.
    """
    geometry, item = problem.geometry, problem.dtype.itemsize
    shared = shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "long long"),
        ("PRECISION", PRECISIONS[problem.dtype]),
        ("PARTS", parts(problem)),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        *bias_alone(has_bias),
        ("PANEL_PIXELS", tile.panel_pixels),
        ("STEP_PANELS", tile.step_panels),
        ("STEP_ROWS", tile.step_rows),
        ("MAX_GROUPS", max_groups(problem, tile)),
        ("BUFFERS", tile.buffers),
        ("PARTIAL_SUMS", partial_sums(problem, tile)),
        ("WARPS", tile.warps),
        ("STAGES", tile.stages),
        ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
        ("SHARED_BYTES", shared),
    )
    line, channels = box(problem, tile)
    c, h, w = geometry.in_channels, geometry.height, geometry.width
    rows = copied_rows(problem)
    columns = w if rows is None else rows.padded
    sizes, line_bytes = ((c, w, h), c * item) if problem.channels_last else ((w, h, c), columns * item)
    input_map = TensorMap(
        input_(0) if rows is None else workspace(0),
        ELEMENT_KINDS[problem.dtype],
        (*sizes, geometry.batch),
        (line_bytes, line_bytes * sizes[1], c * h * columns * item),
        (line // item, tile.panel_pixels, 1, 1)
        if problem.channels_last
        else (tile.panel_pixels, 1, channels, 1),
        (1, 1, 1, 1),
        line,
    )
    tiles_h = row_tiles(problem, tile, device)
    groups, tiles_w = column_tiles(problem, tile)
    tiles = geometry.batch * tiles_h * tiles_w
    launch = Launch(
        Kernel("forward/col2im.cu", "forward_col2im", constants),
        grid=min(tiles, device.multiprocessors * tile.blocks_per_multiprocessor),
        block=32 * tile.warps,
        arguments=(tensor_map(0), input_(1), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        tensor_maps=(input_map,),
        structs=(
            (
                *(geometry.height, geometry.out_height, geometry.out_width),
                *(tiles, position_rows(geometry), groups, int(geometry.width <= tile.columns)),
                *divisor(tiles_w),
                *divisor(tiles_h),
            ),
        ),
    )
    why = f"{geometry.in_channels} channels to {products(geometry)} products a pixel, col2im: {tile}"
    if rows is None:
        return Part("col2im", why, (launch,))
    return Part("col2im", why, (pad_rows(rows, 0, problem.dtype), launch), rows.bytes(problem.dtype))
