"""Plans of csrc/kernels/grad_weight/pixel_rows.cu: the gradient of the weight in TF32 and NCHW, with pixels
along k (sm_90a)."""

from __future__ import annotations

from functools import partial

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.ranked import Ranked, made
from tconv_swap.kernels.common.sizes import pixel_rows_sizes
from tconv_swap.kernels.common.space_to_depth import bias_partial_rows, identity_constants, space_to_depth
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import taps_cover_stride
from tconv_swap.kernels.grad_weight.pixel_rows_classes import (
    choose,
    clocks_of,
    input_read_in_place,
    phases_of,
    planes_of_pixel_rows,
    row_phases,
)
from tconv_swap.kernels.grad_weight.pixel_rows_reduction import reduce
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    EXTRA_BYTES,
    PixelRows,
    Tile,
    blocks_of,
    weight_bytes,
    zero_rows_of,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import (
    Constant,
    ElementKind,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

_FAMILY = "pixel_rows"
#: Threads of a block: a warpgroup that loads and two that multiply.
_THREADS = 384
#: Stages of the ring.
_MAX_STAGES = 6
#: Kernels of a layer over all its sizes.
MAX_SCHEDULES = 2


def part_candidates(
    problem: Problem, device: Device, with_bias: bool, count: int, limit: int = MAX_SCHEDULES
) -> list[Part]:
    """Returns the parts of ``ranked``."""
    return made(ranked(problem, device, with_bias, count, limit))


def ranked(
    problem: Problem, device: Device, with_bias: bool, count: int, limit: int = MAX_SCHEDULES
) -> list[Ranked]:
    """Returns the ``count`` parts that are expected to be the fastest, the fastest first; none where this
    family does not support the problem.
    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias``
    that of the bias.

    Workspace: a copy of grad_output for every column of taps in a stride (and every row of taps with
    ``im2col_rows``), and one of the input where images are no multiple of 16 bytes, together at most ``MAX_COPY_BYTES``
    with the partial sums that are needed because the tensor cores truncate long sums; and at most 64 MiB of partial
    sums, or one copy of the gradient if that is more.

    Args:
        limit: kernels that the layer may have over all its sizes.
    """
    if not supports(problem, device):
        return []
    found = choose(problem, device, limit) if limit else []
    if with_bias:
        found = [one for one in found if _reads_all_of_grad_output(problem.geometry, one[0])]
    return [
        Ranked(clocks_of(problem, *one, device), partial(lower, problem, *one, device, with_bias))
        for one in found[:count]
    ]


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem, provided that a tile fits."""
    g = problem.geometry
    if device.architecture != "sm_90a" or not problem.is_tf32:
        return False
    if problem.channels_last or g.batch == 0:
        return False
    image = max(g.in_channels * (g.height * g.width + 3), g.out_channels * g.out_height * g.out_width)
    max_zero_rows = g.kernel[0] * g.dilation[0] + g.padding[0]
    plane = (ceil_div(g.out_height, g.stride[0]) + max_zero_rows) * g.width
    if max(image, g.out_channels * plane) * 4 >= INT32_LIMIT:
        return False
    return g.batch * g.height * g.width * g.taps < INT32_LIMIT


def _reads_all_of_grad_output(geometry: Geometry, pixel_rows: PixelRows) -> bool:
    """Returns whether the planes hold every pixel of grad_output, and those with an offset in [0, stride)
    exactly once."""
    g = geometry
    all_cols = g.out_width <= g.width * g.stride[1] and taps_cover_stride(g, 1)
    if pixel_rows.im2col_rows:
        return all_cols and g.out_height <= g.height * g.stride[0] and taps_cover_stride(g, 0)
    phases = {(k * g.dilation[0] - g.padding[0]) % g.stride[0] for k in range(g.kernel[0])}
    return all_cols and phases == set(range(g.stride[0]))


def lower(problem: Problem, pixel_rows: PixelRows, tile: Tile, device: Device, with_bias: bool) -> Part:
    """Returns the part that computes the problem with this tile."""
    g = problem.geometry
    phases = phases_of(g, pixel_rows)
    out, into = planes_of_pixel_rows(g, pixel_rows)
    memory = WorkspaceLayout()
    out_at = memory.reserve(out.bytes(g.batch))
    bias_rows = bias_partial_rows(g.batch, out)
    bias_at = memory.reserve(4 * bias_rows * g.out_channels) if with_bias else 0
    launches = []
    in_base = input_(1)
    if not input_read_in_place(g):
        in_at = memory.reserve(into.bytes(g.batch))
        in_base = workspace(in_at)
        launches.append(
            space_to_depth(
                g.batch, input_(1), in_at, into, (g.height, g.width), g.height, identity_constants()
            )
        )
    layout = (
        ("KERNEL_H", g.kernel[0]),
        ("ROW_PHASES", phases[0]),
        ("COL_PHASES", phases[1]),
        ("STRIDE_H", g.stride[0]),
        ("STRIDE_W", g.stride[1]),
        ("PADDING_H", g.padding[0]),
        ("PADDING_W", g.padding[1]),
        ("DILATION_H", g.dilation[0]),
        ("DILATION_W", g.dilation[1]),
        ("IM2COL_ROWS", pixel_rows.im2col_rows),
        ("ZERO_ROWS", pixel_rows.zero_rows),
    )
    out_size = (g.out_height, g.out_width)
    launches.append(
        space_to_depth(
            g.batch, input_(0), out_at, out, out_size, g.height, layout, bias_at if with_bias else None
        )
    )
    direct = tile.splits == 1 and problem.weight_channels_last
    partial_at = 0 if direct else memory.reserve(tile.splits * weight_bytes(g))
    target = output(0) if direct else workspace(partial_at)
    ring = min(_MAX_STAGES, (device.shared_memory_per_block - EXTRA_BYTES) // tile.stage_bytes)
    tile_constants: tuple[tuple[str, Constant], ...] = (
        *g.layer_constants,
        ("ZERO_ROWS", zero_rows_of(g)),
        ("BOX", pixel_rows.box),
        ("ROW_PHASES", row_phases(g)),
        ("TILE_COLS", tile.cols),
        ("SWAPPED", tile.swapped),
        ("CHUNK", tile.chunk),
        ("MULTICAST", tile.multicast),
        ("INPUT_BOX_CHANNELS", tile.input_box_channels),
        ("OUTPUT_BOX_CHANNELS", tile.output_box_channels),
        ("STAGES", ring),
    )
    launches.append(
        Launch(
            # It spills a few registers, outside the loops.
            Kernel(
                "grad_weight/pixel_rows.cu",
                "grad_weight_pixel_rows",
                tile_constants,
                spills=tile.swapped and tile.cols > 128,
            ),
            grid=blocks_of(g, tile),
            block=_THREADS,
            arguments=(tensor_map(0), tensor_map(1), target, struct(0)),
            structs=(pixel_rows_sizes(g, tile.splits, pixel_rows.im2col_rows),),
            shared_bytes=ring * tile.stage_bytes + EXTRA_BYTES,
            overlaps_previous=True,
            tensor_maps=(
                into.map(in_base, pixel_rows.box, tile.input_box_channels, g.batch, ElementKind.TFLOAT32),
                out.map(
                    workspace(out_at), pixel_rows.box, tile.output_box_channels, g.batch, ElementKind.FLOAT32
                ),
            ),
        )
    )
    if not direct:
        launches.append(reduce(problem, tile.splits, partial_at))
    if with_bias:
        launches.append(split_k_reduce(problem.dtype, g.out_channels, bias_rows, bias_at, 1))
    return Part(_FAMILY, f"wgmma, {tile}, boxes of {pixel_rows.box} pixels", tuple(launches), memory.bytes)
