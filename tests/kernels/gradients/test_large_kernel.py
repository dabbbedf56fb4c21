"""gradients/large_kernel: its plans, and its kernel on random geometries."""

from __future__ import annotations

import random

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.gradients.large_kernel import Shape, lower, shape_of, shared_bytes, supports

H200 = plan.Device("sm_90a", 132, 227 << 10)
FCN32S = Geometry(2, 21, 16, 16, 21, (64, 64), (32, 32), (16, 16))
FCN16S = Geometry(2, 21, 32, 32, 21, (32, 32), (16, 16), (8, 8))
#: Tolerances relative to float64, as in test_narrow_joint.py.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(geometry: Geometry, dtype: torch.dtype, channels_last: bool = False) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", [FCN32S, FCN16S, FCN16S.with_batch(8)], ids=str)
def test_one_pass_computes_both_gradients_of_fcn_heads(
    geometry: Geometry, dtype: torch.dtype, channels_last: bool
) -> None:
    posed = problem(geometry, dtype, channels_last)
    shape = shape_of(posed, H200)
    assert shape is not None
    assert shared_bytes(posed, shape) <= H200.shared_memory_per_block
    assert lower(posed, shape, H200).workspace_bytes <= 64 << 20
    assert (
        shape_of(problem(geometry.with_batch(256), dtype, channels_last), H200) is None
    )  # too many partial sums

    made = plan.plan_backward(posed, (True, True, True), H200)
    entries = [one.kernel.entry for one in made.launches]
    pays = dtype != torch.float32 or (channels_last and geometry is FCN32S)
    assert (entries[0] == "gradients_large_kernel") == pays
    # The bias comes with the weight by the implicit GEMM's tiles alone: those of narrow_mma hold some of the taps.
    assert ("grad_bias_general" in entries) == (pays or "grad_weight_narrow_mma" in entries)
    assert pays or {"grad_weight_narrow_mma", "grad_weight_implicit_gemm_mma"} & set(entries)
    by_im2col = dtype != torch.float32 and not channels_last and geometry is not FCN32S
    alone = plan.plan_backward(posed, (True, False, False), H200)
    assert alone.family == ("im2col" if by_im2col else "narrow_mma")


@pytest.mark.parametrize(
    "change",
    [
        {"in_channels": 33},
        {"padding": (16, 17)},
        {"dilation": (2, 1)},
        {"output_padding": (0, 1)},
        {"batch": 0},
    ],
    ids=str,
)
def test_the_family_does_not_compute_other_geometries(change: dict) -> None:
    assert supports(problem(FCN32S, torch.float16), H200)
    assert not supports(problem(FCN32S._replace(**change), torch.float16), H200)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(18))
def test_random_geometries_match_float64(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 3]
    vector = 16 // dtype.itemsize
    while True:
        geometry = Geometry(
            rng.choice((1, 2, 3)),
            rng.randint(1, 32),
            rng.randint(1, 9),
            rng.randint(1, 40),
            rng.randint(1, 4),
            (rng.randint(1, 20), vector * rng.randint(1, 4)),
            (rng.randint(1, 9), vector * rng.randint(1, 3)),
            (rng.randint(0, 4), vector * rng.randint(0, 1)),
        )
        posed = problem(geometry, dtype, rng.random() < 0.5)
        if min(geometry.out_height, geometry.out_width) > 0 and supports(posed, H200):
            break
    warps, taps = rng.choice((1, 3, 8, 12)), rng.choice((16, 32) if dtype == torch.float32 else (16, 32, 64))
    warp_tiles = -(-geometry.out_channels * geometry.taps // taps)
    shape = Shape(warps, taps, rng.choice((1, 1, 2, 5)), -(-warp_tiles // warps))
    part = lower(posed, shape, call.device_facts(0))
    layouts = (posed.channels_last, posed.weight_channels_last)
    assert_kernel_matches(part, geometry, dtype, layouts, TOLERANCE[dtype], (True, True, False))
