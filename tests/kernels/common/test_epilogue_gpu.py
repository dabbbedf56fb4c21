"""Forward kernels with an epilogue on a GPU: every family and every activation against float64, in poisoned memory."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import TF32_TOLERANCE, TOLERANCE
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.common.epilogue import Epilogue, with_epilogue
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.runtime.program import Plan

pytestmark = pytest.mark.gpu

GEOMETRIES = {
    "dcgan": Geometry(3, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "dcgan, small": Geometry(7, 64, 4, 4, 40, (4, 4), (2, 2), (1, 1)),
    "cyclegan": Geometry(2, 64, 31, 33, 32, (3, 3), (2, 2), (1, 1), (1, 1)),
    "groups": Geometry(2, 144, 7, 19, 20 * 2, (3, 3), (2, 2), (2, 2), (2, 2), (3, 3), groups=2),
    "groups, odd channels": Geometry(2, 27, 14, 14, 33, (2, 2), (2, 2), groups=3),
    "odd channels": Geometry(3, 34, 7, 18, 19, (3, 3), (2, 2), (1, 1), (1, 1)),
    "odd rows": Geometry(2, 64, 33, 35, 64, (3, 3), (2, 2)),
    "whole cells": Geometry(2, 128, 16, 16, 64, (2, 2), (2, 2)),
    "one phase": Geometry(4, 64, 32, 64, 64, (3, 3)),
    "phases without taps": Geometry(2, 32, 9, 13, 16, (3, 3), (5, 5), (1, 1), (0, 0), (2, 2)),
    "rgb": Geometry(4, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "rgb, odd": Geometry(2, 64, 31, 29, 3, (4, 4), (2, 2), (1, 1)),
    "depthwise": Geometry(2, 21, 20, 19, 21, (8, 8), (4, 4), (2, 2), groups=21),
    "pixel": Geometry(33, 100, 1, 1, 72, (4, 4)),
    "large cells": Geometry(1, 21, 7, 6, 21, (32, 32), (16, 16), (8, 8)),
    "wide": Geometry(4, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1)),
    "no family": Geometry(3, 7, 5, 6, 9, (1, 1), (3, 3), (0, 0), (2, 2)),
}
MODES = (
    (torch.float16, "ieee"),
    (torch.bfloat16, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
)
ENDS = (
    Epilogue(True, Activation.RELU, torch.float32, 1e-5),
    Epilogue(False, Activation.TANH),
    Epilogue(True, Activation.LEAKY_RELU, torch.float32, 1e-3, 0.2),
    Epilogue(True, Activation.IDENTITY, torch.float32, 0.1),
)


def check(
    made: Plan,
    problem: plan.Problem,
    epilogue: Epilogue,
    with_bias: bool,
    affine: bool = True,
) -> None:
    dtype = problem.dtype
    ended = with_epilogue(made, epilogue)
    assert ended is not None
    torch.manual_seed(0)
    assert_kernel_matches(
        ended,
        problem.geometry,
        dtype,
        (problem.channels_last, problem.weight_channels_last),
        TF32_TOLERANCE if problem.is_tf32 else TOLERANCE[dtype],
        with_bias=with_bias,
        epilogue=epilogue,
        affine=affine,
    )


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize(("dtype", "precision"), MODES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_family_applies_it(name: str, dtype: torch.dtype, precision: str, channels_last: bool) -> None:
    problem = plan.Problem(GEOMETRIES[name], dtype, precision, channels_last, channels_last)
    # Each geometry, dtype and layout has another activation; each family gets all of them.
    turn = list(GEOMETRIES).index(name) + MODES.index((dtype, precision)) + 2 * channels_last
    epilogue, with_bias = ENDS[turn % len(ENDS)], turn % 3 != 0
    check(plan.plan_forward(problem, with_bias, call.device_facts(0)), problem, epilogue, with_bias)


@pytest.mark.parametrize("name", ["rgb", "one phase", "groups, odd channels", "dcgan", "pixel"])
def test_kernels_that_are_not_the_first_choice(name: str) -> None:
    device = call.device_facts(0)
    for dtype, precision, channels_last in (
        (torch.float16, "ieee", True),
        (torch.float32, "tf32", False),
    ):
        problem = plan.Problem(GEOMETRIES[name], dtype, precision, channels_last, channels_last)
        candidates = [
            *plan.forward_candidates(problem, True, device, 8),
            general.plan_forward(problem, True),
        ]
        for made in {one.launches[-1].kernel.entry: one for one in candidates}.values():
            check(made, problem, ENDS[0], True)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "channels_last"])
def test_each_activation(activation: Activation, channels_last: bool) -> None:
    problem = plan.Problem(
        GEOMETRIES["dcgan"],
        torch.float32 if channels_last else torch.float16,
        "ieee",
        channels_last,
        channels_last,
    )
    made = plan.plan_forward(problem, False, call.device_facts(0))
    check(made, problem, Epilogue(True, activation, torch.float32, 1e-5, 0.3), False)


@pytest.mark.parametrize("parameters", [torch.float32, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
def test_norms_without_parameters_and_of_the_tensors_dtype(parameters: torch.dtype, affine: bool) -> None:
    problem = plan.Problem(GEOMETRIES["groups, odd channels"], torch.float16, "ieee", False, False)
    made = plan.plan_forward(problem, True, call.device_facts(0))
    check(made, problem, Epilogue(True, Activation.RELU6, parameters, 1e-5), True, affine)


def test_split_sums_get_it_once() -> None:
    problem = plan.Problem(
        Geometry(2, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1)), torch.float32, "tf32", False, False
    )
    plans = plan.forward_candidates(problem, True, call.device_facts(0), 16)
    made = next(one for one in plans if one.launches[-1].kernel.entry == "forward_implicit_gemm_split_k")
    check(made, problem, ENDS[2], True)
