"""Plans of csrc/kernels/grad_weight/implicit_gemm_tma.cu: what it claims, how a tile becomes launches."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.common.sizes import grad_weight_tile_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, pixel_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import tap_blocks, tile_constants
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_classes import Schedule, choose
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    ASKING_THREADS,
    BIAS_THREADS,
    BOX_CHANNELS,
    BOX_STEP,
    STEP_PIXELS,
    Boxes,
    box_shape,
    has_gaps,
    last_reached,
    leaves_sizes,
    shared_bytes,
)
from tconv_swap.kernels.grad_weight.split_k import Sums, flush_of, reduction, reduction_kernel
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
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

_KINDS = {torch.float16: ElementKind.FLOAT16, torch.bfloat16: ElementKind.BFLOAT16}
#: Bytes between neighbours along each dimension must be multiples of this.
_ALIGNMENT = 16
#: Channels of a group, in and out, below which too much of a box of 64 would be another's (measured: with 32 in, slower
#: than by grad_weight/implicit_gemm_wgmma.cu; 32 out, faster).
_LEAST_IN, _LEAST_OUT = 33, 17
#: In, where the kernel leaves gaps: memory bounds those (measured: faster).
_LEAST_IN_WITH_GAPS = 32


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first. Inputs and outputs as those of
    ``plan_grad_weight``."""
    if not claims(problem, device):
        return []
    return [
        plan_with_boxes(problem, schedule, slices, with_bias)
        for schedule, slices in choose(problem, device, count, most_schedules(problem, by_itself=True))
    ]


def plan_arranged(problem: Problem, device: Device, reduced_channels_last: bool) -> Part | None:
    """The same of tensors that are brought to channels_last first. ``reduced_channels_last``: the gradient's layout
    where another launch adds up slices; else it is in channels_last."""
    if not claims(problem, device):
        return None
    found = choose(problem, device, 1, most_schedules(problem, by_itself=False))
    for schedule, slices in found:
        return plan_with_boxes(problem, schedule, slices, False, reduced_channels_last)
    return None


def most_schedules(problem: Problem, by_itself: bool) -> int:
    """Kernels of this file that a layer has over all sizes: all of them but one, for sizes that others compute, where
    there are such. ``by_itself``: of tensors that lie in channels_last."""
    return MAX_SCHEDULES - (not by_itself or leaves_sizes(of_any_size(problem)))


def claims(problem: Problem, device: Device) -> bool:
    g = problem.geometry
    if problem.dtype not in _KINDS or device.architecture != "sm_90a" or not problem.channels_last:
        return False
    if g.in_channels * 2 % _ALIGNMENT or g.out_channels * 2 % _ALIGNMENT or max(g.stride) > BOX_STEP:
        return False
    least_in = _LEAST_IN_WITH_GAPS if has_gaps(problem) else _LEAST_IN
    if g.in_channels_per_group < least_in or g.out_channels_per_group < _LEAST_OUT:
        return False
    return 0 < g.batch < INT32_LIMIT and max(g.out_height, g.out_width) < INT32_LIMIT // 16


def _maps(problem: Problem, boxes: Boxes) -> tuple[TensorMap, TensorMap]:
    """Of the input and of grad_output."""
    g, tile = problem.geometry, boxes.tile
    kind = _KINDS[problem.dtype]
    # What no pixel of the input reaches, at the bottom and on the right, counts as outside.
    height, width = last_reached(g, 0) + 1, last_reached(g, 1) + 1
    images, rows, cols = box_shape(problem, boxes)

    def strides(channels: int, height: int, width: int) -> tuple[int, ...]:
        return channels * 2, channels * 2 * width, channels * 2 * width * height

    return (
        TensorMap(
            input_(1),
            kind,
            (g.in_channels, g.width, g.height, g.batch),
            strides(g.in_channels, g.height, g.width),
            (BOX_CHANNELS, tile.cols, tile.rows, tile.images),
            (1, 1, 1, 1),
        ),
        TensorMap(
            input_(0),
            kind,
            (g.out_channels, width, height, g.batch),
            strides(g.out_channels, g.out_height, g.out_width),
            (BOX_CHANNELS, (cols - 1) * g.stride[1] + 1, (rows - 1) * g.stride[0] + 1, images),
            (1, g.stride[1], g.stride[0], 1),
            # Memory need not bring the pixel beside one of so few channels, where no tap reads it.
            fetched_bytes=128 if has_gaps(problem) and g.out_channels <= BOX_CHANNELS else 256,
        ),
    )


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, reduced_channels_last: bool) -> tuple[Kernel, Kernel]:
    """That which multiplies, and that which adds up what it leaves."""
    problem, tile = schedule.problem, schedule.boxes.tile

    def constants(weight_channels_last: bool) -> tuple[tuple[str, Constant], ...]:
        return (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("PRECISION", 1 if problem.dtype == torch.float16 else 2),
            *problem.geometry.layer_constants,
            ("CHANNELS_LAST", True),
            ("WEIGHT_CHANNELS_LAST", weight_channels_last),
            *tile_constants(tile),
            ("WARPS_K", 1),
            ("INPUT_COPY", 8),
            ("OUTPUT_COPY", 8),
            ("STAGES", tile.stages),
            ("SHARED_BYTES", shared_bytes(problem, schedule.boxes)),
            ("BIAS_WRITERS", 1),
            ("SWAPPED", False),
        )

    main = Kernel(
        "grad_weight/implicit_gemm_tma.cu",
        "grad_weight_implicit_gemm_tma",
        (
            *constants(problem.weight_channels_last),
            ("FLAT", schedule.boxes.flat),
            ("WITH_BIAS", with_bias),
            ("BIAS_THREADS", BIAS_THREADS if with_bias else 0),
        ),
        spills=schedule.boxes.may_spill,
    )
    return main, reduction_kernel(constants(reduced_channels_last))


def plan_with_boxes(
    problem: Problem,
    schedule: Schedule,
    slices: int,
    with_bias: bool,
    reduced_channels_last: bool | None = None,
) -> Part:
    """The plan that computes the problem with this schedule of its layer. ``reduced_channels_last``: as that of
    ``plan_arranged``; None for the layout of the problem."""
    g, boxes, work = problem.geometry, schedule.boxes, schedule.work
    tile = boxes.tile
    if reduced_channels_last is None:
        reduced_channels_last = problem.weight_channels_last
    main, reduce = _kernels(schedule, with_bias, reduced_channels_last)
    tiles = pixel_tiles(g, tile.shape)
    flush = flush_of(tile.pixels // STEP_PIXELS, ceil_div(tiles, slices))
    through_workspace = slices > 1 or flush > 0
    sums = Sums(
        slices,
        work.slice_bytes if through_workspace else 0,
        math.prod(tap_blocks(problem, tile)) * slices if with_bias else 0,
    )
    launch = Launch(
        main,
        grid=work.blocks * slices,
        block=tile.threads + ASKING_THREADS + (BIAS_THREADS if with_bias else 0),
        arguments=(
            tensor_map(0),
            tensor_map(1),
            output(0),
            workspace(0),
            sums.bias,
            struct(0),
        ),
        shared_bytes=shared_bytes(problem, boxes),
        tensor_maps=_maps(problem, boxes),
        structs=(grad_weight_tile_sizes(g, tile.shape, slices, flush, through_workspace),),
    )
    return Part(
        "implicit_gemm_tma",
        f"{boxes}, {slices} slices",
        (launch, *reduction(reduce, g.out_channels, sums)),
        sums.bytes(g.out_channels),
    )
