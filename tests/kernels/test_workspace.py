"""The workspace of every family on layers whose tensors take gigabytes: it does not grow with them. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from size_cases import LAYERS, any_size

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm

H200 = plan.Device("sm_90a", 132, 227 << 10)
AMPERE = plan.Device("sm_80", 108, 163 << 10)
MODES = (
    (torch.float64, "ieee"),
    (torch.float16, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
)
#: A decoder with eight times the taps, one tap for each pixel, odd rows, few channels, a weight of which few copies
#: fit.
DECODER = Geometry(16, 256, 256, 256, 128, (8, 8), (4, 4), (2, 2))
ODD = Geometry(16, 257, 255, 253, 131, (3, 3), (2, 2))
MANY_WEIGHTS = Geometry(64, 2048, 64, 64, 1024, (4, 4), (2, 2), (1, 1))
LARGE = {
    "decoder": DECODER,
    "unet": Geometry(32, 320, 256, 256, 320, (2, 2), (2, 2)),
    "stride 1": Geometry(8, 256, 512, 512, 128, (3, 3), (1, 1), (1, 1)),
    "odd": ODD,
    "rgb": Geometry(64, 64, 512, 512, 3, (4, 4), (2, 2), (1, 1)),
    "depthwise": Geometry(16, 64, 512, 512, 64, (16, 16), (8, 8), (4, 4), groups=64),
    "cells": Geometry(16, 128, 128, 128, 64, (16, 16), (16, 16)),
    "many weights": MANY_WEIGHTS,
}


def limit(geometry: Geometry) -> int:
    """Returns the bound: copies, partial sums, and one copy of the weight in float32 or in two parts."""
    return MAX_COPY_BYTES + WORKSPACE_LIMIT_BYTES + 8 * math.prod(geometry.weight_shape)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", LARGE.values(), ids=LARGE.keys())
def test_no_plan_takes_more_than_the_limit(geometry: Geometry, channels_last: bool, exhaustive: bool) -> None:
    place = list(LARGE.values()).index(geometry) + channels_last
    for dtype, precision in MODES if exhaustive else MODES[place % 2 :: 2]:
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        for device in (H200, AMPERE):
            for made in (
                plan.plan_forward(problem, True, device),
                plan.plan_backward(problem, (True, True, True), device),
            ):
                assert made.workspace_bytes <= limit(geometry), (made.family, made.why, dtype, precision)


@pytest.mark.parametrize("geometry", [DECODER, ODD, MANY_WEIGHTS], ids=str)
def test_nor_does_what_tuning_would_measure(geometry: Geometry) -> None:
    for (dtype, precision), channels_last in itertools.product(MODES, (False, True)):
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        for mask in ((False, True, False), (False, True, True)):
            for made in plan.backward_candidates(problem, mask, H200, 64):
                assert made.workspace_bytes <= limit(geometry), (made.family, made.why)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("name", ["kb81", "dcgan2", "dpt_k4s4"])
def test_sums_of_splits_of_the_gradient_of_the_input_do_not_grow_with_a_map(
    name: str, precision: str, channels_last: bool
) -> None:
    """Of any kernel of the layer that a size may take: beside another workspace, they are at most 64 MiB."""
    rng = random.Random(name)
    (layer,) = (one.geometry for one in LAYERS if one.name == name)
    for dtype in (torch.float16, torch.float32):
        for geometry in (any_size(rng, layer) for _ in range(60)):
            problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
            for device in (H200, AMPERE):
                for part in (one.make() for one in grad_input_implicit_gemm.ranked(problem, device)):
                    split = any("split_k" in one.kernel.entry for one in part.launches)
                    sums = 2 * 4 * math.prod(geometry.input_shape) if split else 0
                    assert sums <= WORKSPACE_LIMIT_BYTES, (problem, device, part.why)
