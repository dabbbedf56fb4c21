"""Selects the kernels of the forward pass that a layer has over all its sizes, among those of implicit_gemm and
stride1: at most four, with which representative sizes are expected to take little longer than with the best kernel for
each. At stride 1 they also compute the gradient of the input. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tconv_swap.kernels.common.forward_schedules import (
    max_implicit_gemm_schedules,
    max_schedules_of_grad_input,
)
from tconv_swap.kernels.common.schedules import (
    FEW_IMAGES,
    FURTHER_SIZES,
    UNUSUAL,
    Timed,
    representative_sizes,
    select_of_families,
)
from tconv_swap.kernels.forward import implicit_gemm_candidates as forward_candidates
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward import stride1_tile as forward_stride1_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.forward.stride1_clocks import best_tile
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.disk_cache import disk_cache

#: Images of maps of one pixel.
ONE_PIXEL_BATCHES = (128, 4096)
#: Further maps of layers without strides, which do not enlarge theirs and are often the last of a network.
LARGE_MAPS = ((16, 256, 256), (8, 512, 512), (1, 1024, 1024), (4, 375, 333), (8, 150, 225))


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a layer, by family."""

    implicit_gemm: tuple[forward_candidates.Schedule, ...] = ()
    stride1: tuple[forward_stride1_tile.Stride1Kernel, ...] = ()


@disk_cache
def kernels_of(layer: TileProblem, device: Device) -> Kernels:
    """Returns the kernels of ``layer``, which ``of_any_size`` made; the first of implicit_gemm computes every size."""
    sizes, weights = representatives(layer)
    timed = [*_of_implicit_gemm(sizes, device), *_of_stride1(sizes, device)]
    return Kernels(**select_of_families(timed, weights, limit_of(layer, device)))  # type: ignore[arg-type]


def kernels_for(problem: TileProblem, device: Device) -> Kernels:
    """Returns all kernels with tiles that suit this size, also those that its layer does not have."""
    at_stride1 = forward_stride1.supports(problem, device)
    return Kernels(
        tuple(dict.fromkeys(forward_candidates.of_size(problem, device))),
        tuple(forward_stride1_tile.kernels(problem, device)) if at_stride1 else (),
    )


def _of_implicit_gemm(sizes: Sequence[TileProblem], device: Device) -> Iterator[Timed]:
    for one in forward_candidates.pool(sizes, device):
        times = [forward_candidates.clocks(one, size, device) for size in sizes]
        yield Timed("implicit_gemm", one, times, one.computes_any_size)


def _of_stride1(sizes: Sequence[TileProblem], device: Device) -> Iterator[Timed]:
    supported = [forward_stride1.supports(size, device) for size in sizes]
    kernels = dict.fromkeys(
        kernel
        for size, is_supported in zip(sizes, supported, strict=True)
        if is_supported
        for kernel in forward_stride1_tile.kernels(size, device)
    )
    for kernel in kernels:
        times = [
            best_tile(size, kernel, device)[0] if is_supported and kernel.computes(size) else math.inf
            for size, is_supported in zip(sizes, supported, strict=True)
        ]
        yield Timed("stride1", kernel, times, False)


def representatives(layer: TileProblem) -> tuple[list[TileProblem], list[float]]:
    """Returns the sizes that represent all sizes of a layer, and the weight of each. In NCHW grad_output has those of
    the maps, or those that the layer makes of them: other kernels load rows that are not aligned."""
    g = layer.geometry
    if layer.one_pixel:
        return [_sized(layer, batch, 1, 1) for batch in ONE_PIXEL_BATCHES], [1.0] * len(ONE_PIXEL_BATCHES)
    one_row = g.kernel[0] == g.stride[0] == 1 < g.kernel[1] and g.padding[0] == 0
    weighted = representative_sizes(
        one_row=one_row,
        patches=g.kernel == g.stride,
        channels=g.in_channels_per_group,
        further=(*FURTHER_SIZES, *LARGE_MAPS) if max(g.stride) == 1 else FURTHER_SIZES,
    )
    if not one_row:
        weighted += [(size, UNUSUAL) for size in FEW_IMAGES]
    beyond: tuple[int, ...] = (0, 0)
    if layer.of_grad_input and not layer.input_channels_last:
        # Of grad_output, beyond the rows and columns of the input.
        beyond = tuple(
            2 * padding - dilation * (kernel - 1)
            for kernel, padding, dilation in zip(g.kernel, g.padding, g.dilation, strict=True)
        )
    found = []
    for (batch, height, width), weight in weighted:
        both = dict.fromkeys(((height, width), (height + beyond[0], width + beyond[1])))
        sized = [_sized(layer, batch, *size) for size in both if min(size) > 0]
        found += [(one, weight / len(both)) for one in sized]
    found = [one for one in found if min(one[0].geometry.out_height, one[0].geometry.out_width) > 0]
    return [size for size, _ in found], [weight for _, weight in found]


def _sized(layer: TileProblem, batch: int, height: int, width: int) -> TileProblem:
    return replace(layer, geometry=replace(layer.geometry, batch=batch, height=height, width=width))


def limit_of(layer: TileProblem, device: Device) -> int:
    """Returns how many kernels of these families a layer, or its maps of one pixel, may have."""
    if layer.one_pixel:
        return 1
    return (
        max_schedules_of_grad_input(layer)
        if layer.of_grad_input
        else max_implicit_gemm_schedules(layer, device)
    )
