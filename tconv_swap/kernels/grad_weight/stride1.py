"""Plans of csrc/kernels/grad_weight/stride1.cu: the gradient of the weight at stride 1 (sm_90a)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter

import torch

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS, TF32_PRECISIONS
from tconv_swap.kernels.common.limits import WorkspaceLayout
from tconv_swap.kernels.common.pad_rows import Rows, copies_fit, pad_rows
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import grad_weight_stride1_sizes
from tconv_swap.kernels.grad_weight.split_k_untiled import reduce, weight_bytes
from tconv_swap.kernels.grad_weight.stride1_clocks import best_tile
from tconv_swap.kernels.grad_weight.stride1_tile import (
    BOX_BYTES,
    BOX_CHANNELS,
    Stride1Tile,
    alignment,
    copied_rows,
    output_channels,
    output_pixels,
    planes_of,
    raw_stages,
    shared_bytes,
    tiles_of,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
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
#: Threads of the warpgroup that loads.
_PRODUCER_THREADS = 128


def ranked(among: Iterable[Stride1Tile], problem: Problem, device: Device) -> list[Ranked]:
    """Returns the parts of the tiles that compute this size, the one that is expected to be the fastest first.
    Inputs: grad_output, input (16-byte aligned). Output: the gradient of the weight.

    Workspace: at most 64 MiB of partial sums, or one copy of the gradient if that is more; and at most
    ``MAX_COPY_BYTES`` of grad_output and input with longer rows.
    """
    tiles = tuple(among)
    if not tiles or not supports(problem, device):
        return []
    best = [best_tile(problem, tile, device) for tile in tiles if computes(problem, tile.linear)]
    return [Ranked(clocks, partial(lower, problem, tile)) for clocks, tile in sorted(best, key=itemgetter(0))]


def computes(problem: Problem, linear: bool) -> bool:
    """Returns whether the kernel computes the problem, which ``supports`` allows, addressing grad_output linearly or
    not: copies of the rows that it does not read as they lie are small enough."""
    return copies_fit(copied_rows(problem, linear), problem.dtype)


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether kernels compute the problem, provided that copies of its rows fit."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype not in TF32_ELEMENT_KINDS:
        return False
    if problem.is_ieee:
        return False
    if g.batch == 0 or g.taps == 1 or not g.stride == g.dilation == (1, 1):
        return False
    unit = alignment(problem)
    if problem.channels_last and (
        problem.dtype != torch.float32 or g.in_channels_per_group % unit or g.out_channels_per_group % unit
    ):
        return False
    # A plane is addressed linearly.
    pixels = max(g.height * g.width, g.out_height * g.out_width * unit)
    return max(pixels, g.batch * (g.out_height + 8) * g.width) < INT32_LIMIT


def _maps(
    problem: Problem, tile: Stride1Tile, copies: Mapping[int, tuple[Rows, int]]
) -> tuple[TensorMap, TensorMap]:
    """Returns the tensor maps of the input and of grad_output, which may be copies: their rows and places by operand.
    NCHW: [n][channel][row][pixel], or for grad_output addressed linearly [n][channel of a plane][pixel of all
    rows and planes]; channels_last: [n][row][pixel][channel].
    """
    g = problem.geometry
    channels, pixels = output_channels(problem, tile), output_pixels(problem, tile)
    item, planes = problem.dtype.itemsize, planes_of(problem, tile)

    def mapped(index: int, sizes: Sequence[int], box: Sequence[int], swizzle_bytes: int) -> TensorMap:
        base, innermost = input_(index), sizes[0]
        if index in copies:
            rows, place = copies[index]
            base, innermost = workspace(place), rows.padded
        strides = tuple(accumulate((item * innermost, *sizes[1:-1]), operator.mul))
        kind, steps = TF32_ELEMENT_KINDS[problem.dtype], (1,) * len(sizes)
        return TensorMap(base, kind, tuple(sizes), strides, tuple(box), steps, swizzle_bytes)

    if problem.channels_last:
        return (
            mapped(1, (g.in_channels, g.width, g.height, g.batch), (BOX_CHANNELS, tile.cols, 1, 1), 0),
            mapped(
                0, (g.out_channels, g.out_width, g.out_height, g.batch), (BOX_CHANNELS, pixels, 1, 1), 128
            ),
        )
    into = mapped(
        1,
        (g.width, g.height, g.in_channels, g.batch),
        (BOX_BYTES // item, 1, tile.channels, 1),
        BOX_BYTES,
    )
    if tile.linear:
        size = planes * g.out_height * g.out_width
        return into, mapped(0, (size, g.out_channels // planes, g.batch), (pixels, channels // planes, 1), 0)
    return into, mapped(0, (g.out_width, g.out_height, g.out_channels, g.batch), (pixels, 1, channels, 1), 0)


def lower(problem: Problem, tile: Stride1Tile) -> Part:
    """Returns the part that computes the problem with this tile."""
    g = problem.geometry
    direct = tile.splits == 1 and problem.weight_channels_last and problem.dtype == torch.float32
    shared = shared_bytes(problem, tile)
    memory = WorkspaceLayout()
    sums_at = 0 if direct else memory.reserve(tile.splits * weight_bytes(g))
    copied = copied_rows(problem, tile.linear)
    copies = {rows.operand: (rows, memory.reserve(rows.bytes(problem.dtype))) for rows in copied}
    kernel = Kernel(
        "grad_weight/stride1.cu",
        "grad_weight_stride1",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("PRECISION", TF32_PRECISIONS[problem.dtype]),
            *g.layer_constants,
            ("CHANNELS_LAST", problem.channels_last),
            ("LINEAR_OUTPUT", tile.linear),
            ("TILE_TAP_ROWS", tile.tap_rows),
            ("TILE_CI", tile.channels),
            ("WARPGROUPS", tile.warpgroups),
            ("M_TILES", tile.m_tiles),
            ("TILE_W", tile.cols),
            ("STAGES", tile.stages),
            ("OUTPUT_CHANNELS", output_channels(problem, tile)),
            ("OUTPUT_PITCH", output_pixels(problem, tile)),
            ("RAW_STAGES", raw_stages(problem)),
            ("SHARED_BYTES", shared),
        ),
    )
    main = Launch(
        kernel,
        grid=tiles_of(g, tile) * tile.splits,
        block=128 * tile.warpgroups + _PRODUCER_THREADS,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            output(0) if direct else workspace(sums_at),
            struct(0),
        ),
        structs=(grad_weight_stride1_sizes(g, tile.cols, tile.segment, tile.flush, tile.splits),),
        shared_bytes=shared,
        tensor_maps=_maps(problem, tile, copies),
    )
    launches = [pad_rows(rows, place, problem.dtype) for rows, place in copies.values()]
    launches.append(main)
    if not direct:
        launches.append(reduce(problem, tile.splits, sums_at))
    return Part(_FAMILY, f"wgmma, {tile}", tuple(launches), memory.bytes)
