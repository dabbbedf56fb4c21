"""Plans of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu, and the order of the families of the stage.

16 bits in channels_last are planned by implicit_gemm_tma. Wide layers in TF32 also have kernels of im2col_nchw or
im2col_nhwc, and layers at stride 1 one of stride1; at each size the family with the fewest expected clocks is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial

import torch

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.ranked import Ranked, in_turn, made
from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.common.sizes import grad_weight_tile_sizes
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight.implicit_gemm_candidates import Schedule, choose, registers
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import pixel_tiles, taps_cover_stride
from tconv_swap.kernels.grad_weight.implicit_gemm_cost import splits_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    item_bytes,
    shared_bytes,
    step_pixels,
    tap_blocks,
    tile_constants,
)
from tconv_swap.kernels.grad_weight.split_k import Sums, flush_of, reduction, reduction_kernel
from tconv_swap.kernels.gradients import nchw_to_nhwc_pays as gradients_nchw_to_nhwc_pays
from tconv_swap.kernels.gradients.narrow_mma import MANY_TAPS
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    workspace,
)

#: Channels of a group, on either side, from which the TF32 families with pixels along k fill their tiles.
WIDE_CHANNELS = 64
#: Clocks at 1.7 GHz, measured over expected, in TF32 and NCHW, of the implicit GEMM where the kernel is the stride
#: (elsewhere 0.99): the geometric mean of 50 layers and sizes on an H100, whose logarithms deviate by 0.11.
PRODUCT_CLOCKS = 0.59
#: Registers of a thread that must be left over for the compiler never to spill (up to 72 bytes were seen).
SPARE_REGISTERS = 48


@lru_cache(maxsize=256)
def plan_grad_weight(problem: Problem, device: Device, with_bias: bool = False) -> Part | None:
    """Returns the plan of the gradient of the weight, or None where no family of this stage supports the problem.
    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight; ``with_bias`` also that
    of the bias.

    Workspace: at most 64 MiB, or one float32 copy of the gradient in whole tiles if that is more; and 4 bytes
    for each channel, split and warp along the taps for the bias.
    """
    parts = part_candidates(problem, device, with_bias, count=1)
    return parts[0] if parts else None


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """Returns ``count`` parts: the one that is expected to be the fastest, then the best of each family in turn."""
    families = (
        _stride1(problem, device, with_bias, count),
        *_with_pixels_along_k(problem, device, with_bias, count),
        implicit_gemm(problem, device, with_bias, count),
    )
    ranked = sorted(filter(None, families), key=lambda family: family[0].clocks)
    return made(in_turn(*ranked)[:count])


def _stride1(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Ranked]:
    """Returns the parts of stride1. It leaves the bias to a launch of its own, which may cost what stride1 gains, so
    it is not planned with a bias."""
    if with_bias or not _stride1_schedules(problem, device):
        return []
    if not grad_weight_stride1.preferred(problem, device):
        return []
    return grad_weight_stride1.ranked(problem, device, count)


def _with_pixels_along_k(
    problem: Problem, device: Device, with_bias: bool, count: int
) -> Iterator[list[Ranked]]:
    """Yields the parts of each family with pixels along k, in TF32; to be measured, those of im2col also for layers
    without a kernel of it."""
    if _nhwc_schedules(problem) or count > 1:
        yield grad_weight_im2col_nhwc.ranked(problem, device, with_bias, count)
    if _nchw_schedules(problem, device) or count > 1:
        yield grad_weight_im2col_nchw.ranked(problem, device, with_bias, count)


def implicit_gemm(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Ranked]:
    """Returns the parts of the implicit GEMM, whose tiles hold a pixel's channels side by side.
    Over all sizes of a layer the first part uses one of at most ``MAX_SCHEDULES`` kernels.
    """
    if not supports(problem, device) or (with_bias and not reads_all_of_grad_output(problem)):
        return []
    found = grad_weight_tma.ranked(problem, device, with_bias, (count + 1) // 2)
    if len(found) < count:
        schedules = choose(problem, device, count - len(found), max_schedules(problem, device))
        measured = 1.0
        if (
            problem.is_tf32
            and not problem.channels_last
            and problem.geometry.kernel == problem.geometry.stride
        ):
            measured = PRODUCT_CLOCKS
        found += [
            Ranked(
                measured * one.clocks(problem.geometry, device),
                partial(lower, problem, one, device, with_bias),
            )
            for one in schedules
        ]
    return found


def max_schedules(problem: Problem, device: Device) -> int:
    """Returns how many kernels of this file a layer may have over all sizes: the limit of the stage less those
    of the other families."""
    g = problem.geometry
    if g.taps >= MANY_TAPS:
        return 1  # narrow_mma has the other kernels
    if grad_weight_tma.supports(problem, device) or gradients_nchw_to_nhwc_pays.at_some_size(problem, device):
        return MAX_SCHEDULES - grad_weight_tma.max_schedules(problem, by_itself=False)
    if nhwc := _nhwc_schedules(problem):
        return MAX_SCHEDULES - nhwc - _stride1_schedules(problem, device)
    return MAX_SCHEDULES - max(_nchw_schedules(problem, device), _stride1_schedules(problem, device))


def _nhwc_schedules(problem: Problem) -> int:
    """Returns how many kernels of im2col_nhwc a layer in channels_last has over all its sizes."""
    g = problem.geometry
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    wide = channels >= WIDE_CHANNELS // 2 and g.taps > 1
    return grad_weight_im2col_nhwc.MAX_SCHEDULES if problem.channels_last and problem.is_tf32 and wide else 0


def _nchw_schedules(problem: Problem, device: Device) -> int:
    """Returns how many kernels of im2col_nchw a layer in NCHW has over all its sizes."""
    g = problem.geometry
    in_tf32 = device.architecture == "sm_90a" and problem.is_tf32 and not problem.channels_last
    if not in_tf32 or max(g.stride) == 1 or not _im2col_nchw_may_win(problem):
        return 0
    return grad_weight_im2col_nchw.MAX_SCHEDULES


def _stride1_schedules(problem: Problem, device: Device) -> int:
    """Returns how many kernels of stride1 a layer has over all its sizes."""
    g = problem.geometry
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    if (
        channels < grad_weight_stride1.MIN_CHANNELS
        or g.taps == 1
        or not grad_weight_stride1.supports_some_size(problem, device)
    ):
        return 0
    return grad_weight_stride1.MAX_SCHEDULES


def _im2col_nchw_may_win(problem: Problem) -> bool:
    """Returns whether im2col_nchw can be the fastest at some size of a layer in NCHW."""
    g = problem.geometry
    return g.in_channels_per_group >= WIDE_CHANNELS and g.out_channels_per_group >= WIDE_CHANNELS // 2


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernels of this file compute the problem, provided that a tile fits."""
    g = problem.geometry
    if problem.dtype not in DTYPES or device.compute_capability < 80 or g.batch == 0:
        return False
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    # Offsets within an image have 32 bits.
    if image * item_bytes(problem) >= INT32_LIMIT:
        return False
    return min(g.in_channels_per_group, g.out_channels_per_group) >= 8


def reads_all_of_grad_output(problem: Problem) -> bool:
    """Returns whether the taps whose offset lies in [0, stride) read every pixel of grad_output exactly once."""
    g = problem.geometry
    whole = g.out_height == g.stride[0] * g.height and g.out_width == g.stride[1] * g.width
    return whole and taps_cover_stride(g, 0) and taps_cover_stride(g, 1)


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, device: Device) -> tuple[Kernel, Kernel, int]:
    """Returns the kernel that multiplies, the kernel that reduces its splits, and how many rows of bias sums a
    split writes."""
    problem, tile = schedule.problem, schedule.tile
    g = problem.geometry
    into, out = schedule.operands
    precision = {torch.float16: 1, torch.bfloat16: 2}.get(problem.dtype, 3 if problem.is_ieee else 0)
    taken, available = registers(problem, tile, schedule.operands)
    bias_writers = 1 if tile.wgmma else tile.warps[2] * tile.warps[3]
    if not tile.wgmma:  # all warps that read the same pixels of grad_output take turns
        bias_writers *= ceil_div(g.in_channels_per_group, tile.block_m) * tile.warps[0]
    name = "grad_weight_implicit_gemm_wgmma" if tile.wgmma else "grad_weight_implicit_gemm_mma"
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", precision),
        *g.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        *tile_constants(tile),
        ("WARPS_K", tile.warps[3]),
        ("INPUT_COPY", into.copy),
        ("OUTPUT_COPY", out.copy),
        ("STAGES", tile.stages),
        ("SHARED_BYTES", shared_bytes(tile.stages, schedule.operands)),
        ("BIAS_WRITERS", bias_writers),
    )
    main = Kernel(
        f"grad_weight/{name.removeprefix('grad_weight_')}.cu",
        name,
        (
            *constants,
            ("WITH_BIAS", with_bias),
            ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
        ),
        spills=taken + SPARE_REGISTERS > available,
    )
    return main, reduction_kernel(constants), math.prod(tap_blocks(problem, tile)) * bias_writers


def lower(problem: Problem, schedule: Schedule, device: Device, with_bias: bool) -> Part:
    """Returns the part that computes the problem with this schedule of its layer."""
    g, tile, work = problem.geometry, schedule.tile, schedule.work
    main, reduce, bias_rows = _kernels(schedule, with_bias, device)
    tiles = pixel_tiles(g, tile.shape)
    splits = splits_of(work, tile, tiles, device)
    flush = flush_of(tile.pixels // step_pixels(problem) // tile.warps[3], ceil_div(tiles, splits))
    copies = splits * tile.warps[3]
    through_workspace = copies > 1 or flush > 0
    sums = Sums(copies, work.split_bytes if through_workspace else 0, bias_rows * splits if with_bias else 0)
    launch = Launch(
        main,
        grid=work.blocks * splits,
        block=tile.threads,
        arguments=(
            input_(1),
            input_(0),
            output(0),
            workspace(0),
            sums.bias,
            struct(0),
        ),
        shared_bytes=shared_bytes(tile.stages, schedule.operands),
        structs=(grad_weight_tile_sizes(g, tile.shape, splits, flush, through_workspace),),
    )
    return Part(
        "implicit_gemm",
        f"{'wgmma' if tile.wgmma else 'mma'}, {tile}, {splits} splits",
        (launch, *reduction(reduce, g.out_channels, sums)),
        sums.bytes(g.out_channels),
    )
