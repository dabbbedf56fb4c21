"""Selects the kernels of the forward pass that a layer has over all its sizes: at most four, of all families together,
with which representative sizes are expected to take little longer than with the best kernel for each. At stride 1 those
of implicit_gemm and stride1 also compute the gradient of the input. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.one_pixel import (
    has_stride_of_one_pixel,
    has_two_kernels,
    kernels_of_gradient,
    may_begin,
)
from tconv_swap.kernels.common.pad_rows import copies_clocks
from tconv_swap.kernels.common.schedules import (
    FEW_IMAGES,
    FURTHER_SIZES,
    MAX_SCHEDULES,
    RAGGED_SIZES,
    SINGLE,
    UNUSUAL,
    Timed,
    representative_sizes,
    select_of_families,
)
from tconv_swap.kernels.forward import col2im as forward_col2im
from tconv_swap.kernels.forward import gemm as forward_gemm
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_candidates as forward_candidates
from tconv_swap.kernels.forward import narrow_ffma as forward_narrow_ffma
from tconv_swap.kernels.forward import narrow_mma as forward_narrow_mma
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward import stride1_tile as forward_stride1_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    TileProblem,
    as_problem,
    of_any_size,
)
from tconv_swap.kernels.forward.stride1_clocks import best_tile
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Part

#: Images of maps of one pixel, and the weight of each.
ONE_PIXEL_BATCHES = {1: SINGLE, 16: 1.0, 64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0, 2048: UNUSUAL}
#: Further maps of layers that are often the last of a network: those without strides, which do not enlarge their maps,
#: and heads, which have at most FEW_CHANNELS output channels. The usual columns of a head are HEAD_COLUMNS times those
#: of other layers with as many input channels.
FEW_CHANNELS, HEAD_COLUMNS = 8, 2
LARGE_MAPS = ((16, 256, 256), (8, 512, 512), (1, 1024, 1024), (4, 375, 333), (8, 150, 225))


class Family(Protocol):
    """A family that computes a problem as it lies."""

    def candidates(self, sizes: Sequence[Problem], device: Device) -> Sequence[Any]:
        """Returns the tiles that a layer of these sizes may have; none for a layer that the family is not for."""

    def of_size(self, problem: Problem, device: Device) -> Sequence[Any]:
        """Returns the tiles that suit this size, also those that its layer does not have."""

    def clocks(self, sizes: Sequence[Problem], tiles: Sequence[Any], device: Device) -> Iterator[list[float]]:
        """Yields the expected clocks of each size of a layer with each tile; infinitely many if the tile's kernel does
        not compute it."""

    def lower(self, problem: Problem, has_bias: bool, tile: Any, device: Device) -> Part:
        """Returns the part that computes the problem with this tile. Inputs: input (16-byte aligned), weight, bias.
        Output: the output."""


FAMILIES: dict[str, Family] = {
    "narrow_mma": forward_narrow_mma,
    "narrow_ffma": forward_narrow_ffma,
    "col2im": forward_col2im,
    "gemm": forward_gemm,
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a layer, by family."""

    implicit_gemm: tuple[forward_candidates.Schedule, ...] = ()
    stride1: tuple[forward_stride1_tile.Stride1Kernel, ...] = ()
    narrow_mma: tuple[Any, ...] = ()
    narrow_ffma: tuple[Any, ...] = ()
    col2im: tuple[Any, ...] = ()
    gemm: tuple[Any, ...] = ()


@disk_cache
def kernels_of(layer: TileProblem, device: Device) -> Kernels:
    """Returns the kernels of ``layer``, which ``of_any_size`` made. One of them computes every size."""
    sizes, weights = representatives(layer)
    found = select_of_families(list(_timed(layer, sizes, device)), weights, limit_of(layer, device))
    return Kernels(**found)  # type: ignore[arg-type]


def kernels_for(problem: TileProblem, device: Device) -> Kernels:
    """Returns all kernels with tiles that suit this size, also those that its layer does not have."""
    found: dict[str, tuple[Any, ...]] = {}
    seen = forward_implicit_gemm.read_as(problem)
    if forward_implicit_gemm.supports(seen, device):
        found["implicit_gemm"] = tuple(dict.fromkeys(forward_candidates.of_size(seen, device)))
    if forward_stride1.supports(problem, device):
        found["stride1"] = tuple(forward_stride1_tile.kernels(problem, device))
    if not problem.of_grad_input:
        posed = as_problem(problem)
        found |= {name: tuple(family.of_size(posed, device)) for name, family in FAMILIES.items()}
    return Kernels(**found)


def _timed(layer: TileProblem, sizes: Sequence[TileProblem], device: Device) -> Iterator[Timed]:
    """Yields the candidates of all families."""
    if not sizes:
        return
    if forward_implicit_gemm.supports(of_any_size(forward_implicit_gemm.read_as(layer)), device):
        yield from _of_implicit_gemm(sizes, device)
    yield from _of_stride1(sizes, device)
    if layer.of_grad_input:
        return
    posed = [as_problem(size) for size in sizes]
    for name, family in FAMILIES.items():
        tiles = family.candidates(posed, device)
        for tile, times in zip(tiles, family.clocks(posed, tiles, device), strict=True):
            yield Timed(name, tile, times, math.inf not in times)


def _of_implicit_gemm(sizes: Sequence[TileProblem], device: Device) -> Iterator[Timed]:
    seen = [forward_implicit_gemm.read_as(size) for size in sizes]
    copies = [copies_clocks(forward_implicit_gemm.copies_of(size), size.dtype) for size in sizes]
    for one, clocks in forward_candidates.pool(seen, device):
        times = [of_size + added for of_size, added in zip(clocks, copies, strict=True)]
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
            best_tile(size, kernel, device)[0]
            if is_supported and forward_stride1.computes(size, kernel)
            else math.inf
            for size, is_supported in zip(sizes, supported, strict=True)
        ]
        yield Timed("stride1", kernel, times, False)


def representatives(layer: TileProblem) -> tuple[list[TileProblem], list[float]]:
    """Returns the sizes that represent all sizes of a layer, and the weight of each. In NCHW grad_output has those of
    the maps, or those that the layer makes of them: other kernels load rows that are not aligned."""
    g = layer.geometry
    if layer.one_pixel:
        return [_sized(layer, batch, 1, 1) for batch in ONE_PIXEL_BATCHES], list(ONE_PIXEL_BATCHES.values())
    is_head = g.out_channels <= FEW_CHANNELS
    weighted = representative_sizes(
        one_row=g.one_row,
        patches=g.kernel == g.stride,
        channels=ceil_div(g.in_channels_per_group, HEAD_COLUMNS if is_head else 1),
        further=(*FURTHER_SIZES, *LARGE_MAPS) if is_head or max(g.stride) == 1 else FURTHER_SIZES,
        unusual=() if layer.input_channels_last else RAGGED_SIZES,
    )
    if not g.one_row:
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
    return layer._replace(geometry=layer.geometry._replace(batch=batch, height=height, width=width))


def limit_of(layer: TileProblem, device: Device) -> int:
    """Returns how many kernels a layer, or its maps of one pixel, may have."""
    if layer.of_grad_input:
        return 1 if layer.one_pixel else MAX_SCHEDULES - _of_gradient_of_pixels(layer.geometry, device)
    if layer.one_pixel:
        return _of_pixels(layer, device)
    return MAX_SCHEDULES - (_of_pixels(layer, device) if has_stride_of_one_pixel(layer.geometry) else 0)


def _of_pixels(layer: TileProblem, device: Device) -> int:
    """Returns how many kernels maps of one pixel may have, where they have kernels of their own."""
    pixel = as_problem(layer)._replace(geometry=layer.geometry._replace(height=1, width=1))
    return 2 if has_two_kernels(layer.geometry) and forward_gemm.supports(pixel, device) else 1


def _of_gradient_of_pixels(convolution: Geometry, device: Device) -> int:
    """Returns the same for the gradient of the input, which is this convolution."""
    of_axes = zip(convolution.kernel, convolution.padding, convolution.dilation, strict=True)
    # The layer's own padding is what its gradient lacks of whole taps.
    rows, columns = (dilation * (kernel - 1) - padding for kernel, padding, dilation in of_axes)
    inputs, outputs = convolution.out_channels, convolution.in_channels
    layer = convolution._replace(in_channels=inputs, out_channels=outputs, padding=(rows, columns))
    return kernels_of_gradient(layer, may_begin(layer), device)
