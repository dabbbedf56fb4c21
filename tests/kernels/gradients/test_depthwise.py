"""gradients/depthwise: its plans, and its kernel on random geometries."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.gradients import depthwise as gradients_depthwise
from tconv_swap.kernels.gradients.depthwise import DepthwiseTile, lags, meets_all, tile_of

H200 = plan.Device("sm_90a", 132, 227 << 10)
TURING = plan.Device("sm_75", 30, 64 << 10)
CENTERNET = Geometry(16, 64, 64, 64, 64, (4, 4), (2, 2), (1, 1), groups=64)
FCN = Geometry(2, 21, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)
LAYERS = (CENTERNET, FCN)
ALL = (True, True, True)
#: As in cuda_cases.py.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_every_gradient_comes_from_one_pass(geometry: Geometry, channels_last: bool) -> None:
    for dtype in DTYPES:
        made = plan.plan_backward(problem(geometry, dtype, channels_last), ALL, H200)
        assert made.family == "depthwise"
        entries = [step.kernel.entry for step in made.launches]
        # Launches of their own add up the partial sums of grad_weight and grad_bias, in a fixed order.
        assert entries == ["gradients_depthwise", "split_k_reduce", "split_k_reduce"]
        assert [output.shape for output in made.outputs] == [
            geometry.input_shape,
            geometry.weight_shape,
            (geometry.out_channels,),
        ]
        assert made.launches[0].shared_bytes <= TURING.shared_memory_per_block


def test_the_planner_takes_the_family_where_a_thread_can_keep_its_taps() -> None:
    def supported(posed: plan.Problem, device: plan.Device = H200) -> bool:
        return plan.plan_backward(posed, (True, True, False), device).family == "depthwise"

    assert supported(problem(CENTERNET), TURING)
    assert not supported(problem(CENTERNET._replace(out_channels=128)))
    assert not supported(problem(CENTERNET.with_batch(0)))
    assert not supported(problem(CENTERNET, torch.float64))
    # More taps than a thread can keep, however many threads share a tile.
    assert not supported(problem(Geometry(2, 8, 20, 20, 8, (9, 9), groups=8)))


def test_the_bias_has_a_launch_of_its_own_where_the_taps_do_not_meet_all_of_grad_output() -> None:
    gaps = Geometry(4, 32, 20, 20, 32, (2, 2), (3, 3), groups=32)
    beyond = CENTERNET._replace(padding=(0, 0), output_padding=(1, 1))
    assert meets_all(CENTERNET)
    for geometry in (gaps, beyond):
        assert not meets_all(geometry)
        made = plan.plan_backward(problem(geometry), ALL, H200)
        assert made.family == "depthwise, general"
        assert len(made.outputs) == 3


@pytest.mark.parametrize("batch", [1, 16, 512])
@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_partial_sums_are_bounded_whatever_the_batch(geometry: Geometry, batch: int) -> None:
    for channels_last in (False, True):
        posed = problem(geometry.with_batch(batch), channels_last=channels_last)
        part = gradients_depthwise.plan_gradients(posed, ALL, H200)
        assert part is not None
        assert part.workspace_bytes <= WORKSPACE_LIMIT_BYTES
        tile = tile_of(posed, ALL, H200)
        assert tile is not None
        # Each step of a tile meets all rows of the kernel.
        assert tile.phases * tile.phase_rows * lags(geometry) >= geometry.kernel[0]


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        channels = rng.choice((1, 3, 8, 21, 64, 70, 140))
        kernel, stride = (rng.randint(1, 7), rng.randint(1, 7)), (rng.randint(1, 5), rng.randint(1, 5))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        padding = (rng.randint(0, 4), rng.randint(0, 4))
        output_padding = (
            rng.choice((0, max(stride[0], dilation[0]) - 1)),
            rng.choice((0, 1)) * (max(stride[1], dilation[1]) - 1),
        )
        if rng.random() < 0.5:
            stride, dilation = (rng.choice((2, 6, 8, 16)), rng.choice((2, 4, 8))), (1, 1)
            kernel, padding = (2 * stride[0], 2 * stride[1]), (stride[0] // 2, stride[1] // 2)
            output_padding = (0, 0)
        geometry = Geometry(
            rng.randint(1, 9),
            channels,
            rng.randint(1, 70),
            rng.choice((rng.randint(1, 70), 8, 16, 64)),
            channels,
            kernel,
            stride,
            padding,
            output_padding,
            dilation,
            channels,
        )
        if min(geometry.out_height, geometry.out_width) > 0 and geometry.elements < 20_000_000:
            return geometry


def random_tile(rng: random.Random, posed: plan.Problem, mask: tuple[bool, ...]) -> DepthwiseTile | None:
    """Returns the tile that the planner takes, with a random number of rows."""
    tile = tile_of(posed, mask, rng.choice((H200, TURING)))
    return None if tile is None else replace(tile, rows=rng.choice((tile.rows, 3, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_geometries_match_float64(seed: int) -> None:
    """In poisoned memory, and the same bits again."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    tile = None
    while tile is None:
        g, dtype, channels_last = random_geometry(rng), rng.choice(DTYPES), rng.random() < 0.5
        mask = (rng.random() < 0.8, rng.random() < 0.8, rng.random() < 0.5 and meets_all(g))
        posed = problem(g, dtype, channels_last)
        if gradients_depthwise.plan_gradients(posed, mask, facts) is not None:
            tile = random_tile(rng, posed, mask)
    part = gradients_depthwise.lower(posed, tile, mask, facts)
    layouts = (channels_last, channels_last)
    assert_kernel_matches(part, g, dtype, layouts, TOLERANCE[dtype], mask)
