"""Plans of all gradients in one pass over the input, where the output has few channels and taps: RGB heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.sizes import patch_sizes
from tconv_swap.kernels.gradients.narrow_mma import (
    BIAS_CHANNELS,
    IEEE,
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
    ElementKind,
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
#: Values of csrc/kernels/common/mma.cuh, and of the copy engine.
_PRECISIONS = {torch.float32: IEEE, torch.float16: 1, torch.bfloat16: 2}
_KINDS = {
    torch.float32: ElementKind.FLOAT32,
    torch.float16: ElementKind.FLOAT16,
    torch.bfloat16: ElementKind.BFLOAT16,
}
MOST_CHANNELS, MOST_TAPS, MOST_KERNEL = 128, 96, 32
STEP_BYTES, LINE_BYTES = 32, 128
#: Where fewer channels or pixels of an image fill a tile, two passes by smaller ones were not compared.
FEWEST_CHANNELS, FEWEST_PIXELS = 40, 64
#: In 16 bits: taps from which the sums are many.
MANY_SUMS = 64
RESERVED_BYTES = 1024


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
    gather_warps: int

    def __str__(self) -> str:
        warps = f"{self.input_warps} + {self.weight_warps} + {self.gather_warps} warps"
        return f"{self.pixels} pixels, {self.channels} channels, {warps}, {self.stages} stages"

    @property
    def channels(self) -> int:
        """Of the input, with padding."""
        return 16 * self.input_c_tiles * self.input_warps_c

    @property
    def input_warps(self) -> int:
        return self.input_warps_c * self.input_warps_p

    @property
    def weight_warps(self) -> int:
        return self.channels // 16 // self.weight_m_tiles * self.weight_warps_k

    @property
    def threads(self) -> int:
        return 32 * (self.input_warps + self.weight_warps + self.gather_warps)

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
            ("GATHER_WARPS", self.gather_warps),
            ("SHARED_BYTES", shared_bytes),
        )


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes the gradients of a problem."""
    geometry = problem.geometry
    if problem.dtype not in _PRECISIONS or device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    item = problem.dtype.itemsize
    image = geometry.height * geometry.width
    run = geometry.in_channels if problem.channels_last else image
    return (
        geometry.groups == 1
        and geometry.out_channels < TF32_CHANNELS
        and geometry.in_channels <= MOST_CHANNELS
        and geometry.in_channels > NARROW_CHANNELS
        and geometry.out_channels * geometry.taps <= MOST_TAPS
        and max(geometry.kernel) <= MOST_KERNEL
        and run * item % 16 == 0
        and geometry.in_channels * image < INT32_LIMIT
        and geometry.out_channels * geometry.out_height * geometry.out_width < INT32_LIMIT
        and geometry.batch * ceil_div(image, 32) < INT32_LIMIT // 2
    )


def plan_gradients(problem: Problem, device: Device, wants_bias: bool) -> Part | None:
    """Inputs: grad_output, input (16-byte aligned), weight. Outputs: the gradients of the input and of the weight, and
    if ``wants_bias`` and ``counts_the_output`` that of the bias. None for what is not the family's own.

    Workspace: at most 64 MiB.
    """
    if not claims(problem, device) or not pays(problem):
        return None
    found = rank(problem, device)
    if not found:
        return None
    return build(problem, found[0], device, wants_bias and counts_the_output(problem.geometry))


def may_read_fours(problem: Problem) -> bool:
    """Whether neighbours in a row of grad_output are read four at a time, if its rows are multiples of four."""
    g = problem.geometry
    return (
        problem.dtype == torch.float32
        and not problem.channels_last
        and g.stride[1] % 4 == 0
        and g.dilation[1] == 1
    )


def kernels_of(layer: Problem, device: Device) -> int:
    """Kernels that a layer has, whatever its sizes."""
    g = layer.geometry
    channels = FEWEST_CHANNELS <= g.in_channels <= MOST_CHANNELS and g.out_channels < TF32_CHANNELS
    if device.architecture != "sm_90a" or g.groups > 1 or not channels:
        return 0
    if layer.dtype not in _PRECISIONS or g.out_channels * g.taps > MOST_TAPS:
        return 0
    return 2 if may_read_fours(layer) else 1


def pays(problem: Problem) -> bool:
    """Whether it is faster than two passes: multiplies and tiles that are filled."""
    geometry = problem.geometry
    image = geometry.height * geometry.width
    return geometry.in_channels >= FEWEST_CHANNELS and image >= FEWEST_PIXELS


def _steps(problem: Problem) -> int:
    """Of a multiply's k, over all taps."""
    geometry = problem.geometry
    return ceil_div(geometry.out_channels * geometry.taps * problem.dtype.itemsize, STEP_BYTES)


def _multiplied_bytes(problem: Problem, tile: Tile) -> int:
    """PATCHES_AT of csrc/kernels/gradients/narrow_joint.cu: the input and the weights."""
    item = problem.dtype.itemsize
    weights = tile.channels // 16 * _steps(problem) * _parts(problem) * 512
    return tile.stages * tile.pixels * tile.channels * item + weights


def _parts(problem: Problem) -> int:
    return 2 if problem.dtype.itemsize == 4 else 1


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """SHARED_BYTES of csrc/kernels/gradients/narrow_joint.cu."""
    group = 8 * (_steps(problem) * STEP_BYTES + 16) + 32
    patches = 2 * _parts(problem) * (tile.pixels // 8 * group)
    return _multiplied_bytes(problem, tile) + patches + 8 * (tile.stages + 1)


def fits(problem: Problem, tile: Tile, device: Device) -> bool:
    """Whether a multiprocessor has the memory for the tile's blocks, and a block for the sums that warps exchange."""
    sums = tile.weight_m_tiles * _steps(problem) * STEP_BYTES // problem.dtype.itemsize // 8 * 4
    pairs = tile.channels // 16 // tile.weight_m_tiles * (tile.weight_warps_k // 2)
    shared = shared_bytes(problem, tile) + RESERVED_BYTES
    return (
        tile.blocks * shared <= device.shared_memory_per_block + RESERVED_BYTES
        and pairs * sums * 128 <= _multiplied_bytes(problem, tile)
    )


def tiles(problem: Problem, device: Device) -> Iterator[Tile]:
    """Every kind of tile that the kernel computes right."""
    line = LINE_BYTES // problem.dtype.itemsize
    wanted = ceil_div(problem.geometry.in_channels, 16)
    for c16, pixels in product((1, 2, 4, 8), (32, 64, 128)):
        if c16 < wanted or c16 >= 2 * wanted + 2 or (16 * c16 if problem.channels_last else pixels) % line:
            continue
        for c_tiles, m_tiles, warps_p, warps_k in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
            if c16 % c_tiles or c16 % m_tiles or pixels // 16 % warps_p or pixels // 16 % warps_k:
                continue
            input_warps, weight_warps = c16 // c_tiles * warps_p, c16 // m_tiles * warps_k
            if input_warps != weight_warps or input_warps not in (2, 4, 8):
                continue
            if 64 * input_warps % pixels:
                continue
            for blocks, stages, gather in product((2, 1), (4, 3, 2), (0, 4)):
                if gather and (blocks > 1 or input_warps != 4):
                    continue
                tile = Tile(
                    pixels, stages, c_tiles, c16 // c_tiles, warps_p, m_tiles, warps_k, blocks, gather
                )
                if fits(problem, tile, device):
                    yield tile


def rank(problem: Problem, device: Device) -> list[Tile]:
    """The tiles worth measuring, the one that is expected to be the fastest first; empty where none fits.

    As measured (docs/kernels/gathered.md): float32 by four warps of each kind, which hold many sums. 16 bits, which
    memory bounds, by more of them, in large tiles or, where many taps make many sums, in small ones. A layer has the
    same tile at every size.
    """
    geometry = problem.geometry
    c16 = 4 if geometry.in_channels <= 64 else 8
    kinds, gather = [(64, 4, 2, 1), (32, 4, 2, 1)], 4
    if problem.dtype.itemsize == 2:
        few = (128, c16, 2, 8 // c16)
        many = (64, c16, 1, 8 // c16)
        gather = 0
        kinds = [many, few] if geometry.out_channels * geometry.taps > MANY_SUMS else [few, many]
    found = []
    for (pixels, warps, m_tiles, blocks), stages in product(kinds, (4, 3, 2)):
        warps_c, warps_m = c16 // 2, c16 // m_tiles
        tile = Tile(pixels, stages, 2, warps_c, warps // warps_c, m_tiles, warps // warps_m, blocks, gather)
        if fits(problem, tile, device):
            found.append(tile)
    return found


def build(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """The part that runs ``tile``: outputs input, weight, and ``with_bias`` bias."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    image = geometry.height * geometry.width
    line = LINE_BYTES // item
    runs = geometry.batch * ceil_div(image, tile.pixels)
    units = tile.pixels // 16 // tile.weight_warps_k
    blocks = device.multiprocessors * tile.blocks
    most = max(1, LONGEST_CHAIN[item == 4] // units)
    slices = min(runs, max(blocks, ceil_div(runs, most)))
    count = geometry.in_channels * geometry.out_channels * geometry.taps
    slices = max(1, min(slices, WORKSPACE_LIMIT_BYTES // (4 * (count + 2 * geometry.out_channels)) - 1))
    bias_at = round_up(4 * count * slices, WORKSPACE_ALIGNMENT)
    shared = shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int"),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("PRECISION", _PRECISIONS[problem.dtype]),
        ("WITH_BIAS", with_bias),
        ("IN_FOURS", may_read_fours(problem) and geometry.out_width % 4 == 0),
        *tile.constants(shared),
    )
    c = geometry.in_channels
    sizes = (c, image) if problem.channels_last else (image, c)
    boxes = TensorMap(
        input_(1),
        _KINDS[problem.dtype],
        (*sizes, geometry.batch),
        (sizes[0] * item, c * image * item),
        (line, tile.pixels if problem.channels_last else tile.channels, 1),
        (1, 1, 1),
        LINE_BYTES,
    )
    launch = Launch(
        # Two blocks of a multiprocessor leave a thread 128 registers: in 16 bits some 12 bytes more are wanted.
        Kernel("gradients/narrow_joint.cu", "gradients_narrow_joint", constants, problem.dtype.itemsize == 2),
        grid=slices,
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
        tensor_maps=(boxes,),
    )
    launches = [launch, split_k_reduce(problem.dtype, count, slices, 0, 1)]
    if with_bias:
        launches.append(split_k_reduce(problem.dtype, geometry.out_channels, 2 * slices, bias_at, 2))
    workspace_bytes = bias_at + 8 * geometry.out_channels * slices
    why = f"{geometry.in_channels} to {geometry.out_channels} channels: all gradients in one pass, tiles of {tile}"
    return Part(FAMILY, why, overlapping(launches, device), workspace_bytes)


def counts_the_output(geometry: Geometry) -> bool:
    """Whether the patches hold every pixel of the output, and a thread the sums of its channels."""
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
