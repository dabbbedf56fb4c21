"""Plans of csrc/kernels/forward/stride1.cu: layers of stride 1 in NCHW on sm_90a. They compute the output, and the
gradient of the input, which is the forward pass of a transposed weight over grad_output."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS, TF32_PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.sizes import Words, divisor
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, make_problem
from tconv_swap.kernels.forward.stride1_tile import (
    PIXELS,
    WARPGROUPS,
    Tile,
    candidates,
    chunk_bytes,
    expected_clocks,
    first_col,
    has_unaligned_rows,
    padded_channels,
    pitch,
    planes_of,
    shared_bytes,
    weight_bytes,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Output,
    Part,
    Plan,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

_FAMILY = "stride1"
#: Batch, rows and columns of large maps. A layer has a kernel of this family if it is the fastest for one of them.
LARGE_MAPS = ((8, 1024, 1024), (1, 1024, 1024), (8, 512, 1024), (8, 512, 512), (16, 256, 256))
#: The fewest multiply-adds, and the fewest channels on either side, with which the kernel was measured to be faster.
MIN_MACS, MIN_CHANNELS = 1 << 35, 32
#: In 16 bits it is faster only with at least so many output channels, or with at most so many columns of taps.
MANY_CHANNELS, FEW_TAPS = 64, 3
_PRODUCER_THREADS, _PACK_THREADS = 32, 256


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the plan of a forward pass, or None where another kernel is expected to be faster.

    Inputs: input (16-byte aligned), weight, bias. Output: the output. Workspace: the packed weights.
    """
    tile_problem = _tile_problem(problem, has_bias)
    pays = (
        not has_unaligned_rows(tile_problem)
        and supports_some_size(tile_problem, device)
        and preferred(tile_problem, device)
    )
    plans = plan_candidates(problem, has_bias, device, 1) if pays else []
    return plans[0] if plans else None


def supports_some_size(problem: TileProblem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for some sizes of the layer, all with one kernel."""
    return _is_preferred_somewhere(replace(problem, geometry=of_any_size(problem.geometry)), device)


@lru_cache(maxsize=256)
def _is_preferred_somewhere(layer: TileProblem, device: Device) -> bool:
    return any(preferred(_sized(layer, *size), device) for size in LARGE_MAPS)


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """Returns the ``count`` plans that are expected to be the fastest, the best first."""
    outputs = (Output(problem.geometry.output_shape),)
    return [
        Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
        for part in part_candidates(_tile_problem(problem, has_bias), device, count)
    ]


def _tile_problem(problem: Problem, has_bias: bool) -> TileProblem:
    return make_problem(
        problem.geometry,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias,
    )


def part_candidates(problem: TileProblem, device: Device, count: int) -> list[Part]:
    """Returns the ``count`` parts that are expected to be the fastest, for an output or a gradient of an input."""
    if not supports(problem, device):
        return []
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    kernel = _kernel_of_layer(layer, has_unaligned_rows(problem), planes_of(problem), device)

    def order(tile: Tile) -> tuple[bool, float]:
        return tile.kernel != kernel, expected_clocks(problem, tile, device)

    return [lower(problem, tile) for tile in sorted(candidates(problem, device), key=order)[:count]]


@disk_cache
def _kernel_of_layer(
    layer: TileProblem, unaligned_rows: bool, planes: int, device: Device
) -> tuple[int, int, bool, int] | None:
    """Returns what is compiled in for all sizes of a layer with such rows: ``Tile.kernel`` of the best tile for
    large images; None where no tile computes them."""
    for size in ((8, 1024 + rows, 1024 + columns) for rows in range(8) for columns in range(8)):
        sized = _sized(layer, *size)
        if (has_unaligned_rows(sized), planes_of(sized)) != (unaligned_rows, planes):
            continue
        if not supports(sized, device):
            continue
        tiles = list(candidates(sized, device))
        tiles = [tile for tile in tiles if tile.warpgroups == WARPGROUPS[-1]] or tiles
        best = min(tiles, key=lambda tile: expected_clocks(sized, tile, device), default=None)
        return None if best is None else best.kernel
    return None


def _sized(layer: TileProblem, batch: int, height: int, width: int) -> TileProblem:
    return replace(layer, geometry=replace(layer.geometry, batch=batch, height=height, width=width))


def preferred(problem: TileProblem, device: Device) -> bool:
    """Whether the kernel was measured to be the fastest: for large images, and where the best tile has two
    warpgroups. In 16 bits, with few channels, reading the pixels of a wide kernel takes too long."""
    g = problem.geometry
    if g.macs < MIN_MACS or min(g.in_channels, g.out_channels) < MIN_CHANNELS:
        return False
    if problem.item == 2 and g.out_channels < MANY_CHANNELS and g.kernel[1] > FEW_TAPS:
        return False
    tiles = candidates(problem, device) if supports(problem, device) else iter(())
    best = min(tiles, key=lambda tile: expected_clocks(problem, tile, device), default=None)
    return best is not None and best.warpgroups == WARPGROUPS[-1]


def supports(problem: TileProblem, device: Device) -> bool:
    """Whether the kernel computes the problem."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype not in TF32_ELEMENT_KINDS or problem.parts != 1:
        return False
    if problem.input_channels_last or problem.output_channels_last or g.batch == 0 or g.groups != 1:
        return False
    if g.stride != (1, 1) or g.dilation != (1, 1) or g.in_channels > 256:
        return False
    if has_unaligned_rows(problem):
        first = first_col(problem)
        if first < 0 or first + g.out_width + g.kernel[1] - 1 > g.width:
            return False
        if planes_of(problem) > 2 or g.in_channels % planes_of(problem):
            return False
    pixels = max(g.height * g.width, g.out_height * g.out_width)
    return pixels < INT32_LIMIT and g.batch * (g.out_height + 8) * (g.out_width + 8) < INT32_LIMIT


def _sizes(problem: TileProblem, tile: Tile) -> Words:
    """``Stride1Sizes`` of csrc/kernels/common/sizes.cuh."""
    g = problem.geometry
    column_tiles = ceil_div(g.out_width, tile.warpgroups * PIXELS)
    segments = ceil_div(g.out_height, tile.segment)
    return (
        *(g.height, g.width, g.out_height, g.out_width),
        *(tile.segment, g.batch * segments * column_tiles),
        *divisor(column_tiles),
        *divisor(segments),
    )


def lower(problem: TileProblem, tile: Tile) -> Part:
    """Returns the part of a plan that computes the problem with this tile. Its workspace holds the packed weights."""
    g = problem.geometry
    channel_tiles = ceil_div(g.out_channels, tile.channels)
    packed = channel_tiles * weight_bytes(problem, tile.channels, tile.stacked)
    weight_layout: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", TF32_PRECISIONS[problem.dtype]),
        ("TILE_CHANNELS", tile.channels),
        ("STACKED", tile.stacked),
        ("CHUNK_BYTES", chunk_bytes(problem)),
    )
    pack = Launch(
        Kernel(
            "forward/stride1_pack.cu",
            "forward_stride1_pack",
            (
                *g.layer_constants,
                *weight_layout,
                ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
                ("OF_GRAD_INPUT", problem.of_grad_input),
                ("THREADS", _PACK_THREADS),
            ),
        ),
        grid=ceil_div(packed // 16, _PACK_THREADS),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    shared = shared_bytes(problem, tile)
    planes = planes_of(problem)
    channels = padded_channels(problem) // planes
    width, rows = pitch(problem, tile.warpgroups), problem.item * g.width
    size = rows * g.height
    unaligned_rows = has_unaligned_rows(problem)
    main = Launch(
        Kernel(
            "forward/stride1.cu",
            "forward_stride1",
            (
                *g.layer_constants,
                *weight_layout,
                ("UNALIGNED_ROWS", unaligned_rows),
                ("PLANES", planes),
                ("WARPGROUPS", tile.warpgroups),
                ("STAGES", tile.stages),
                ("PITCH", width),
                *bias_alone(problem.has_bias),
                ("SHARED_BYTES", shared),
            ),
        ),
        grid=channel_tiles * tile.blocks,
        block=128 * tile.warpgroups + _PRODUCER_THREADS,
        arguments=(tensor_map(0), workspace(0), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        overlaps_previous=True,
        structs=(_sizes(problem, tile),),
        tensor_maps=(
            TensorMap(
                input_(0),
                TF32_ELEMENT_KINDS[problem.dtype],
                (planes * g.height * g.width, g.in_channels // planes, g.batch)
                if unaligned_rows
                else (g.width, g.height, g.in_channels, g.batch),
                (planes * size, size * g.in_channels)
                if unaligned_rows
                else (rows, size, size * g.in_channels),
                (width, channels, 1) if unaligned_rows else (width, 1, channels, 1),
                (1, 1, 1) if unaligned_rows else (1, 1, 1, 1),
                swizzle_bytes=0,
            ),
        ),
    )
    return Part(_FAMILY, f"{problem.precision} tensor cores, {tile}", (pack, main), packed)
