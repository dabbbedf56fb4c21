"""Plans of csrc/kernels/forward/stride1.cu: layers of stride 1 in NCHW on sm_90a. They compute the output, and the
gradient of the input, which is the forward pass of a transposed weight over grad_output."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import itemgetter

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS, TF32_PRECISIONS
from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.pad_rows import copies_fit, pad_rows
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import Words, divisor
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.forward.stride1_clocks import best_tile
from tconv_swap.kernels.forward.stride1_tile import (
    PIXELS,
    Stride1Kernel,
    Tile,
    chunk_bytes,
    copied_rows,
    packed_bytes,
    padded_channels,
    pitch,
    shared_bytes,
)
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
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

_FAMILY = "stride1"
_PRODUCER_THREADS, _PACK_THREADS = 32, 256


def ranked(among: Iterable[Stride1Kernel], problem: TileProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the kernels that compute this size, the one that is expected to be the fastest first.
    Inputs: input (16-byte aligned), weight, bias. Output: the output. Workspace: the packed weights, and at most
    ``MAX_COPY_BYTES`` of the input with longer rows."""
    kernels = tuple(among)
    if not kernels or not supports(problem, device):
        return []
    best = [best_tile(problem, kernel, device) for kernel in kernels if computes(problem, kernel)]
    return [Ranked(clocks, partial(lower, problem, tile)) for clocks, tile in sorted(best, key=itemgetter(0))]


def computes(problem: TileProblem, kernel: Stride1Kernel) -> bool:
    """Whether the kernel computes the problem, which ``supports`` allows: it loads the rows as they lie, or copies."""
    return kernel.loads(problem) and copies_fit(copied_rows(problem, kernel), problem.dtype)


def supports(problem: TileProblem, device: Device) -> bool:
    """Whether kernels compute the problem, provided that copies of its rows fit."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype not in TF32_ELEMENT_KINDS or problem.parts != 1:
        return False
    if problem.input_channels_last or problem.output_channels_last or g.batch == 0 or g.groups != 1:
        return False
    if g.stride != (1, 1) or g.dilation != (1, 1) or g.in_channels > 256:
        return False
    pixels = max(g.height * g.width, g.out_height * g.out_width)
    return pixels < INT32_LIMIT and g.batch * (g.out_height + 8) * (g.out_width + 8) < INT32_LIMIT


def _sizes(problem: TileProblem, tile: Tile) -> Words:
    """``Stride1Sizes`` of csrc/kernels/common/sizes.cuh."""
    g = problem.geometry
    column_tiles = ceil_div(g.out_width, tile.kernel.warpgroups * PIXELS)
    segments = ceil_div(g.out_height, tile.segment)
    return (
        *(g.height, g.width, g.out_height, g.out_width),
        *(tile.segment, g.batch * segments * column_tiles),
        *divisor(column_tiles),
        *divisor(segments),
    )


def lower(problem: TileProblem, tile: Tile) -> Part:
    """Returns the part of a plan that computes the problem with this tile. Its workspace holds the packed weights, and
    the input where its rows are copied to longer ones."""
    g, kernel = problem.geometry, tile.kernel
    memory = WorkspaceLayout()
    channel_tiles, packed = ceil_div(g.out_channels, kernel.channels), packed_bytes(problem, kernel)
    weight_layout: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", TF32_PRECISIONS[problem.dtype]),
        ("TILE_CHANNELS", kernel.channels),
        ("STACKED", kernel.stacked),
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
    memory.reserve(packed)
    base, row = input_(0), problem.item * g.width
    copies = []
    for rows in copied_rows(problem, kernel):
        at = memory.reserve(rows.bytes(problem.dtype))
        base, row = workspace(at), problem.item * rows.padded
        copies.append(pad_rows(rows, at, problem.dtype))
    shared = shared_bytes(problem, kernel)
    planes = kernel.planes
    channels = padded_channels(problem) // planes
    width, size = pitch(problem, kernel), row * g.height
    unaligned_rows = kernel.unaligned_rows
    main = Launch(
        Kernel(
            "forward/stride1.cu",
            "forward_stride1",
            (
                *g.layer_constants,
                *weight_layout,
                ("UNALIGNED_ROWS", unaligned_rows),
                ("PLANES", planes),
                ("WARPGROUPS", kernel.warpgroups),
                ("STAGES", kernel.stages),
                ("PITCH", width),
                *bias_alone(problem.has_bias),
                ("SHARED_BYTES", shared),
            ),
        ),
        grid=channel_tiles * tile.blocks,
        block=128 * kernel.warpgroups + _PRODUCER_THREADS,
        arguments=(tensor_map(0), workspace(0), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        overlaps_previous=True,
        structs=(_sizes(problem, tile),),
        tensor_maps=(
            TensorMap(
                base,
                TF32_ELEMENT_KINDS[problem.dtype],
                (planes * g.height * g.width, g.in_channels // planes, g.batch)
                if unaligned_rows
                else (g.width, g.height, g.in_channels, g.batch),
                (planes * size, size * g.in_channels)
                if unaligned_rows
                else (row, size, size * g.in_channels),
                (width, channels, 1) if unaligned_rows else (width, 1, channels, 1),
                (1, 1, 1) if unaligned_rows else (1, 1, 1, 1),
                swizzle_bytes=0,
            ),
        ),
    )
    why = f"{problem.precision} tensor cores, {tile}"
    return Part(_FAMILY, why, (*copies, pack, main), memory.bytes)
