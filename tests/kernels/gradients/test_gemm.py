"""gradients/gemm: all gradients of a layer whose input is one pixel; its plans, and its kernel on random geometries."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.gradients import gemm as gradients_gemm

H200 = plan.Device("sm_90a", 132, 227 << 10)
LATENT = Geometry(128, 100, 1, 1, 512, (4, 4))
MASKS = [(True, True, False), (True, True, True), (True, False, False), (False, True, True)]
#: Tolerances of both products, and of the bias relative to the sum of magnitudes, as in tests/cuda/test_cuda_op.py.
TOLERANCE = {torch.float32: (1e-3, 1e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}


def problem(
    geometry: Geometry = LATENT, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> plan.Problem:
    precision = "tf32" if dtype == torch.float32 else "ieee"
    return plan.Problem(geometry, dtype, precision, channels_last, channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_launch_computes_all_gradients(dtype: torch.dtype, channels_last: bool) -> None:
    posed = problem(dtype=dtype, channels_last=channels_last)
    for mask in MASKS:
        made = plan.plan_backward(posed, mask, H200)
        assert made.family == "gemm"
        assert len(made.outputs) == sum(mask)
        # Launches of their own add up the partial sums of grad_input and of the bias.
        assert len(made.launches) == 1 + mask[0] + mask[2]
        assert made.launches[0].shared_bytes <= H200.shared_memory_per_block


@pytest.mark.parametrize(
    "change",
    [
        {"height": 2, "width": 2},
        {"padding": (1, 1)},  # taps that reach nothing
        {"output_padding": (1, 1), "stride": (2, 2)},  # pixels that no tap reaches
        {"dilation": (2, 2)},
        {"groups": 4},
        {"in_channels": 102},
        {"batch": 0},
        {"batch": 4096},
    ],
    ids=str,
)
def test_the_family_does_not_compute_other_geometries(change: dict) -> None:
    assert gradients_gemm.supports(problem(), H200)
    assert not gradients_gemm.supports(problem(LATENT._replace(**change)), H200)


def test_the_family_computes_tf32_in_one_layout_on_sm_90a_only() -> None:
    assert not gradients_gemm.supports(problem()._replace(precision="ieee"), H200)
    assert not gradients_gemm.supports(problem()._replace(weight_channels_last=True), H200)
    assert not gradients_gemm.supports(problem(), H200._replace(architecture="sm_80"))
    assert gradients_gemm.plan_backward(problem(), (False, False, True), H200) is None


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_expected_clocks_decide(dtype: torch.dtype, channels_last: bool) -> None:
    """At each size of a layer with a large kernel; for all batches alike of one with a small kernel, whose maps of one
    pixel have one kernel."""
    chosen = set()
    for layer, mask in product(
        (LATENT, LATENT._replace(in_channels=1024, out_channels=64), LATENT._replace(kernel=(3, 3))), MASKS
    ):
        families = []
        for batch in (1, 8, 64, 200, 512):
            posed = problem(layer.with_batch(batch), dtype, channels_last)
            compared = (
                posed if layer.kernel == (4, 4) else problem(layer.with_batch(64), dtype, channels_last)
            )
            ours = gradients_gemm.expected_clocks(compared, mask, H200)
            others = plan.expected_clocks(compared, mask, H200)
            family = plan.plan_backward(posed, mask, H200).family
            assert (family == "gemm") == (ours <= others)
            families.append(family == "gemm")
        assert layer.kernel == (4, 4) or len(set(families)) == 1
        chosen.update(families)
    assert chosen == {True, False}


def test_tuning_reaches_it_where_others_are_expected_to_be_faster() -> None:
    for mask in ((True, False, False), (False, True, False), (False, True, True)):
        for batch in (1, 128, 512):
            found = plan.backward_candidates(problem(LATENT.with_batch(batch)), mask, H200, 8)
            assert "gemm" in {one.family for one in found}


def random_geometry(rng: random.Random) -> Geometry:
    kernel = rng.choice(((4, 4), (2, 3), (4, 1), (1, 1)))
    channels = rng.choice((4, 100, 128, 132, 260)), rng.choice((8, 24, 40, 64, 256))
    return Geometry(rng.choice((1, 3, 64, 130, 300)), channels[0], 1, 1, channels[1], kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_geometries_match_float64(seed: int) -> None:
    """In poisoned memory, and the same bits again."""
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs sm_90a (TMA)")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    posed = problem(random_geometry(rng), list(TOLERANCE)[seed % 3], rng.random() < 0.5)
    mask = rng.choice(MASKS)
    made = gradients_gemm.plan_backward(posed, mask, facts)
    assert made is not None
    layouts, (product, bias) = (posed.channels_last,) * 2, TOLERANCE[posed.dtype]
    assert_kernel_matches(made, posed.geometry, posed.dtype, layouts, product, mask, bias_tolerance=bias)
