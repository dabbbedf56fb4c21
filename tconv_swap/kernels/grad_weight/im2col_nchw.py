"""Plans of csrc/kernels/grad_weight/im2col_nchw.cu: the gradient of the weight in TF32 and NCHW, without a copy of
grad_output (sm_90a)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from operator import itemgetter

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.pad_images import pad_images
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import im2col_nchw_sizes
from tconv_swap.kernels.grad_weight.im2col_nchw_clocks import best_tiles
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    BOX_PIXELS,
    MAX_STAGES,
    MAX_STEPS,
    Im2colKernel,
    Tile,
    copies_grad_output,
    fixed_bytes,
    fragment_taps,
    input_read_in_place,
    out_row_pitch,
    padded_grad_output,
    padded_input,
    ring,
    stage_bytes,
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

_FAMILY = "im2col_nchw"


def ranked(among: Iterable[Im2colKernel], problem: Problem, device: Device, with_bias: bool) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size, the one that is expected to be the fastest first.
    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias``
    that of the bias.

    Workspace: a copy of the input where its rows are not aligned for the copy engine, and one of grad_output
    where its rows are no multiple of 16 bytes, together at most ``MAX_COPY_BYTES``; at most 64 MiB of
    partial sums, or one copy of the gradient if that is more; and for the bias 8 bytes for each split, tile of
    input channels, row of a stride and output channel, or segment of a copied image.
    """
    kernels = tuple(among)
    if not kernels or not supports(problem, device):
        return []
    if with_bias and not adds_all_of_grad_output(problem.geometry):
        return []
    return [
        Ranked(clocks, partial(lower, problem, tile, device, with_bias))
        for clocks, tile in _fastest_tiles(problem.geometry, kernels, device)
    ]


@lru_cache(maxsize=256)
def _fastest_tiles(
    geometry: Geometry, kernels: tuple[Im2colKernel, ...], device: Device
) -> list[tuple[float, Tile]]:
    """Returns the fastest tile of each kernel with its expected clocks, the fastest first. (A size is ranked with and
    without the bias.)"""
    return sorted(filter(None, best_tiles(geometry, kernels, device)), key=itemgetter(0))


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem, provided that a tile fits."""
    g = problem.geometry
    if device.architecture != "sm_90a" or not problem.is_tf32:
        return False
    if problem.channels_last or g.batch == 0:
        return False
    image = max(g.in_channels * g.height * (g.width + 64), g.out_channels * g.out_height * (g.out_width + 3))
    pixels = g.batch * g.height * (g.width + 64)
    return 4 * image < INT32_LIMIT and pixels < INT32_LIMIT and weight_bytes(g) < INT32_LIMIT


def adds_all_of_grad_output(geometry: Geometry) -> bool:
    """Returns whether the bias adds up every element of grad_output exactly once.
    The rows of taps whose offset lies in [0, stride) must read every row once; of a row, everything over the
    input is added up. Where grad_output is copied, the launch that copies it adds up every element.
    """
    g = geometry
    if copies_grad_output(g):
        return True
    over_input = g.out_height <= g.stride[0] * g.height and g.out_width <= g.stride[1] * g.width
    return over_input and taps_cover_stride(g, 0)


def lower(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """Returns the part that computes the problem with this tile."""
    g, kernel, stage = problem.geometry, tile.kernel, tile.stage
    memory = WorkspaceLayout()
    launches = []
    into = padded_input(g, stage)
    in_base = input_(1)
    if not input_read_in_place(g, stage):
        in_at = memory.reserve(into.bytes)
        in_base = workspace(in_at)
        launches.append(pad_images(input_(1), in_at, into))
    # Where grad_output is copied, the launch that copies it also adds up the bias.
    out = padded_grad_output(g)
    out_base = input_(0)
    bias_rows = 2 * tile.splits * ceil_div(g.in_channels_per_group, kernel.cols) * g.stride[0]
    copies_output = copies_grad_output(g)
    if copies_output:
        out_at = memory.reserve(out.bytes)
        out_base, bias_rows = workspace(out_at), out.bias_rows
    bias_at = memory.reserve(4 * bias_rows * g.out_channels) if with_bias else 0
    if copies_output:
        launches.append(pad_images(input_(0), out_at, out, bias_at if with_bias else None))
    adds_bias = with_bias and not copies_output
    direct = tile.splits == 1
    partial_at = 0 if direct else memory.reserve(tile.splits * weight_bytes(g))
    stages = ring(g, kernel, stage, device)
    launches.append(
        Launch(
            Kernel(
                "grad_weight/im2col_nchw.cu",
                "grad_weight_im2col_nchw",
                (
                    *g.layer_constants,
                    ("TILE_CO", kernel.tile_co(g)),
                    ("OUT_BOX_COLS", kernel.out_box_cols),
                    ("FRAGMENT_TAPS", fragment_taps(g)),
                    ("WARPGROUPS", kernel.warpgroups),
                    ("M_TILES", kernel.m_tiles),
                    ("TILE_CI", kernel.cols),
                    ("MAX_STAGES", MAX_STAGES),
                    ("MAX_STEPS", MAX_STEPS),
                    ("WITH_BIAS", adds_bias),
                ),
            ),
            grid=tiles_of(g, kernel) * tile.splits,
            block=128 * (kernel.warpgroups + 1),
            arguments=(
                tensor_map(0),
                tensor_map(1),
                output(0) if direct else workspace(partial_at),
                workspace(bias_at),
                struct(0),
            ),
            structs=(
                im2col_nchw_sizes(
                    g,
                    (stage.images, stage.rows, stage.cols),
                    stage.pitch,
                    (stage.run_boxes(g), stage.out_boxes(g, kernel.out_box_cols)),
                    stage.left_halo(g),
                    stage.run_steps(g),
                    stages,
                    tile.splits,
                    direct and not problem.weight_channels_last,
                ),
            ),
            shared_bytes=stages * stage_bytes(g, kernel, stage) + fixed_bytes(g),
            overlaps_previous=bool(launches),
            tensor_maps=(
                into.map(in_base, BOX_PIXELS, kernel.cols),
                _grad_output_map(g, tile, out_base, 4 * out.pitch, adds_bias),
            ),
        )
    )
    if not direct:
        launches.append(reduce(problem, tile.splits, partial_at))
    if with_bias:
        launches.append(
            split_k_reduce(problem.dtype, g.out_channels, bias_rows, bias_at, 1, overlaps_previous=True)
        )
    return Part(_FAMILY, f"wgmma, {tile.describe(g)}", tuple(launches), memory.bytes)


def _grad_output_map(
    geometry: Geometry, tile: Tile, base: Argument, plane: int, adds_bias: bool
) -> TensorMap:
    """Returns the tensor map of every ``stride``-th row of grad_output, unrounded where the bias is added up
    from it.
    Args:
        plane: bytes of a channel of an image.
    """
    g, kernel, stage = geometry, tile.kernel, tile.stage
    step = g.stride[0] if stage.rows > 1 else 1
    return TensorMap(
        base,
        ElementKind.FLOAT32 if adds_bias else ElementKind.TFLOAT32,
        sizes=(g.out_width, g.out_channels, g.out_height, g.batch),
        strides=(plane, 4 * out_row_pitch(g), plane * g.out_channels),
        box=(kernel.out_box_cols, kernel.tile_co(g), (stage.rows - 1) * step + 1, stage.images),
        steps=(1, 1, step, 1),
        swizzle_bytes=4 * kernel.out_box_cols,
    )
