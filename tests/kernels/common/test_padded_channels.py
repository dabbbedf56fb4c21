"""Tensors in channels_last with an odd number of channels in 16 bits: copies of them have more."""

from __future__ import annotations

import random

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import H200

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.pad_rows import Rows
from tconv_swap.kernels.common.padded_channels import MIN_CHANNELS, padded_channels, reading_copies
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.program import ArgumentKind, Launch, Part, Plan

#: Layers with an odd number of input and output channels: strided, of stride 1, with a copy engine's kernel.
LAYERS = [
    Geometry(3, 33, 12, 11, 17, (3, 3), (2, 2), (1, 1)),
    Geometry(2, 129, 9, 16, 49, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 257, 7, 9, 129, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 65, 20, 18, 33, (3, 3), (1, 1), (1, 1)),
    Geometry(4, 45, 1, 60, 21, (1, 16), (1, 8), (0, 4)),
    Geometry(5, 129, 1, 1, 65, (4, 4)),
]
#: As many channels on the other side as the copy engine's kernels need.
EVEN = 128


def forward_of(layer: Geometry, weight_last: bool = True) -> Plan:
    problem = Problem(layer, torch.float16, "ieee", True, weight_last)
    return next(
        made
        for made in forward_plan.plan_candidates(problem, True, H200, 8)
        if made.family == "implicit_gemm"
    )


def grad_input_of(layer: Geometry, weight_last: bool = True) -> Part:
    problem = Problem(layer, torch.float16, "ieee", True, weight_last)
    (made,) = grad_input_implicit_gemm.part_candidates(problem, H200, 1)
    return made


def inputs_of(launches: tuple[Launch, ...]) -> set[int]:
    return {a.value for one in launches for a in one.operands if a.kind is ArgumentKind.INPUT}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("weight_last", [False, True])
def test_only_the_copies_are_read(layer: Geometry, weight_last: bool) -> None:
    for made, copied in (
        (forward_of(layer, weight_last), (0, 1)),
        (grad_input_of(layer, weight_last), (0, 2)),
    ):
        pads, rest = made.launches[:2], made.launches[2:]
        assert [one.kernel.entry for one in pads] == ["pad_rows", "pad_rows"]
        assert [inputs_of((one,)) for one in pads] == [{operand} for operand in copied]
        assert not inputs_of(rest) & set(copied)
        assert not rest[0].overlaps_previous
        places = [a.value for one in pads for a in one.operands if a.kind is ArgumentKind.WORKSPACE]
        ends = [
            at + 16 * count * pieces for at, (count, _, pieces, *_) in zip(places, copies(pads), strict=True)
        ]
        assert places[0] < ends[0] <= places[1] < ends[1] <= made.workspace_bytes


def copies(pads: tuple[Launch, ...]) -> list[tuple[int, ...]]:
    return [one.structs[0] for one in pads]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_copies_have_whole_pieces_of_the_tensors(layer: Geometry) -> None:
    g = layer
    for made, shapes, channels in (
        (forward_of(g), (g.input_shape, g.weight_shape), g.in_channels),
        (grad_input_of(g), (g.output_shape, g.weight_shape), g.out_channels),
    ):
        wide = -(-channels // 8) * 8
        for (rows, width, pieces, *_), shape in zip(copies(made.launches[:2]), shapes, strict=True):
            assert rows * width == torch.Size(shape).numel()
            assert 8 * pieces * channels == width * wide


def test_the_launch_after_the_copies_waits_for_them() -> None:
    made = forward_of(LAYERS[0])
    *_, last = made.launches
    overlapping = last._replace(overlaps_previous=True)
    found = reading_copies((overlapping, overlapping), 0, (Rows(0, 4, 33, 40),), torch.float16)
    (pad, first, second), _ = found
    assert [one.overlaps_previous for one in (pad, first, second)] == [False, False, True]


def test_other_problems_are_read_as_they_are() -> None:
    layer = LAYERS[0]
    problem = Problem(layer, torch.float16, "ieee", True, True)
    assert padded_channels(problem, 33) == 40
    for other in (
        problem._replace(channels_last=False),
        problem._replace(dtype=torch.float32),
        problem._replace(geometry=layer._replace(in_channels=34, out_channels=34, groups=2)),
    ):
        assert padded_channels(other, 33) is None
    assert padded_channels(problem, 34) is None
    assert padded_channels(problem, MIN_CHANNELS - 1) is None


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", [*LAYERS, *(one._replace(in_channels=EVEN) for one in LAYERS)], ids=str)
def test_against_float64(layer: Geometry, dtype: torch.dtype, weight_last: bool) -> None:
    torch.manual_seed(0)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the tiles are chosen for sm_90a")
    rng, tolerance = random.Random(0), 1e-3 if dtype == torch.float16 else 8e-3
    for _ in range(3):
        problem = Problem(layer, dtype, "ieee", True, weight_last)
        for part in grad_input_implicit_gemm.part_candidates(problem, H200, 3):
            assert_kernel_matches(
                part, layer, dtype, (True, weight_last), tolerance, mask=(True, False, False)
            )
        for plan in forward_plan.plan_candidates(problem, True, H200, 4):
            assert_kernel_matches(plan, layer, dtype, (True, weight_last), tolerance, with_bias=True)
        layer = layer._replace(batch=rng.randint(1, 5), width=layer.width + rng.randint(0, 9))
