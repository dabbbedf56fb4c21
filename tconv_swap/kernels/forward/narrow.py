"""Which family computes a layer that memory bounds, or that has few channels: forward/narrow_mma.py,
forward/narrow_ffma.py, or neither, where tiles of forward/implicit_gemm.py that wgmma multiplies are expected to be
faster. The choice is one for all sizes of a layer, so that it has the kernels of one family.

docs/kernels/forward/narrow_mma.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from math import exp, log

import torch

from tconv_swap.kernels.common.forward_schedules import max_narrow_schedules
from tconv_swap.kernels.common.layer_sizes import of_any_size, representative_sizes
from tconv_swap.kernels.forward import implicit_gemm, narrow_ffma, narrow_mma
from tconv_swap.kernels.forward.narrow_ffma_choice import choose as choose_ffma
from tconv_swap.kernels.forward.narrow_ffma_choice import expected_time as expected_ffma
from tconv_swap.kernels.forward.narrow_mma_choice import choose as choose_mma
from tconv_swap.kernels.forward.narrow_mma_choice import expected_time as expected_mma
from tconv_swap.kernels.forward.narrow_mma_choice import parts_of, useful_share
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.program import Plan

#: Input channels of a group that fill half of a multiply of 16-bit numbers; with fewer channels FFMA is faster.
MIN_CHANNELS = 8
#: Float32 takes six products; where less than this share of them is used, the costs of both decide.
MIN_FLOAT32_SHARE = 0.5
#: The parts of an element whose products are exact. cuDNN computes such layers in float32 even where TF32 is allowed,
#: so tiles of TF32 would be less exact than what they replace.
EXACT_PARTS = 3


class Family(Enum):
    """``TILES``: the implicit GEMM's."""

    MMA, FFMA, TILES = "narrow_mma", "narrow_ffma", "implicit_gemm"


#: Returns the expected microseconds of a problem; None if the family does not compute it.
Expected = Callable[[Problem, Device], float | None]


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """Returns the plan of the family that the layer has, or None for a layer that neither narrow family computes or
    that is left to larger tiles.

    Inputs: input (16-byte aligned), weight, bias. Output: the output.
    """
    if not narrow_ffma.supports(problem.geometry, problem.dtype):
        return None
    family = family_of(replace(problem, geometry=of_any_size(problem.geometry)), device)
    if family is Family.TILES:
        return None
    made = narrow_mma.plan_forward(problem, has_bias, device) if family is Family.MMA else None
    return made or narrow_ffma.plan_forward(problem, has_bias, device)


@lru_cache(maxsize=256)
def family_of(layer: Problem, device: Device) -> Family:
    """Returns the family of a layer (``of_any_size``) that ``narrow_ffma.supports``."""
    geometry = layer.geometry
    if geometry.in_channels_per_group < MIN_CHANNELS:
        return Family.FFMA
    padded = layer.dtype == torch.float32 and useful_share(geometry) < MIN_FLOAT32_SHARE
    if padded and _ratio(layer, device, _mma, _ffma) >= 1:
        return Family.FFMA
    may_be_tiles = parts_of(layer) < EXACT_PARTS
    return Family.TILES if may_be_tiles and _ratio(layer, device, _mma, _tiles) > 1 else Family.MMA


def _mma(problem: Problem, device: Device) -> float | None:
    if not narrow_mma.supports(problem, device):
        return None
    tiles = choose_mma(problem, device, max_narrow_schedules(problem, device), 1)
    return expected_mma(problem, tiles[0]) if tiles else None


def _ffma(problem: Problem, device: Device) -> float | None:
    tiles = choose_ffma(problem, device, max_narrow_schedules(problem, device), 1)
    return expected_ffma(problem, tiles[0], device) if tiles else None


def _tiles(problem: Problem, device: Device) -> float | None:
    return implicit_gemm.expected_time(problem, device)


def _ratio(layer: Problem, device: Device, ours: Expected, others: Expected) -> float:
    """Returns the geometric mean, over representative sizes of several images, of the ratio of the expected times; 1
    if no such size is computed by both."""
    logarithms = []
    for size in representative_sizes(layer.geometry)[0]:
        if size.batch == 1:
            continue
        sized = replace(layer, geometry=size)
        our, other = ours(sized, device), others(sized, device)
        if our is not None and other is not None:
            logarithms.append(log(our / other))
    return exp(sum(logarithms) / len(logarithms)) if logarithms else 1.0
