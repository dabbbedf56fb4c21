"""gradients/narrow_joint: its plans, and its kernel on random geometries with every tile."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from harness import assert_kernel_matches
from sampling import sampled
from size_cases import random_output_padding

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.gradients.narrow_joint import counts_the_output, lower, shared_bytes, supports, tiles

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
PIX2PIX = Geometry(16, 128, 128, 128, 3, (4, 4), (2, 2), (1, 1))
FSRCNN = Geometry(4, 56, 270, 480, 1, (9, 9), (4, 4), (4, 4), (3, 3))
LAYERS = (DCGAN, PIX2PIX, FSRCNN)
#: Tolerances of the gradients relative to float64; the products of float32 are exact to float32.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(geometry: Geometry, dtype: torch.dtype, channels_last: bool = False) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize(
    ("geometry", "dtype", "channels_last"),
    sampled(itertools.product(LAYERS, DTYPES, (False, True)), 5),
    ids=str,
)
def test_one_pass_computes_all_gradients_of_rgb_heads(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> None:
    posed = problem(geometry, dtype, channels_last)
    for mask in ((True, True, True), (True, True, False)):
        made = plan.plan_backward(posed, mask, H200)
        entries = [one.kernel.entry for one in made.launches]
        assert entries == ["gradients_narrow_joint"] + ["split_k_reduce"] * (2 if mask[2] else 1)
        assert len(made.outputs) == sum(mask)
        assert made.workspace_bytes <= 64 << 20
        main = made.launches[0]
        assert all(size <= 256 for one in main.tensor_maps for size in one.box)
        assert all(stride % 16 == 0 for one in main.tensor_maps for stride in one.strides)
    alone = plan.plan_backward(posed, (True, False, False), H200)
    assert alone.family == ("narrow_mma" if dtype == torch.float32 else "im2col")
    assert plan.plan_backward(posed, (True, True, False), plan.Device("sm_90", 132, 227 << 10)).family != (
        "narrow_joint"
    )


def test_the_bias_has_a_launch_of_its_own_where_im2col_does_not_hold_all_of_grad_output() -> None:
    gaps = PIX2PIX._replace(stride=(5, 5), padding=(1, 1))
    assert counts_the_output(PIX2PIX)
    assert not counts_the_output(gaps)
    entries = [
        one.kernel.entry
        for one in plan.plan_backward(problem(gaps, torch.float32), (True,) * 3, H200).launches
    ]
    assert entries[0] == "gradients_narrow_joint"
    assert "grad_bias_general" in entries


@pytest.mark.parametrize(
    "change",
    [
        {"in_channels": 136},
        {"out_channels": 8},
        {"groups": 1, "kernel": (11, 9)},  # more taps than a tile holds
        {"width": 127, "height": 127},  # channels do not begin at multiples of 16 bytes
        {"batch": 0},
    ],
    ids=str,
)
def test_the_family_does_not_compute_other_geometries(change: dict) -> None:
    assert supports(problem(PIX2PIX, torch.float16), H200)
    assert not supports(problem(PIX2PIX._replace(**change), torch.float16), H200)


def test_one_kernel_computes_every_batch_size() -> None:
    kernels = {
        plan.plan_backward(problem(DCGAN.with_batch(batch), torch.float16), (True,) * 3, H200)
        .launches[0]
        .kernel
        for batch in (1, 7, 128)
    }
    assert len(kernels) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_sum_has_more_terms_than_its_dtype_allows(dtype: torch.dtype) -> None:
    posed = problem(DCGAN.with_batch(1 << 14), dtype)
    main = plan.plan_backward(posed, (True, True, False), H200).launches[0]
    constants = dict(main.kernel.constants)
    tiles_each = -(-main.arguments[-1].value // main.grid)
    steps = tiles_each * constants["PIXELS"] // 16 // constants["WEIGHT_WARPS_K"]
    assert steps <= (2 * 256 if dtype == torch.float32 else 2048)


def random_problem(rng: random.Random, dtype: torch.dtype) -> plan.Problem:
    while True:
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        dilation = (rng.choice((1, 1, 2)), rng.choice((1, 1, 3)))
        geometry = Geometry(
            rng.choice((1, 2, 3, 5, 40)),
            rng.choice((12, 16, 24, 40, 56, 64, 72, 100, 128)),
            rng.randint(1, 20),
            rng.randint(1, 40),
            rng.randint(1, 7),
            (rng.randint(1, 6), rng.randint(1, 6)),
            stride,
            (rng.randint(0, 3), rng.randint(0, 3)),
            random_output_padding(rng, stride, dilation),
            dilation,
        )
        posed = plan.Problem(geometry, dtype, "ieee", rng.random() < 0.5, rng.random() < 0.5)
        whole = geometry.out_height > 0 and geometry.out_width > 0
        if whole and supports(posed, H200) and any(tiles(posed, H200)):
            return posed


def test_every_tile_fits_into_a_multiprocessor() -> None:
    rng = random.Random(0)
    for index in range(12):
        posed = random_problem(rng, DTYPES[index % 3])
        for tile in tiles(posed, H200):
            assert tile.blocks * (shared_bytes(posed, tile) + 1024) <= H200.shared_memory_per_block + 1024
            assert tile.threads <= 1024
            assert lower(posed, tile, H200, False).workspace_bytes <= 64 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_random_geometries_match_float64_with_random_tiles(seed: int) -> None:
    """In poisoned memory, and the same bits again."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs sm_90a (TMA)")
    posed = random_problem(rng, DTYPES[seed % 3])
    with_bias = counts_the_output(posed.geometry)
    part = lower(posed, rng.choice(list(tiles(posed, facts))), facts, with_bias)
    layouts, mask = (posed.channels_last, posed.weight_channels_last), (True, True, with_bias)
    assert_kernel_matches(part, posed.geometry, posed.dtype, layouts, TOLERANCE[posed.dtype], mask)
