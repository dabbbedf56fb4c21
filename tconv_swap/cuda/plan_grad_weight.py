"""Plans of csrc/kernels/grad_weight_mma.cu and grad_weight_wgmma.cu: what they claim, which tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from tconv_swap.cuda.grad_weight_cost import expected_clocks, slice_bytes, slices_of
from tconv_swap.cuda.grad_weight_tile import (
    Tile,
    ceil_div,
    is_ieee,
    item_bytes,
    pixel_tiles,
    shared_bytes,
    step_pixels,
    tap_blocks,
    weight_tiles,
    windows,
)
from tconv_swap.cuda.problem import Device, Problem
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    int64,
    output,
    workspace,
)
from tconv_swap.geometry import Pair

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REDUCE_THREADS = 256
INT32_LIMIT = 2**31
#: Multiplies that follow one another into the same sums: the multiplier truncates, so more would add to the error.
MOST_MULTIPLIES = 1024
REGISTERS = 65536


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
    if not _claims(problem, device) or (with_bias and not _reads_all_of_grad_output(problem)):
        return []
    tiles = sorted(candidates(problem, device), key=lambda tile: expected_clocks(problem, tile, device))
    return [plan_with_tile(problem, tile, device, with_bias) for tile in tiles[:count]]


def _claims(problem: Problem, device: Device) -> bool:
    g = problem.geometry
    if problem.dtype not in _DTYPES or device.compute_capability < 80 or g.batch == 0:
        return False
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    # Offsets within an image are counted in 32 bits.
    if image * item_bytes(problem) >= INT32_LIMIT:
        return False
    return min(g.in_channels_per_group, g.out_channels_per_group) >= 8


def _reads_all_of_grad_output(problem: Problem) -> bool:
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


def candidates(problem: Problem, device: Device) -> Iterator[Tile]:
    """Tiles that fit."""
    step = step_pixels(problem)
    kinds = [(False, _warp_choices)]
    if device.architecture == "sm_90a" and not is_ieee(problem):
        kinds.append((True, _warpgroup_choices if item_bytes(problem) == 2 else _swapped_choices))
    for taps, tap_step in _tap_choices(problem):
        for wgmma, choices in kinds:
            for warps, warp_m, warp_n, warp_taps in choices(problem, math.prod(taps)):
                for pixels, blocks in itertools.product(_pixel_choices(problem, step * warps[3]), (1, 2)):
                    if wgmma and not _fits_wgmma(problem, pixels, warps, warp_m, warp_n):
                        continue
                    if math.prod(warps) * blocks > 16:
                        continue
                    for stages in (4, 3) if wgmma else (3, 2):
                        tile = Tile(
                            warps, warp_m, warp_n, warp_taps, taps, tap_step, *pixels, stages, blocks, wgmma
                        )
                        if _fits(problem, tile, device):
                            yield tile
                            break


_Warps = tuple[tuple[int, int, int, int], int, int, int]


def _warpgroup_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """The same for warpgroups, whose four warps lie along m."""
    g = problem.geometry
    if g.in_channels_per_group <= 32:
        return
    for warp_n, warp_taps in itertools.product((128, 64, 32), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_n * warp_taps // 2
        if warp_taps > taps or not 48 <= sums <= 160 or warp_n >= max(64, 2 * g.out_channels_per_group):
            continue
        for groups_m, groups_n, groups_k in itertools.product((1, 2), (1, 2), (1, 2)):
            groups_t = ceil_div(taps, warp_taps)
            if not 2 <= groups_m * groups_n * groups_t * groups_k <= 4:
                continue
            if (groups_m - 1) * 64 >= g.in_channels_per_group:
                continue
            if (groups_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (4 * groups_m, groups_n, groups_t, groups_k), 16, warp_n, warp_taps


def _fits_wgmma(
    problem: Problem, pixels: tuple[int, int, int], warps: tuple[int, int, int, int], warp_m: int, warp_n: int
) -> bool:
    if item_bytes(problem) == 2:
        return pixels[2] >= 8
    # Pairs of steps; channels are dealt to threads.
    dealt = 32 * math.prod(warps) % warp_m == 0 or not problem.channels_last
    return dealt and math.prod(pixels) % (16 * warps[3]) == 0


def _swapped_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """The same for TF32, where the four warps of a warpgroup lie along n."""
    g = problem.geometry
    if g.out_channels_per_group <= 32:
        return
    for warp_m, warp_taps in itertools.product((256, 128, 64, 32), (1, 2, 3, 4, 5, 6)):
        sums = warp_m * warp_taps // 2
        if warp_taps > taps or not 32 <= sums <= 160 or warp_m >= max(64, 2 * g.in_channels_per_group):
            continue
        for groups_n, groups_k in itertools.product((1, 2, 3, 4), (1, 2)):
            groups_t = ceil_div(taps, warp_taps)
            if (
                not 1 <= groups_n * groups_t * groups_k <= 4
                or (groups_n - 1) * 64 >= g.out_channels_per_group
            ):
                continue
            yield (1, 4 * groups_n, groups_t, groups_k), warp_m, 16, warp_taps


def _warp_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """Warps along m, n, taps, pixels; channels in, channels out and taps of one warp."""
    g = problem.geometry
    # Too few sums a warp wait for their operands; a small product has no more.
    widest = [
        min(64, 1 << (channels - 1).bit_length())
        for channels in (g.in_channels_per_group, g.out_channels_per_group)
    ]
    least = min(48, max(16, widest[0]) * widest[1] * min(taps, 5) // 64)
    for warp_m, warp_n, warp_taps in itertools.product((64, 32, 16), (64, 32, 16, 8), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_m * warp_n * warp_taps // 32
        if warp_taps > taps or not least <= sums <= 128 or (is_ieee(problem) and warp_m == 64):
            continue
        if warp_m >= max(32, 2 * g.in_channels_per_group) or warp_n >= max(16, 2 * g.out_channels_per_group):
            continue
        warps_t = ceil_div(taps, warp_taps)
        for warps_m, warps_n, warps_k in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
            warps = warps_m * warps_n * warps_t * warps_k
            if not 4 <= warps <= 16 or (warps_k > 1 and warps > 8) or warps_m * warps_n > 4:
                continue
            if (warps_m - 1) * warp_m >= g.in_channels_per_group:
                continue
            if (warps_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (warps_m, warps_n, warps_t, warps_k), warp_m, warp_n, warp_taps


def _tap_choices(problem: Problem) -> Iterator[tuple[Pair, Pair]]:
    """Taps of a block and steps between them: all; those of one vertical phase; fewer rows or columns."""
    g = problem.geometry
    period = g.stride[0] // math.gcd(g.stride[0], g.dilation[0])
    row_choices = {(g.kernel[0], 1), (1, 1)}
    if period > 1:
        row_choices.add((ceil_div(g.kernel[0], period), min(period, g.kernel[0])))
    if g.kernel[0] > 3:
        row_choices.add((ceil_div(g.kernel[0], ceil_div(g.kernel[0], 3)), 1))
    col_choices = {(g.kernel[1], 1), (ceil_div(g.kernel[1], 2), 1), (min(8, g.kernel[1]), 1)}
    for rows, row_step in sorted(row_choices):
        for cols, col_step in sorted(col_choices):
            if rows * cols <= 32:
                yield (rows, cols), (row_step, col_step)


def _pixel_choices(problem: Problem, step: int) -> Iterator[tuple[int, int, int]]:
    """Images, rows, columns of a tile of pixels: a multiple of ``step``, powers of two."""
    g = problem.geometry
    widest, tallest, deepest = (1 << max(0, size - 1).bit_length() for size in (g.width, g.height, g.batch))
    for cols, rows in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64)):
        if cols > widest or rows > tallest or (cols < 8 and cols != widest):
            continue
        if rows * cols >= max(64, step):
            images = [1]
        elif cols == widest and rows == tallest:
            # Small maps: whole images, many of them.
            images = [size // (rows * cols) for size in (32, 64, 128) if size <= deepest * rows * cols]
            images = images or [max(step, 32) // (rows * cols)]
        else:
            images = [1]
        for n in images:
            if n * rows * cols % step == 0 and 32 <= n * rows * cols <= 256:
                yield n, rows, cols


def _fits(problem: Problem, tile: Tile, device: Device) -> bool:
    into, out = windows(problem, tile)
    staged = into.staged_registers(tile.threads) + out.staged_registers(tile.threads)
    if staged and tile.stages > (3 if tile.wgmma else 2):
        return False
    ieee = is_ieee(problem)
    swapped = tile.wgmma and item_bytes(problem) == 4
    fragments = (
        8 * tile.warp_taps
        if swapped
        else 0
        if tile.wgmma
        else tile.warp_m // 16 * (8 if ieee else 4) + (16 if ieee else 8)
    )
    # Each quarter of a multiprocessor has its own registers.
    warps = ceil_div(tile.threads * tile.blocks_per_multiprocessor, 128) * 128
    registers = min(255, REGISTERS // warps // 8 * 8)
    if tile.sums + fragments + staged + tile.warp_taps + tile.warp_n // 8 + 48 > registers:
        return False
    shared = shared_bytes(problem, tile)
    return tile.blocks_per_multiprocessor * (shared + 1024) <= device.shared_memory_per_block + 1024


def plan_with_tile(problem: Problem, tile: Tile, device: Device, with_bias: bool) -> Part:
    """The plan that computes the problem with this tile."""
    g = problem.geometry
    into, out = windows(problem, tile)
    slices = slices_of(problem, tile, device)
    ieee = is_ieee(problem)
    precision = {torch.float16: 1, torch.bfloat16: 2}.get(problem.dtype, 3 if ieee else 0)
    step = step_pixels(problem)
    multiplies = tile.pixels // step // tile.warps[3]
    flush = max(1, MOST_MULTIPLIES // multiplies)
    if ceil_div(pixel_tiles(problem, tile), slices) < 2 * flush:
        flush = 0
    through_workspace = slices * tile.warps[3] > 1 or flush > 0
    shared = shared_bytes(problem, tile)
    bias_writers = 1 if tile.wgmma and item_bytes(problem) == 2 else tile.warps[2] * tile.warps[3]
    rows = math.prod(tap_blocks(problem, tile)) * bias_writers * slices
    partial_bytes = slices * tile.warps[3] * slice_bytes(problem, tile) if through_workspace else 0
    bias_bytes = rows * g.out_channels * 4 if with_bias else 0
    swapped = tile.wgmma and item_bytes(problem) == 4
    name = "grad_weight_wgmma_tf32" if swapped else "grad_weight_wgmma" if tile.wgmma else "grad_weight_mma"
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", precision),
        *g.constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("WARPS_M", tile.warps[0]),
        ("WARPS_N", tile.warps[1]),
        ("WARPS_T", tile.warps[2]),
        ("WARPS_K", tile.warps[3]),
        ("WARP_M", tile.warp_m),
        ("WARP_N", tile.warp_n),
        ("WARP_TAPS", tile.warp_taps),
        ("TAP_ROWS", tile.taps[0]),
        ("TAP_COLS", tile.taps[1]),
        ("TAP_ROW_STEP", tile.tap_step[0]),
        ("TAP_COL_STEP", tile.tap_step[1]),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("INPUT_COPY", into.copy),
        ("OUTPUT_COPY", out.copy),
        ("STAGES", tile.stages),
        ("SHARED_BYTES", shared),
        ("SLICES", slices),
        ("THROUGH_WORKSPACE", through_workspace),
        ("BIAS_WRITERS", bias_writers),
        ("SWAPPED", swapped),
    )
    launches = [
        Launch(
            Kernel(
                f"{name}.cu",
                name,
                (
                    *constants,
                    ("FLUSH", flush),
                    ("WITH_BIAS", with_bias),
                    ("BLOCKS_PER_MULTIPROCESSOR", tile.blocks_per_multiprocessor),
                ),
            ),
            grid=weight_tiles(problem, tile) * slices,
            block=tile.threads,
            arguments=(
                input_(1),
                input_(0),
                output(0),
                workspace(0),
                workspace(partial_bytes if with_bias else 0),
                int64(g.batch),
            ),
            shared_bytes=shared,
        )
    ]
    sharers = min(8, 1 << (slices * tile.warps[3]).bit_length() - 1)
    units = _REDUCE_THREADS // sharers
    weight_blocks = ceil_div(partial_bytes // (slices * tile.warps[3] * 16), units)
    bias_blocks = ceil_div(g.out_channels, units) if with_bias else 0
    if weight_blocks + bias_blocks:
        launches.append(
            Launch(
                Kernel(
                    "grad_weight_reduce.cu",
                    "grad_weight_reduce",
                    (*constants, ("REDUCE_THREADS", _REDUCE_THREADS), ("SHARERS", sharers)),
                ),
                grid=weight_blocks + bias_blocks,
                block=_REDUCE_THREADS,
                arguments=(
                    workspace(0),
                    workspace(partial_bytes if with_bias else 0),
                    output(0),
                    output(1) if with_bias else workspace(0),
                ),
                overlaps_previous=True,
            )
        )
    return Part(
        "weight tile",
        f"{'wgmma' if tile.wgmma else 'mma'}, {tile}, {slices} slices",
        tuple(launches),
        partial_bytes + bias_bytes,
    )
