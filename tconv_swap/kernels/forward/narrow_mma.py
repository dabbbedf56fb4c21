"""Plans of csrc/kernels/forward/narrow_mma.cu: problems with few channels, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tconv_swap.kernels.common.dtypes import PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.ranked import CLOCKS_OF_MICROSECOND
from tconv_swap.kernels.common.sizes import map_sizes
from tconv_swap.kernels.forward.narrow import is_narrow
from tconv_swap.kernels.forward.narrow_ffma_tile import axes
from tconv_swap.kernels.forward.narrow_mma_choice import computes, expected_time, pool_of
from tconv_swap.kernels.forward.narrow_mma_choice import of_size as tiles_of_size
from tconv_swap.kernels.forward.narrow_mma_cost import size_of
from tconv_swap.kernels.forward.narrow_mma_tile import Tile, packed_bytes, product, shared_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    int64,
    output,
    struct,
    workspace,
)

_PACK_THREADS = 256
#: Waves of blocks, with one pass and with several. Passes with taps take longer than passes without; with many waves
#: all multiprocessors get about equal work.
WAVES = (2, 12)


def supports(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes the problem: its offsets within an image have to fit 32 bits."""
    geometry = problem.geometry
    if problem.dtype not in PRECISIONS or device.compute_capability < 80 or geometry.batch == 0:
        return False
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    # The number of tiles of all images has to fit, too.
    positions = geometry.batch * axes(geometry)[0].positions * axes(geometry)[1].positions
    return image < INT32_LIMIT and positions < INT32_LIMIT // 2


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that a layer of these sizes may have; none for a layer that is not narrow."""
    if not supports(sizes[0], device) or not is_narrow(sizes[0].geometry):
        return ()
    return pool_of(sizes, device)


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that suit this size, also those that its layer does not have."""
    if not supports(problem, device) or not is_narrow(problem.geometry):
        return []
    return list(tiles_of_size(problem, device))


def clocks(sizes: Sequence[Problem], tiles: Iterable[Tile], device: Device) -> Iterator[list[float]]:
    """Yields the expected clocks of each size of a layer with each tile; infinitely many if the tile's kernel does not
    compute it."""
    supported = [(one, size_of(one.geometry) if supports(one, device) else None) for one in sizes]
    for tile in tiles:
        microseconds = expected_time(sizes[0], tile)
        yield [
            CLOCKS_OF_MICROSECOND * microseconds(size)
            if size is not None and computes(problem, tile)
            else math.inf
            for problem, size in supported
        ]


def lower(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Part:
    """Returns the part that computes the problem with this tile. Its workspace holds the packed weights.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    geometry, item, channels_last = problem.geometry, problem.dtype.itemsize, problem.channels_last
    p = product(geometry, tile.stacked, tile.columns_fastest)
    packed = packed_bytes(geometry, p, tile.parts)
    shared = shared_bytes(geometry, p, tile, item, channels_last)
    common: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "long long"),
        ("PRECISION", PRECISIONS[problem.dtype]),
        ("PARTS", tile.parts),
        *geometry.layer_constants,
        ("CHANNELS_LAST", channels_last),
        ("STACKED", tile.stacked),
        ("COLUMNS_FASTEST", tile.columns_fastest),
    )
    lanes = packed * p.passes // 16 // tile.parts
    pack = Launch(
        Kernel(
            "forward/narrow_mma_pack.cu",
            "forward_narrow_mma_pack",
            (*common, ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last), ("THREADS", _PACK_THREADS)),
        ),
        grid=ceil_div(lanes, _PACK_THREADS),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    vertical, horizontal = axes(geometry)
    tiles_h, tiles_w = ceil_div(vertical.positions, tile.tile_h), ceil_div(horizontal.positions, tile.tile_w)
    tiles = geometry.batch * tiles_h * tiles_w
    blocks = device.multiprocessors * tile.blocks_per_multiprocessor * WAVES[p.passes > 1]
    # A block computes every tile_stride-th tile of its pass; all blocks of a pass compute about equally many.
    tile_stride = min(tiles, ceil_div(blocks, p.passes))
    tile_stride = ceil_div(tiles, ceil_div(tiles, tile_stride))
    forward = Launch(
        Kernel(
            "forward/narrow_mma.cu",
            "forward_narrow_mma",
            (
                *common,
                ("WEIGHT_CHANNELS_LAST", False),
                *bias_alone(has_bias),
                *(entry for entry in tile.constants if entry not in common),
                ("SHARED_BYTES", shared),
            ),
        ),
        grid=p.passes * tile_stride,
        block=32 * tile.warps,
        arguments=(input_(0), workspace(0), input_(2), output(0), struct(0), int64(tile_stride)),
        shared_bytes=shared,
        overlaps_previous=True,
        structs=(
            map_sizes(
                geometry, (vertical.positions, horizontal.positions), (geometry.batch, tiles_h, tiles_w)
            ),
        ),
    )
    return Part(
        "narrow_mma",
        f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group, stacked: {tile}",
        (pack, forward),
        packed * p.passes,
    )
