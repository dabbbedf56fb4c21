"""Selects the kernels that compute the gradient of the input of a layer with strides over all its sizes: at most four,
of all families together, with which representative sizes are expected to take little longer than with the best kernel
for each. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tconv_swap.kernels.common.one_pixel import kernels_of_gradient, may_begin
from tconv_swap.kernels.common.schedules import (
    MAX_SCHEDULES,
    ONE_PIXEL,
    Timed,
    ragged_sizes,
    representative_sizes,
    select_of_families,
)
from tconv_swap.kernels.forward.implicit_gemm_fit import power_above
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input import implicit_gemm_candidates as grad_input_candidates
from tconv_swap.kernels.grad_input import implicit_gemm_choice as grad_input_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    as_problem,
    of_any_size,
    sized,
)
from tconv_swap.kernels.gradients.joint_kernels import joint_kernels
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.disk_cache import disk_cache

#: The candidates of implicit_gemm are the BEST of each representative size that has other tiles, and the BEST of those
#: that compute any size.
BEST = 6
#: The share of the copy of grad_output that counts: the gradient of the weight, which is mostly computed as well, reads
#: it too.
COPY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a layer, by family. ``implicit_gemm_tma``: in NCHW they read copies in channels_last."""

    implicit_gemm: tuple[grad_input_choice.Schedule, ...] = ()
    implicit_gemm_tma: tuple[grad_input_tma_choice.Schedule, ...] = ()
    im2col: tuple[grad_input_im2col_choice.Schedule, ...] = ()
    narrow_mma: tuple[grad_input_narrow_mma.GradInputTile, ...] = ()


@disk_cache
def kernels_of(layer: StridedProblem, device: Device) -> Kernels:
    """Returns the kernels of a layer (``of_any_size``). The first one of implicit_gemm or narrow_mma, or of
    implicit_gemm_tma in channels_last, computes any size. (Sizes with more positions than TMA counts go to the general
    kernels.)"""
    sizes, weights = representatives(layer)
    found = select_of_families(list(_timed(layer, sizes, device)), weights, limit_of(layer, device))
    return Kernels(**found)  # type: ignore[arg-type]


def limit_of(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels of these families a layer, or its maps of one pixel, may have."""
    if layer.one_pixel:
        return 1
    # The general kernel computes what would leave too many partial sums.
    general = layer.geometry.taps >= grad_input_narrow_mma.MOST_TAPS
    joint = joint_kernels(as_problem(layer), device)
    return MAX_SCHEDULES - _of_one_pixel(layer, device) - joint - general


def kernels_for(problem: StridedProblem, device: Device) -> Kernels:
    """Returns all kernels with tiles that suit this size, also those that its layer does not have."""
    layer, read = of_any_size(problem), problem
    if not problem.input_channels_last:
        read = grad_input_nchw_to_nhwc.convolution_of_copies(problem)
    loaded = grad_input_tma.supports(read, device)
    by_tma = grad_input_tma_choice.candidates(of_any_size(read), device) if loaded else ()
    by_im2col = grad_input_im2col.supports(problem, device)
    by_threads, of_layer = (
        grad_input_choice.supports(layer, device),
        grad_input_candidates.tiles_of_layer(layer, device),
    )
    return Kernels(
        tuple(one.schedule for one in grad_input_candidates.candidates(problem, of_layer))
        if by_threads
        else (),
        tuple((shape,) for kernel in by_tma for shape in kernel),
        tuple(grad_input_im2col.every_shape(layer, device)) if by_im2col else (),
        grad_input_narrow_mma.candidates([posed], device)
        if grad_input_narrow_mma.supports(posed := as_problem(problem), device)
        else (),
    )


def _timed(layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    """Yields the candidates of all families. (At stride 1 the kernels of the forward pass compute the others.)"""
    if grad_input_narrow_mma.supports(as_problem(layer), device):
        yield from _of_narrow_mma(layer, sizes, device)
    if layer.step == (1, 1):
        return
    if layer.input_channels_last:
        yield from _of_tma(layer, sizes, device)
    else:
        yield from _of_copies(layer, sizes, device)
    yield from _of_im2col(layer, sizes, device)
    if grad_input_choice.supports(layer, device):
        yield from _of_implicit_gemm(sizes, device)


def _of_implicit_gemm(sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    of_layer = grad_input_candidates.tiles_of_layer(sizes[0], device)
    kept: dict[grad_input_choice.Schedule, grad_input_candidates.Candidate] = {}
    for size in _with_other_tiles(sizes):
        every = list(grad_input_candidates.candidates(size, of_layer))
        clocks = grad_input_candidates.expected_clocks(every, size, device)
        nearest = [every[i] for i in sorted(range(len(every)), key=clocks.__getitem__)]
        kept.update((one.schedule, one) for one in nearest[:BEST])
        of_any_size = (one for one in nearest if one.schedule.computes_any_size(size))
        kept.update((one.schedule, one) for one in islice(of_any_size, BEST))
    times = [grad_input_candidates.expected_clocks(kept.values(), size, device) for size in sizes]
    for one, of_sizes in zip(kept, zip(*times, strict=True), strict=True):
        yield Timed("implicit_gemm", one, list(of_sizes), one.computes_any_size(sizes[0]))


def _with_other_tiles(sizes: Sequence[StridedProblem]) -> Iterator[StridedProblem]:
    """Yields one of the sizes that have the same tiles, which are powers of two."""
    found = set()
    for size in sizes:
        tiles = power_above(size.positions[1]), size.geometry.batch == 1, size.can_be_aligned
        if tiles not in found:
            found.add(tiles)
            yield size


def _of_tma(layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    loads = [grad_input_tma.supports(size, device) for size in sizes]
    if not any(loads):
        return
    for kernel in grad_input_tma_choice.candidates(layer, device):
        times = [
            _best(grad_input_tma_choice.ranked([kernel], size, device)) if loaded else math.inf
            for size, loaded in zip(sizes, loads, strict=True)
        ]
        any_size = grad_input_tma_choice.computes_any_size(kernel)
        yield Timed("implicit_gemm_tma", kernel, times, any_size and all(loads))


def _of_copies(layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    if not grad_input_nchw_to_nhwc.supports_some_size(layer, device):
        return
    # What the kernels read, and the clocks of the copies.
    copies = [
        (
            grad_input_nchw_to_nhwc.convolution_of_copies(size),
            grad_input_nchw_to_nhwc.expected(size, 0.0, COPY_SHARE),
        )
        if grad_input_nchw_to_nhwc.supports(size, device)
        else None
        for size in sizes
    ]
    of_layer = grad_input_nchw_to_nhwc.convolution_of_copies(layer)
    for kernel in grad_input_tma_choice.candidates(of_layer, device):
        times = [
            _best(grad_input_tma_choice.ranked([kernel], copied[0], device)) + copied[1]
            if copied
            else math.inf
            for copied in copies
        ]
        yield Timed("implicit_gemm_tma", kernel, times, False)


def _of_im2col(layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    schedules = grad_input_im2col.candidates(layer, sizes, device)
    times = [grad_input_im2col.best_clocks(schedules, size, device) for size in sizes]
    for schedule, of_sizes in zip(schedules, zip(*times, strict=True), strict=True):
        yield Timed("im2col", schedule, list(of_sizes), False)


def _of_narrow_mma(layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device) -> Iterator[Timed]:
    posed = [as_problem(size) for size in sizes]
    for tile in grad_input_narrow_mma.candidates(posed, device):
        times = grad_input_narrow_mma.clocks_of_sizes(tile, posed, device)
        any_size = grad_input_narrow_mma.computes_any_size(as_problem(layer), tile)
        yield Timed("narrow_mma", tile, times, any_size)


def _best(ranked: Sequence[tuple[Any, ...]]) -> float:
    return ranked[0][0] if ranked else math.inf


def representatives(layer: StridedProblem) -> tuple[list[StridedProblem], list[float]]:
    """Returns the sizes that represent all sizes of a layer, and the weight of each."""
    if layer.one_pixel:
        return [sized(layer, *size) for size in ONE_PIXEL], [1.0] * len(ONE_PIXEL)
    found: list[StridedProblem] = []
    weights: list[float] = []
    for size, weight in representative_sizes(
        layer.one_row,
        layer.geometry.kernel == layer.step,
        layer.geometry.out_channels_per_group,
        unusual=ragged_sizes(layer.input_channels_last, layer.step[1], layer.item),
    ):
        # Layers have the smallest grad_output of a size, or one whose columns are whole strides: in NCHW other kernels
        # load its rows. Vocoders multiply the length of their input.
        smallest = sized(layer, *size)
        whole = _of_whole_strides(smallest)
        if layer.one_row:
            both = [whole]
        else:
            both = [smallest] if layer.input_channels_last or whole == smallest else [smallest, whole]
        found += both
        weights += [weight / len(both)] * len(both)
    return found, weights


def _of_whole_strides(problem: StridedProblem) -> StridedProblem:
    """Returns the problem with the output_padding that makes grad_output's columns whole strides, as layers that
    multiply the length of their input have it."""
    geometry, step = problem.geometry, problem.step[1]
    added = -geometry.width % step
    missing_h, missing_w = geometry.output_padding
    resized = geometry._replace(width=geometry.width + added, output_padding=(missing_h, missing_w - added))
    return problem._replace(geometry=resized)


def _of_one_pixel(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels maps of one pixel have beside those of other maps: of another step, and of
    gradients/gemm.py."""
    geometry = as_problem(layer).geometry
    return kernels_of_gradient(geometry, may_begin(geometry), device)
