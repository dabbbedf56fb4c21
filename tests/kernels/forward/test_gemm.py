"""The plans of csrc/kernels/forward/gemm.cu (maps of one pixel), and on a GPU its results on random geometries."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.forward import gemm as forward_gemm
from tconv_swap.kernels.forward.implicit_gemm_layout import make_problem, of_any_size
from tconv_swap.kernels.forward.selection import kernels_of, limit_of
from tconv_swap.kernels.grad_input.implicit_gemm import as_forward

H200 = plan.Device("sm_90a", 132, 227 << 10)
A10 = plan.Device("sm_86", 72, 99 << 10)
DCGAN = Geometry(128, 100, 1, 1, 512, (4, 4))
MODES = (
    (torch.float16, "ieee", 1e-3),
    (torch.bfloat16, "ieee", 8e-3),
    (torch.float32, "tf32", 6e-4),
    (torch.float32, "ieee", 1e-6),
)


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float16, precision: str = "ieee", last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, dtype, precision, last, last)


@pytest.mark.parametrize("batch", [1, 7, 64, 128])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_one_launch_computes_the_first_layer_of_a_generator(
    mode: tuple[torch.dtype, str, float], batch: int
) -> None:
    for device in (H200, A10):
        for last in (False, True):
            made = plan.plan_forward(problem(DCGAN.with_batch(batch), *mode[:2], last), True, device)
            assert made.family == "gemm"
            assert len(made.launches) == 1
            assert made.launches[0].shared_bytes <= device.shared_memory_per_block


def test_any_number_of_images_has_one_of_two_kernels() -> None:
    for mode, last in product(MODES, (False, True)):
        batches = (1, 3, 16, 100, 128, 256, 400, 512, 1000, 5000)
        made = [
            plan.plan_forward(problem(DCGAN.with_batch(one), *mode[:2], last), True, H200) for one in batches
        ]
        assert {one.family for one in made} <= {"gemm", "implicit_gemm"}
        assert len({one.launches[-1].kernel for one in made}) <= 2


@pytest.mark.parametrize(
    "layer",
    [
        Geometry(4, 32, 96, 96, 48, (3, 3)),
        Geometry(4, 32, 96, 96, 48, (2, 3)),
        Geometry(4, 64, 96, 96, 96, (3, 5)),
    ],
    ids=str,
)
def test_a_layer_without_strides_has_three_kernels_for_other_maps(layer: Geometry) -> None:
    """All maps of one pixel have one kernel; the output of large images has one of stride1."""
    for batch in (1, 256, 257, 5000):
        pixels = layer._replace(batch=batch, height=1, width=1)
        assert plan.plan_forward(problem(pixels), True, H200).family == "gemm"
    forward = make_problem(layer, torch.float16, "ieee", False, False, True)
    for posed in (forward, as_forward(problem(layer))):
        found = kernels_of(of_any_size(posed), H200)
        assert len(found.implicit_gemm) + len(found.stride1) == limit_of(of_any_size(posed), H200) == 3
        assert found.implicit_gemm[0].computes_any_size
        assert found.stride1 or posed.of_grad_input


def test_a_layer_with_a_small_kernel_leaves_three_kernels_for_other_maps() -> None:
    """One with a large kernel may have another kernel for many images."""
    for kernel, limit in (((3, 3), 3), ((4, 4), 2)):
        layer = Geometry(4, 64, 96, 96, 128, kernel, (2, 2))
        posed = make_problem(layer, torch.float16, "ieee", True, True, True)
        assert limit_of(of_any_size(posed), H200) == limit


@pytest.mark.parametrize(
    "other",
    [
        DCGAN._replace(width=2),
        DCGAN._replace(padding=(1, 1)),
        DCGAN._replace(stride=(2, 2), output_padding=(1, 0)),
        DCGAN._replace(dilation=(2, 2)),
        DCGAN._replace(groups=2),
        DCGAN._replace(in_channels=101),  # rows of the input of 202 bytes
        DCGAN._replace(out_channels=3, kernel=(3, 3)),  # of the weight: of 54
    ],
    ids=str,
)
def test_other_problems_are_not_claimed(other: Geometry) -> None:
    assert forward_gemm.supports(problem(DCGAN), H200)
    assert not forward_gemm.supports(problem(other), H200)


def test_layouts_that_differ_are_not_claimed() -> None:
    for last, weight_last in ((False, True), (True, False)):
        mixed = plan.Problem(DCGAN, torch.float16, "ieee", last, weight_last)
        assert not forward_gemm.supports(mixed, H200)
        assert forward_gemm.supports(mixed._replace(geometry=DCGAN._replace(kernel=(1, 1))), H200)


def random_geometry(rng: random.Random) -> Geometry:
    return Geometry(
        rng.choice((1, 3, 17, 64, 100, 129, 300)),
        rng.choice((2, 4, 10, 63, 64, 100, 130, 512)),
        1,
        1,
        rng.choice((1, 3, 8, 20, 65)),
        (rng.randint(1, 5), rng.randint(1, 5)),
        (rng.randint(1, 3), rng.randint(1, 3)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Every problem that the kernel supports is computed right by a random tile, in poisoned memory, with the same bits
    twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, precision, tolerance = MODES[seed % 4]
    facts = call.device_facts(0)
    if facts.compute_capability < 80:
        pytest.skip("the kernel is made for sm_80 and later")
    while True:
        posed = problem(random_geometry(rng), dtype, precision, rng.random() < 0.5)
        tiles = forward_gemm.of_size(posed, facts)
        if tiles:
            break
    with_bias = rng.random() < 0.5
    made = forward_gemm.lower(posed, with_bias, rng.choice(tiles), facts)
    layouts = (posed.channels_last, posed.weight_channels_last)
    assert_kernel_matches(made, posed.geometry, dtype, layouts, tolerance, with_bias=with_bias)
