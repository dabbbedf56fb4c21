"""The gradient of the bias by csrc/kernels/grad_bias/general.cu: its splits, and on a GPU its results."""

from __future__ import annotations

import math
import random

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general

H200 = plan.Device("sm_90a", 132, 227 << 10)
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float64: 1e-14}


def problems(seed: int, count: int = 8) -> list[plan.Problem]:
    """Returns problems of any number of channels and of rows of any length, of which some make whole vectors."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        channels = rng.choice((1, 2, 3, 7, 8, 64, 66, 100, 513, 1030))
        size = rng.choice(((1, 1), (rng.randint(1, 9), rng.randint(1, 9)), (16, 24)))
        kernel = (rng.randint(1, 4), rng.randint(1, 4))
        geometry = Geometry(rng.choice((1, 2, 5, 70)), 4, *size, channels, kernel, (2, 2))
        dtype = rng.choice(list(TOLERANCES))
        found.append(plan.Problem(geometry, dtype, "ieee", rng.random() < 0.5, False))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_term_is_in_one_split(seed: int) -> None:
    for problem in problems(seed, 40):
        g = problem.geometry
        main, reduce = general.plan_grad_bias(problem, H200).launches
        constants = dict(main.kernel.constants)
        vector, threads = int(constants["VECTOR"]), int(constants["THREADS"])
        per_split, length = (argument.value for argument in main.arguments[-2:])
        pixels = g.out_height * g.out_width
        if problem.channels_last:
            period = g.out_channels * vector // math.gcd(g.out_channels, vector)
            assert (length - 1) * period < g.batch * pixels * g.out_channels <= length * period
            tiles = -(-period // vector // threads)
        else:
            # A plane begins anywhere in a vector, unless all planes are whole ones.
            first = 0 if pixels % vector == 0 else vector - 1
            assert length == g.batch * -(-(first + pixels) // vector)
            tiles = g.out_channels
        splits, rest = divmod(main.grid, tiles)
        assert rest == 0
        assert (splits - 1) * per_split < length <= splits * per_split
        rows = 2 if problem.dtype.itemsize > 2 else 1
        assert reduce.arguments[-1].value == rows * splits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(8))
def test_random_geometries_match_float64(seed: int) -> None:
    torch.manual_seed(seed)
    for problem in problems(100 + seed):
        made = general.plan_grad_bias(problem, call.device_facts(0))
        tolerance, last = TOLERANCES[problem.dtype], problem.channels_last
        assert_kernel_matches(
            made, problem.geometry, problem.dtype, (last, False), tolerance, (False, False, True)
        )
