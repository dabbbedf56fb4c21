"""Plans of csrc/kernels/forward_cells.cu: narrow problems on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tconv_swap.cuda.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.cuda.plans import plan_narrow
from tconv_swap.cuda.plans.cells_cost import microseconds
from tconv_swap.cuda.plans.cells_tile import (
    HALF_CHANNELS,
    Tile,
    packed_bytes,
    product,
    registers,
    shared_bytes,
    stores_directly,
)
from tconv_swap.cuda.plans.epilogue import bias_alone
from tconv_swap.cuda.plans.narrow_tile import axes
from tconv_swap.cuda.plans.plan_narrow import NOMINAL_BATCHES
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Plan,
    input_,
    int64,
    output,
    workspace,
)
from tconv_swap.geometry import Geometry

_PACK_THREADS = 256
#: The values are shared with csrc/kernels/mma.cuh.
_PRECISIONS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
#: Blocks for each one that runs at a time, with one pass and with several: those with and without taps take different
#: times, and even out where there are many.
BLOCKS_IN_LINE = (2, 12)
#: Input channels of a group that fill half of what a multiply of 16-bit numbers takes; with fewer FFMA is faster.
FEWEST_CHANNELS = 8
#: cuDNN computes layers of fewer channels in float32 even where TF32 is allowed, and dilated and grouped ones.
ROUNDED_CHANNELS = 16
#: Float32 takes six products: FFMA is faster where less than this share of them is of use.
FLOAT32_SHARE = 0.5
#: With more rows of M than the second, every row of a cell is a pass of its own; with fewer than the first, none.
STACKED_ROWS = (16, 64)
#: Columns of a cell that fill a tile of M.
MANY_COLUMNS = 16
#: Of a unit: rows, and columns of 8 cells.
UNITS = ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1))
#: Of a multiprocessor: registers, shared memory in bytes; of a thread: registers; what a block reserves of memory.
REGISTERS, SHARED_BYTES = 65536, 228 * 1024
MOST_REGISTERS = 255
RESERVED_BYTES = 1024
RESIDENT_BYTES = 80 * 1024


def claims(problem: Problem, device: Device) -> bool:
    """Whether this kernel computes the problem right: its offsets within an image are of 32 bits."""
    geometry = problem.geometry
    if problem.dtype not in _PRECISIONS or device.compute_capability < 80 or geometry.batch == 0:
        return False
    image = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
    )
    return image < INT32_LIMIT


def pays(problem: Problem) -> bool:
    """Whether it is expected to be faster than FFMA on what memory bounds."""
    geometry = problem.geometry
    if geometry.in_channels_per_group < FEWEST_CHANNELS:
        return False
    return problem.dtype != torch.float32 or useful_share(geometry) >= FLOAT32_SHARE


def parts_of(problem: Problem) -> int:
    """Numbers of 16 bits that an element is multiplied as: float32 as two where cuDNN rounds to TF32 as well."""
    geometry = problem.geometry
    if problem.dtype != torch.float32:
        return 1
    fewest = min(geometry.in_channels, geometry.out_channels)
    rounded = geometry.groups == 1 and geometry.dilation == (1, 1) and fewest >= ROUNDED_CHANNELS
    return 2 if problem.precision == "tf32" and rounded else 3


def useful_share(geometry: Geometry) -> float:
    """Of what is multiplied, the share that is neither padding nor a tap that an output does not have."""
    vertical, horizontal = axes(geometry)
    stacked = _rows(geometry) <= STACKED_ROWS[0]
    p = product(geometry, stacked, stacked or horizontal.stride >= MANY_COLUMNS)
    useful = geometry.taps * geometry.in_channels_per_group * geometry.out_channels_per_group
    passes = 1 if stacked else round(p.passes * vertical.used)
    return useful / (passes * p.all_pairs * p.v * 16 * 2 * HALF_CHANNELS)


def _rows(geometry: Geometry) -> int:
    """Outputs of a cell, of one group, in columns that have taps."""
    _, horizontal = axes(geometry)
    return geometry.stride[0] * round(horizontal.used * horizontal.stride) * geometry.out_channels_per_group


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """The plan with the best tile, or None where the kernel does not pay.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    plans = plan_candidates(problem, has_bias, device, count=1) if pays(problem) else []
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """The ``count`` plans that are expected to be the fastest for a narrow problem, the best first."""
    if not claims(problem, device) or not plan_narrow.claims(problem.geometry, problem.dtype):
        return []
    return [plan_with_tile(problem, has_bias, tile, device) for tile in rank(problem, device)[:count]]


def rank(problem: Problem, device: Device) -> list[Tile]:
    """The tiles, the one that is expected to be the fastest first; empty when none fits."""
    geometry = problem.geometry
    nominal = geometry.with_batch(max(batch for batch in NOMINAL_BATCHES if batch <= geometry.batch))

    def expected(tile: Tile) -> float:
        return microseconds(nominal, tile, problem.dtype.itemsize, problem.channels_last)

    return sorted(candidates(problem, device), key=expected)


def candidates(problem: Problem, device: Device) -> Iterator[Tile]:
    """The tiles worth a thought."""
    geometry = problem.geometry
    vertical, horizontal = axes(geometry)
    rows = _rows(geometry)
    for stacked in (True, False):
        if rows <= STACKED_ROWS[0] if not stacked else rows > STACKED_ROWS[1]:
            continue
        columns_fastest = not problem.channels_last and (stacked or horizontal.stride >= MANY_COLUMNS)
        p = product(geometry, stacked, columns_fastest)
        direct = not stacked and stores_directly(
            geometry, problem.dtype.itemsize, problem.channels_last, columns_fastest
        )
        for unit_rows, unit_cols in UNITS:
            for tile_w in (8, 16, 32, 64, 128):
                if tile_w % (8 * unit_cols) or tile_w >= 2 * max(8, horizontal.cells):
                    continue
                for tile_h in (unit_rows, 2 * unit_rows, 4 * unit_rows):
                    if tile_h >= 2 * max(unit_rows, vertical.cells):
                        continue
                    units = geometry.groups * p.m_tiles * (tile_h // unit_rows) * (tile_w // 8 // unit_cols)
                    for warps in (4, 8):
                        # Without a stage to fill, many warps share the weights that they read (measured).
                        if units < warps > 4 or (direct and warps < 8 <= units):
                            continue
                        for resident in (True, False):
                            tile = Tile(
                                stacked,
                                columns_fastest,
                                tile_h,
                                tile_w,
                                unit_rows,
                                unit_cols,
                                warps,
                                resident,
                                parts_of(problem),
                                direct,
                                1,
                            )
                            blocks = _blocks(problem, tile, device)
                            if blocks:
                                yield replace(tile, blocks_per_multiprocessor=blocks)


def _blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """How many blocks of the tile a multiprocessor has room for."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    if tile.resident and packed_bytes(geometry, tile) > RESIDENT_BYTES:
        return 0
    shared = shared_bytes(geometry, tile, item, problem.channels_last)
    if shared > device.shared_memory_per_block:
        return 0
    needed = registers(geometry, tile, item, problem.channels_last)
    if needed > MOST_REGISTERS:
        return 0
    room = min(SHARED_BYTES, device.shared_memory_per_block + RESERVED_BYTES)
    # Registers are handed out by eights.
    return min(room // (shared + RESERVED_BYTES), REGISTERS // (32 * tile.warps * round_up(needed, 8)))


def plan_with_tile(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Plan:
    """The plan that computes the problem with this tile."""
    geometry, item, channels_last = problem.geometry, problem.dtype.itemsize, problem.channels_last
    p = product(geometry, tile.stacked, tile.columns_fastest)
    packed = packed_bytes(geometry, tile)
    shared = shared_bytes(geometry, tile, item, channels_last)
    common: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "long long"),
        ("PRECISION", _PRECISIONS[problem.dtype]),
        ("PARTS", tile.parts),
        *geometry.constants,
        ("CHANNELS_LAST", channels_last),
        ("STACKED", tile.stacked),
        ("COLUMNS_FASTEST", tile.columns_fastest),
    )
    lanes = packed * p.passes // 16 // tile.parts
    pack = Launch(
        Kernel(
            "pack_cells.cu",
            "pack_cells",
            (*common, ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last), ("THREADS", _PACK_THREADS)),
        ),
        grid=ceil_div(lanes, _PACK_THREADS),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    vertical, horizontal = axes(geometry)
    tiles = geometry.batch * ceil_div(vertical.cells, tile.tile_h) * ceil_div(horizontal.cells, tile.tile_w)
    blocks = device.multiprocessors * tile.blocks_per_multiprocessor * BLOCKS_IN_LINE[p.passes > 1]
    walks = min(tiles, ceil_div(blocks, p.passes))
    walks = ceil_div(tiles, ceil_div(tiles, walks))
    forward = Launch(
        Kernel(
            "forward_cells.cu",
            "forward_cells",
            (
                *common,
                ("WEIGHT_CHANNELS_LAST", False),
                *bias_alone(has_bias),
                *(entry for entry in tile.constants if entry not in common),
                ("SHARED_BYTES", shared),
            ),
        ),
        grid=p.passes * walks,
        block=32 * tile.warps,
        arguments=(input_(0), workspace(0), input_(2), output(0), int64(geometry.batch), int64(walks)),
        shared_bytes=shared,
        overlaps_previous=True,
    )
    return Plan(
        "narrow tensor",
        f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group, stacked: {tile}",
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(pack, forward),
        workspace_bytes=packed * p.passes,
    )
