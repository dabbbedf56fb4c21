"""Plans of csrc/kernels/grad_weight/stride1.cu: the gradient of the weight at stride 1 (sm_90a)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from tconv_swap.kernels.common.dtypes import TF32_ELEMENT_KINDS, TF32_PRECISIONS
from tconv_swap.kernels.common.ranked import Ranked, made
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.common.sizes import grad_weight_stride1_sizes
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, stride1_may_win
from tconv_swap.kernels.grad_weight.split_k_untiled import reduce, weight_bytes
from tconv_swap.kernels.grad_weight.stride1_tile import (
    BOX_BYTES,
    BOX_CHANNELS,
    Stride1Tile,
    alignment,
    candidates,
    expected_clocks,
    linear_output,
    output_channels,
    output_pixels,
    output_rows,
    planes_of,
    raw_stages,
    shared_bytes,
    tiles_of,
    with_splits,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
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
#: Kernels of a layer over all its sizes.
MAX_SCHEDULES = 1
#: Channels on either side of a group from which the family was measured to be faster (1.4 to 2.7 times on nine layers,
#: of 17 to 128 output channels and 2 to 309 billion multiply-accumulates), and the least work of the sizes for which
#: a layer's kernel is chosen.
MIN_CHANNELS, MIN_MACS = 16, 1 << 30
#: Images, rows and columns of the large problems that were measured.
LARGE = (8, 512, 512)
#: Its measured over its expected time is 1.43, that of the families beside which it is ranked 1.05 to 1.17 (geometric
#: means, docs/choice-by-cost.md).
MEASURED_OVER_EXPECTED = 1.43 / 1.1
#: Threads of the warpgroup that loads.
_PRODUCER_THREADS = 128


def part_candidates(problem: Problem, device: Device, count: int) -> list[Part]:
    """Returns the parts of ``ranked``."""
    return made(ranked(problem, device, count))


def ranked(problem: Problem, device: Device, count: int) -> list[Ranked]:
    """Returns the ``count`` parts that are expected to be the fastest, the fastest first.
    Inputs: grad_output, input (16-byte aligned). Output: the gradient of the weight.

    Workspace: at most 64 MiB of partial sums, or one copy of the gradient if that is more.
    """
    if not supports(problem, device):
        return []
    return [
        Ranked(
            MEASURED_OVER_EXPECTED * expected_clocks(problem, tile, device),
            partial(lower, problem, tile),
        )
        for tile in choose(problem, device)[:count]
    ]


def choose(problem: Problem, device: Device) -> list[Stride1Tile]:
    """Returns the tiles of the layer's kernels that compute the size, the fastest expected first."""
    rows = output_rows(problem)
    found = [
        with_splits(problem, tile, device)
        for tile in schedules(of_any_size(problem, False), device)
        if tile.rows.serve(rows)
    ]
    return sorted(found, key=lambda tile: expected_clocks(problem, tile, device))


@disk_cache
def schedules(layer: Problem, device: Device) -> tuple[Stride1Tile, ...]:
    """Returns the tiles that a layer has over all its sizes."""
    return select_schedules(
        layer,
        MAX_SCHEDULES,
        lambda problem: candidates(problem, device) if supports(problem, device) else (),
        lambda problem, tile: (
            problem.geometry.macs >= MIN_MACS
            and supports(problem, device)
            and tile.rows.serve(output_rows(problem))
        ),
        lambda problem, tile: expected_clocks(problem, with_splits(problem, tile, device), device),
        # In 16 bits only these may be preferred.
        lambda tile: tile.channels >= layer.geometry.in_channels_per_group,
        every=1,
    )


def supports_some_size(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes some sizes of a layer."""
    return bool(schedules(of_any_size(problem, False), device))


def preferred(problem: Problem, device: Device) -> bool:
    """Returns whether large problems that are supported were measured to be faster with this family.
    In 16 bits only layers whose best tile for a large image holds all input channels, so that grad_output is
    loaded once.
    """
    return problem.dtype == torch.float32 or _holds_all_channels(of_any_size(problem, False), device)


@disk_cache
def _holds_all_channels(layer: Problem, device: Device) -> bool:
    """Returns whether the best tile for a large image holds all input channels of a group."""
    batch, height, width = LARGE
    large = replace(layer, geometry=replace(layer.geometry, batch=batch, height=height, width=width))
    tiles = [with_splits(large, tile, device) for tile in candidates(large, device)]
    best = min(tiles, key=lambda tile: expected_clocks(large, tile, device))
    return best.channels >= layer.geometry.in_channels_per_group


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype not in TF32_ELEMENT_KINDS:
        return False
    if problem.is_ieee:
        return False
    if g.batch == 0 or not stride1_may_win(g):
        return False
    unit, planes = alignment(problem), planes_of(problem)
    if problem.channels_last:
        if (
            problem.dtype != torch.float32
            or g.in_channels_per_group % unit
            or g.out_channels_per_group % unit
        ):
            return False
    elif g.width % unit or (
        linear_output(problem) and (g.padding[1] > 0 or g.out_channels_per_group % planes)
    ):
        return False
    pixels = max(g.height * g.width, g.out_height * g.out_width)
    return max(pixels * planes, g.batch * (g.out_height + 8) * g.width) < INT32_LIMIT


def _maps(problem: Problem, tile: Stride1Tile) -> tuple[TensorMap, TensorMap]:
    """Returns the tensor maps of the input and of grad_output.
    NCHW: [n][channel][row][pixel], or for grad_output addressed linearly [n][channel of a plane][pixel of all
    rows and planes]; channels_last: [n][row][pixel][channel].
    """
    g = problem.geometry
    channels, pixels = output_channels(problem, tile), output_pixels(problem, tile)
    item, planes = problem.dtype.itemsize, tile.rows.planes
    one = (1, 1, 1, 1)

    def mapped(index: int, sizes: Sequence[int], box: Sequence[int], swizzle_bytes: int) -> TensorMap:
        strides = tuple(accumulate((item * sizes[0], *sizes[1:-1]), operator.mul))
        return TensorMap(
            input_(index),
            TF32_ELEMENT_KINDS[problem.dtype],
            tuple(sizes),
            strides,
            tuple(box),
            one[: len(sizes)],
            swizzle_bytes,
        )

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
    if tile.rows.linear:
        size = planes * g.out_height * g.out_width
        return into, mapped(0, (size, g.out_channels // planes, g.batch), (pixels, channels // planes, 1), 0)
    return into, mapped(0, (g.out_width, g.out_height, g.out_channels, g.batch), (pixels, 1, channels, 1), 0)


def lower(problem: Problem, tile: Stride1Tile) -> Part:
    """Returns the part that computes the problem with this tile."""
    g = problem.geometry
    direct = tile.splits == 1 and problem.weight_channels_last and problem.dtype == torch.float32
    shared = shared_bytes(problem, tile)
    kernel = Kernel(
        "grad_weight/stride1.cu",
        "grad_weight_stride1",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("PRECISION", TF32_PRECISIONS[problem.dtype]),
            *g.layer_constants,
            ("CHANNELS_LAST", problem.channels_last),
            ("LINEAR_OUTPUT", tile.rows.linear),
            ("PLANES", tile.rows.planes),
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
            output(0) if direct else workspace(0),
            struct(0),
        ),
        structs=(grad_weight_stride1_sizes(g, tile.cols, tile.segment, tile.flush, tile.splits),),
        shared_bytes=shared,
        tensor_maps=_maps(problem, tile),
    )
    if direct:
        return Part(_FAMILY, f"wgmma, {tile}", (main,), 0)
    launches = (main, reduce(problem, tile.splits, 0))
    return Part(_FAMILY, f"wgmma, {tile}", launches, tile.splits * weight_bytes(g))
