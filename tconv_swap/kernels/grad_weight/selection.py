"""Selects the kernels that compute the gradient of the weight of a layer over all its sizes: at most four, of all
families together, with which representative sizes are expected to take little longer than with the best kernel for
each. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.one_pixel import kernels_of_gradient
from tconv_swap.kernels.common.schedules import (
    FURTHER_SIZES,
    MAX_SCHEDULES,
    ONE_PIXEL,
    Timed,
    ragged_sizes,
    representative_sizes,
    select_of_families,
)
from tconv_swap.kernels.grad_weight import bias_clocks as grad_weight_bias_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nchw_clocks as grad_weight_im2col_nchw_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw_tile as grad_weight_im2col_nchw_tile
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import im2col_nhwc_clocks as grad_weight_im2col_nhwc_clocks
from tconv_swap.kernels.grad_weight import im2col_nhwc_tile as grad_weight_im2col_nhwc_tile
from tconv_swap.kernels.grad_weight import implicit_gemm_candidates as grad_weight_candidates
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_choice as grad_weight_tma_choice
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.grad_weight import nchw_to_nhwc as grad_weight_nchw_to_nhwc
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight import stride1_clocks as grad_weight_stride1_clocks
from tconv_swap.kernels.grad_weight import stride1_tile as grad_weight_stride1_tile
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import computes_any_size
from tconv_swap.kernels.grad_weight.layer import has_pixels, of_any_size
from tconv_swap.kernels.gradients.joint_kernels import joint_kernels
from tconv_swap.kernels.gradients.narrow_mma import MANY_TAPS
from tconv_swap.kernels.gradients.narrow_mma import supports as is_narrow
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache

#: The share of the copy of grad_output that counts: the gradient of the input, which is mostly computed as well, may
#: read it too.
COPY_SHARE = 0.5
#: The share of the launches of the bias's gradient that counts where a tile of narrow_mma does not add it up: not every
#: layer has a bias. (The kernels of the other families add it up whatever their tiles, or never.)
BIAS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a layer, by family. ``implicit_gemm_tma``: in NCHW they read copies in channels_last."""

    implicit_gemm: tuple[grad_weight_candidates.Schedule, ...] = ()
    implicit_gemm_tma: tuple[grad_weight_tma_choice.Schedule, ...] = ()
    im2col_nchw: tuple[grad_weight_im2col_nchw_tile.Im2colKernel, ...] = ()
    im2col_nhwc: tuple[grad_weight_im2col_nhwc_clocks.Schedule, ...] = ()
    stride1: tuple[grad_weight_stride1_tile.Stride1Tile, ...] = ()
    narrow_mma: tuple[grad_weight_narrow_mma.GradWeightTile, ...] = ()


class Representative(NamedTuple):
    """A size that stands for others, and its weight among the sizes of a layer."""

    geometry: Geometry
    weight: float


def layer_of(problem: Problem) -> Problem:
    """Returns the problem that stands for all sizes of a layer, or for its maps of one pixel if they have a kernel of
    their own."""
    return of_any_size(problem, pixels_apart=problem.geometry.taps < MANY_TAPS)


@disk_cache
def kernels_of(layer: Problem, device: Device) -> Kernels:
    """Returns the kernels of a layer (``layer_of``). One of them computes any size, unless the layer has none such.
    (Sizes of more pixels than a kernel counts go to the general kernels.)"""
    sizes = representatives(layer)
    timed = list(_timed(layer, [size.geometry for size in sizes], device))
    found = select_of_families(timed, [size.weight for size in sizes], limit_of(layer, device))
    return Kernels(**found)  # type: ignore[arg-type]


def kernels_for(problem: Problem, device: Device) -> Kernels:
    """Returns all kernels with tiles that suit this size, also those that its layer does not have."""
    layer, own_size = layer_of(problem), (problem.geometry,)
    by_tma = grad_weight_tma.supports(_read(problem), device)
    by_threads = grad_weight_candidates.supports(problem, device)
    by_nchw = grad_weight_im2col_nchw.supports(problem, device)
    by_nhwc = grad_weight_im2col_nhwc.supports(problem, device)
    at_stride1 = grad_weight_stride1.supports(problem, device)
    return Kernels(
        grad_weight_candidates.pool(layer, device, own_size) if by_threads else (),
        grad_weight_tma_choice.pool(_read(layer), device, own_size) if by_tma else (),
        tuple(grad_weight_im2col_nchw_tile.kernels(problem.geometry)) if by_nchw else (),
        grad_weight_im2col_nhwc_clocks.pool(layer, device) if by_nhwc else (),
        tuple(grad_weight_stride1_tile.candidates(problem, device)) if at_stride1 else (),
        grad_weight_narrow_mma.candidates([problem], device) if is_narrow(problem, device) else (),
    )


def limit_of(layer: Problem, device: Device) -> int:
    """Returns how many kernels of these families a layer, or its maps of one pixel, may have."""
    geometry, most = layer.geometry, MAX_SCHEDULES - joint_kernels(layer, device)
    pixels_apart = geometry.taps < MANY_TAPS and has_pixels(geometry)
    if pixels_apart and geometry.height == 1:
        return 1
    return most - kernels_of_gradient(geometry, pixels_apart, device)


def representatives(layer: Problem) -> list[Representative]:
    """Returns the sizes that represent all sizes of a layer. In NCHW they have the smallest grad_output of a map, or
    one whose rows are aligned: other kernels load such rows."""
    g = layer.geometry
    if g.height == g.width == 1:
        return [Representative(_sized(g, *size), 1.0) for size in ONE_PIXEL]
    weighted = representative_sizes(
        g.one_row,
        g.kernel == g.stride,
        g.in_channels_per_group,
        FURTHER_SIZES,
        ragged_sizes(layer.channels_last, g.stride[1], layer.dtype.itemsize),
    )
    found = []
    for size, weight in weighted:
        aligned = _sized(g, *size)
        both = {aligned} if layer.channels_last else {aligned, aligned._replace(output_padding=(0, 0))}
        both = {one for one in both if min(one.out_height, one.out_width) > 0}
        padded_first = sorted(both, key=lambda one: one.output_padding, reverse=True)
        found += [Representative(one, weight / len(both)) for one in padded_first]
    return found


def _sized(geometry: Geometry, batch: int, height: int, width: int) -> Geometry:
    return geometry._replace(batch=batch, height=height, width=width)


def _read(problem: Problem) -> Problem:
    """Returns the problem that TMA reads: that of copies in NCHW."""
    return problem if problem.channels_last else grad_weight_nchw_to_nhwc.problem_of_copies(problem)


def _timed(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    """Yields the candidates of all families."""
    if not sizes:
        return
    yield from _of_implicit_gemm(layer, sizes, device)
    yield from _of_tma(layer, sizes, device)
    yield from _of_im2col_nchw(layer, sizes, device)
    yield from _of_im2col_nhwc(layer, sizes, device)
    yield from _of_stride1(layer, sizes, device)
    if is_narrow(layer, device):
        yield from _of_narrow_mma(layer, sizes, device)


def _of_implicit_gemm(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    if not grad_weight_candidates.supports(layer, device):
        return
    pool = grad_weight_candidates.pool(layer, device, tuple(sizes))
    for one, times in grad_weight_candidates.clocks_of_sizes(pool, layer, sizes, device):
        yield Timed("implicit_gemm", one, times, one.computes_any_size)


def _of_tma(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    copied = not layer.channels_last
    if copied and not grad_weight_nchw_to_nhwc.supports_some_size(layer, device):
        return
    read = _read(layer)
    if not grad_weight_tma.supports(read, device):
        return
    posed = [layer._replace(geometry=geometry) for geometry in sizes]
    possible = [not copied or grad_weight_nchw_to_nhwc.supports(problem, device) for problem in posed]
    pool = grad_weight_tma_choice.pool(read, device, tuple(sizes))
    for one, found in grad_weight_tma_choice.fastest_of_sizes(pool, sizes, device):
        times = [
            math.inf
            if best is None or not may
            else grad_weight_nchw_to_nhwc.expected(problem, best, COPY_SHARE)
            if copied
            else best.clocks
            for problem, may, best in zip(posed, possible, found, strict=True)
        ]
        every = not copied and computes_any_size(read, one.kernel, device)
        yield Timed("implicit_gemm_tma", one, times, every)


def _of_im2col_nchw(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    if not grad_weight_im2col_nchw.supports(layer, device):
        return
    kernels = list(grad_weight_im2col_nchw_tile.kernels(layer.geometry))
    best = (grad_weight_im2col_nchw_clocks.best_tiles(geometry, kernels, device) for geometry in sizes)
    for kernel, of_sizes in zip(kernels, zip(*best, strict=True), strict=True):
        yield Timed("im2col_nchw", kernel, [one[0] if one else math.inf for one in of_sizes], False)


def _of_im2col_nhwc(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    if not grad_weight_im2col_nhwc.supports(layer, device):
        return
    stages = [grad_weight_im2col_nhwc_tile.stages_of_choices(geometry) for geometry in sizes]
    fixed = [grad_weight_im2col_nhwc_clocks.fixed_clocks(geometry) for geometry in sizes]
    for schedule in grad_weight_im2col_nhwc_clocks.pool(layer, device):
        best = (schedule.fastest(choices, device) for choices in stages)
        times = [more + one[0] if one else math.inf for more, one in zip(fixed, best, strict=True)]
        # Large sizes need more partial sums than the workspace holds.
        yield Timed("im2col_nhwc", schedule, times, False)


def _of_stride1(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    posed = [layer._replace(geometry=geometry) for geometry in sizes]
    supported = [grad_weight_stride1.supports(problem, device) for problem in posed]
    computed = {
        linear: [
            may and grad_weight_stride1.computes(problem, linear)
            for problem, may in zip(posed, supported, strict=True)
        ]
        for linear in (False, True)
    }
    for tile in grad_weight_stride1_tile.candidates(layer, device) if any(supported) else ():
        times = [
            grad_weight_stride1_clocks.best_tile(problem, tile, device)[0] if may else math.inf
            for problem, may in zip(posed, computed[tile.linear], strict=True)
        ]
        yield Timed("stride1", tile, times, False)


def _of_narrow_mma(layer: Problem, sizes: Sequence[Geometry], device: Device) -> Iterator[Timed]:
    posed = [layer._replace(geometry=geometry) for geometry in sizes]
    bias = [BIAS_SHARE * grad_weight_bias_clocks.clocks(problem) for problem in posed]
    for tile in grad_weight_narrow_mma.candidates(posed, device):
        clocks = grad_weight_narrow_mma.clocks_of_sizes(tile, posed, device)
        times = [
            of_size + (0.0 if grad_weight_narrow_mma.supports_tile(problem, tile, True) else of_bias)
            for of_size, problem, of_bias in zip(clocks, posed, bias, strict=True)
        ]
        yield Timed("narrow_mma", tile, times, grad_weight_narrow_mma.computes_any_size(layer, tile))
