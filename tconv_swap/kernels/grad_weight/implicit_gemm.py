"""Plans of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu, and of the stage: at each size the kernel of a layer
with the fewest expected clocks is taken, of whichever family (selection.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial

import torch

from tconv_swap.kernels.common.ranked import Ranked, in_turn
from tconv_swap.kernels.common.sizes import grad_weight_tile_sizes
from tconv_swap.kernels.grad_weight import bias_clocks as grad_weight_bias_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.grad_weight import nchw_to_nhwc as grad_weight_nchw_to_nhwc
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight.implicit_gemm_candidates import Schedule, registers, supports
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import splits_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    block_constants,
    shape_constants,
    shared_bytes,
    step_pixels,
    tap_blocks,
)
from tconv_swap.kernels.grad_weight.layer import pixel_tiles, reads_all_of_grad_output
from tconv_swap.kernels.grad_weight.selection import Kernels, kernels_for, kernels_of, layer_of
from tconv_swap.kernels.grad_weight.split_k import Sums, flush_of, reduction, reduction_kernel
from tconv_swap.kernels.gradients.narrow_mma import as_exact
from tconv_swap.kernels.gradients.narrow_mma import supports as is_narrow
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div
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

#: Registers of a thread that must be left over for the compiler never to spill (up to 72 bytes were seen).
SPARE_REGISTERS = 48


@lru_cache(maxsize=256)
def plan_grad_weight(problem: Problem, device: Device, with_bias: bool = False) -> Part | None:
    """Returns the plan of the gradient of the weight, or None where no family of this stage supports the problem;
    ``with_bias`` also where launches of its own for the bias are expected to be faster.
    Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight; ``with_bias`` also that
    of the bias.

    Workspace: at most 64 MiB, or one float32 copy of the gradient in whole tiles if that is more; and 4 bytes
    for each output channel, split and writer of the bias (``BIAS_WRITERS``).
    """
    found = ranked(problem, device, with_bias)
    if not found:
        return None
    if with_bias:
        apart = ranked(problem, device, False)
        if apart[0].clocks + grad_weight_bias_clocks.clocks(problem) < found[0].clocks:
            return None
    return found[0].make()


def expected_clocks(problem: Problem, device: Device, with_bias: bool = False) -> float:
    """Returns the expected clocks of the gradient of the weight by the layer's kernels, ``with_bias`` also of that of
    the bias; infinite where none computes this size."""
    copies = ranked_from_copies(problem, device)
    return min(clocks_as_it_lies(problem, device, with_bias), copies[0].clocks if copies else math.inf)


@lru_cache(maxsize=256)
def clocks_as_it_lies(problem: Problem, device: Device, with_bias: bool) -> float:
    """Returns the same without copies."""
    alone = ranked(problem, device, False)
    clocks = alone[0].clocks if alone else math.inf
    if not with_bias:
        return clocks
    together = ranked(problem, device, True)
    apart = clocks + grad_weight_bias_clocks.clocks(problem)
    return min(apart, together[0].clocks if together else math.inf)


def part_candidates(
    problem: Problem, device: Device, with_bias: bool, count: int, further: bool = True
) -> list[Part]:
    """Returns ``count`` parts: the one that is expected to be the fastest, then the best of each family in turn; after
    the kernels of the layer, if ``further``, those that it may have."""
    problem = as_exact(problem, device)
    found = [*ranked(problem, device, with_bias)[:count]]
    if further and len(found) < count:
        found += _ranked(kernels_for(problem, device), problem, device, with_bias)
    parts = dict.fromkeys(one.make() for one in found[: 2 * count])
    return list(parts)[:count]


@lru_cache(maxsize=256)
def ranked(problem: Problem, device: Device, with_bias: bool) -> tuple[Ranked, ...]:
    """Returns the parts of the layer's kernels that read the tensors as they lie, with their expected clocks: the one
    that is expected to be the fastest, then the best of each family in turn. (The plans of one size ask several
    times.)"""
    problem = as_exact(problem, device)
    return tuple(_ranked(kernels_of(layer_of(problem), device), problem, device, with_bias))


@lru_cache(maxsize=256)
def ranked_from_copies(problem: Problem, device: Device) -> tuple[Ranked, ...]:
    """Returns the parts of the layer's kernels that read copies in channels_last of NCHW tensors, with their expected
    clocks and those of the copies."""
    problem = as_exact(problem, device)
    if not grad_weight_nchw_to_nhwc.supports(problem, device):
        return ()
    kernels = kernels_of(layer_of(problem), device)
    return tuple(grad_weight_nchw_to_nhwc.ranked(kernels.implicit_gemm_tma, problem, device))


def _ranked(kernels: Kernels, problem: Problem, device: Device, with_bias: bool) -> list[Ranked]:
    families = [
        _ranked_here(kernels.implicit_gemm, problem, device, with_bias),
        grad_weight_im2col_nchw.ranked(kernels.im2col_nchw, problem, device, with_bias),
        grad_weight_im2col_nhwc.ranked(kernels.im2col_nhwc, problem, device, with_bias),
    ]
    if problem.channels_last:
        families.append(grad_weight_tma.ranked(kernels.implicit_gemm_tma, problem, device, with_bias))
    if not with_bias:  # stride1 does not add up the bias
        families.append(grad_weight_stride1.ranked(kernels.stride1, problem, device))
    if is_narrow(problem, device):
        families.append(grad_weight_narrow_mma.ranked(kernels.narrow_mma, problem, device, with_bias))
    return in_turn(*sorted(filter(None, families), key=lambda family: family[0].clocks))


def _ranked_here(
    among: Iterable[Schedule], problem: Problem, device: Device, with_bias: bool
) -> list[Ranked]:
    """Returns the parts of the implicit GEMM's own kernels that compute this size."""
    geometry = problem.geometry
    if not supports(problem, device) or (with_bias and not reads_all_of_grad_output(geometry)):
        return []
    legal = [one for one in among if one.legal(geometry)]
    found = [
        Ranked(one.clocks(geometry, device), partial(lower, problem, one, device, with_bias))
        for one in [one for one in legal if one.suits(geometry)] or legal
    ]
    return sorted(found, key=lambda one: one.clocks) if len(found) > 1 else found


@lru_cache(maxsize=4096)
def _kernels(schedule: Schedule, with_bias: bool, device: Device) -> tuple[Kernel, Kernel, int]:
    """Returns the kernel that multiplies, the kernel that reduces its splits, and how many rows of bias sums a
    split writes."""
    problem, tile = schedule.problem, schedule.tile
    g = problem.geometry
    into, out = schedule.operands
    precision = {torch.float16: 1, torch.bfloat16: 2}.get(problem.dtype, 3 if problem.is_ieee else 0)
    taken, available = registers(problem, tile, schedule.operands)
    # All blocks, and warps of mma.sync, that read the same pixels of grad_output take turns.
    bias_writers = ceil_div(g.in_channels_per_group, tile.block_m)
    if not tile.wgmma:
        bias_writers *= tile.warps[0] * tile.warps[2] * tile.warps[3]
    name = "grad_weight_implicit_gemm_wgmma" if tile.wgmma else "grad_weight_implicit_gemm_mma"
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", precision),
        *g.layer_constants,
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        *block_constants(tile),
        ("BIAS_WRITERS", bias_writers),
    )
    main = Kernel(
        f"grad_weight/{name.removeprefix('grad_weight_')}.cu",
        name,
        (
            *constants,
            ("CHANNELS_LAST", problem.channels_last),
            *shape_constants(tile),
            ("INPUT_COPY", into.copy),
            ("OUTPUT_COPY", out.copy),
            ("STAGES", tile.stages),
            ("SHARED_BYTES", shared_bytes(tile.stages, schedule.operands)),
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
