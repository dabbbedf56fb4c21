"""Plans of csrc/kernels/grad_weight_{mma,wgmma,wgmma_tf32}.cu: what they claim, how a tile becomes launches.

What the copy engine can bring is planned by grad_weight_tma, strided layers with many channels in TF32 by
plan_grad_weight_{direct,rows,in_place}, those of stride 1 by grad_weight_stride1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.common.sizes import grad_weight_tile_sizes
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import pixel_rows as grad_weight_pixel_rows
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight.im2col_nchw_classes import LEAST_MACS
from tconv_swap.kernels.grad_weight.implicit_gemm_candidates import Schedule, choose, registers
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import pixel_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_cost import slices_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    item_bytes,
    shared_bytes,
    step_pixels,
    tap_blocks,
    tile_constants,
    windows,
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

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Of a group, from which tiles with pixels along lines are filled; the least work they were measured to be faster at.
MANY_CHANNELS = 64
LEAST_MACS_IN_PLACE = 1 << 29
#: In NCHW with so many input channels times output channels of a group.
MANY_PAIRS, LEAST_MACS_MANY_PAIRS = 256 * 128, 1 << 28
LEAST_MULTIPLIES_OF_A_PIXEL = 200
#: The same from which parting grad_output first is the faster.
MOST_MULTIPLIES_OF_A_PIXEL = 4096
#: At stride 1: channels on either side of a group, and work, from which strips were measured to be the faster.
STRIPS_CHANNELS, STRIPS_MACS = 32, 1 << 35
#: Registers that a thread must have left over for the compiler never to spill (seen: up to 72 bytes).
SPARE_REGISTERS = 48


@lru_cache(maxsize=256)
def plan_grad_weight(problem: Problem, device: Device, with_bias: bool = False) -> Part | None:
    """Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias`` that of
    the bias. None for what this family does not claim.

    Workspace: at most 64 MiB, or one copy of the gradient in float32 and whole tiles if that is more; and 4 bytes for
    each channel, slice and warp along the taps for the bias.
    """
    parts = part_candidates(problem, device, with_bias, count=1)
    return parts[0] if parts else None


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    if strips := _down_strips(problem, device, with_bias, count):
        return strips
    as_it_lies, along_lines = _as_it_lies(problem), _along_pixels(problem)
    preferred = as_it_lies or along_lines
    along_pixels: list[Part] = []
    if as_it_lies or count > 1:
        # Each claims one layout.
        along_pixels += grad_weight_im2col_nchw.part_candidates(problem, device, with_bias, (count + 1) // 2)
        along_pixels += grad_weight_im2col_nhwc.part_candidates(problem, device, with_bias, (count + 1) // 2)
    if along_lines or count > 1:
        _, most = _along_pixels_schedules(problem, device)
        lines = grad_weight_pixel_rows.part_candidates(problem, device, with_bias, count, most)
        along_pixels = along_pixels + lines if as_it_lies else lines[: count // 2 or 1] + along_pixels
        along_pixels = along_pixels[:count]
    if not along_pixels:
        return across_pixels(problem, device, with_bias, count)
    if count == 1:
        return along_pixels
    # Some of each kind for whoever measures.
    others = across_pixels(problem, device, with_bias, count // 2 if preferred else count - 1)
    if preferred:
        return along_pixels[: count - len(others)] + others
    return others + along_pixels[: count - len(others)]


def _down_strips(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """Those of grad_weight_stride1, where they were measured to be the faster, and some others for whoever
    measures; else none. The bias they leave to a pass of its own, which may take what they gain."""
    g = problem.geometry
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    if with_bias or channels < STRIPS_CHANNELS or g.macs < STRIPS_MACS:
        return []
    strips = grad_weight_stride1.part_candidates(problem, device, count)
    if not strips or not grad_weight_stride1.preferred(problem, device):
        return []
    return strips[: count - count // 2] + across_pixels(problem, device, False, count // 2)


def across_pixels(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """Those in whose tiles a pixel's channels lie together; over all sizes of a layer the first is one of
    ``MAX_SCHEDULES``."""
    if not claims(problem, device) or (with_bias and not reads_all_of_grad_output(problem)):
        return []
    boxes = grad_weight_tma.part_candidates(problem, device, with_bias, (count + 1) // 2)
    if len(boxes) == count:
        return boxes
    found = choose(problem, device, count - len(boxes), most_schedules(problem, device))
    return boxes + [plan_with_schedule(problem, one, device, with_bias) for one in found]


def most_schedules(problem: Problem, device: Device) -> int:
    """Kernels of this file that a layer has over all sizes: those that it has in all, less what others take."""
    g = problem.geometry
    if g.taps >= MANY_TAPS:
        return 1  # of what plan_narrow_grad_weight leaves over
    if grad_weight_tma.claims(problem, device) or gradients_nchw_to_nhwc_pays.at_some_size(problem, device):
        return MAX_SCHEDULES - grad_weight_tma.most_schedules(problem, by_itself=False)
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    if problem.channels_last and problem.is_tf32 and channels >= STRIPS_CHANNELS and g.taps > 1:
        return MAX_SCHEDULES - grad_weight_im2col_nhwc.MAX_SCHEDULES
    others = max(sum(_along_pixels_schedules(problem, device)), _strips_schedules(problem, device))
    return MAX_SCHEDULES - others


def _along_pixels_schedules(problem: Problem, device: Device) -> tuple[int, int]:
    """Kernels that a layer in NCHW has of grad_weight_im2col_nchw and of grad_weight_pixel_rows, whatever its sizes."""
    g = problem.geometry
    in_tf32 = device.architecture == "sm_90a" and problem.is_tf32 and not problem.channels_last
    if not in_tf32 or max(g.stride) == 1:
        return 0, 0
    of_direct = grad_weight_im2col_nchw.MAX_SCHEDULES if _may_lie(problem) else 0
    if not _has_many_channels(problem):
        return of_direct, 0
    return of_direct, 1 if of_direct else grad_weight_pixel_rows.MAX_SCHEDULES


def _strips_schedules(problem: Problem, device: Device) -> int:
    """Kernels that a layer has of grad_weight_stride1, whatever its sizes."""
    g = problem.geometry
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    if channels < STRIPS_CHANNELS or g.taps == 1 or not grad_weight_stride1.claims_some(problem, device):
        return 0
    return grad_weight_stride1.MAX_SCHEDULES


def _along_pixels(problem: Problem) -> bool:
    """Strides in NCHW with channels enough for large tiles, work enough for all of them and multiplies enough for each
    pixel of grad_output, which is copied first: where pixels along k in TF32 were the faster."""
    g = problem.geometry
    if problem.channels_last or max(g.stride) == 1 or not _has_many_channels(problem):
        return False
    many = g.in_channels_per_group * g.out_channels_per_group >= MANY_PAIRS
    return g.macs >= (LEAST_MACS_MANY_PAIRS if many else LEAST_MACS)


def _has_many_channels(problem: Problem) -> bool:
    """The same of a layer in NCHW, whatever its sizes."""
    g = problem.geometry
    enough = LEAST_MULTIPLIES_OF_A_PIXEL * math.prod(g.stride)
    channels = min(g.in_channels_per_group, g.out_channels_per_group)
    return channels >= MANY_CHANNELS and g.in_channels_per_group * g.taps >= enough


def _as_it_lies(problem: Problem) -> bool:
    """Where grad_output's words straight from memory were the faster in TF32: channels and work enough; and in NCHW
    strides, rows that boxes can bring, and not so many multiplies for each of its elements that parting it costs next
    to nothing."""
    g = problem.geometry
    if g.in_channels_per_group < MANY_CHANNELS or g.out_channels_per_group < MANY_CHANNELS // 2:
        return False
    if problem.channels_last:
        return g.taps > 1 and g.macs >= LEAST_MACS_IN_PLACE
    if max(g.stride) == 1 or g.height == 1 or g.out_width % 4 != 0:
        return False
    return g.macs >= LEAST_MACS and _may_lie(problem)


def _may_lie(problem: Problem) -> bool:
    """The same of a layer in NCHW, whatever its sizes."""
    g = problem.geometry
    if g.in_channels_per_group < MANY_CHANNELS or g.out_channels_per_group < MANY_CHANNELS // 2:
        return False
    one_row = g.kernel[0] == g.stride[0] == 1
    many = MOST_MULTIPLIES_OF_A_PIXEL * math.prod(g.stride)
    return not one_row and g.in_channels_per_group * g.taps <= many


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernels of this file compute the problem, if there is a tile."""
    g = problem.geometry
    if problem.dtype not in _DTYPES or device.compute_capability < 80 or g.batch == 0:
        return False
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    # Offsets within an image are counted in 32 bits.
    if image * item_bytes(problem) >= INT32_LIMIT:
        return False
    return min(g.in_channels_per_group, g.out_channels_per_group) >= 8


def reads_all_of_grad_output(problem: Problem) -> bool:
    """Whether the taps whose offset lies in [0, stride) read every pixel of grad_output, and each once."""
    g = problem.geometry
    return all(
        out == stride * size
        and all((r + padding) % dilation == 0 and (r + padding) // dilation < kernel for r in range(stride))
        for out, size, stride, padding, dilation, kernel in zip(
            (g.out_height, g.out_width),
            (g.height, g.width),
            g.stride,
            g.padding,
            g.dilation,
            g.kernel,
            strict=True,
        )
    )


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, device: Device) -> tuple[Kernel, Kernel, int]:
    """That which multiplies, that which adds up what it leaves, and rows of the bias that one slice writes."""
    problem, tile = schedule.problem, schedule.tile
    g = problem.geometry
    into, out = windows(problem, tile)
    precision = {torch.float16: 1, torch.bfloat16: 2}.get(problem.dtype, 3 if problem.is_ieee else 0)
    taken, available = registers(problem, tile)
    bias_writers = 1 if tile.wgmma and item_bytes(problem) == 2 else tile.warps[2] * tile.warps[3]
    if not tile.wgmma:  # all warps that read the same of grad_output take their turns
        bias_writers *= ceil_div(g.in_channels_per_group, tile.block_m) * tile.warps[0]
    swapped = tile.wgmma and item_bytes(problem) == 4
    name = (
        "grad_weight_implicit_gemm_wgmma_tf32"
        if swapped
        else "grad_weight_implicit_gemm_wgmma"
        if tile.wgmma
        else "grad_weight_implicit_gemm_mma"
    )
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
        ("SHARED_BYTES", shared_bytes(problem, tile)),
        ("BIAS_WRITERS", bias_writers),
        ("SWAPPED", swapped),
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


def plan_with_schedule(problem: Problem, schedule: Schedule, device: Device, with_bias: bool) -> Part:
    """The plan that computes the problem with this schedule of its layer."""
    g, tile, work = problem.geometry, schedule.tile, schedule.work
    main, reduce, bias_rows = _kernels(schedule, with_bias, device)
    tiles = pixel_tiles(g, tile.shape)
    slices = slices_of(work, tile, tiles, device)
    flush = flush_of(tile.pixels // step_pixels(problem) // tile.warps[3], ceil_div(tiles, slices))
    copies = slices * tile.warps[3]
    through_workspace = copies > 1 or flush > 0
    sums = Sums(copies, work.slice_bytes if through_workspace else 0, bias_rows * slices if with_bias else 0)
    launch = Launch(
        main,
        grid=work.blocks * slices,
        block=tile.threads,
        arguments=(
            input_(1),
            input_(0),
            output(0),
            workspace(0),
            sums.bias,
            struct(0),
        ),
        shared_bytes=shared_bytes(schedule.problem, tile),
        structs=(grad_weight_tile_sizes(g, tile.shape, slices, flush, through_workspace),),
    )
    return Part(
        "implicit_gemm",
        f"{'wgmma' if tile.wgmma else 'mma'}, {tile}, {slices} slices",
        (launch, *reduction(reduce, g.out_channels, sums)),
        sums.bytes(g.out_channels),
    )
