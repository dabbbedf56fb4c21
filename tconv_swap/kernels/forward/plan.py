"""Plans the forward pass: the one of a layer's kernels, of all families, with the fewest expected clocks computes a
size. Pure functions of data."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from operator import attrgetter

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.ranked import Ranked, in_turn
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, as_problem, make_problem, of_any_size
from tconv_swap.kernels.forward.narrow import as_exact
from tconv_swap.kernels.forward.selection import FAMILIES, Kernels, kernels_for, kernels_of
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Output, Part, Plan


def plan_candidates(
    problem: Problem, has_bias: bool, device: Device, count: int, further: bool = True
) -> list[Plan]:
    """Returns ``count`` plans: the one that is expected to be the fastest, then the best of each family in turn; after
    the kernels of the layer, if ``further``, those that it may have. None for a problem that only the general kernel
    computes.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    outputs = (Output(problem.geometry.output_shape, problem.channels_last),)
    return [
        Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
        for part in part_candidates(posed(problem, has_bias), device, count, further)
    ]


def posed(problem: Problem, has_bias: bool) -> TileProblem:
    """Returns the problem as it is computed: without TF32 where cuDNN computes in float32."""
    exact = as_exact(problem)
    return make_problem(
        exact.geometry,
        exact.dtype,
        exact.precision,
        exact.channels_last,
        exact.weight_channels_last,
        has_bias,
    )


def part_candidates(problem: TileProblem, device: Device, count: int, further: bool = True) -> list[Part]:
    """Returns the same of a forward pass, or of a gradient of the input that is one."""
    if problem.dtype not in DTYPES or problem.geometry.batch == 0:
        return []
    found = [*ranked(problem, device)[:count]]
    if further and len(found) < count:
        found += _ranked(kernels_for(problem, device), problem, device)
    parts = dict.fromkeys(one.make() for one in found[: 2 * count])
    return list(parts)[:count]


@lru_cache(maxsize=256)
def ranked(problem: TileProblem, device: Device) -> tuple[Ranked, ...]:
    """Returns the parts of the layer's kernels with their expected clocks: the one that is expected to be the fastest,
    then the best of each family in turn. (The plans of a gradient of the input ask several times.)"""
    return tuple(_ranked(kernels_of(of_any_size(problem), device), problem, device))


def _ranked(kernels: Kernels, problem: TileProblem, device: Device) -> list[Ranked]:
    """Returns the parts of those kernels that compute this size, in the same order."""
    families = [
        forward_implicit_gemm.ranked(kernels.implicit_gemm, problem, device),
        forward_stride1.ranked(kernels.stride1, problem, device),
    ]
    if not problem.of_grad_input:
        families += _as_they_lie(kernels, as_problem(problem), problem.has_bias, device)
    return in_turn(*sorted(filter(None, families), key=lambda family: family[0].clocks))


def _as_they_lie(kernels: Kernels, problem: Problem, has_bias: bool, device: Device) -> list[list[Ranked]]:
    """Returns the parts of ``FAMILIES``, the best of each first."""
    found = []
    for name, family in FAMILIES.items():
        if not (tiles := getattr(kernels, name)):
            continue
        parts = [
            Ranked(clocks, partial(family.lower, problem, has_bias, tile, device))
            for (clocks,), tile in zip(family.clocks([problem], tiles, device), tiles, strict=True)
            if clocks < math.inf
        ]
        found.append(sorted(parts, key=attrgetter("clocks")))
    return found
