"""Plans the gradient of the input on tensor cores, which is a convolution of grad_output. The functions are pure.

At stride 1 the kernels of the forward pass compute it (forward/stride1.py, forward/implicit_gemm.py). At other strides
csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu do, grad_input/implicit_gemm_tma.py
in channels_last, grad_input/im2col.py and grad_input/nchw_to_nhwc.py in NCHW, and grad_input/narrow_mma.py few
channels at any stride: grad_input/selection.py selects the kernels of a layer, and the one with the fewest expected
clocks computes a size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, log

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.pad_rows import Rows, copies_clocks, copies_fit
from tconv_swap.kernels.common.padded_channels import padded_channels, reading_copies
from tconv_swap.kernels.common.ranked import Ranked, in_turn
from tconv_swap.kernels.common.sizes import tile_sizes
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    PRODUCER_THREADS,
    Tile,
    TileProblem,
    block_count,
    make_problem,
)
from tconv_swap.kernels.forward.implicit_gemm_layout import of_any_size as forward_of_any_size
from tconv_swap.kernels.forward.split_k import reduce_launch
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.implicit_gemm_choice import Schedule, supports
from tconv_swap.kernels.grad_input.implicit_gemm_choice import ranked as ranked_tiles
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    as_convolution,
    as_problem,
    consumer_threads,
    of_any_size,
    shared_bytes,
)
from tconv_swap.kernels.grad_input.implicit_gemm_registers import (
    copy_registers,
    phases_ahead,
    producer_registers,
    tile_registers,
)
from tconv_swap.kernels.grad_input.selection import Kernels, kernels_for, kernels_of, representatives
from tconv_swap.kernels.gradients.narrow_mma import as_exact
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import (
    Argument,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    with_operands,
    workspace,
)

FAMILY = "implicit_gemm"


@lru_cache(maxsize=256)
def plan_grad_input(problem: Problem, device: Device) -> Part | None:
    """Returns the fastest part, or None for a problem that no kernel of the family computes.

    Inputs: grad_output (16-byte aligned), input, weight. Output: the gradient of the input. Workspace: the packed
    weights (IEEE float32: both of their parts), their channels rounded up to whole tiles, and where the sum over
    channels is split, as many copies of the gradient in float32: for strides at most 64 MiB, but for maps of one pixel.
    """
    parts = part_candidates(problem, device, count=1, further=False)
    return parts[0] if parts else None


def part_candidates(problem: Problem, device: Device, count: int, further: bool = True) -> list[Part]:
    """Returns the ``count`` parts that are expected to be the fastest, the fastest first; after the kernels of the
    layer, if ``further``, those that it may have."""
    problem = as_exact(problem, device)
    if (channels := channels_of_copies(problem, device)) is not None:
        return _of_more_channels(problem, channels, device, count, further)
    if by_forward_kernels(problem, device):
        return _of_stride_one(problem, device, count, further)
    found = ranked(problem, device)[:count]
    if further and len(found) < count:
        found += tuple(_of_other_kernels(problem, device))
    parts = dict.fromkeys(one.make() for one in found[: 2 * count])
    return list(parts)[:count]


@lru_cache(maxsize=256)
def expected_clocks(problem: Problem, device: Device) -> float:
    """Returns the expected clocks of the part that ``plan_grad_input`` returns; infinitely many where there is none."""
    problem = as_exact(problem, device)
    if (channels := channels_of_copies(problem, device)) is not None:
        copied = _copied(problem, channels)
        if not copies_fit(copied, problem.dtype):
            return inf
        wider = problem._replace(geometry=problem.geometry._replace(out_channels=channels))
        return expected_clocks(wider, device) + copies_clocks(copied, problem.dtype)
    if by_forward_kernels(problem, device):
        found = forward_plan.ranked(as_forward(problem), device)
    else:
        found = ranked(problem, device)
    return found[0].clocks if found else inf


def channels_of_copies(problem: Problem, device: Device) -> int | None:
    """Returns how many output channels the copies of grad_output and weight have that the kernels read; None if they
    read the tensors as they lie, as those for few channels do."""
    if grad_input_narrow_mma.supports(problem, device):
        return None
    return padded_channels(problem, problem.geometry.out_channels)


@lru_cache(maxsize=256)
def by_forward_kernels(problem: Problem, device: Device) -> bool:
    """Returns whether kernels of the forward pass compute the problem, as they do at stride 1."""
    convolution = as_convolution(problem)
    return convolution.step == (1, 1) and _forward_is_faster(of_any_size(convolution), device)


@lru_cache(maxsize=256)
def _forward_is_faster(layer: StridedProblem, device: Device) -> bool:
    """Returns whether kernels of the forward pass are expected to be faster than those for few channels. The choice is
    one for all sizes of a layer, so that it has the kernels of one of them."""
    if not grad_input_narrow_mma.supports(as_problem(layer), device):
        return True
    if not forward_implicit_gemm.supports(forward_of_any_size(as_forward(as_problem(layer))), device):
        return False
    kernels, ratio = kernels_of(layer, device).narrow_mma, 0.0
    for size, weight in zip(*representatives(layer), strict=True):
        posed = as_problem(size)
        ours = grad_input_narrow_mma.ranked(kernels, posed, device)
        others = forward_plan.ranked(as_forward(posed), device)
        if ours and others:
            ratio += weight * log(ours[0].clocks / others[0].clocks)
    return ratio > 0


@lru_cache(maxsize=256)
def ranked(problem: Problem, device: Device) -> tuple[Ranked, ...]:
    """Returns the parts of the layer's kernels for a problem that they read as it lies, with their expected clocks: the
    one that is expected to be the fastest, then the best of each family in turn. (The plans of one size ask several
    times.)"""
    problem = as_exact(problem, device)
    convolution = as_convolution(problem)
    return tuple(_ranked(kernels_of(of_any_size(convolution), device), problem, convolution, device))


@lru_cache(maxsize=256)
def ranked_from_copies(problem: Problem, device: Device) -> tuple[Ranked, ...]:
    """Returns the parts of the layer's kernels that read channels_last, for a problem in NCHW whose grad_output is
    copied already and whose weight is copied by another launch, with the expected clocks of all but the former."""
    problem = as_exact(problem, device)
    layer = of_any_size(as_convolution(problem))
    kernels = kernels_of(layer, device).implicit_gemm_tma
    return tuple(grad_input_nchw_to_nhwc.ranked_from_copies(kernels, problem, device))


def _of_other_kernels(problem: Problem, device: Device) -> list[Ranked]:
    """Returns the parts of kernels that the layer may have, made for this size, in the same order."""
    convolution = as_convolution(problem)
    return _ranked(kernels_for(convolution, device), problem, convolution, device)


def _ranked(kernels: Kernels, problem: Problem, convolution: StridedProblem, device: Device) -> list[Ranked]:
    families = [grad_input_im2col.ranked(kernels.im2col, convolution, device)]
    if kernels.narrow_mma:
        families.append(grad_input_narrow_mma.ranked(kernels.narrow_mma, as_problem(convolution), device))
    if convolution.input_channels_last:
        families.append(grad_input_tma.ranked(kernels.implicit_gemm_tma, convolution, device))
    else:
        families.append(grad_input_nchw_to_nhwc.ranked(kernels.implicit_gemm_tma, problem, device))
    if supports(convolution, device):
        families.append(_ranked_here(kernels.implicit_gemm, convolution, device))
    return in_turn(*sorted(filter(None, families), key=lambda family: family[0].clocks))


def _ranked_here(among: Iterable[Schedule], convolution: StridedProblem, device: Device) -> list[Ranked]:
    """Returns the parts of the implicit GEMM's own kernels that compute this size."""
    return [
        Ranked(expected, partial(lower, posed, tile, device.multiprocessors))
        for expected, posed, tile in ranked_tiles(among, convolution, device)
    ]


def _of_stride_one(problem: Problem, device: Device, count: int, further: bool) -> list[Part]:
    """Returns the parts of a problem without strides, by the kernels of the forward pass."""
    return [
        one._replace(launches=reading_backward(one.launches))
        for one in forward_plan.part_candidates(as_forward(problem), device, count, further)
    ]


def _of_more_channels(
    problem: Problem, channels: int, device: Device, count: int, further: bool
) -> list[Part]:
    """Returns the parts of the problem with so many output channels, reading copies of grad_output and weight."""
    copied = _copied(problem, channels)
    if not copies_fit(copied, problem.dtype):
        return []
    wider = problem._replace(geometry=problem.geometry._replace(out_channels=channels))
    return [
        Part(
            part.family,
            f"{part.why}, channels padded",
            *reading_copies(part.launches, part.workspace_bytes, copied, problem.dtype),
        )
        for part in part_candidates(wider, device, count, further)
    ]


def _copied(problem: Problem, channels: int) -> tuple[Rows, ...]:
    """Returns the rows of grad_output and weight that are copied to rows of so many output channels."""
    g = problem.geometry
    rows, width = (g.in_channels * g.taps, 1) if problem.weight_channels_last else (g.in_channels, g.taps)
    return (
        Rows(0, g.batch * g.out_height * g.out_width, g.out_channels, channels),
        Rows(2, rows, width * g.out_channels, width * channels),
    )


def as_forward(problem: Problem) -> TileProblem:
    """Returns the problem as a forward pass. At stride 1 the gradient is itself a transposed convolution: of
    grad_output, with the weight's channels exchanged and its taps backwards. Its padding may be negative, which the
    kernels allow."""
    geometry = problem.geometry
    padding = tuple(
        d * (k - 1) - p for d, k, p in zip(geometry.dilation, geometry.kernel, geometry.padding, strict=True)
    )
    swapped = Geometry(
        geometry.batch,
        geometry.out_channels,
        geometry.out_height,
        geometry.out_width,
        geometry.in_channels,
        geometry.kernel,
        padding=(padding[0], padding[1]),
        # The rows and columns that output_padding added do not contribute to the gradient.
        output_padding=(-geometry.output_padding[0], -geometry.output_padding[1]),
        dilation=geometry.dilation,
        groups=geometry.groups,
    )
    forward = make_problem(
        swapped,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias=False,
    )
    return forward._replace(of_grad_input=True)


def reading_backward(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Returns launches that read (input, weight, bias), changed so that they read (grad_output, input, weight)."""

    def placed(argument: Argument) -> Argument:
        # No kernel reads the bias; one that expects an argument for it gets the weight.
        return input_(2) if argument == input_(1) else argument

    return tuple(with_operands(launch, placed) for launch in launches)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The part of a plan that is the same for all sizes: its kernels, and the bytes of memory that they take."""

    main: Kernel
    shared_bytes: int
    pack: Launch
    packed_bytes: int


@lru_cache(maxsize=4096)
def _compiled(layer: StridedProblem, tile: Tile) -> Compiled:
    """Returns the kernels of a layer (``of_any_size``); a tile of 2 splits stands for any number of splits above 1."""
    pack, packed_bytes = forward_implicit_gemm.pack_launch(_as_packed(layer), tile)
    shared = shared_bytes(layer, tile)
    name = "grad_input_implicit_gemm_wgmma" if tile.wgmma else "grad_input_implicit_gemm_mma"
    constants: tuple[tuple[str, Constant], ...] = (
        *forward_implicit_gemm.tile_constants(layer, tile),
        ("STEP_H", layer.step[0]),
        ("STEP_W", layer.step[1]),
        ("SHARED_BYTES", shared),
    )
    if tile.wgmma:
        constants += (
            ("PRODUCER_WARPS", PRODUCER_THREADS // 32),
            ("PRODUCER_REGISTERS", producer_registers(tile)),
            ("PHASES_AHEAD", phases_ahead(layer, tile)),
            ("M_PARTS", tile.m_parts),
        )
    kernel = Kernel(
        f"grad_input/{name.removeprefix('grad_input_')}.cu", name, constants, spills=_spills(layer, tile)
    )
    return Compiled(kernel, shared, pack, packed_bytes)


def lower(problem: StridedProblem, tile: Tile, multiprocessors: int = 132) -> Part:
    """Returns the part that computes the problem with this tile."""
    compiled = _compiled(of_any_size(problem), tile._replace(splits=min(tile.splits, 2)))
    packed_bytes, count = compiled.packed_bytes, problem.grad_input_elements
    grid, block = block_count(problem, tile), consumer_threads(tile)
    if tile.wgmma:
        # Blocks are persistent: each computes one tile after another.
        grid, block = min(grid, multiprocessors * tile.blocks_per_multiprocessor), block + PRODUCER_THREADS
    main = Launch(
        compiled.main,
        grid=grid,
        block=block,
        arguments=(
            input_(0),
            workspace(0),
            output(0) if tile.splits == 1 else workspace(packed_bytes),
            struct(0),
        ),
        shared_bytes=compiled.shared_bytes,
        overlaps_previous=True,
        structs=(tile_sizes(problem, tile),),
    )
    launches = [compiled.pack, main]
    if tile.splits > 1:
        launches.append(reduce_launch(problem, tile.splits, packed_bytes, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        reading_backward(tuple(launches)),
        packed_bytes + (count * 4 * tile.splits if tile.splits > 1 else 0),
    )


def _spills(problem: StridedProblem, tile: Tile) -> bool:
    """Returns whether the compiler may spill registers. Three products need registers of their own, and so does
    rounding fragments to TF32. In grad_input/implicit_gemm_wgmma.cu 128 of a thread's 168 registers may be
    accumulators, or half of them may hold elements on their way to a stage."""
    if problem.precision == "IEEE":
        return True
    if not tile.wgmma:
        return problem.precision == "TF32" or tile_registers(problem, tile) > 100
    carried = copy_registers(problem, tile, phases_ahead(problem, tile))
    return 4 * tile.warp_fragments * tile.m_parts >= 128 or carried > 56


def _as_packed(problem: StridedProblem) -> TileProblem:
    """Returns the problem that forward/implicit_gemm_pack.cu gets: its phase groups are the phases of grad_output."""
    return TileProblem(
        problem.geometry._replace(stride=problem.step, padding=(0, 0)),
        problem.dtype,
        problem.precision,
        problem.input_channels_last,
        problem.output_channels_last,
        problem.weight_channels_last,
        has_bias=False,
        block_phases=(1, 1 if problem.input_channels_last else problem.step[1]),
        of_grad_input=True,
    )
