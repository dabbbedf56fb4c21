"""Plans all gradients in one pass over the input where the output has few channels and taps: RGB heads
(csrc/kernels/gradients/narrow_joint.cu)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import ELEMENT_KINDS, PRECISIONS
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.hardware import RESERVED_BYTES
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.sizes import patch_sizes
from tconv_swap.kernels.gradients.narrow_mma import (
    BIAS_CHANNELS,
    LONGEST_CHAIN,
    NARROW_CHANNELS,
    TF32_CHANNELS,
    overlapping,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
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

FAMILY = "narrow_joint"
MAX_CHANNELS, MAX_TAPS, MAX_KERNEL = 128, 96, 32
STEP_BYTES, ROW_BYTES = 32, 128
#: In 16 bits: with more taps the sums take so many registers that small tiles are faster.
MANY_SUMS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """The constants of csrc/kernels/gradients/narrow_joint.cu."""

    pixels: int
    stages: int
    input_c_tiles: int
    input_warps_c: int
    input_warps_p: int
    weight_m_tiles: int
    weight_warps_k: int
    blocks: int
    producer_warps: int

    def __str__(self) -> str:
        warps = f"{self.input_warps} + {self.weight_warps} + {self.producer_warps} warps"
        return f"{self.pixels} pixels, {self.channels} channels, {warps}, {self.stages} stages"

    @property
    def channels(self) -> int:
        """Returns the channels of the input, with padding."""
        return 16 * self.input_c_tiles * self.input_warps_c

    @property
    def input_warps(self) -> int:
        return self.input_warps_c * self.input_warps_p

    @property
    def weight_warps(self) -> int:
        return self.channels // 16 // self.weight_m_tiles * self.weight_warps_k

    @property
    def threads(self) -> int:
        return 32 * (self.input_warps + self.weight_warps + self.producer_warps)

    def constants(self, shared_bytes: int) -> tuple[tuple[str, Constant], ...]:
        return (
            ("PIXELS", self.pixels),
            ("STAGES", self.stages),
            ("INPUT_C_TILES", self.input_c_tiles),
            ("INPUT_WARPS_C", self.input_warps_c),
            ("INPUT_WARPS", self.input_warps),
            ("INPUT_P_TILES", self.pixels // 16 // self.input_warps_p),
            ("WEIGHT_M_TILES", self.weight_m_tiles),
            ("WEIGHT_WARPS_K", self.weight_warps_k),
            ("WEIGHT_WARPS", self.weight_warps),
            ("MIN_BLOCKS", self.blocks),
            ("PRODUCER_WARPS", self.producer_warps),
            ("SHARED_BYTES", shared_bytes),
        )


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the gradients of a problem."""
    geometry = problem.geometry
    if problem.dtype not in PRECISIONS or device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    item = problem.dtype.itemsize
    image = geometry.height * geometry.width
    row = geometry.in_channels if problem.channels_last else image
    return (
        geometry.groups == 1
        and geometry.out_channels < TF32_CHANNELS
        and geometry.in_channels <= MAX_CHANNELS
        and geometry.in_channels > NARROW_CHANNELS
        and geometry.out_channels * geometry.taps <= MAX_TAPS
        and max(geometry.kernel) <= MAX_KERNEL
        and row * item % 16 == 0
        and geometry.in_channels * image < INT32_LIMIT
        and geometry.out_channels * geometry.out_height * geometry.out_width < INT32_LIMIT
        and geometry.batch * ceil_div(image, 32) < INT32_LIMIT // 2
    )


def plan_gradients(problem: Problem, device: Device, wants_bias: bool) -> Part | None:
    """Returns the part, or None for a problem that the family does not compute.

    Inputs: grad_output, input (16-byte aligned), weight. Outputs: the gradients of the input and of the weight, and
    if ``wants_bias`` and ``counts_the_output`` that of the bias. Workspace: at most 64 MiB.
    """
    if not supports(problem, device):
        return None
    found = rank(problem, device)
    if not found:
        return None
    return lower(problem, found[0], device, wants_bias and counts_the_output(problem.geometry))


def may_read_vectors(problem: Problem) -> bool:
    """Returns whether one load reads four neighbours in a row of grad_output, if rows are multiples of four."""
    g = problem.geometry
    return (
        problem.dtype == torch.float32
        and not problem.channels_last
        and g.stride[1] % 4 == 0
        and g.dilation[1] == 1
    )


def kernels_of(layer: Problem, device: Device) -> int:
    """Returns how many kernels a layer has for all its sizes."""
    g = layer.geometry
    channels = NARROW_CHANNELS < g.in_channels <= MAX_CHANNELS and g.out_channels < TF32_CHANNELS
    if device.architecture != "sm_90a" or g.groups > 1 or not channels:
        return 0
    if layer.dtype not in PRECISIONS or g.out_channels * g.taps > MAX_TAPS:
        return 0
    return 2 if may_read_vectors(layer) else 1


def _steps(problem: Problem) -> int:
    """Returns how many steps of k all taps have."""
    geometry = problem.geometry
    return ceil_div(geometry.out_channels * geometry.taps * problem.dtype.itemsize, STEP_BYTES)


def _multiplied_bytes(problem: Problem, tile: Tile) -> int:
    """Returns IM2COL_AT of csrc/kernels/gradients/narrow_joint.cu: the bytes of the input and the weights."""
    item = problem.dtype.itemsize
    weights = tile.channels // 16 * _steps(problem) * _parts(problem) * 512
    return tile.stages * tile.pixels * tile.channels * item + weights


def _parts(problem: Problem) -> int:
    return 2 if problem.dtype.itemsize == 4 else 1


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Returns SHARED_BYTES of csrc/kernels/gradients/narrow_joint.cu."""
    group = 8 * (_steps(problem) * STEP_BYTES + 16) + 32
    im2col = 2 * _parts(problem) * (tile.pixels // 8 * group)
    return _multiplied_bytes(problem, tile) + im2col + 8 * (tile.stages + 1)


def fits(problem: Problem, tile: Tile, device: Device) -> bool:
    """Returns whether shared memory holds the tile's blocks of a multiprocessor, and a block's memory the sums that its
    warps exchange."""
    sums = tile.weight_m_tiles * _steps(problem) * STEP_BYTES // problem.dtype.itemsize // 8 * 4
    pairs = tile.channels // 16 // tile.weight_m_tiles * (tile.weight_warps_k // 2)
    shared = shared_bytes(problem, tile) + RESERVED_BYTES
    return (
        tile.blocks * shared <= device.shared_memory_per_block + RESERVED_BYTES
        and pairs * sums * 128 <= _multiplied_bytes(problem, tile)
    )


def tiles(problem: Problem, device: Device) -> Iterator[Tile]:
    """Yields every tile that the kernel computes correctly."""
    row_elements = ROW_BYTES // problem.dtype.itemsize
    wanted = ceil_div(problem.geometry.in_channels, 16)
    for c16, pixels in product((1, 2, 4, 8), (32, 64, 128)):
        if (
            c16 < wanted
            or c16 >= 2 * wanted + 2
            or (16 * c16 if problem.channels_last else pixels) % row_elements
        ):
            continue
        for c_tiles, m_tiles, warps_p, warps_k in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
            if c16 % c_tiles or c16 % m_tiles or pixels // 16 % warps_p or pixels // 16 % warps_k:
                continue
            input_warps, weight_warps = c16 // c_tiles * warps_p, c16 // m_tiles * warps_k
            if input_warps != weight_warps or input_warps not in (2, 4, 8):
                continue
            if 64 * input_warps % pixels:
                continue
            for blocks, stages, producers in product((2, 1), (4, 3, 2), (0, 4)):
                if producers and (blocks > 1 or input_warps != 4):
                    continue
                tile = Tile(
                    pixels, stages, c_tiles, c16 // c_tiles, warps_p, m_tiles, warps_k, blocks, producers
                )
                if fits(problem, tile, device):
                    yield tile


def rank(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that fit, the one that is expected to be the fastest first. A layer has the same tile at every
    size.

    The order was measured (docs/kernels/gradients/narrow_joint.md): float32 is fastest with four warps of each kind,
    which hold many sums. 16 bits, which memory bounds, are fastest with more warps, in large tiles, or in small ones if
    many taps make many sums.
    """
    geometry = problem.geometry
    c16 = 4 if geometry.in_channels <= 64 else 8
    shapes, producers = [(64, 4, 2, 1), (32, 4, 2, 1)], 4
    if problem.dtype.itemsize == 2:
        few = (128, c16, 2, 8 // c16)
        many = (64, c16, 1, 8 // c16)
        producers = 0
        shapes = [many, few] if geometry.out_channels * geometry.taps > MANY_SUMS else [few, many]
    found = []
    for (pixels, warps, m_tiles, blocks), stages in product(shapes, (4, 3, 2)):
        warps_c, warps_m = c16 // 2, c16 // m_tiles
        tile = Tile(
            pixels, stages, 2, warps_c, warps // warps_c, m_tiles, warps // warps_m, blocks, producers
        )
        if fits(problem, tile, device):
            found.append(tile)
    return found


def lower(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """Returns the part that runs ``tile``; its outputs are the gradients of input, weight, and ``with_bias`` bias."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    image = geometry.height * geometry.width
    row_elements = ROW_BYTES // item
    all_tiles = geometry.batch * ceil_div(image, tile.pixels)
    tile_steps = tile.pixels // 16 // tile.weight_warps_k
    blocks = device.multiprocessors * tile.blocks
    max_tiles = max(1, LONGEST_CHAIN[item == 4] // tile_steps)
    splits = min(all_tiles, max(blocks, ceil_div(all_tiles, max_tiles)))
    count = geometry.in_channels * geometry.out_channels * geometry.taps
    splits = max(1, min(splits, WORKSPACE_LIMIT_BYTES // (4 * (count + 2 * geometry.out_channels)) - 1))
    bias_at = round_up(4 * count * splits, WORKSPACE_ALIGNMENT)
    shared = shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int"),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("PRECISION", PRECISIONS[problem.dtype]),
        ("WITH_BIAS", with_bias),
        ("VECTOR_READS", may_read_vectors(problem) and geometry.out_width % 4 == 0),
        *tile.constants(shared),
    )
    c = geometry.in_channels
    sizes = (c, image) if problem.channels_last else (image, c)
    input_map = TensorMap(
        input_(1),
        ELEMENT_KINDS[problem.dtype],
        (*sizes, geometry.batch),
        (sizes[0] * item, c * image * item),
        (row_elements, tile.pixels if problem.channels_last else tile.channels, 1),
        (1, 1, 1),
        ROW_BYTES,
    )
    launch = Launch(
        # With two blocks on a multiprocessor a thread has 128 registers: in 16 bits about 12 bytes spill.
        Kernel("gradients/narrow_joint.cu", "gradients_narrow_joint", constants, problem.dtype.itemsize == 2),
        grid=splits,
        block=tile.threads,
        arguments=(
            tensor_map(0),
            input_(0),
            input_(2),
            output(0),
            workspace(0),
            workspace(bias_at),
            struct(0),
        ),
        shared_bytes=shared,
        structs=(patch_sizes(geometry, tile.pixels),),
        tensor_maps=(input_map,),
    )
    launches = [launch, split_k_reduce(problem.dtype, count, splits, 0, 1)]
    if with_bias:
        launches.append(split_k_reduce(problem.dtype, geometry.out_channels, 2 * splits, bias_at, 2))
    workspace_bytes = bias_at + 8 * geometry.out_channels * splits
    why = f"{geometry.in_channels} to {geometry.out_channels} channels: all gradients in one pass, tiles of {tile}"
    return Part(FAMILY, why, overlapping(launches, device), workspace_bytes)


def counts_the_output(geometry: Geometry) -> bool:
    """Returns whether the im2col rows hold every pixel of the output, and a thread can keep the sums of its
    channels."""
    return geometry.out_channels <= BIAS_CHANNELS and all(
        dilation == 1 and kernel >= stride and output_padding <= padding
        for kernel, stride, dilation, padding, output_padding in zip(
            geometry.kernel,
            geometry.stride,
            geometry.dilation,
            geometry.padding,
            geometry.output_padding,
            strict=True,
        )
    )
