"""Layers and random problems of the gradient of the weight in TF32, for the families that have pixels along k."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
UNET = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
SMALL_MAP = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
WIDE = Geometry(32, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1))
ODD = Geometry(8, 256, 37, 37, 256, (4, 4), (4, 4))
GROUPED = Geometry(1, 4096, 64, 64, 2048, (3, 3), (2, 2), groups=8)
ONE_ROW = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))
LAYERS = (UNET, SMALL_MAP, WIDE, ODD, GROUPED)
#: Beside them, rows shorter than a box, and a single row.
STRIDED = (*LAYERS, Geometry(2, 64, 14, 14, 64, (2, 2), (2, 2)), ONE_ROW)
#: Relative L2 error of the weight's gradient against float64, as in tests/cuda/test_cuda_op.py.
TOLERANCE = 1e-3
#: The same of the bias's gradient, which is summed with compensation: about the rounding of the result; plain sums are
#: farther off.
BIAS_TOLERANCE = 1e-7


def tf32_problem(geometry: Geometry, channels_last: bool = False) -> plan.Problem:
    """Returns the problem in TF32, with images and weight in the same layout."""
    return plan.Problem(geometry, torch.float32, "tf32", channels_last, channels_last)


def random_problem(rng: random.Random, channels_last: bool) -> plan.Problem:
    """Returns a random problem in TF32; the weight has either layout."""
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        kernel = rng.choice((stride, (rng.randint(1, 6), rng.randint(1, 6))))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        geometry = Geometry(
            rng.randint(1, 7),
            groups * rng.choice((8, 37, 64, 128, 136, 256)),
            rng.randint(1, 30),
            rng.choice((rng.randint(1, 80), 4, 16, 32, 64)),
            groups * rng.choice((8, 21, 64, 96, 128, 131, 256)),
            kernel,
            stride,
            (rng.randint(0, 3), rng.randint(0, 3)),
            (
                rng.randint(0, max(stride[0], dilation[0]) - 1),
                rng.randint(0, max(stride[1], dilation[1]) - 1),
            ),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return plan.Problem(geometry, torch.float32, "tf32", channels_last, rng.random() < 0.5)


def hopper() -> plan.Device:
    """Returns the GPU, or skips the test where it has no wgmma."""
    device = call.device_facts(0)
    if device.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    return device


def assert_random_tile_matches(family: ModuleType, channels_last: bool, seed: int, with_bias: bool) -> None:
    """Runs a random tile of a family (``tiles_for``, ``lower``) on a random problem, against float64."""
    device, rng = hopper(), random.Random(seed)
    torch.manual_seed(seed)
    tiles: list[Any] = []
    while not tiles:
        problem = random_problem(rng, channels_last)
        tiles = family.tiles_for(problem, device, with_bias)
    part = family.lower(problem, rng.choice(tiles), device, with_bias)
    assert_part_matches(problem, part, with_bias)


def assert_part_matches(problem: plan.Problem, part: Part, with_bias: bool) -> None:
    """Fails unless the part matches float64 in poisoned memory, with the same bits twice."""
    layouts, mask = (problem.channels_last, problem.weight_channels_last), (False, True, with_bias)
    run = assert_kernel_matches(part, problem.geometry, torch.float32, layouts, TOLERANCE, mask)
    if with_bias:
        sums = run.truths[1]
        assert (run.found[1].double() - sums).norm() <= BIAS_TOLERANCE * sums.norm(), part.why
