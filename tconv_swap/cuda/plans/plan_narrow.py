"""Plans of the narrow forward kernel: few output channels, depthwise and narrow groups, phases with few taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2, sqrt

import torch

from tconv_swap.cuda.integers import INT32_LIMIT, ceil_div
from tconv_swap.cuda.plans.epilogue import bias_alone
from tconv_swap.cuda.plans.narrow_cost import microseconds
from tconv_swap.cuda.plans.narrow_tile import (
    MAX_SUMS,
    MAX_THREADS,
    MIN_SUMS,
    UNROLLED_MULTIPLY_ADDS,
    Tile,
    axes,
    columns_of_tiles,
    input_loads,
    registers,
    row_tiles,
    shared_bytes,
    threads,
    unrolled,
)
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import ELEMENT_TYPES, Kernel, Launch, Output, Plan, input_, int64, output
from tconv_swap.geometry import Geometry

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Above so many multiply-adds for each element moved or each output, FFMA bounds the time, and tensor cores are the
#: tool ...
MULTIPLY_ADDS_PER_ELEMENT = 84
MULTIPLY_ADDS_PER_OUTPUT = 96
#: ... unless there are so few channels on one side that most of a tensor core's tile would be padding.
NARROW_CHANNELS = 8

#: Tiles are chosen for the largest of these not above the batch: a layer's kernel is compiled three times at most,
#: whatever batches it meets.
NOMINAL_BATCHES = (1, 8, 64)
#: So many tiles, the best by a lower bound of their time, are looked at closely.
FINALISTS = 40
#: A block's shared memory, in bytes: beyond, too few blocks fit a multiprocessor to hide each other's waits.
SHARED_BYTES = 72 * 1024
#: Pieces of the output that a tile writes should not be shorter than this, in bytes, or a whole row or pixel of it.
ROW_BYTES = 256
PIXEL_BYTES = 64
#: Threads, below which a block takes several images.
SMALL_BLOCK = 32
#: Accesses with which a thread brings its part of a chunk: each takes registers. More only where no tile has fewer.
MAX_LOADS = (10, 28)
#: A sum of so few terms is as accurate in any order.
SHORT_SUM = 8


def claims(geometry: Geometry, dtype: torch.dtype) -> bool:
    """Whether this kernel is a candidate: what bounds the problem is memory, or no other kernel's tile fits it."""
    if dtype not in DTYPES or geometry.batch == 0:
        return False
    if min(geometry.in_channels_per_group, geometry.out_channels_per_group) <= NARROW_CHANNELS:
        return True
    return (
        _terms(geometry) <= MULTIPLY_ADDS_PER_OUTPUT
        and geometry.macs <= MULTIPLY_ADDS_PER_ELEMENT * geometry.elements
    )


def _terms(geometry: Geometry) -> int:
    """Products that are summed for an output, at most."""
    vertical, horizontal = axes(geometry)
    return vertical.taps * horizontal.taps * geometry.in_channels_per_group


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """The narrow kernel with its best tile, or None for a geometry that is not its own.

    Its arithmetic is IEEE float32 whatever the problem allows. Inputs: input, weight, bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1)
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """The ``count`` plans that are expected to be the fastest, the best first; measuring them finds the true one."""
    geometry, dtype, channels_last = problem.geometry, problem.dtype, problem.channels_last
    if not claims(geometry, dtype):
        return []
    plans = []
    for tile in rank(geometry, dtype, channels_last, device)[:count]:
        if columns_of_tiles(geometry, tile) * row_tiles(geometry, tile) >= INT32_LIMIT:
            continue
        time, repeat = microseconds(geometry, tile, channels_last, dtype.itemsize, device.multiprocessors)
        channels = f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group"
        why = f"{channels}: float32 FFMA, about {time:.0f} us expected on an H200"
        plans.append(build(problem, has_bias, tile, repeat, why))
    return plans


def rank(geometry: Geometry, dtype: torch.dtype, channels_last: bool, device: Device) -> list[Tile]:
    """The best tiles by their expected time, the fastest first; empty when none is legal."""
    asynchronous = dtype == torch.float32 and device.compute_capability >= 80
    limit = min(SHARED_BYTES, device.shared_memory_per_block)
    nominal = geometry.with_batch(max(batch for batch in NOMINAL_BATCHES if batch <= geometry.batch))

    def expected(tile: Tile, bank_conflicts: bool) -> float:
        return microseconds(
            nominal, tile, channels_last, dtype.itemsize, device.multiprocessors, bank_conflicts
        )[0]

    for max_loads in MAX_LOADS:
        tiles = candidates(nominal, channels_last, dtype.itemsize, asynchronous, limit, max_loads)
        finalists = sorted(tiles, key=lambda tile: expected(tile, False))[:FINALISTS]
        if finalists:
            return sorted(finalists, key=lambda tile: expected(tile, True))
    return []


def candidates(
    geometry: Geometry,
    channels_last: bool,
    element_bytes: int,
    asynchronous: bool,
    shared_limit: int,
    max_loads: int,
) -> Iterator[Tile]:
    """The tiles worth a thought."""
    vertical, horizontal = axes(geometry)
    # 16-bit outputs round away what the order of a sum in float32 changes.
    partial = _partial(geometry) if element_bytes == 4 else 0
    for phases_h, phases_w in _phases(geometry):
        for thread_channels, lanes_c, slices_c, block_groups in _channels(
            geometry, channels_last, element_bytes
        ):
            for rows, columns, adjacent in _cells(geometry, phases_h, phases_w, thread_channels):
                lanes = lanes_c * slices_c * (horizontal.stride // phases_w)
                for lanes_w in _powers(horizontal.cells, columns):
                    written = lanes_w * columns * horizontal.stride * (1 if not channels_last else lanes_c)
                    if written * element_bytes < ROW_BYTES and lanes_w * columns < horizontal.cells:
                        continue
                    for block in (128, 256):
                        lanes_h = min(block // (lanes * lanes_w), ceil_div(vertical.cells, rows))
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
                        )
                        yield from _staged(
                            geometry, shape, channels_last, element_bytes, shared_limit, max_loads
                        )


def _partial(geometry: Geometry) -> int:
    """Input channels in the lower of two levels of sums: about as many terms there as above. 0: one level."""
    terms, channels = _terms(geometry), geometry.in_channels_per_group
    if channels == 1 or terms <= SHORT_SUM:
        return 0
    return 1 << max(0, round(log2(channels / sqrt(terms))))


def _phases(geometry: Geometry) -> list[tuple[int, int]]:
    """How many phases a thread owns on each axis: all of a small stride, or one."""
    options = [sorted({1, stride}) if stride <= 4 else [1] for stride in geometry.stride]
    return [(h, w) for h in options[0] for w in options[1]]


def _channels(geometry: Geometry, channels_last: bool, element_bytes: int) -> list[tuple[int, int, int, int]]:
    """(thread_channels, lanes_c, slices_c, block_groups): which output channels a thread and a block own."""
    channels, groups = geometry.out_channels_per_group, geometry.groups
    widths = sorted({min(channels, width) for width in (4, 8, 16)} | ({7} if channels % 7 == 0 else set()))
    options = []
    if not channels_last:
        for width in widths:
            slices = ceil_div(channels, width)
            options += [(width, 1, count, 1) for count in sorted({1, min(2, slices), min(4, slices)})]
        return options
    if channels * element_bytes < PIXEL_BYTES and groups > 1:
        # Whole groups side by side, until a pixel's piece of the output is long enough.
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


def _cells(
    geometry: Geometry, phases_h: int, phases_w: int, channels: int
) -> Iterator[tuple[int, int, bool]]:
    """(thread_rows, thread_columns, adjacent): the cells a thread owns."""
    for rows in (1, 2, 4, 8):
        for columns in (1, 2, 4, 8, 16):
            sums = phases_h * phases_w * rows * columns * channels
            if sums > MAX_SUMS or sums < MIN_SUMS:
                continue
            yield rows, columns, False
            if 1 < columns <= 4 and phases_w == geometry.stride[1]:
                yield rows, columns, True


def _powers(cells: int, columns: int) -> Iterator[int]:
    """Threads side by side: powers of two, up to the first that covers the row."""
    lanes = 1
    while lanes <= 128:
        yield lanes
        if lanes * columns >= cells:
            return
        lanes *= 2


def _staged(
    geometry: Geometry,
    shape: Tile,
    channels_last: bool,
    element_bytes: int,
    shared_limit: int,
    max_loads: int,
) -> Iterator[Tile]:
    """The tile with each way to bring its input that fits."""
    channels = geometry.in_channels_per_group
    block = threads(geometry, shape)
    if block > MAX_THREADS:
        return
    if block < SMALL_BLOCK and row_tiles(geometry, shape) == geometry.batch:
        # Small images: as many as fill a block.
        shape = replace(shape, block_images=min(SMALL_BLOCK // block, geometry.batch))
        block = threads(geometry, shape)
    chunks = (
        {channels} if shape.block_groups > 1 else {c for c in (1, 2, 4, 8, 16, channels) if c <= channels}
    )
    found = 0
    for chunk in sorted(chunks, reverse=True):
        tile = replace(shape, chunk=chunk)
        tile = replace(tile, load=_load(geometry, tile, channels_last, element_bytes))
        if shared_bytes(geometry, tile, channels_last) > shared_limit:
            if chunk == channels:
                continue
            tile = replace(tile, resident=False)
        if (
            shared_bytes(geometry, tile, channels_last) <= shared_limit
            and unrolled(geometry, tile, channels_last) <= UNROLLED_MULTIPLY_ADDS
            and input_loads(geometry, tile, channels_last) <= max_loads
        ):
            needed = registers(geometry, tile, channels_last)
            if needed <= 255 and needed * block <= 65536:
                found += 1
                yield replace(tile, min_blocks=max(1, min(65536 // (needed * block), 2048 // block)))
        if found == 2:
            return


def _load(geometry: Geometry, tile: Tile, channels_last: bool, element_bytes: int) -> int:
    """Elements that travel together: as many as the alignment of the tensor and the tile allow, up to 16 bytes."""
    if channels_last:
        sizes = [
            geometry.in_channels,
            geometry.in_channels_per_group * tile.block_groups,
            tile.block_groups * tile.chunk,
        ]
    else:
        sizes = [geometry.width, tile.lanes_w * tile.thread_columns]
    load = 16 // element_bytes
    if channels_last and tile.block_groups == 1 and tile.partial:
        load = min(load, max(2, tile.partial))  # channels read together are summed together
    while any(size % load for size in sizes):
        load //= 2
    return load


def build(problem: Problem, has_bias: bool, tile: Tile, repeat: int, why: str) -> Plan:
    """The plan that runs ``tile``, ``repeat`` of them in each block."""
    geometry, channels_last = problem.geometry, problem.channels_last
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    kernel = Kernel(
        "forward_narrow.cu",
        "forward_narrow",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("Index", "int" if image * tile.block_images < INT32_LIMIT else "long long"),
            *geometry.constants,
            ("CHANNELS_LAST", channels_last),
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            *bias_alone(has_bias),
            *tile.constants,
        ),
    )
    launch = Launch(
        kernel,
        grid=columns_of_tiles(geometry, tile) * ceil_div(row_tiles(geometry, tile), repeat),
        block=threads(geometry, tile),
        arguments=(input_(0), input_(1), input_(2), output(0), int64(geometry.batch), int64(repeat)),
        shared_bytes=shared_bytes(geometry, tile, channels_last),
    )
    return Plan(
        "narrow",
        why,
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(launch,) if geometry.batch else (),
    )
