"""Plans of the general kernels: any geometry, any dtype, both layouts, every NVIDIA GPU from sm_75."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

REDUCE_THREADS = 256
#: Partial sums of a split gradient may take this much memory, or one slice where even one is larger.
WORKSPACE_LIMIT_BYTES = 64 << 20
#: Blocks per multiprocessor that a split aims at: enough to hide latency, few enough to keep slices long.
BLOCKS_PER_MULTIPROCESSOR = 4
INT32_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's tile of the product and a thread's part of it. 256 threads each."""

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
    """A square tile, or a tall one where the product is narrow."""
    if columns > 16:
        return Tile(64, 64, 16, 4, 4)
    if columns > 4:
        return Tile(256, 16, 8, 4, 4)
    return Tile(256, 4, 8, 4, 1)


def _common(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool, weight_channels_last: bool
) -> tuple[tuple[str, Constant], ...]:
    largest = max(
        geometry.batch * geometry.in_channels * geometry.height * geometry.width,
        geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width,
        geometry.in_channels * geometry.out_channels_per_group * geometry.taps,
    )
    return (
        ("Element", ELEMENT_TYPES[dtype]),
        ("Index", "int" if largest <= INT32_ELEMENTS else "long long"),
        *geometry.constants,
        ("CHANNELS_LAST", channels_last),
        ("WEIGHT_CHANNELS_LAST", weight_channels_last),
    )


def plan_forward(
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool,
    weight_channels_last: bool,
    has_bias: bool,
) -> Plan:
    """Inputs: input, weight, bias. Output: the output."""
    tile = _tile(geometry.out_channels_per_group)
    phases = geometry.stride[0] * geometry.stride[1]
    cells = -(-geometry.out_height // geometry.stride[0]) * -(-geometry.out_width // geometry.stride[1])
    tiles_m = -(-geometry.batch * cells // tile.m)
    tiles_n = -(-geometry.out_channels_per_group // tile.n)
    kernel = Kernel(
        "general_forward.cu",
        "general_forward",
        (
            *_common(geometry, dtype, channels_last, weight_channels_last),
            *tile.constants,
            ("HAS_BIAS", has_bias),
        ),
    )
    launch = Launch(
        kernel,
        grid=tiles_m * phases * geometry.groups * tiles_n,
        block=tile.threads,
        arguments=(input_(0), input_(1), input_(2), output(0), int64(geometry.batch)),
    )
    return Plan(
        "general",
        "covers every geometry",
        outputs=(Output(geometry.output_shape, channels_last),),
        launches=(launch,) if geometry.batch else (),
    )


def plan_backward(
    geometry: Geometry,
    dtype: torch.dtype,
    channels_last: bool,
    weight_channels_last: bool,
    output_mask: tuple[bool, ...],
    multiprocessors: int,
) -> Plan:
    """Inputs: grad_output, input, weight. Outputs: the gradients the mask asks for (input, weight, bias).

    Workspace: for the weight and for the bias, at most 64 MiB, or one copy in the accumulation type if that is more.
    """
    common = _common(geometry, dtype, channels_last, weight_channels_last)
    outputs: list[Output] = []
    launches: list[Launch] = []
    offset = 0
    if output_mask[0]:
        launches += _grad_input(geometry, common, len(outputs))
        outputs.append(Output(geometry.input_shape, channels_last))
    if output_mask[1]:
        bytes_, steps = _grad_weight(geometry, dtype, common, multiprocessors, len(outputs), offset)
        offset += bytes_
        launches += steps
        outputs.append(Output(geometry.weight_shape, weight_channels_last))
    if output_mask[2]:
        bytes_, steps = _grad_bias(
            geometry, dtype, common, channels_last, multiprocessors, len(outputs), offset
        )
        offset += bytes_
        launches += steps
        outputs.append(Output((geometry.out_channels,)))
    return Plan("general", "covers every geometry", tuple(outputs), tuple(launches), workspace_bytes=offset)


def _grad_input(geometry: Geometry, common: tuple[tuple[str, Constant], ...], index: int) -> list[Launch]:
    if geometry.batch == 0:
        return []
    tile = _tile(geometry.in_channels_per_group)
    tiles_m = -(-geometry.batch * geometry.height * geometry.width // tile.m)
    tiles_n = -(-geometry.in_channels_per_group // tile.n)
    kernel = Kernel("general_grad_input.cu", "general_grad_input", (*common, *tile.constants))
    return [
        Launch(
            kernel,
            grid=tiles_m * tiles_n * geometry.groups,
            block=tile.threads,
            arguments=(input_(0), input_(2), output(index), int64(geometry.batch)),
        )
    ]


def _split(length: int, blocks: int, least: int, slice_bytes: int, multiprocessors: int) -> tuple[int, int]:
    """How many slices a sum of ``length`` terms is cut into when one slice fills ``blocks`` blocks, and the
    length of a slice: enough to fill the chip, none shorter than ``least``, within the workspace limit."""
    wanted = -(-multiprocessors * BLOCKS_PER_MULTIPROCESSOR // blocks)
    slices = max(1, min(wanted, length // least, WORKSPACE_LIMIT_BYTES // slice_bytes))
    per_slice = max(1, -(-length // slices))
    return max(1, -(-length // per_slice)), per_slice


def _sum_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


def _reduce(dtype: torch.dtype, count: int, slices: int, offset: int, index: int) -> Launch:
    kernel = Kernel(
        "reduce_slices.cu", "reduce_slices", (("Element", ELEMENT_TYPES[dtype]), ("THREADS", REDUCE_THREADS))
    )
    return Launch(
        kernel,
        grid=-(-count // REDUCE_THREADS),
        block=REDUCE_THREADS,
        arguments=(workspace(offset), output(index), int64(count), int64(slices)),
    )


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _grad_weight(
    geometry: Geometry,
    dtype: torch.dtype,
    common: tuple[tuple[str, Constant], ...],
    multiprocessors: int,
    index: int,
    offset: int,
) -> tuple[int, list[Launch]]:
    columns = geometry.taps * geometry.out_channels_per_group
    tile = _tile(columns)
    blocks = -(-geometry.in_channels_per_group // tile.m) * -(-columns // tile.n) * geometry.groups
    count = geometry.in_channels * columns
    pixels = geometry.batch * geometry.height * geometry.width
    slices, per_slice = _split(pixels, blocks, 4 * tile.k, count * _sum_bytes(dtype), multiprocessors)
    kernel = Kernel("general_grad_weight.cu", "general_grad_weight", (*common, *tile.constants))
    launch = Launch(
        kernel,
        grid=blocks * slices,
        block=tile.threads,
        arguments=(input_(1), input_(0), workspace(offset), int64(geometry.batch), int64(per_slice)),
    )
    return _aligned(count * slices * _sum_bytes(dtype)), [
        launch,
        _reduce(dtype, count, slices, offset, index),
    ]


def _grad_bias(
    geometry: Geometry,
    dtype: torch.dtype,
    common: tuple[tuple[str, Constant], ...],
    channels_last: bool,
    multiprocessors: int,
    index: int,
    offset: int,
) -> tuple[int, list[Launch]]:
    threads = 256
    channels = geometry.out_channels
    blocks = -(-channels // 32) if channels_last else channels
    positions = geometry.batch * geometry.out_height * geometry.out_width
    slices, per_slice = _split(positions, blocks, 4 * threads, channels * _sum_bytes(dtype), multiprocessors)
    kernel = Kernel("general_grad_bias.cu", "general_grad_bias", (*common, ("THREADS", threads)))
    launch = Launch(
        kernel,
        grid=blocks * slices,
        block=threads,
        arguments=(input_(0), workspace(offset), int64(geometry.batch), int64(per_slice)),
    )
    return _aligned(channels * slices * _sum_bytes(dtype)), [
        launch,
        _reduce(dtype, channels, slices, offset, index),
    ]
