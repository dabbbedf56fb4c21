"""Plans of csrc/kernels/forward/gemm.cu: maps of one pixel, whose forward pass is a product of two matrices in
their own layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import BF16, FP16, IEEE, PRECISIONS, TF32, TF32_PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.hardware import RESERVED_BYTES, RESIDENT_THREADS
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    int64,
    output,
)

#: The fewest and the most bytes of an image's channels that a stage holds.
CHUNK_BYTES = (128, 256)
MAX_STAGES = 4
MAX_WARPS = 8
#: The most bytes of a copy.
MAX_COPY_BYTES = 16

# The constants of ``clocks`` are fitted to 2,194 times of an H200, in clocks of 1.7 GHz; the standard deviation of the
# logarithm is 0.10 (docs/kernels/forward/gemm.md).
LAUNCH_CLOCKS = 7670
#: Clocks of a multiprocessor for a multiply-add of a tile, by precision; for a warp's copy, over its lanes; for a byte
#: of a stage; for an output of a tile.
MULTIPLY_CLOCKS = {TF32: 1.28 / 4096, FP16: 0.392 / 4096, BF16: 0.392 / 4096, IEEE: 16.6 / 4096}
COPY_CLOCKS, STAGE_BYTE_CLOCKS, OUTPUT_CLOCKS = 1.03 / 32, 0.0115, 61.6 / 256
#: The number of warps of a multiprocessor that hide half of each other's waits; how many times as long a tile of more
#: than MODERATE_TILE outputs takes (84 times: 1.06 in 16 bits, 1.16 in float32).
HIDING_WARPS, LARGE_TILE, MODERATE_TILE = 3.0, 1.13, 64 * 64
#: Clocks until the first chunk has come, and until each has that is not loaded ahead with the first.
FIRST_CHUNK_CLOCKS, CHUNK_CLOCKS = 388, 309
#: Clocks of a byte of the weight, of the output, and of the input for each tile of outputs.
WEIGHT_BYTE_CLOCKS, OUTPUT_BYTE_CLOCKS, REREAD_BYTE_CLOCKS = 0.000339, 0.000425, 0.00014


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: images and outputs of each image, by ``warps_m`` times ``warps_n`` warps."""

    images: int
    outputs: int
    warps_m: int
    warps_n: int
    stages: int

    def __str__(self) -> str:
        return f"{self.images} images x {self.outputs} outputs, {self.warps_m * self.warps_n} warps"


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem: maps of one pixel, and rows that its copies fit."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    if (geometry.height, geometry.width) != (1, 1) or geometry.batch == 0:
        return False
    if problem.dtype not in PRECISIONS or device.compute_capability < 80 or geometry.groups != 1:
        return False
    if (geometry.out_height, geometry.out_width) != geometry.kernel or any(geometry.padding):
        return False
    outputs = _outputs(geometry)
    if geometry.in_channels * item % 4 or outputs * item % 16:
        return False
    return _same_order(problem) and max(geometry.in_channels * 256, outputs) < INT32_LIMIT


def _outputs(geometry: Geometry) -> int:
    return geometry.out_channels * geometry.taps


def _same_order(problem: Problem) -> bool:
    """Whether the outputs of an image have the order of the weight's."""
    geometry = problem.geometry
    return problem.channels_last == problem.weight_channels_last or 1 in (
        geometry.taps,
        geometry.out_channels,
    )


def _precision(problem: Problem) -> int:
    return (TF32_PRECISIONS if problem.is_tf32 else PRECISIONS)[problem.dtype]


def _chunk(problem: Problem) -> int:
    """Returns the channels of a chunk: those with the least padding to whole multiplies, and then the smallest
    chunks."""
    channels, item = problem.geometry.in_channels, problem.dtype.itemsize
    step = 8 if _precision(problem) == TF32 else 16

    def chunk(count: int) -> int:
        return round_up(ceil_div(channels, count), step)

    fewest, most = (ceil_div(channels * item, size) for size in reversed(CHUNK_BYTES))
    return chunk(min(range(fewest, most + 1), key=lambda count: (count * chunk(count), -count)))


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Returns the bytes of shared memory of a block, as csrc/kernels/forward/gemm.cu lays it out; the kernel
    asserts that both agree."""
    item, precision = problem.dtype.itemsize, _precision(problem)
    chunk = _chunk(problem)
    input_pitch = chunk * item + (32 if precision == IEEE else 16)
    weight_pitch = tile.outputs * item + (32 if precision == TF32 else 16)
    return tile.stages * (tile.images * input_pitch + chunk * weight_pitch)


def lower(problem: Problem, has_bias: bool, tile: Tile, device: Device) -> Part:
    """Returns the part that computes the problem with this tile.

    Inputs: input, weight (both 16-byte aligned), bias. Output: the output.
    """
    geometry, precision = problem.geometry, _precision(problem)
    outputs, shared = _outputs(geometry), shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", precision),
        ("PARTS", 3 if precision == IEEE else 1),
        ("IN_CHANNELS", geometry.in_channels),
        ("OUT_CHANNELS", geometry.out_channels),
        ("OUTPUTS", outputs),
        ("CHANNELS_LAST", problem.channels_last),
        *bias_alone(has_bias),
        ("TILE_M", tile.images),
        ("TILE_N", tile.outputs),
        ("WARPS_M", tile.warps_m),
        ("WARPS_N", tile.warps_n),
        ("CHUNK", _chunk(problem)),
        ("STAGES", tile.stages),
        ("SHARED_BYTES", shared),
    )
    launch = Launch(
        Kernel("forward/gemm.cu", "forward_gemm", constants),
        grid=ceil_div(geometry.batch, tile.images) * ceil_div(outputs, tile.outputs),
        block=32 * tile.warps_m * tile.warps_n,
        arguments=(input_(0), input_(1), input_(2), output(0), int64(geometry.batch)),
        shared_bytes=shared,
    )
    why = f"one pixel, {geometry.in_channels} channels to {outputs} outputs: {tile}"
    return Part("gemm", why, (launch,))


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that suit this size, also those that its layer does not have."""
    return list(_tiles(problem, device)) if supports(problem, device) else []


def candidates(sizes: Sequence[Problem], device: Device) -> tuple[Tile, ...]:
    """Returns the tiles that a layer of these sizes may have."""
    return tuple(dict.fromkeys(tile for size in sizes for tile in of_size(size, device)))


def clocks(sizes: Sequence[Problem], tiles: Iterable[Tile], device: Device) -> Iterator[list[float]]:
    """Yields the expected clocks of each size of a layer with each tile; infinitely many if the kernel does not compute
    it."""
    supported = [(size, supports(size, device)) for size in sizes]
    for tile in tiles:
        yield [_clocks(size, tile, device) if is_supported else math.inf for size, is_supported in supported]


def _clocks(problem: Problem, tile: Tile, device: Device) -> float:
    g, item = problem.geometry, problem.dtype.itemsize
    chunk, outputs = _chunk(problem), _outputs(g)
    output_tiles, chunks = ceil_div(outputs, tile.outputs), ceil_div(g.in_channels, chunk)
    blocks = ceil_div(g.batch, tile.images) * output_tiles
    input_copy = math.gcd(g.in_channels * item, MAX_COPY_BYTES)
    stage = (tile.images + tile.outputs) * chunk * item
    copies = tile.images * chunk * item // input_copy + tile.outputs * chunk * item // MAX_COPY_BYTES
    of_chunk = (
        MULTIPLY_CLOCKS[_precision(problem)] * tile.images * tile.outputs * chunk
        + COPY_CLOCKS * copies
        + STAGE_BYTE_CLOCKS * stage
    )
    # Blocks of a multiprocessor share it; each waits for its first chunks, and for later ones.
    rounds = ceil_div(blocks, device.multiprocessors)
    resident = min(
        (device.shared_memory_per_block + RESERVED_BYTES) // (shared_bytes(problem, tile) + RESERVED_BYTES),
        RESIDENT_THREADS // (32 * tile.warps_m * tile.warps_n),
    )
    resident = max(1, resident)
    waits = ceil_div(blocks, device.multiprocessors * resident)
    of_chunk *= 1 + HIDING_WARPS / (min(resident, rounds) * tile.warps_m * tile.warps_n)
    found = LAUNCH_CLOCKS + rounds * (chunks * of_chunk + OUTPUT_CLOCKS * tile.images * tile.outputs)
    found += waits * (FIRST_CHUNK_CLOCKS + CHUNK_CLOCKS * max(0, chunks - tile.stages + 1))
    found += WEIGHT_BYTE_CLOCKS * g.in_channels * outputs * item
    found += OUTPUT_BYTE_CLOCKS * g.batch * outputs * item
    found += REREAD_BYTE_CLOCKS * output_tiles * g.batch * g.in_channels * item
    return found * (LARGE_TILE if tile.images * tile.outputs > MODERATE_TILE else 1.0)


def _tiles(problem: Problem, device: Device) -> Iterator[Tile]:
    """Yields every tile that fits the batch and the device."""
    geometry = problem.geometry
    stages = min(MAX_STAGES, ceil_div(geometry.in_channels, _chunk(problem)))
    for images, outputs in product((16, 32, 64, 128), (32, 64, 128)):
        if images > 16 and images >= 2 * geometry.batch:
            continue
        warps_m = max(1, images // 32)
        for warps_n in (1, 2, 4):
            columns = outputs // 8 // warps_n
            tile = Tile(images, outputs, warps_m, warps_n, stages)
            fits = (
                2 <= warps_m * warps_n <= MAX_WARPS
                and shared_bytes(problem, tile) <= device.shared_memory_per_block
            )
            if columns in (2, 4) and fits:
                yield tile
