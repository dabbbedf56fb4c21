"""Plans of csrc/kernels/grad_weight/implicit_gemm_tma.cu: what it supports, and the launches of a tile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import ELEMENT_KINDS, HALF_DTYPES
from tconv_swap.kernels.common.hardware import MAX_STEP, TMA_ALIGNMENT
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.common.sizes import Words, implicit_gemm_tma_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import block_constants, tap_blocks
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import Schedule
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import ranked as ranked_schedules
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_shape import STEP_PIXELS, last_reached
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    BIAS_THREADS,
    BOX_CHANNELS,
    MAX_STAGES,
    PRODUCER_THREADS,
    ROW_BYTES,
    Stage,
    TmaKernel,
    has_gaps,
)
from tconv_swap.kernels.grad_weight.layer import pixel_tiles, reads_all_of_grad_output
from tconv_swap.kernels.grad_weight.split_k import Sums, flush_of, reduction, reduction_kernel
from tconv_swap.kernels.problem import Device, Problem
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

#: Channels of a group, in and out, below which a box of 64 holds too many of other groups (measured: with 32 in,
#: slower than grad_weight/implicit_gemm_wgmma.cu; with 32 out, faster).
_MIN_IN, _MIN_OUT = 33, 17
#: The fewest input channels of a group where the kernel skips rows or columns of grad_output. Memory bounds those
#: layers, and this kernel was measured to be faster.
_MIN_IN_WITH_GAPS = 32


def ranked(among: Iterable[Schedule], problem: Problem, device: Device, with_bias: bool) -> list[Ranked]:
    """Returns the parts of the schedules that compute this size, the one that is expected to be the fastest first;
    inputs and outputs are those of ``implicit_gemm.plan_grad_weight``."""
    geometry = problem.geometry
    if not supports(problem, device) or (with_bias and not reads_all_of_grad_output(geometry)):
        return []
    return [
        Ranked(best.clocks, partial(lower, problem, schedule, best.stage, best.splits, with_bias))
        for best, schedule in ranked_schedules(tuple(among), geometry, device)
    ]


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem, provided that a tile fits."""
    g = problem.geometry
    if problem.dtype not in HALF_DTYPES or device.architecture != "sm_90a" or not problem.channels_last:
        return False
    # A pixel's channels, and those of a group, begin at multiples of 16 bytes: a box that begins elsewhere is an
    # illegal instruction.
    if (g.in_channels_per_group | g.out_channels_per_group) * 2 % TMA_ALIGNMENT or max(g.stride) > MAX_STEP:
        return False
    min_in = _MIN_IN_WITH_GAPS if has_gaps(problem) else _MIN_IN
    if g.in_channels_per_group < min_in or g.out_channels_per_group < _MIN_OUT:
        return False
    return 0 < g.batch < INT32_LIMIT and max(g.out_height, g.out_width) < INT32_LIMIT // 16


def _maps(problem: Problem, stage: Stage) -> tuple[TensorMap, TensorMap]:
    """Returns the tensor maps of the input and of grad_output."""
    g = problem.geometry
    kind = ELEMENT_KINDS[problem.dtype]
    # Pixels at the bottom and on the right that no pixel of the input reaches are outside of the map, so read as zero.
    height, width = last_reached(g, 0) + 1, last_reached(g, 1) + 1
    (tile_images, tile_rows, tile_cols), (images, rows, cols) = stage.shape, stage.boxes.shape

    def strides(channels: int, height: int, width: int) -> tuple[int, ...]:
        return channels * 2, channels * 2 * width, channels * 2 * width * height

    return (
        TensorMap(
            input_(1),
            kind,
            (g.in_channels, g.width, g.height, g.batch),
            strides(g.in_channels, g.height, g.width),
            (BOX_CHANNELS, tile_cols, tile_rows, tile_images),
            (1, 1, 1, 1),
        ),
        TensorMap(
            input_(0),
            kind,
            (g.out_channels, width, height, g.batch),
            strides(g.out_channels, g.out_height, g.out_width),
            (BOX_CHANNELS, (cols - 1) * g.stride[1] + 1, (rows - 1) * g.stride[0] + 1, images),
            (1, g.stride[1], g.stride[0], 1),
            # With so few channels a larger fetch would bring the next pixel, which no tap reads.
            fetched_bytes=128 if has_gaps(problem) and g.out_channels <= BOX_CHANNELS else 256,
        ),
    )


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, reduced_channels_last: bool) -> tuple[Kernel, Kernel]:
    """Returns the kernel that multiplies and the kernel that reduces its splits."""
    problem, kernel = schedule.problem, schedule.kernel

    def constants(weight_channels_last: bool) -> tuple[tuple[str, Constant], ...]:
        return (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("PRECISION", 1 if problem.dtype == torch.float16 else 2),
            *problem.geometry.layer_constants,
            ("WEIGHT_CHANNELS_LAST", weight_channels_last),
            *block_constants(kernel),
            ("BIAS_WRITERS", _bias_writers(schedule)),
        )

    main = Kernel(
        "grad_weight/implicit_gemm_tma.cu",
        "grad_weight_implicit_gemm_tma",
        (
            *constants(problem.weight_channels_last),
            ("CHANNELS_LAST", True),
            ("TILE_PIXELS", kernel.pixels),
            ("BOX_PER_TAP_COL", kernel.box_per_tap_col),
            ("MAX_STAGES", MAX_STAGES),
            ("WITH_BIAS", with_bias),
            ("BIAS_THREADS", BIAS_THREADS if with_bias else 0),
        ),
        spills=kernel.may_spill,
    )
    return main, reduction_kernel(constants(reduced_channels_last))


def _sizes(
    geometry: Geometry, kernel: TmaKernel, stage: Stage, splits: int, flush: int, through_workspace: bool
) -> Words:
    """Returns the sizes that a launch gives the kernel."""
    boxes = stage.boxes
    output_boxes = boxes.per_channel_block * kernel.channel_blocks
    copied = kernel.input_blocks * kernel.pixels * ROW_BYTES + output_boxes * boxes.copied_bytes
    return implicit_gemm_tma_sizes(
        geometry,
        stage.shape,
        (boxes.shape[2], boxes.bytes, boxes.group_pixels(stage.shape)),
        copied,
        stage.stages,
        [pixel * ROW_BYTES // 16 for pixel in boxes.steps(stage.shape)],
        splits,
        flush,
        through_workspace,
    )


def _bias_writers(schedule: Schedule) -> int:
    """Returns the blocks of different input channels, which take turns in adding up the bias."""
    return ceil_div(schedule.problem.geometry.in_channels_per_group, schedule.kernel.block_m)


def lower(
    problem: Problem,
    schedule: Schedule,
    stage: Stage,
    splits: int,
    with_bias: bool,
    reduced_channels_last: bool | None = None,
) -> Part:
    """Returns the part that computes the problem with this schedule of its layer and a stage of its kernel.
    Args:
        reduced_channels_last: the layout of the gradient where a second launch adds up splits; None for that of the
            problem.
    """
    g, kernel, work = problem.geometry, schedule.kernel, schedule.work
    if reduced_channels_last is None:
        reduced_channels_last = problem.weight_channels_last
    main, reduce = _kernels(schedule, with_bias, reduced_channels_last)
    tiles = pixel_tiles(g, stage.shape)
    flush = flush_of(kernel.pixels // STEP_PIXELS, ceil_div(tiles, splits))
    through_workspace = splits > 1 or flush > 0
    sums = Sums(
        splits,
        work.split_bytes if through_workspace else 0,
        math.prod(tap_blocks(problem, kernel)) * _bias_writers(schedule) * splits if with_bias else 0,
    )
    launch = Launch(
        main,
        grid=work.blocks * splits,
        block=kernel.threads + PRODUCER_THREADS + (BIAS_THREADS if with_bias else 0),
        arguments=(
            tensor_map(0),
            tensor_map(1),
            output(0),
            workspace(0),
            sums.bias,
            struct(0),
        ),
        shared_bytes=stage.shared_bytes,
        tensor_maps=_maps(problem, stage),
        structs=(_sizes(g, kernel, stage, splits, flush, through_workspace),),
    )
    return Part(
        "implicit_gemm_tma",
        f"{kernel}, {stage}, {splits} splits",
        (launch, *reduction(reduce, g.out_channels, sums)),
        sums.bytes(g.out_channels),
    )
