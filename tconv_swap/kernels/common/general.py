"""Plans of the general kernels: any geometry, any dtype, both layouts, every NVIDIA GPU from sm_75."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.sizes import image_sizes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Part,
    Plan,
    input_,
    int64,
    output,
    struct,
    workspace,
)

REDUCE_THREADS = 256
#: Threads that share the sum of a result where one thread for each result would not fill a GPU.
REDUCE_LANES = 8
FEW_RESULTS = 1 << 16
#: The same where there are so few results that the length of a thread's sum decides the time.
MAX_REDUCE_LANES = 32
VERY_FEW_RESULTS = 1 << 12
#: Bytes that the partial sums of a split gradient may take, unless a single split is larger. Copies of tensors may take
#: limits.MAX_COPY_BYTES on top.
WORKSPACE_LIMIT_BYTES = 64 << 20
#: Blocks per multiprocessor that a split aims at: enough to hide latency, few enough to keep splits long.
BLOCKS_PER_MULTIPROCESSOR = 4
INT32_ELEMENTS = 2**31 - 1
#: From this many taps on, other families compute most problems (gradients/narrow_mma.py).
MANY_TAPS = 256
#: How many pixels, or positions, a tile may extend beyond the last one.
MAX_TILE_PIXELS = 256
#: Of grad_bias/general.cu: bytes of a load, and loads of a thread before it adds them up.
BIAS_VECTOR_BYTES = 16
BIAS_LOADS = 4


class BiasBlocks(NamedTuple):
    """The blocks of grad_bias/general.cu in a layout.

    Attributes:
        threads: of a block.
        wanted: blocks of a multiprocessor that splits aim at.
        resident: blocks of a multiprocessor for which there are registers.
    """

    threads: int
    wanted: int
    resident: int


#: A block has one channel: the number of blocks is a multiple of that of channels, so more than wanted may run at once.
BIAS_NCHW = BiasBlocks(256, 4, 5)
#: A block has all channels: few large blocks leave few partial sums.
BIAS_CHANNELS_LAST = BiasBlocks(512, 2, 2)
_WHY = "covers every geometry"


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of the product that a block computes, and the part of it that a thread computes. A block has 256
    threads."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        return (self.m // self.thread_m) * (self.n // self.thread_n)

    @property
    def constants(self) -> tuple[tuple[str, Constant], ...]:
        return (
            ("TILE_M", self.m),
            ("TILE_N", self.n),
            ("TILE_K", self.k),
            ("THREAD_M", self.thread_m),
            ("THREAD_N", self.thread_n),
        )


def _tile(columns: int) -> Tile:
    """Returns a square tile, or a tall one if the product has few columns."""
    if columns > 16:
        return Tile(64, 64, 16, 4, 4)
    if columns > 4:
        return Tile(256, 16, 8, 4, 4)
    return Tile(256, 4, 8, 4, 1)


def _common(problem: Problem, of_gradients: bool) -> tuple[tuple[str, Constant], ...]:
    geometry = problem.geometry
    largest = max(
        geometry.batch * geometry.in_channels * geometry.height * geometry.width,
        geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width,
        geometry.in_channels * geometry.out_channels_per_group * geometry.taps,
    )
    few = largest <= INT32_ELEMENTS - MAX_TILE_PIXELS
    if of_gradients and geometry.taps >= MANY_TAPS:
        # Only large images of such layers are computed here, so one kernel is enough.
        few = False
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int" if few else "long long"),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
    )


def plan_forward(problem: Problem, has_bias: bool) -> Plan:
    """Returns the plan of a forward pass. Inputs: input, weight, bias. Output: the output."""
    geometry = problem.geometry
    tile = _tile(geometry.out_channels_per_group)
    phases = geometry.stride[0] * geometry.stride[1]
    positions = (
        ceil_div(geometry.out_height, geometry.stride[0]),
        ceil_div(geometry.out_width, geometry.stride[1]),
    )
    tiles_m = ceil_div(geometry.batch * positions[0] * positions[1], tile.m)
    tiles_n = ceil_div(geometry.out_channels_per_group, tile.n)
    kernel = Kernel(
        "forward/general.cu",
        "forward_general",
        (
            *_common(problem, of_gradients=False),
            *tile.constants,
            *bias_alone(has_bias),
        ),
    )
    launch = Launch(
        kernel,
        grid=tiles_m * phases * geometry.groups * tiles_n,
        block=tile.threads,
        arguments=(input_(0), input_(1), input_(2), output(0), struct(0)),
        structs=(image_sizes(geometry, positions),),
    )
    return Plan(
        "general",
        _WHY,
        outputs=(Output(geometry.output_shape, problem.channels_last),),
        launches=(launch,) if geometry.batch else (),
    )


def plan_grad_input(problem: Problem) -> Part:
    """Returns the part that computes the gradient of the input. Inputs: grad_output, input, weight."""
    geometry = problem.geometry
    if geometry.batch == 0:
        return Part("general", _WHY, ())
    tile = _tile(geometry.in_channels_per_group)
    tiles_m = ceil_div(geometry.batch * geometry.height * geometry.width, tile.m)
    tiles_n = ceil_div(geometry.in_channels_per_group, tile.n)
    kernel = Kernel(
        "grad_input/general.cu",
        "grad_input_general",
        (*_common(problem, of_gradients=True), *tile.constants),
    )
    launch = Launch(
        kernel,
        grid=tiles_m * tiles_n * geometry.groups,
        block=tile.threads,
        arguments=(input_(0), input_(2), output(0), struct(0)),
        structs=(image_sizes(geometry),),
    )
    return Part("general", _WHY, (launch,))


def _split(length: int, blocks: int, min_length: int, split_bytes: int, all_blocks: int) -> tuple[int, int]:
    """Returns the number of splits of a sum of ``length`` terms, and the terms of a split.

    One split fills ``blocks`` blocks. There are enough splits for ``all_blocks``, but none is shorter than
    ``min_length``, and their ``split_bytes`` of partial sums stay within the workspace limit.
    """
    wanted = ceil_div(all_blocks, blocks)
    splits = max(1, min(wanted, length // min_length, WORKSPACE_LIMIT_BYTES // split_bytes))
    per_split = max(1, ceil_div(length, splits))
    return max(1, ceil_div(length, per_split)), per_split


def _sum_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


def split_k_reduce(
    dtype: torch.dtype,
    count: int,
    splits: int,
    offset: int = 0,
    index: int = 0,
    overlaps_previous: bool = False,
) -> Launch:
    """Returns the launch that adds up ``splits`` copies of ``count`` partial sums in the workspace, in a fixed order,
    into output ``index``."""
    lanes = REDUCE_LANES if count <= FEW_RESULTS else 1
    if count <= VERY_FEW_RESULTS:
        lanes = MAX_REDUCE_LANES
    kernel = Kernel(
        "common/split_k_reduce.cu",
        "split_k_reduce",
        (("Element", ELEMENT_TYPES[dtype]), ("THREADS", REDUCE_THREADS), ("LANES", lanes)),
    )
    return Launch(
        kernel,
        grid=ceil_div(count * lanes, REDUCE_THREADS),
        block=REDUCE_THREADS,
        arguments=(workspace(offset), output(index), int64(count), int64(splits)),
        overlaps_previous=overlaps_previous,
    )


def plan_grad_weight(problem: Problem, device: Device) -> Part:
    """Returns the part that computes the gradient of the weight. Inputs: grad_output, input, weight.

    Workspace: at most 64 MiB, or one copy of the gradient in the accumulation type if that is more.
    """
    geometry, dtype = problem.geometry, problem.dtype
    columns = geometry.taps * geometry.out_channels_per_group
    tile = _tile(columns)
    blocks = ceil_div(geometry.in_channels_per_group, tile.m) * ceil_div(columns, tile.n) * geometry.groups
    count = geometry.in_channels * columns
    pixels = geometry.batch * geometry.height * geometry.width
    all_blocks = device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR
    splits, per_split = _split(pixels, blocks, 4 * tile.k, count * _sum_bytes(dtype), all_blocks)
    kernel = Kernel(
        "grad_weight/general.cu",
        "grad_weight_general",
        (*_common(problem, of_gradients=True), *tile.constants),
    )
    launch = Launch(
        kernel,
        grid=blocks * splits,
        block=tile.threads,
        arguments=(input_(1), input_(0), workspace(0), struct(0), int64(per_split)),
        structs=(image_sizes(geometry),),
    )
    return Part(
        "general", _WHY, (launch, split_k_reduce(dtype, count, splits)), count * splits * _sum_bytes(dtype)
    )


def plan_grad_bias(problem: Problem, device: Device) -> Part:
    """Returns the part that computes the gradient of the bias. Input: grad_output. Workspace: at most 64 MiB."""
    geometry, dtype = problem.geometry, problem.dtype
    of_layout = BIAS_CHANNELS_LAST if problem.channels_last else BIAS_NCHW
    threads, channels = of_layout.threads, geometry.out_channels
    pixels = geometry.out_height * geometry.out_width
    vector = BIAS_VECTOR_BYTES // dtype.itemsize
    if problem.channels_last:
        if channels // math.gcd(channels, vector) > threads:
            # The elements of a vector stay in the same position, so that no channel is divided among blocks.
            vector = math.gcd(channels, vector)
        period = channels // math.gcd(channels, vector)
        blocks = ceil_div(period, threads)
        at_once = threads // ceil_div(period, blocks)
        length = ceil_div(geometry.batch * pixels * channels, period * vector)
    else:
        # A plane that does not begin at a whole vector may touch one more.
        vectors = pixels // vector if pixels % vector == 0 else (pixels + vector - 2) // vector + 1
        blocks, at_once, length = channels, threads, geometry.batch * vectors
    rows = 1 if dtype.itemsize == 2 else 2  # of a split: 16-bit types have no compensation
    splits, per_split = _split(
        length,
        blocks,
        at_once,
        rows * channels * _sum_bytes(dtype),
        device.multiprocessors * of_layout.wanted,
    )
    constants = _common(problem, of_gradients=True)
    kernel = Kernel(
        "grad_bias/general.cu",
        "grad_bias_general",
        (
            *constants,
            ("THREADS", threads),
            ("VECTOR", vector),
            ("LOADS_IN_FLIGHT", BIAS_LOADS),
            ("BLOCKS", of_layout.resident),
        ),
        # Five blocks leave 48 registers to a thread; offsets of 64 bits take up to two more (8 bytes were seen).
        spills=not problem.channels_last and dtype.itemsize == 2 and ("Index", "long long") in constants,
    )
    launch = Launch(
        kernel,
        grid=blocks * splits,
        block=threads,
        arguments=(input_(0), workspace(0), struct(0), int64(per_split), int64(length)),
        structs=(image_sizes(geometry),),
    )
    overlaps = device.compute_capability >= 90
    return Part(
        "general",
        _WHY,
        (launch, split_k_reduce(dtype, channels, rows * splits, overlaps_previous=overlaps)),
        rows * channels * splits * _sum_bytes(dtype),
    )
