"""Plans of csrc/kernels/grad_weight/implicit_gemm_tma.cu: what it supports, and the launches of a tile."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch

from tconv_swap.kernels.common.dtypes import ELEMENT_KINDS, HALF_DTYPES
from tconv_swap.kernels.common.hardware import MAX_STEP, TMA_ALIGNMENT
from tconv_swap.kernels.common.ranked import Ranked, made
from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.common.sizes import grad_weight_tile_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, pixel_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import tap_blocks, tile_constants
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_classes import Schedule, choose
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    BIAS_THREADS,
    BOX_CHANNELS,
    PRODUCER_THREADS,
    STEP_PIXELS,
    TmaTile,
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


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """Returns the parts of ``ranked``."""
    return made(ranked(problem, device, with_bias, count))


def ranked(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Ranked]:
    """Returns the ``count`` parts that are expected to be the fastest, the fastest first; inputs and outputs
    are those of ``implicit_gemm.plan_grad_weight``."""
    if not supports(problem, device):
        return []
    return [
        Ranked(clocks, partial(lower, problem, schedule, splits, with_bias))
        for schedule, splits, clocks in choose(problem, device, count, max_schedules(problem, by_itself=True))
    ]


def plan_from_nhwc_copies(problem: Problem, device: Device, reduced_channels_last: bool) -> Part | None:
    """Returns the part for tensors that were converted to channels_last first.
    Args:
        reduced_channels_last: the layout of the gradient where a second launch adds up splits; else it is
            channels_last.
    """
    if not supports(problem, device):
        return None
    found = choose(problem, device, 1, max_schedules(problem, by_itself=False))
    for schedule, splits, _ in found:
        return lower(problem, schedule, splits, False, reduced_channels_last)
    return None


def max_schedules(problem: Problem, by_itself: bool) -> int:
    """Returns how many kernels of this file a layer may have over all sizes.
    One of the stage's is left for the sizes that other kernels compute, if there are such. ``by_itself``: the
    tensors are in channels_last already.
    """
    return MAX_SCHEDULES - (not by_itself or leaves_sizes(of_any_size(problem)))


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem, provided that a tile fits."""
    g = problem.geometry
    if problem.dtype not in HALF_DTYPES or device.architecture != "sm_90a" or not problem.channels_last:
        return False
    if g.in_channels * 2 % TMA_ALIGNMENT or g.out_channels * 2 % TMA_ALIGNMENT or max(g.stride) > MAX_STEP:
        return False
    min_in = _MIN_IN_WITH_GAPS if has_gaps(problem) else _MIN_IN
    if g.in_channels_per_group < min_in or g.out_channels_per_group < _MIN_OUT:
        return False
    return 0 < g.batch < INT32_LIMIT and max(g.out_height, g.out_width) < INT32_LIMIT // 16


def _maps(problem: Problem, tma_tile: TmaTile) -> tuple[TensorMap, TensorMap]:
    """Returns the tensor maps of the input and of grad_output."""
    g, tile = problem.geometry, tma_tile.tile
    kind = ELEMENT_KINDS[problem.dtype]
    # Pixels at the bottom and on the right that no pixel of the input reaches are outside of the map, so read as zero.
    height, width = last_reached(g, 0) + 1, last_reached(g, 1) + 1
    images, rows, cols = box_shape(problem, tma_tile)

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
            # With so few channels a larger fetch would bring the next pixel, which no tap reads.
            fetched_bytes=128 if has_gaps(problem) and g.out_channels <= BOX_CHANNELS else 256,
        ),
    )


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, reduced_channels_last: bool) -> tuple[Kernel, Kernel]:
    """Returns the kernel that multiplies and the kernel that reduces its splits."""
    problem, tile = schedule.problem, schedule.tma_tile.tile

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
            ("SHARED_BYTES", shared_bytes(problem, schedule.tma_tile)),
            ("BIAS_WRITERS", 1),
        )

    main = Kernel(
        "grad_weight/implicit_gemm_tma.cu",
        "grad_weight_implicit_gemm_tma",
        (
            *constants(problem.weight_channels_last),
            ("BOX_PER_TAP_COL", schedule.tma_tile.box_per_tap_col),
            ("WITH_BIAS", with_bias),
            ("BIAS_THREADS", BIAS_THREADS if with_bias else 0),
        ),
        spills=schedule.tma_tile.may_spill,
    )
    return main, reduction_kernel(constants(reduced_channels_last))


def lower(
    problem: Problem,
    schedule: Schedule,
    splits: int,
    with_bias: bool,
    reduced_channels_last: bool | None = None,
) -> Part:
    """Returns the part that computes the problem with this schedule of its layer.
    Args:
        reduced_channels_last: as in ``plan_from_nhwc_copies``; None for the layout of the problem.
    """
    g, tma_tile, work = problem.geometry, schedule.tma_tile, schedule.work
    tile = tma_tile.tile
    if reduced_channels_last is None:
        reduced_channels_last = problem.weight_channels_last
    main, reduce = _kernels(schedule, with_bias, reduced_channels_last)
    tiles = pixel_tiles(g, tile.shape)
    flush = flush_of(tile.pixels // STEP_PIXELS, ceil_div(tiles, splits))
    through_workspace = splits > 1 or flush > 0
    sums = Sums(
        splits,
        work.split_bytes if through_workspace else 0,
        math.prod(tap_blocks(problem, tile)) * splits if with_bias else 0,
    )
    launch = Launch(
        main,
        grid=work.blocks * splits,
        block=tile.threads + PRODUCER_THREADS + (BIAS_THREADS if with_bias else 0),
        arguments=(
            tensor_map(0),
            tensor_map(1),
            output(0),
            workspace(0),
            sums.bias,
            struct(0),
        ),
        shared_bytes=shared_bytes(problem, tma_tile),
        tensor_maps=_maps(problem, tma_tile),
        structs=(grad_weight_tile_sizes(g, tile.shape, splits, flush, through_workspace),),
    )
    return Part(
        "implicit_gemm_tma",
        f"{tma_tile}, {splits} splits",
        (launch, *reduction(reduce, g.out_channels, sums)),
        sums.bytes(g.out_channels),
    )
