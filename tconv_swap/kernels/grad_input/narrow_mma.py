"""Plans the gradient of the input where a group has few channels on a side, is depthwise, or has a large kernel
(csrc/kernels/grad_input/narrow_mma.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.hardware import REGISTERS, SECTOR_BYTES
from tconv_swap.kernels.common.ranked import CLOCKS_OF_MICROSECOND, Ranked
from tconv_swap.kernels.common.schedules import pool
from tconv_swap.kernels.common.sizes import segment_sizes
from tconv_swap.kernels.gradients import narrow_mma
from tconv_swap.kernels.gradients.grad_output_tile import (
    GradOutputTile,
    chunk_taps,
    chunks,
    load_widths,
    of_one_pixel,
    with_pitches,
)
from tconv_swap.kernels.gradients.narrow_mma import (
    CHUNK_TAPS,
    FAMILY,
    SHARED_BYTES,
    WEIGHT_REGISTERS,
    NarrowTile,
    channel_tiles,
    chunk_shapes,
    common_constants,
    input_bytes,
    loadable,
    loader_registers,
    loads_rows,
    overlapping,
    powers,
    rounds_nothing,
    why,
)
from tconv_swap.kernels.gradients.narrow_mma_cost import (
    GRAD_INPUT,
    Multiplies,
    microseconds,
    tile_price,
    tile_work,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Constant, Kernel, Launch, Part, input_, output, struct, workspace

#: The fewest taps that the implicit GEMM does not compute, and the fewest with which larger sizes are left to the
#: general kernel.
MANY_TAPS, MOST_TAPS = 65, 256
#: The most bytes of one store, and the lanes of a warp that store channels of the same pixel (channels_last), or pixels
#: of the same channel (NCHW).
STORE_BYTES, PIXEL_LANES, CHANNEL_LANES = 16, 8, 4


@dataclass(frozen=True, slots=True)
class GradInputTile(NarrowTile):
    """The constants of csrc/kernels/grad_input/narrow_mma.cu, and what a tile costs."""

    warps_p: int
    store: int
    splits: int
    chunks_here: int
    weights_in_registers: bool

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return (
            *self.shared_constants,
            ("WARPS_P", self.warps_p),
            ("STORE", self.store),
            ("SPLITS", self.splits),
            ("CHUNKS_HERE", self.chunks_here),
            ("WEIGHTS_IN_REGISTERS", self.weights_in_registers),
        )


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernels compute a problem. In 16 bits PyTorch's operator was 1.2 to 1.6 times as fast below
    ``MOST_TAPS`` (one layer, both layouts, H200)."""
    return narrow_mma.supports(problem, device, MANY_TAPS if problem.dtype.itemsize == 4 else MOST_TAPS)


def ranked(among: Iterable[GradInputTile], problem: Problem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size with their expected clocks, the one that is expected to
    be the fastest first.

    Inputs: grad_output, input, weight. Output: the gradient of the input. Workspace: at most 64 MiB, if the taps are
    split.
    """
    found = [
        Ranked(expected_clocks(problem, tile, device), partial(lower, problem, tile, device))
        for tile in among
        if supports(problem, device) and supports_tile(problem, tile)
    ]
    return sorted(found, key=lambda one: one.clocks)


def supports_tile(problem: Problem, tile: GradInputTile) -> bool:
    """Returns whether a tile's kernel computes the size."""
    if tile.splits > 1 and input_bytes(problem.geometry) * tile.splits > WORKSPACE_LIMIT_BYTES:
        return False
    return loads_rows(problem, tile.grad_output)


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[GradInputTile, ...]:
    """Returns the tiles that a layer of these sizes may have."""
    return pool(
        sizes,
        lambda problem: grad_input_tiles(problem, device),
        supports_tile,
        lambda problem, tile: expected_clocks(problem, tile, device),
        lambda tile: computes_any_size(sizes[0], tile),
    )


def computes_any_size(layer: Problem, tile: GradInputTile) -> bool:
    """Returns whether a tile computes any size of a layer, as far as the workspace has room for its splits. Taps that
    no wide tile holds are always split."""
    fits = tile.splits == 1 or MANY_TAPS <= layer.geometry.taps < MOST_TAPS
    return fits and _loads_every_size(layer, tile.grad_output.load)


def _loads_every_size(layer: Problem, load: int) -> bool:
    """Returns whether rows of grad_output hold whole loads whatever the size; for many taps, of sizes without
    output_padding (the general kernel computes the others)."""
    if layer.channels_last or load == 1:
        return True
    g = layer.geometry
    return g.taps >= MOST_TAPS and g.stride[1] % load == 0 and (g.out_width - g.output_padding[1]) % load == 0


def lower(problem: Problem, tile: GradInputTile, device: Device) -> Part:
    """Returns the part that runs ``tile``."""
    geometry = problem.geometry
    down = geometry.batch * ceil_div(geometry.height, tile.grad_output.tile_h)
    across = blocks_across(geometry, tile)
    segment_tiles = _segment_tiles(down, across, device.multiprocessors * tile.resident, 2)
    kernel = Kernel(
        "grad_input/narrow_mma.cu", "grad_input_narrow_mma", (*common_constants(problem), *tile.constants)
    )
    split = tile.splits > 1
    launch = Launch(
        kernel,
        grid=across * ceil_div(down, segment_tiles),
        block=tile.grad_output.threads,
        arguments=(
            input_(0),
            input_(2),
            workspace(0) if split else output(0),
            struct(0),
        ),
        structs=(
            segment_sizes(geometry, (tile.grad_output.tile_h, tile.grad_output.tile_w), segment_tiles, split),
        ),
        shared_bytes=tile.shared_bytes,
    )
    if not split:
        return Part(FAMILY, why(geometry), (launch,))
    count = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    launches = (launch, split_k_reduce(problem.dtype, count, tile.splits))
    return Part(FAMILY, why(geometry), overlapping(launches, device), 4 * count * tile.splits)


def _segment_tiles(down: int, across: int, blocks: int, rounds: int) -> int:
    """Returns how many tiles below each other a block computes: so many that each block that runs at a time has
    at least ``rounds`` blocks to run."""
    return max(1, down * across // (blocks * rounds))


def blocks_across(geometry: Geometry, tile: GradInputTile) -> int:
    """Returns how many blocks share one row of tiles, with all splits of the taps."""
    return tile.blocks_of_a_row(geometry) * tile.splits


def grad_input_tiles(problem: Problem, device: Device) -> Iterator[GradInputTile]:
    """Yields the tiles that are compared."""
    geometry, element_bytes = problem.geometry, problem.dtype.itemsize
    asynchronous = problem.dtype == torch.float32
    layer = of_one_pixel(geometry)
    for m_tiles, warps_m, groups in channel_tiles(problem):
        max_warps_p = max(1, 8 // (warps_m * groups))
        for chunk in chunk_shapes(geometry, groups, CHUNK_TAPS):
            widths = load_widths(
                geometry, groups * chunk[0], problem.channels_last, element_bytes, asynchronous
            )
            for load, warps_p, store, n_tiles in product(widths, powers(max_warps_p), (1, 2), (2, 4, 8)):
                if m_tiles * n_tiles > (8 if rounds_nothing(problem) else 16):
                    continue
                if warps_p * warps_m * groups < 4 and warps_p * 2 <= max_warps_p:
                    continue
                units = n_tiles // store
                for units_across in powers(units * warps_p):
                    if units % units_across and units_across % units:
                        continue
                    tile_w = units_across * 8 * store
                    if units_across > 1 and tile_w >= 2 * geometry.width:
                        continue
                    grad_output = GradOutputTile(
                        tile_h=units * warps_p // units_across,
                        tile_w=tile_w,
                        block_groups=groups,
                        chunk_co=chunk[0],
                        chunk_kh=chunk[1],
                        load=load,
                        async_=asynchronous,
                        threads=32 * warps_p * warps_m * groups,
                    )
                    if not loadable(problem, grad_output):
                        continue
                    pixels = tuple(4 * (g // 2) + g % 2 if store == 2 else g for g in range(8))
                    grad_output, passes = with_pitches(
                        layer, grad_output, problem.channels_last, pixels, False
                    )
                    made = _with_splits(
                        problem, device, grad_output, m_tiles, n_tiles, warps_m, warps_p, store, passes
                    )
                    if made is not None:
                        yield made


def _with_splits(
    problem: Problem,
    device: Device,
    grad_output: GradOutputTile,
    m_tiles: int,
    n_tiles: int,
    warps_m: int,
    warps_p: int,
    store: int,
    passes: float,
) -> GradInputTile | None:
    """Returns the tile with the splits of the taps that it needs to fit into shared memory, or to use the whole GPU, or
    None if it does not fit."""
    geometry = problem.geometry
    channels_last = problem.channels_last
    staged = channels_last and grad_output.block_groups > 1
    block_m = 16 * m_tiles * warps_m
    k_steps = ceil_div(chunk_taps(geometry, grad_output), 8)
    neighbours = channels_last and not staged and geometry.in_channels_per_group > 8
    whole = neighbours or block_m < geometry.in_channels_per_group
    weight_rows = block_m if whole else geometry.in_channels_per_group
    weights = grad_output.block_groups * weight_rows * (8 * k_steps + 4)
    stage = 0
    if staged:
        stage = (
            grad_output.tile_h
            * grad_output.tile_w
            * (grad_output.block_groups * geometry.in_channels_per_group | 1)
        )
    budget = (
        min(SHARED_BYTES, device.shared_memory_per_block) // 4
        - grad_output.shared_words
        - stage
        - 8 * k_steps
    )
    if budget < weights:
        return None
    all_chunks = chunks(geometry, grad_output)
    here = min(all_chunks, budget // weights)
    m_blocks = ceil_div(geometry.in_channels_per_group, block_m)
    blocks = (
        m_blocks
        * (geometry.groups // grad_output.block_groups)
        * ceil_div(geometry.width, grad_output.tile_w)
        * ceil_div(geometry.height, grad_output.tile_h)
        * geometry.batch
    )
    wanted = 2 * device.multiprocessors
    if blocks < wanted:
        here = min(here, max(1, all_chunks * blocks // wanted))
    splits = ceil_div(all_chunks, here)
    if splits > 1 and input_bytes(geometry) * splits > WORKSPACE_LIMIT_BYTES:
        return None
    in_registers = here == 1 and splits == 1 and weight_rows == block_m
    ieee = rounds_nothing(problem)
    # IEEE keeps two parts of each weight.
    weight_registers = k_steps * m_tiles * (8 if ieee else 4)
    in_registers = in_registers and weight_registers <= WEIGHT_REGISTERS * (2 / 3 if ieee else 1)
    needed = (
        (110 if ieee else 60)
        + m_tiles * n_tiles * 4
        + (weight_registers if in_registers else 0)
        + 2 * n_tiles * (4 if ieee else 1)
        + loader_registers(problem, grad_output)
    )
    if needed > 250 or needed * grad_output.threads > REGISTERS:
        return None
    shared = 4 * (grad_output.shared_words + here * weights + stage + 8 * k_steps)
    rows_read = 2 if geometry.in_channels_per_group <= 8 else 4
    multiplies = Multiplies(
        grad_output.threads // 32 * k_steps * here,
        m_tiles,
        n_tiles,
        passes,
        0 if in_registers else rows_read,
    )
    return GradInputTile(
        grad_output,
        m_tiles,
        n_tiles,
        warps_m,
        needed,
        shared,
        tile_price(tile_work(problem, grad_output, multiplies), GRAD_INPUT, here),
        warps_p,
        store,
        splits,
        here,
        in_registers,
    )


def expected_clocks(problem: Problem, tile: GradInputTile, device: Device) -> float:
    """Returns the expected clocks of a size; infinitely many if the tile does not support it."""
    (clocks,) = clocks_of_sizes(tile, [problem], device)
    return clocks


def clocks_of_sizes(tile: GradInputTile, sizes: Sequence[Problem], device: Device) -> list[float]:
    """Returns the expected clocks of sizes of a layer; infinitely many where the tile does not support the size."""
    layer, grad_output, resident = sizes[0], tile.grad_output, tile.resident
    geometry = layer.geometry
    k_steps = ceil_div(chunk_taps(geometry, grad_output), 8)
    channels = (
        min(16 * tile.m_tiles * tile.warps_m, geometry.in_channels_per_group) * grad_output.block_groups
    )
    # Taps follow one another in memory, or in channels_last the output channels of a tap.
    run = grad_output.chunk_co if layer.weight_channels_last else SECTOR_BYTES
    of_weight = max(1.0, run * layer.dtype.itemsize / SECTOR_BYTES) / run
    found = []
    for problem in sizes:
        if not supports_tile(problem, tile):
            found.append(inf)
            continue
        geometry = problem.geometry
        down = geometry.batch * ceil_div(geometry.height, grad_output.tile_h)
        across = blocks_across(geometry, tile)
        blocks = across * ceil_div(down, _segment_tiles(down, across, device.multiprocessors * resident, 2))
        weights = blocks * tile.chunks_here * channels * k_steps * 8
        expected = microseconds(
            *(problem, tile.price, GRAD_INPUT, device),
            *(across * down, blocks, resident),
            weights=weights,
            partial_bytes=input_bytes(geometry) * tile.splits if tile.splits > 1 else 0,
            sectors=weights * of_weight + further_sectors(problem, tile),
        )
        found.append(CLOCKS_OF_MICROSECOND * expected)
    return found


def further_sectors(problem: Problem, tile: GradInputTile) -> float:
    """Returns how many sectors of memory all stores touch beyond those that the results fill: each store is counted for
    itself, and lanes that store neighbours touch a sector together."""
    g, channels = problem.geometry, problem.geometry.in_channels_per_group
    item = 4 if tile.splits > 1 else problem.dtype.itemsize
    elements = g.batch * g.in_channels * g.height * g.width
    together = tile.grad_output.block_groups * channels
    if problem.channels_last and tile.grad_output.block_groups == 1:
        together = PIXEL_LANES * (_lane_channels(g, tile, item) if channels > 8 else 1)
    row, stores = g.in_channels, 1
    if not problem.channels_last:
        own = 2 * tile.store
        row, together, stores = g.width, CHANNEL_LANES * own, 1 if g.width % own == 0 else own
    run = together * item
    whole = row * item % SECTOR_BYTES == 0 and (run % SECTOR_BYTES == 0 or SECTOR_BYTES % run == 0)
    touched = max(1.0, run / SECTOR_BYTES) if whole else (run + SECTOR_BYTES - item) / SECTOR_BYTES
    return elements / together * stores * touched - elements * item / SECTOR_BYTES


def _lane_channels(geometry: Geometry, tile: GradInputTile, item: int) -> int:
    """Returns how many neighbouring channels of a pixel a lane stores at once (ADJACENT_CHANNELS of the kernel)."""
    own, channels = 2 * tile.m_tiles, geometry.in_channels_per_group
    return own if STORE_BYTES % (own * item) == 0 and channels % own == 0 else 1
