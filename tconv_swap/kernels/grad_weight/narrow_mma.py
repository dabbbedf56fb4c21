"""Plans of csrc/kernels/grad_weight/narrow_mma.cu: the gradient of the weight of groups with few channels on
one side, depthwise layers and large kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd, inf
from typing import NamedTuple

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.hardware import REGISTERS
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.ranked import CLOCKS_OF_MICROSECOND, Ranked
from tconv_swap.kernels.common.schedules import EVERY, best_of_sizes
from tconv_swap.kernels.common.sizes import segment_sizes
from tconv_swap.kernels.gradients.grad_output_tile import (
    GradOutputTile,
    chunks,
    load_widths,
    of_one_pixel,
    with_pitches,
)
from tconv_swap.kernels.gradients.narrow_mma import (
    BIAS_CHANNELS,
    CHUNK_TAPS,
    FAMILY,
    INPUT_REGISTERS,
    LONGEST_CHAIN,
    MANY_TAPS,
    MAX_SUM_TILES,
    SHARED_BYTES,
    NarrowTile,
    TilePrice,
    channel_tiles,
    chunk_shapes,
    common_constants,
    loadable,
    loader_registers,
    loads_rows,
    overlapping,
    powers,
    rounds_nothing,
    why,
)
from tconv_swap.kernels.gradients.narrow_mma_cost import (
    GRAD_WEIGHT,
    Multiplies,
    microseconds,
    tile_price,
    tile_work,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import Constant, Kernel, Launch, Part, input_, output, struct, workspace


@dataclass(frozen=True, slots=True)
class GradWeightTile(NarrowTile):
    """The constants of csrc/kernels/grad_weight/narrow_mma.cu, and what the cost of a tile depends on."""

    warps_n: int
    warps_k: int
    input_vector: int
    depth: int
    ieee: bool

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        """Returns the constants of the kernel that define the tile."""
        return (
            *self.shared_constants,
            ("WARPS_N", self.warps_n),
            ("WARPS_K", self.warps_k),
            ("INPUT_VECTOR", self.input_vector),
            ("DEPTH", self.depth),
        )


def ranked(
    among: Iterable[GradWeightTile], problem: Problem, device: Device, with_bias: bool
) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size with their expected clocks, the one that is expected to
    be the fastest first. Inputs: grad_output, input, weight. Outputs: the gradient of the weight, and ``with_bias``
    that of the bias.

    Workspace: at most 64 MiB.
    """
    found = [
        Ranked(clocks_of_sizes(tile, [problem], device)[0], partial(lower, problem, tile, device, with_bias))
        for tile in among
        if supports_tile(problem, tile, with_bias)
    ]
    return sorted(found, key=lambda one: one.clocks)


def supports_tile(problem: Problem, tile: GradWeightTile, with_bias: bool) -> bool:
    """Returns whether a tile's kernel computes the size."""
    geometry = problem.geometry
    splits = ceil_div(geometry.width, tile.grad_output.tile_w)
    return (
        loads_rows(problem, tile.grad_output)
        and (problem.channels_last or geometry.width % tile.input_vector == 0)
        and splits * _split_bytes(geometry) <= WORKSPACE_LIMIT_BYTES
        and (not with_bias or _holds_the_output(geometry, tile.grad_output))
    )


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[GradWeightTile, ...]:
    """Returns the tiles that a layer of these sizes may have."""
    compared = sizes[::EVERY]
    widths = [_row_loads(problem) for problem in compared]
    timed: list[list[tuple[float, GradWeightTile]]] = [[] for _ in compared]
    for tile in grad_weight_tiles(sizes[0], device):
        suited = [i for i, problem in enumerate(compared) if _suits(problem, tile, widths[i])]
        clocks = clocks_of_sizes(tile, [compared[i] for i in suited], device)
        for i, of_size in zip(suited, clocks, strict=True):
            timed[i].append((of_size, tile))
    return best_of_sizes(timed, lambda tile: computes_any_size(sizes[0], tile))


def computes_any_size(layer: Problem, tile: GradWeightTile) -> bool:
    """Returns whether a tile computes any size of a layer. The workspace has no room for the sums of many taps over
    large maps."""
    if layer.geometry.taps >= MANY_TAPS:
        return False
    return layer.channels_last or tile.input_vector == tile.grad_output.load == 1


def _holds_the_output(geometry: Geometry, grad_output: GradOutputTile) -> bool:
    """Returns whether the tiles hold every pixel of the output, and a block the bias sums of its channels."""
    if grad_output.channels > BIAS_CHANNELS or grad_output.chunk_kh < geometry.kernel[0]:
        return False
    gaps = grad_output.chunk_kh > 1 and gcd(geometry.stride[0], geometry.dilation[0]) > 1
    gaps = gaps or (grad_output.chunk_kh == 1 and geometry.stride[0] > 1)
    return not gaps and all(
        dilation * (kernel - 1) + 1 >= stride and output_padding <= padding
        for kernel, stride, dilation, padding, output_padding in zip(
            geometry.kernel,
            geometry.stride,
            geometry.dilation,
            geometry.padding,
            geometry.output_padding,
            strict=True,
        )
    )


def lower(problem: Problem, tile: GradWeightTile, device: Device, with_bias: bool = False) -> Part:
    """Returns the part that computes the problem with ``tile``."""
    geometry = problem.geometry
    _, _, blocks, repeat, splits = cut_of(geometry, tile, device)
    kernel = Kernel(
        "grad_weight/narrow_mma.cu",
        "grad_weight_narrow_mma",
        (
            *common_constants(problem),
            *tile.constants,
            ("WITH_BIAS", with_bias),
        ),
        # A thread with 96 sums also holds 16-bit elements of NCHW in registers until they are converted. On sm_80 160
        # bytes spill.
        spills=problem.dtype.itemsize == 2
        and not problem.channels_last
        and tile.m_tiles * tile.n_tiles >= 24,
    )
    count = geometry.in_channels * geometry.out_channels_per_group * geometry.taps
    bias_at = round_up(4 * count * splits, WORKSPACE_ALIGNMENT)
    bias = output(1 if with_bias else 0)
    shared = tile.shared_bytes
    if with_bias:
        shared = max(shared, 8 * tile.grad_output.channels * tile.grad_output.threads // 32)
    launch = Launch(
        kernel,
        grid=blocks,
        block=tile.grad_output.threads,
        arguments=(
            input_(1),
            input_(0),
            workspace(0) if splits > 1 else output(0),
            workspace(bias_at if with_bias else 0) if splits > 1 else bias,
            struct(0),
        ),
        structs=(
            segment_sizes(geometry, (tile.grad_output.tile_h, tile.grad_output.tile_w), repeat, splits > 1),
        ),
        shared_bytes=shared,
    )
    if splits == 1:
        return Part(FAMILY, why(geometry), (launch,))
    launches = [launch, split_k_reduce(problem.dtype, count, splits)]
    if with_bias:
        launches.append(split_k_reduce(problem.dtype, geometry.out_channels, 2 * splits, bias_at, 1))
    bytes_ = bias_at + 8 * geometry.out_channels * splits if with_bias else 4 * count * splits
    return Part(FAMILY, why(geometry), overlapping(launches, device), bytes_)


class Cut(NamedTuple):
    """How the tiles of a size are shared out.
    Attributes:
        tiles: of the size, with those of all channels, taps and groups.
        resident: blocks that a multiprocessor runs at a time.
        blocks: of the launch.
        repeat: how many tiles a block walks down.
        splits: how many partial sums of the gradient that leaves.
    """

    tiles: int
    resident: int
    blocks: int
    repeat: int
    splits: int


def cut_of(geometry: Geometry, tile: GradWeightTile, device: Device) -> Cut:
    """Returns how the tiles of a size are shared out: over enough blocks to fill the GPU once."""
    grad_output, resident = tile.grad_output, tile.resident
    down = geometry.batch * -(-geometry.height // grad_output.tile_h)
    # The blocks that share one row of tiles: along channels, taps, groups and columns of the image.
    across = tile.blocks_of_a_row(geometry) * chunks(geometry, grad_output)
    tiles_w = -(-geometry.width // grad_output.tile_w)
    most_walks = WORKSPACE_LIMIT_BYTES // (_split_bytes(geometry) * tiles_w) or 1
    walks = min(down, device.multiprocessors * resident // across or 1)
    units = grad_output.tile_h * grad_output.tile_w // 16 // tile.warps_k
    longest = LONGEST_CHAIN[tile.ieee] // units or 1
    repeat = max(min(-(-down // walks), longest), -(-down // most_walks))
    walks = -(-down // repeat)
    return Cut(across * down, resident, across * walks, repeat, tiles_w * walks)


def _split_bytes(geometry: Geometry) -> int:
    """Returns the bytes of one split's sums of the weight and of the bias."""
    weights = geometry.in_channels * geometry.out_channels_per_group * geometry.taps
    return 4 * (weights + geometry.out_channels) + WORKSPACE_ALIGNMENT


def grad_weight_tiles(problem: Problem, device: Device) -> Iterator[GradWeightTile]:
    """Yields the tiles that are compared for some size of a layer."""
    geometry, element_bytes = problem.geometry, problem.dtype.itemsize
    channels_last, asynchronous = problem.channels_last, problem.dtype == torch.float32
    exact, layer = rounds_nothing(problem), of_one_pixel(geometry)
    for m_tiles, warps_m, groups in channel_tiles(problem):
        for chunk in chunk_shapes(geometry, groups, CHUNK_TAPS):
            n_total = ceil_div(chunk[0] * chunk[1] * geometry.kernel[1], 8)
            min_n = ceil_div(n_total, MAX_SUM_TILES[exact] // m_tiles)
            # In NCHW rows of some size hold whole loads of any width.
            widths = (
                load_widths(geometry, groups * chunk[0], True, element_bytes, asynchronous)
                if channels_last
                else tuple(sorted(powers(16 // element_bytes), reverse=True))
            )
            # The pitches are the same for any number of threads.
            pitched: dict[tuple[int, int, int, int], tuple[GradOutputTile, float]] = {}
            for load, warps_n, warps_k, tile_w, tile_h in product(
                widths, sorted({min_n, min(2 * min_n, n_total)}), powers(8), (16, 32, 64, 128), powers(16)
            ):
                n_tiles = ceil_div(n_total, warps_n)
                warps = warps_k * warps_n * warps_m * groups
                if warps > 16 or (warps > 8 and warps_k > 1) or (warps < 4 and warps_k < 8):
                    continue
                if tile_h * tile_w // 16 % warps_k:
                    continue
                unpitched = GradOutputTile(
                    tile_h=tile_h,
                    tile_w=tile_w,
                    block_groups=groups,
                    chunk_co=chunk[0],
                    chunk_kh=chunk[1],
                    load=load,
                    async_=asynchronous,
                    threads=32 * warps,
                )
                if not loadable(problem, unpitched):
                    continue
                loading = loader_registers(problem, unpitched)
                sums = m_tiles * n_tiles * 4
                for vector in (1, 2, 4):
                    words = _input_words(problem, groups, m_tiles, vector)
                    units = tile_h * tile_w // 16 // warps_k
                    depth = max(d for d in powers(min(4, units)) if d == 1 or d * words <= INPUT_REGISTERS)
                    needed = (
                        (70 if exact else 45)
                        + sums
                        + 8 * m_tiles
                        + words * depth
                        + n_tiles * (7 if exact else 3)
                        + loading
                    )
                    if needed > 250 or needed * unpitched.threads > REGISTERS:
                        continue
                    laid = load, tile_h, tile_w, vector
                    if laid not in pitched:
                        pixels = (0, vector, 2 * vector, 3 * vector)
                        pitched[laid] = with_pitches(layer, unpitched, channels_last, pixels, True)
                    grad_output, passes = pitched[laid]
                    exchange = warps // warps_k * (warps_k // 2) * sums * 32
                    shared = 4 * max(grad_output.shared_words, exchange)
                    if shared > min(SHARED_BYTES, device.shared_memory_per_block):
                        continue
                    grad_output = replace(grad_output, threads=unpitched.threads)
                    multiplies = Multiplies(2 * units * warps, m_tiles, n_tiles, passes, 0)
                    yield GradWeightTile(
                        grad_output,
                        m_tiles,
                        n_tiles,
                        warps_m,
                        needed,
                        shared,
                        _price(problem, grad_output, multiplies, vector),
                        warps_n,
                        warps_k,
                        vector,
                        depth,
                        exact,
                    )


def _price(problem: Problem, grad_output: GradOutputTile, multiplies: Multiplies, vector: int) -> TilePrice:
    """Returns the price of a tile whose loads of the input in NCHW have ``vector`` elements."""
    load = _input_load(problem, grad_output.block_groups, multiplies.m_tiles, vector)
    rows_of_input = 1 if problem.geometry.in_channels_per_group <= 8 else 2
    inputs = multiplies.steps * multiplies.m_tiles * 2 * rows_of_input / load
    return tile_price(tile_work(problem, grad_output, multiplies), GRAD_WEIGHT, 1, inputs)


def _row_loads(problem: Problem) -> tuple[int, ...]:
    """Returns how many elements loads of rows in NCHW have that are compared for a size."""
    return load_widths(problem.geometry, 1, False, problem.dtype.itemsize, problem.dtype == torch.float32)


def _suits(problem: Problem, tile: GradWeightTile, row_loads: Sequence[int]) -> bool:
    """Returns whether a tile of a layer is compared for a size: it computes it, and is not far larger than its map."""
    tile_h, tile_w = tile.grad_output.tile_h, tile.grad_output.tile_w
    if tile_w > 16 and tile_w >= 2 * problem.geometry.width:
        return False
    if tile_h > 1 and tile_h >= 2 * problem.geometry.height:
        return False
    loads = problem.channels_last or tile.grad_output.load in row_loads
    return loads and supports_tile(problem, tile, False)


def _input_load(problem: Problem, groups: int, m_tiles: int, vector: int) -> int:
    """Returns INPUT_LOAD of csrc/kernels/grad_weight/narrow_mma_input.cuh."""
    geometry, channels = problem.geometry, 2 * m_tiles
    if not problem.channels_last:
        return vector
    if groups > 1 or geometry.in_channels_per_group <= 8 or geometry.in_channels_per_group % channels:
        return 1
    return min(channels, 16 // problem.dtype.itemsize)


def _input_words(problem: Problem, groups: int, m_tiles: int, vector: int) -> int:
    """Returns the registers that hold the input of a unit of 16 pixels."""
    load = _input_load(problem, groups, m_tiles, vector)
    count = m_tiles * (1 if problem.geometry.in_channels_per_group <= 8 else 2) * 4 // load
    return count * ceil_div(load * problem.dtype.itemsize, 4)


def clocks_of_sizes(tile: GradWeightTile, sizes: Sequence[Problem], device: Device) -> list[float]:
    """Returns the expected clocks of sizes of a layer; infinitely many where the tile does not support the size."""
    if not sizes:
        return []
    geometry = sizes[0].geometry
    count = 4 * geometry.in_channels * geometry.out_channels_per_group * geometry.taps
    found = []
    for problem in sizes:
        if not supports_tile(problem, tile, False):
            found.append(inf)
            continue
        cut = cut_of(problem.geometry, tile, device)
        partial_bytes = count * cut.splits if cut.splits > 1 else 0
        expected = microseconds(
            *(problem, tile.price, GRAD_WEIGHT, device),
            *(cut.tiles, cut.blocks, cut.resident),
            partial_bytes=partial_bytes,
        )
        found.append(CLOCKS_OF_MICROSECOND * expected)
    return found
