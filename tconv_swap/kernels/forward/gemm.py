"""Plans of csrc/kernels/forward/gemm.cu: maps of one pixel, whose forward pass is a product of two matrices in
their own layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import IEEE, PRECISIONS, TF32, TF32_PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.forward.implicit_gemm_layout import LARGE_KERNEL, has_stride_of_one_pixel
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Plan,
    input_,
    int64,
    output,
)

#: The fewest and the most bytes of an image's channels that a stage holds.
CHUNK_BYTES = (128, 256)
MAX_STAGES = 4
MAX_WARPS = 8
#: With more images the multiplies take most of the time, and wgmma is faster (measured on an H200: about equal at 256
#: images, slower at 512).
MAX_IMAGES = 256
#: The images for which the tile of a layer is chosen.
NOMINAL_IMAGES = 128
#: Images times outputs of the largest tile that is not counted as large.
MODERATE_TILE = 64 * 64


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
    """Whether the kernel computes the problem: maps of one pixel, and rows that its copies fit."""
    geometry = problem.geometry
    if (geometry.height, geometry.width) != (1, 1) or geometry.batch == 0:
        return False
    return _supports_layer(problem, device)


def supports_some_size(problem: Problem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for some sizes of the layer, all with one kernel. Where stride = kernel, the
    implicit GEMM's kernels for other maps compute maps of one pixel, too."""
    return has_stride_of_one_pixel(problem.geometry) and _supports_layer(problem, device)


def computes_every_batch(problem: Problem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for all maps of one pixel, however many images, so that the implicit GEMM
    needs no kernel for them and has more for all other maps. This does not hold for layers with a large kernel: they
    are the first layers of generators, which get many images."""
    return min(problem.geometry.kernel) < LARGE_KERNEL and supports_some_size(problem, device)


def _supports_layer(problem: Problem, device: Device) -> bool:
    """Whether the kernel computes the layer's maps of one pixel."""
    geometry, item = replace(problem.geometry, height=1, width=1), problem.dtype.itemsize
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


def lower(problem: Problem, has_bias: bool, tile: Tile) -> Plan:
    """Returns the plan that computes the problem with this tile."""
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
    return Plan(
        "gemm",
        f"one pixel, {geometry.in_channels} channels to {outputs} outputs: {tile}",
        outputs=(Output(geometry.output_shape, problem.channels_last),),
        launches=(launch,),
    )


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the plan with the best tile, or None where another kernel is expected to be faster.

    Inputs: input, weight (both 16-byte aligned), bias. Output: the output.
    """
    few = problem.geometry.batch <= MAX_IMAGES
    pays = supports_some_size(problem, device) and (few or computes_every_batch(problem, device))
    plans = plan_candidates(problem, has_bias, device, count=1) if pays else []
    return plans[0] if plans else None


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns ``count`` plans: the layer's, whatever the batch is, then those that are expected to be the fastest."""
    if not supports(problem, device):
        return []
    tiles = [*rank(replace(problem, geometry=problem.geometry.with_batch(NOMINAL_IMAGES)), device)[:1]]
    if len(tiles) < count:
        tiles = list(dict.fromkeys([*tiles, *rank(problem, device)]))
    return [lower(problem, has_bias, tile) for tile in tiles[:count]]


@lru_cache(maxsize=1024)
def rank(problem: Problem, device: Device) -> tuple[Tile, ...]:
    """Returns all tiles, the one that is expected to be the fastest first."""
    return tuple(sorted(candidates(problem, device), key=lambda tile: _cost(problem, tile, device)))


def _cost(problem: Problem, tile: Tile, device: Device) -> tuple[bool, bool, int, int]:
    """Returns the key by which tiles are sorted, as measured on an H200: first tiles that give at least 1.5 blocks to
    each multiprocessor, then tiles of a moderate size, then those that load the fewest bytes, where an image's float32
    channels count twice. Of equal tiles the one with longer rows of the weight comes first."""
    geometry = problem.geometry
    blocks = ceil_div(geometry.batch, tile.images) * ceil_div(_outputs(geometry), tile.outputs)
    few, large = 2 * blocks < 3 * device.multiprocessors, tile.images * tile.outputs > MODERATE_TILE
    return few, large, blocks * (tile.images * problem.dtype.itemsize // 2 + tile.outputs), -tile.outputs


def candidates(problem: Problem, device: Device) -> Iterator[Tile]:
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
