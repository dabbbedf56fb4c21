"""The kernels and tiles of the forward implicit GEMM that a layer and a size have."""

from __future__ import annotations

from tconv_swap.kernels.forward import selection as forward_selection
from tconv_swap.kernels.forward.implicit_gemm_candidates import Schedule, ranked
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, of_any_size
from tconv_swap.kernels.problem import Device


def kernels_of(layer: TileProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns those of a layer."""
    return forward_selection.kernels_of(layer, device).implicit_gemm


def kernels_for(problem: TileProblem, device: Device) -> tuple[Schedule, ...]:
    """Returns all that suit a size, not only those that its layer has."""
    return forward_selection.kernels_for(problem, device).implicit_gemm


def choose(problem: TileProblem, device: Device, count: int = 1) -> list[tuple[TileProblem, Tile]]:
    """Returns at most ``count`` tiles for this size, the fastest first: those of the layer's kernels, then others."""
    found = ranked(kernels_of(of_any_size(problem), device), problem, device)
    if len(found) < count:
        found += [one for one in ranked(kernels_for(problem, device), problem, device) if one not in found]
    return [(seen, tile) for _, seen, tile in found[:count]]
