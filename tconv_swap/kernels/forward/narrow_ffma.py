"""Plans of csrc/kernels/forward/narrow_ffma.cu: few output channels, depthwise and narrow groups, phases with few
taps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.ranked import CLOCKS_OF_MICROSECOND
from tconv_swap.kernels.common.sizes import Words, divisor
from tconv_swap.kernels.forward.narrow import is_narrow
from tconv_swap.kernels.forward.narrow_ffma_choice import computes, expected_time, pool_of, terms
from tconv_swap.kernels.forward.narrow_ffma_choice import of_size as tiles_of_size
from tconv_swap.kernels.forward.narrow_ffma_tile import (
    Tile,
    axes,
    columns_of_tiles,
    footprint,
    row_tiles,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, Part, input_, output, struct

#: The most multiply-adds of an output, by the bytes of an element, where narrow_mma computes the layer too: with more,
#: FFMA was never the fastest (171 and 25 stages of an H200).
MULTIPLY_ADDS = {2: 48, 4: 512}


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that a layer of these sizes may have; none for a layer that is not narrow."""
    layer = sizes[0]._replace(geometry=of_any_size(sizes[0].geometry))
    return pool_of(layer, device) if _is_candidate(layer, device) else ()


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that suit this size, also those that its layer does not have."""
    return tiles_of_size(problem, device) if supports(problem) else []


def _is_candidate(layer: Problem, device: Device) -> bool:
    """Returns whether tiles of a layer are worth comparing, whatever its sizes."""
    if not supports(layer):
        return False
    return device.compute_capability < 80 or terms(layer.geometry) <= MULTIPLY_ADDS[layer.dtype.itemsize]


def supports(problem: Problem) -> bool:
    """Returns whether the kernel is for such problems. It computes in IEEE float32 even where TF32 is allowed."""
    return problem.dtype in DTYPES and problem.geometry.batch > 0 and is_narrow(problem.geometry)


def clocks(sizes: Sequence[Problem], tiles: Iterable[Tile], device: Device) -> Iterator[list[float]]:
    """Yields the expected clocks of each size of a layer with each tile; infinitely many if the tile's kernel does not
    compute it."""
    times = [expected_time(size, device) for size in sizes]
    for tile in tiles:
        taken = footprint(sizes[0].geometry, tile, sizes[0].channels_last)
        yield [
            CLOCKS_OF_MICROSECOND * time_of(tile, taken)[0]
            if size.geometry.batch > 0 and computes(size, tile)
            else math.inf
            for size, time_of in zip(sizes, times, strict=True)
        ]


def _sizes(geometry: Geometry, tile: Tile, repeat: int) -> Words:
    """``NarrowFfmaSizes`` of csrc/kernels/common/sizes.cuh."""
    vertical, horizontal = axes(geometry)
    down = ceil_div(vertical.positions, tile.lanes_h * tile.thread_rows)
    all_tiles = row_tiles(geometry, tile)
    return (
        *(geometry.batch, geometry.height, geometry.width, geometry.out_height, geometry.out_width),
        *(all_tiles, repeat),
        *divisor(down),
        *divisor(ceil_div(horizontal.positions, tile.lanes_w * tile.thread_columns)),
        *divisor(ceil_div(all_tiles, repeat)),
    )


def lower(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Part:
    """Returns the part that computes the problem with this tile. Inputs: input, weight, bias. Output: the output."""
    geometry, channels_last = problem.geometry, problem.channels_last
    taken = footprint(geometry, tile, channels_last)
    time, repeat = expected_time(problem, device)(tile, taken)
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    kernel = Kernel(
        "forward/narrow_ffma.cu",
        "forward_narrow_ffma",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("Index", "int" if image * tile.block_images < INT32_LIMIT else "long long"),
            *geometry.layer_constants,
            ("CHANNELS_LAST", channels_last),
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            *bias_alone(has_bias),
            *tile.constants,
        ),
    )
    launch = Launch(
        kernel,
        grid=columns_of_tiles(geometry, tile) * ceil_div(row_tiles(geometry, tile), repeat),
        block=taken.threads,
        arguments=(input_(0), input_(1), input_(2), output(0), struct(0)),
        shared_bytes=taken.shared_bytes,
        structs=(_sizes(geometry, tile, repeat),),
    )
    channels = f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group"
    return Part(
        "narrow_ffma", f"{channels}: float32 FFMA, about {time:.0f} us expected on an H200", (launch,)
    )
