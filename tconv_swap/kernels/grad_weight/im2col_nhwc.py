"""Plans of csrc/kernels/grad_weight/im2col_nhwc.cu: the gradient of the weight in TF32 and channels_last
(sm_90a)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.hardware import MAX_STEP
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import Words, im2col_nhwc_sizes
from tconv_swap.kernels.grad_weight.im2col_nhwc_clocks import Schedule
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import (
    BOX_CHANNELS,
    FIXED_BYTES,
    MAX_STAGES,
    Tile,
    rows_are_contiguous,
    tiles_of,
)
from tconv_swap.kernels.grad_weight.layer import taps_cover_stride
from tconv_swap.kernels.grad_weight.split_k_untiled import reduce, weight_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import (
    Argument,
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

_FAMILY = "im2col_nhwc"


def ranked(among: Iterable[Schedule], problem: Problem, device: Device, with_bias: bool) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size, the one that is expected to be the fastest first.
    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias``
    that of the bias.

    Workspace: at most 64 MiB of partial sums, or one copy of the gradient if that is more; and for the bias 8
    bytes for each split, tile of input channels, offset in a stride and output channel.
    """
    schedules, geometry = tuple(among), problem.geometry
    if not schedules or not supports(problem, device):
        return []
    if with_bias and not adds_all_of_grad_output(geometry):
        return []
    best = (one.best(geometry, device) for one in schedules)
    return [
        Ranked(clocks, partial(lower, problem, tile, device, with_bias))
        for clocks, tile in sorted(filter(None, best), key=itemgetter(0))
    ]


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem, provided that a tile fits."""
    g = problem.geometry
    if device.architecture != "sm_90a" or not problem.is_tf32:
        return False
    # A pixel's channels, and those of a group, begin at multiples of 16 bytes.
    if (g.in_channels_per_group | g.out_channels_per_group) % 4 or max(g.stride) > MAX_STEP:
        return False
    pixels = max(g.height * (g.width + BOX_CHANNELS), g.out_height * g.out_width) * g.batch
    return problem.channels_last and 0 < pixels < INT32_LIMIT


def adds_all_of_grad_output(geometry: Geometry) -> bool:
    """Returns whether the taps whose offset lies in [0, stride) read every pixel of grad_output exactly once."""
    g = geometry
    over_input = g.out_height <= g.stride[0] * g.height and g.out_width <= g.stride[1] * g.width
    return over_input and taps_cover_stride(g, 0) and taps_cover_stride(g, 1)


def lower(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """Returns the part that computes the problem with this tile."""
    g = problem.geometry
    memory = WorkspaceLayout()
    direct = tile.copies == 1 and problem.weight_channels_last
    partial_at = 0 if direct else memory.reserve(tile.copies * weight_bytes(g))
    bias_rows = 2 * tile.splits * ceil_div(g.in_channels_per_group, tile.cols) * prod(g.stride)
    bias_at = memory.reserve(4 * bias_rows * g.out_channels) if with_bias else 0
    ring = tile.ring(g, device)
    launches = [
        Launch(
            Kernel(
                "grad_weight/im2col_nhwc.cu",
                "grad_weight_im2col_nhwc",
                (
                    *g.layer_constants,
                    ("TAP_ROWS", tile.taps[0]),
                    ("TAP_COLS", tile.taps[1]),
                    ("CO_BOXES", tile.co_boxes),
                    ("BOX_PER_TAP_COL", tile.box_per_tap_col),
                    ("WARPGROUPS", tile.warpgroups),
                    ("TILE_CI", tile.cols),
                    ("MAX_STAGES", MAX_STAGES),
                    ("CLUSTER", tile.cluster),
                    ("WITH_BIAS", with_bias),
                ),
                # It spills a few registers, outside the loops.
                spills=tile.warpgroups == 3 or with_bias,
            ),
            grid=tiles_of(g, tile) * tile.splits,
            block=128 * (tile.warpgroups + 1),
            arguments=(
                tensor_map(0),
                tensor_map(1),
                output(0) if direct else workspace(partial_at),
                workspace(bias_at),
                struct(0),
            ),
            shared_bytes=ring * tile.stage_bytes(g) + FIXED_BYTES,
            tensor_maps=_tensor_maps(g, tile, with_bias),
            structs=(_sizes(g, tile, ring),),
        )
    ]
    if not direct:
        launches.append(reduce(problem, tile.copies, partial_at))
    if with_bias:
        launches.append(
            split_k_reduce(problem.dtype, g.out_channels, bias_rows, bias_at, 1, overlaps_previous=True)
        )
    return Part(
        _FAMILY, f"wgmma, {tile}, the input transposed in shared memory", tuple(launches), memory.bytes
    )


def _sizes(geometry: Geometry, tile: Tile, ring: int) -> Words:
    """Returns the kernel's size arguments; contiguous rows of all images count as one image."""
    g, p = geometry, tile.pixels
    if rows_are_contiguous(g):
        g = g._replace(batch=1, height=g.batch * g.height)
    return im2col_nhwc_sizes(g, (p.images, p.rows, p.cols), ring, tile.splits, tile.copies > 1)


def _tensor_maps(geometry: Geometry, tile: Tile, adds_bias: bool) -> tuple[TensorMap, TensorMap]:
    """Returns the tensor maps of the input, and of every ``stride``-th row and column of grad_output, unrounded
    where the bias is added up from it."""
    g, p = geometry, tile.pixels
    into = _pixels_map(
        input_(1),
        ElementKind.TFLOAT32,
        (g.in_channels, g.width, g.height),
        g,
        (p.cols, p.rows, p.images),
        (1, 1),
    )
    element = ElementKind.FLOAT32 if adds_bias else ElementKind.TFLOAT32
    box = (tile.pitch(g), p.rows, p.images)
    steps = (g.stride[1], g.stride[0])
    out = _pixels_map(input_(0), element, (g.out_channels, g.out_width, g.out_height), g, box, steps)
    return into, out


def _pixels_map(
    base: Argument,
    element: ElementKind,
    image: tuple[int, int, int],
    geometry: Geometry,
    pixels: tuple[int, int, int],
    steps: tuple[int, int],
) -> TensorMap:
    """Returns the tensor map of a tensor in channels_last.
    Args:
        image: channels, columns, rows.
        pixels: columns, rows and images of a box.
        steps: from a column and a row of a box to the next.
    """
    channels, width, height = image
    batch = geometry.batch
    row = 4 * channels * width
    sizes = (
        (channels, width, height * batch, 1)
        if rows_are_contiguous(geometry)
        else (channels, width, height, batch)
    )
    across, down = (step if count > 1 else 1 for step, count in zip(steps, pixels, strict=False))
    return TensorMap(
        base,
        element,
        sizes=sizes,
        strides=(4 * channels, row, row * height),
        box=(BOX_CHANNELS, (pixels[0] - 1) * across + 1, (pixels[1] - 1) * down + 1, pixels[2]),
        steps=(1, across, down, 1),
    )
