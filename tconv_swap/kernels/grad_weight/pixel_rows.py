"""Plans of csrc/kernels/grad_weight/pixel_rows.cu: the gradient of the weight in TF32 and NCHW, pixels along k
(sm_90a)."""

from __future__ import annotations

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.sizes import pixel_rows_sizes
from tconv_swap.kernels.common.space_to_depth import bias_partial_rows, identity_constants, space_to_depth
from tconv_swap.kernels.grad_weight.pixel_rows_classes import (
    choose,
    lies_as_lines,
    phases_of,
    planes_of_lines,
)
from tconv_swap.kernels.grad_weight.pixel_rows_reduction import reduce
from tconv_swap.kernels.grad_weight.pixel_rows_tile import EXTRA_BYTES, Lines, Tile, blocks_of, weight_bytes
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
_THREADS = 384
_MOST_STAGES_IN_RING = 6
#: Kernels of a layer, whatever its sizes.
MAX_SCHEDULES = 2


def part_candidates(
    problem: Problem, device: Device, with_bias: bool, count: int, most: int = MAX_SCHEDULES
) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first; of ``most`` kernels of the layer.

    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias`` that of
    the bias. Empty for what this family does not claim.

    Workspace: a copy of grad_output for every column of taps in a stride (and row, where rows are unfolded) and one of
    the input where it does not lie as lines of pixels already, together at most ``MAX_COPY_BYTES``, what
    sums have to be short for included; and at most 64 MiB of partial sums, or one copy of the gradient if that is more.
    """
    if not claims(problem, device):
        return []
    found = choose(problem, device, most) if most else []
    if with_bias:
        found = [cut for cut in found if _reads_all_of_grad_output(problem.geometry, cut[0])]
    return [plan_with_tile(problem, *cut, device, with_bias) for cut in found[:count]]


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernels can do it, if there is a tile."""
    g = problem.geometry
    if device.architecture != "sm_90a" or not problem.is_tf32:
        return False
    if problem.channels_last or g.batch == 0:
        return False
    image = max(g.in_channels * (g.height * g.width + 3), g.out_channels * g.out_height * g.out_width)
    most_lead = g.kernel[0] * g.dilation[0] + g.padding[0]
    line = (ceil_div(g.out_height, g.stride[0]) + most_lead) * g.width
    if max(image, g.out_channels * line) * 4 >= INT32_LIMIT:
        return False
    return g.batch * g.height * g.width * g.taps < INT32_LIMIT


def _reads_all_of_grad_output(geometry: Geometry, lines: Lines) -> bool:
    """Whether the planes hold every pixel of grad_output, those with an offset in [0, stride) each once."""
    g = geometry
    offsets = [{k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis])} for axis in (0, 1)]
    all_cols = g.out_width <= g.width * g.stride[1] and offsets[1].issuperset(range(g.stride[1]))
    if lines.unfold_rows:
        return (
            all_cols and g.out_height <= g.height * g.stride[0] and offsets[0].issuperset(range(g.stride[0]))
        )
    return all_cols and {offset % g.stride[0] for offset in offsets[0]} == set(range(g.stride[0]))


def plan_with_tile(problem: Problem, lines: Lines, tile: Tile, device: Device, with_bias: bool) -> Part:
    """The plan that computes the problem with this tile."""
    g = problem.geometry
    phases = phases_of(g, lines)
    out, into = planes_of_lines(g, lines)
    memory = WorkspaceLayout()
    out_at = memory.reserve(out.bytes(g.batch))
    bias_rows = bias_partial_rows(g.batch, out)
    bias_at = memory.reserve(4 * bias_rows * g.out_channels) if with_bias else 0
    launches = []
    in_base = input_(1)
    if not lies_as_lines(g):
        in_at = memory.reserve(into.bytes(g.batch))
        in_base = workspace(in_at)
        launches.append(
            space_to_depth(
                g.batch, input_(1), in_at, into, (g.height, g.width), g.height, identity_constants()
            )
        )
    parting = (
        ("KERNEL_H", g.kernel[0]),
        ("ROW_PHASES", phases[0]),
        ("COL_PHASES", phases[1]),
        ("STRIDE_H", g.stride[0]),
        ("STRIDE_W", g.stride[1]),
        ("PADDING_H", g.padding[0]),
        ("PADDING_W", g.padding[1]),
        ("DILATION_H", g.dilation[0]),
        ("DILATION_W", g.dilation[1]),
        ("IM2COL_ROWS", lines.unfold_rows),
        ("ZERO_ROWS", lines.lead),
    )
    out_size = (g.out_height, g.out_width)
    launches.append(
        space_to_depth(
            g.batch, input_(0), out_at, out, out_size, g.height, parting, bias_at if with_bias else None
        )
    )
    direct = tile.slices == 1 and problem.weight_channels_last
    partial_at = 0 if direct else memory.reserve(tile.slices * weight_bytes(g))
    target = output(0) if direct else workspace(partial_at)
    ring = min(_MOST_STAGES_IN_RING, (device.shared_memory_per_block - EXTRA_BYTES) // tile.stage_bytes)
    tile_constants: tuple[tuple[str, Constant], ...] = (
        *g.layer_constants,
        ("IM2COL_ROWS", lines.unfold_rows),
        ("ZERO_ROWS", lines.lead),
        ("BOX", lines.box),
        ("ROW_PHASES", phases[0]),
        ("TILE_COLS", tile.cols),
        ("SWAPPED", tile.swapped),
        ("CHUNK", tile.chunk),
        ("SHARES", tile.shares),
        ("INPUT_COPY", tile.input_copy),
        ("OUTPUT_COPY", tile.output_copy),
        ("STAGES", ring),
    )
    launches.append(
        Launch(
            # A few words, outside the loops.
            Kernel(
                "grad_weight/pixel_rows.cu",
                "grad_weight_pixel_rows",
                tile_constants,
                spills=tile.swapped and tile.cols > 128,
            ),
            grid=blocks_of(g, tile),
            block=_THREADS,
            arguments=(tensor_map(0), tensor_map(1), target, struct(0)),
            structs=(pixel_rows_sizes(g, tile.slices),),
            shared_bytes=ring * tile.stage_bytes + EXTRA_BYTES,
            overlaps_previous=True,
            tensor_maps=(
                into.map(in_base, lines.box, tile.input_copy, g.batch, ElementKind.TFLOAT32),
                out.map(workspace(out_at), lines.box, tile.output_copy, g.batch, ElementKind.FLOAT32),
            ),
        )
    )
    if not direct:
        launches.append(reduce(problem, tile.slices, partial_at))
    if with_bias:
        launches.append(split_k_reduce(problem.dtype, g.out_channels, bias_rows, bias_at, 1))
    return Part(_FAMILY, f"wgmma, {tile}, boxes of {lines.box} pixels", tuple(launches), memory.bytes)
