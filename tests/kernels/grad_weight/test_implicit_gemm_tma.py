"""The implicit GEMM of the weight's gradient with TMA (csrc/kernels/grad_weight/implicit_gemm_tma.cu): which layers it
computes, the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import math
import random

import pytest
import torch
from harness import assert_kernel_matches
from oracle import conv_transpose2d_reference

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight.implicit_gemm_tma import lower, supports
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import Schedule
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import split_choices, works_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import TmaTile, candidates, shared_bytes
from tconv_swap.kernels.grad_weight.layer import pixel_tiles, reads_all_of_grad_output
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import ArgumentKind, Output, Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN2 = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
UNET = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
CYCLEGAN = Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1))
MASKRCNN = Geometry(256, 256, 14, 14, 256, (2, 2), (2, 2))
AUDIO = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))
POSE = Geometry(32, 2048, 8, 6, 256, (4, 4), (2, 2), (1, 1))
LAYERS = (DCGAN2, UNET, CYCLEGAN, MASKRCNN, AUDIO, POSE)
#: Relative L2 errors against float64, as in tests/cuda/test_cuda_op.py.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float16, channels_last: bool = True
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_wide_layers_in_16_bits_and_channels_last_are_planned_with_tma(geometry: Geometry) -> None:
    def family(posed: plan.Problem, device: plan.Device = H200) -> str:
        return plan.plan_backward(posed, (False, True, False), device).family

    assert family(problem(geometry)) == family(problem(geometry, torch.bfloat16)) == "implicit_gemm_tma"
    assert family(problem(geometry, channels_last=False)) != "implicit_gemm_tma"
    assert family(problem(geometry, torch.float32)) != "implicit_gemm_tma"
    assert family(problem(geometry), plan.Device("sm_100", 132, 227 << 10)) != "implicit_gemm_tma"


@pytest.mark.parametrize(
    "change",
    [
        {"in_channels": 100},  # a pixel does not begin at a multiple of 16 bytes
        {"out_channels": 68},
        {"stride": (9, 2)},  # beyond a box's steps
        {"out_channels": 16},
        {"batch": 0},
    ],
    ids=str,
)
def test_what_tma_cannot_load_is_not_claimed(change: dict) -> None:
    assert supports(problem(CYCLEGAN), H200)
    assert not supports(problem(CYCLEGAN._replace(**change)), H200)


def test_few_channels_are_planned_with_tma_where_the_kernel_leaves_gaps() -> None:
    gaps = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
    part = plan.plan_backward(problem(gaps), (False, True, False), H200)
    assert part.family == "implicit_gemm_tma"
    # Three taps side by side, not two and one unused.
    constants = dict(part.launches[0].kernel.constants)
    assert (constants["TAP_ROWS"], constants["TAP_COLS"]) in ((1, 3), (3, 1))
    assert not supports(problem(gaps._replace(stride=(3, 3), dilation=(1, 1))), H200)
    assert not supports(problem(gaps._replace(in_channels=24)), H200)


def possible_splits(posed: plan.Problem, tma_tile: TmaTile, device: plan.Device) -> list[int]:
    """Returns into how many splits the pixels may be cut."""
    tiles = pixel_tiles(posed.geometry, tma_tile.tile.shape)
    return split_choices(next(works_of(posed, (tma_tile,))), tiles, device)


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_every_tile_keeps_the_limits_of_workspace_shared_memory_and_tensor_maps(geometry: Geometry) -> None:
    posed = problem(geometry)
    found = list(candidates(posed, H200))
    assert found
    for tma_tile in random.Random(0).sample(found, min(40, len(found))):
        assert shared_bytes(posed, tma_tile) <= H200.shared_memory_per_block
        for splits in possible_splits(posed, tma_tile, H200):
            part = lower(posed, Schedule(posed, tma_tile, next(works_of(posed, (tma_tile,)))), splits, False)
            one_copy = 4 * math.prod(geometry.weight_shape)
            # Whole tiles may be four times the gradient: taps and channels may not fill them.
            assert part.workspace_bytes <= max(64 << 20, 4 * one_copy)
            main = part.launches[0]
            for one in main.tensor_maps:
                assert all(0 < size <= 256 for size in one.box)
                assert all(step <= 8 for step in one.steps)
                assert all(stride % 16 == 0 for stride in one.strides)


def test_tiles_never_read_pixels_that_no_tap_reaches() -> None:
    """Offsets 0, 4, 8 at stride 5 leave gaps that pixels beyond the last would read."""
    geometry = Geometry(8, 64, 16, 13, 64, (1, 3), (1, 5), dilation=(1, 4))
    tiles = list(candidates(problem(geometry), H200))
    assert {tma_tile.tile.cols for tma_tile in tiles} <= {13}
    without = list(candidates(problem(geometry._replace(dilation=(1, 1))), H200))
    assert {tma_tile.tile.cols for tma_tile in without} >= {8, 16}


def test_boxes_begin_at_whole_pieces_of_memory() -> None:
    """A box of a group whose channels begin elsewhere raised an illegal instruction, although all channels together
    were whole pieces."""
    grouped = Geometry(1, 8 * 512, 64, 64, 8 * 256, (3, 3), (2, 2), groups=8)
    assert supports(problem(grouped), H200)
    for channels in ({"in_channels": 8 * 511}, {"out_channels": 8 * 257}, {"in_channels": 8 * 516}):
        assert not supports(problem(grouped._replace(**channels)), H200)


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        stride = (rng.randint(1, 5), rng.randint(1, 5))
        kernel = (rng.randint(1, 5), rng.randint(1, 5))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        padding = (rng.randint(0, 3), rng.randint(0, 3))
        output_padding = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        if rng.random() < 0.4:
            kernel, padding, output_padding, dilation = stride, (0, 0), (0, 0), (1, 1)
        height, width = rng.choice(
            ((4, 4), (8, 6), (5, 7), (8, 8), (9, 13), (14, 14), (1, 70), (12, 10), (33, 31))
        )
        geometry = Geometry(
            rng.choice((1, 2, 3, 5, 16)),
            groups * rng.choice((40, 64, 68, 72, 128, 200, 256)),
            height,
            width,
            groups * rng.choice((24, 32, 40, 60, 64, 72, 128, 136, 256, 320)),
            kernel,
            stride,
            padding,
            (output_padding[0], output_padding[1]),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def forced(posed: plan.Problem, tma_tile: TmaTile, splits: int, with_bias: bool) -> Plan:
    g = posed.geometry
    part = lower(posed, Schedule(posed, tma_tile, next(works_of(posed, (tma_tile,)))), splits, with_bias)
    assert any(a.kind is ArgumentKind.TENSOR_MAP for a in part.launches[0].arguments)
    outputs = [Output(g.weight_shape, posed.weight_channels_last), Output((g.out_channels,))]
    return Plan(part.family, part.why, tuple(outputs[: 1 + with_bias]), part.launches, part.workspace_bytes)


def posed_at_random(
    rng: random.Random, dtype: torch.dtype, facts: plan.Device
) -> tuple[plan.Problem, list[TmaTile]]:
    while True:
        posed = plan.Problem(random_geometry(rng), dtype, "ieee", True, rng.random() < 0.5)
        tiles = list(candidates(posed, facts)) if supports(posed, facts) else []
        if rng.random() < 0.4:
            tiles = [one for one in tiles if one.box_per_tap_col] or tiles
        if tiles:
            return posed, tiles


def tensors(posed: plan.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    g = posed.geometry
    grad, x = (torch.randn(shape, device="cuda").to(posed.dtype) for shape in (g.output_shape, g.input_shape))
    return grad.contiguous(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(64))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Whatever the kernel supports, with a random tile: poisoned outputs, the same bits twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    posed, tiles = posed_at_random(rng, (torch.float16, torch.bfloat16)[seed % 2], facts)
    tma_tile = rng.choice(tiles)
    with_bias = reads_all_of_grad_output(posed.geometry)
    made = forced(posed, tma_tile, rng.choice(possible_splits(posed, tma_tile, facts)), with_bias)
    layouts, mask = (True, posed.weight_channels_last), (False, True, with_bias)
    assert_kernel_matches(made, posed.geometry, posed.dtype, layouts, TOLERANCE[posed.dtype], mask)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dilation"), [(13, 1), (16, 4)])
def test_an_infinity_that_no_tap_reads_does_not_reach_the_gradient(size: int, dilation: int) -> None:
    """Gaps between the taps, and output padding; 13 pixels fill no tile."""
    torch.manual_seed(0)
    facts = call.device_facts(0)
    posed = problem(Geometry(4, 64, size, size, 72, (3, 3), (5, 5), (1, 1), (3, 3), (dilation, dilation)))
    g = posed.geometry
    grad, x = tensors(posed)
    ones = (torch.ones(shape, device="cuda") for shape in (g.input_shape, g.weight_shape))
    reached = (
        conv_transpose2d_reference(*ones, None, g.stride, g.padding, g.output_padding, 1, g.dilation) != 0
    )
    assert not reached.all()
    grad = grad.masked_fill(~reached, float("inf")).contiguous(memory_format=torch.channels_last)
    tiles = list(candidates(posed, facts))
    assert tiles
    for tma_tile in random.Random(0).sample(tiles, min(6, len(tiles))):
        made = forced(posed, tma_tile, 1, False)
        handle = launch.add_plan(made, posed.dtype, torch.device("cuda", 0), facts.architecture)
        (gradient,) = torch.ops.tconv_swap.launch.default(handle, [grad, x, None])
        assert torch.isfinite(gradient).all(), made.why
