"""grad_input/nchw_to_nhwc: which gradients of the input copies in channels_last compute, their workspace and cost, and
random problems on a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.implicit_gemm_tma_choice import choose
from tconv_swap.runtime.program import output, workspace

H200 = plan.Device("sm_90a", 132, 227 << 10)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(geometry: Geometry, dtype: torch.dtype = torch.float16) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", False, False)


def random_problems(seed: int, count: int) -> Iterator[plan.Problem]:
    """Yields problems that copies compute: odd sizes, groups, strides, dilation, maps of one row."""
    rng = random.Random(seed)
    found = 0
    while found < count:
        groups = rng.choice((1, 1, 1, 2))
        kernel = rng.randint(1, 5), rng.randint(2, 5)
        stride = rng.randint(1, 3), rng.randint(1, 3)
        dilation = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1)))
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = rng.randint(0, reach[0]), rng.randint(0, reach[1])
        output_padding = rng.randint(0, stride[0] - 1), rng.randint(0, stride[1] - 1)
        size = rng.randint(1, 21), rng.randint(2, 21)
        geometry = Geometry(
            rng.choice((1, 3, 9)),
            groups * rng.choice((40, 64, 136)),
            *size,
            groups * rng.choice((40, 64, 72, 136)),
            kernel,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
        )
        posed = problem(geometry, rng.choice(tuple(TOLERANCE)))
        if min(geometry.output_shape) > 0 and grad_input_nchw_to_nhwc.supports(posed, H200):
            found += 1
            yield posed


@pytest.mark.parametrize(
    ("geometry", "converted"),
    [
        (Geometry(2, 1024, 32, 32, 512, (3, 3), (2, 2)), True),
        (Geometry(334, 256, 7, 7, 128, (3, 3), (2, 2), (1, 1), (1, 1)), True),  # rows that no copy of 4 fits
        (Geometry(16, 256, 32, 32, 128, (4, 4), (2, 2), (1, 1)), False),  # im2col loads these rows
        (Geometry(8, 256, 37, 37, 256, (4, 4), (4, 4)), False),  # each element is read once
        (Geometry(334, 256, 7, 7, 132, (3, 3), (2, 2), (1, 1), (1, 1)), False),  # no multiple of 8 channels
    ],
    ids=str,
)
def test_which_gradients_of_the_input_go_that_way_alone(geometry: Geometry, converted: bool) -> None:
    made = plan.plan_backward(problem(geometry), (True, False, False), H200)
    assert ("nchw_to_nhwc, implicit_gemm_tma" in made.family) == ("nchw_to_nhwc" in made.family) == converted


def test_copies_take_at_most_1_gib() -> None:
    few = Geometry(110, 256, 64, 128, 128, (3, 3), (2, 2), (1, 1), (1, 1))
    assert grad_input_nchw_to_nhwc.supports(problem(few), H200)
    assert not grad_input_nchw_to_nhwc.supports(problem(few.with_batch(140)), H200)
    assert not grad_input_nchw_to_nhwc.supports(problem(few.with_batch(0)), H200)


def test_a_copy_that_is_there_already_counts_no_more() -> None:
    """The gradient of the weight reads the copy of grad_output, too."""
    posed = problem(Geometry(334, 256, 7, 7, 128, (3, 3), (2, 2), (1, 1), (1, 1)))
    (tile,) = choose(grad_input_nchw_to_nhwc.convolution_of_copies(posed), H200)
    alone, shared = (
        grad_input_nchw_to_nhwc.expected(posed, tile, H200, grad_output_is_copied=copied)
        for copied in (False, True)
    )
    copied_bytes = 2 * math.prod(posed.geometry.output_shape)
    assert alone - shared == pytest.approx(
        grad_input_nchw_to_nhwc.LAUNCH_CLOCKS + 2 * copied_bytes * grad_input_nchw_to_nhwc.COPIED_BYTE_CLOCKS
    )


def test_copies_for_the_gradient_of_the_input_alone_follow_the_sums_of_splits() -> None:
    posed = problem(Geometry(1, 512, 5, 5, 256, (4, 4), (2, 2), (1, 1)))
    assert grad_input_nchw_to_nhwc.supports(posed, H200)
    split = False
    for ranked in grad_input_nchw_to_nhwc.ranked(posed, H200, 8):
        part = ranked.make()
        grad_output, weight, main = part.launches[:3]
        assert not grad_output.overlaps_previous
        assert not main.overlaps_previous
        assert [one.base for one in main.tensor_maps] == [grad_output.arguments[1], weight.arguments[1]]
        first, second = grad_output.arguments[1].value, weight.arguments[1].value
        assert second >= first + 2 * math.prod(posed.geometry.output_shape)
        assert part.workspace_bytes >= second + 2 * math.prod(posed.geometry.weight_shape)
        if len(part.launches) > 3:
            split = True
            assert first >= 2 * 4 * math.prod(posed.geometry.input_shape)
            assert main.arguments[2] == workspace(0)
        else:
            assert main.arguments[2] == output(0)
    assert split


@pytest.mark.parametrize("seed", range(4))
def test_random_problems_have_parts_whose_workspace_holds_them(seed: int) -> None:
    for posed in random_problems(seed, 10):
        for ranked in grad_input_nchw_to_nhwc.ranked(posed, H200, 3):
            part = ranked.make()
            assert ranked.clocks > 0
            places = [a.value for one in part.launches for a in one.operands if a.kind.name == "WORKSPACE"]
            assert all(place % 256 == 0 and place < part.workspace_bytes for place in places)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs sm_90a"
)
@pytest.mark.parametrize("seed", range(4))
def test_random_problems_match_float64(seed: int) -> None:
    torch.manual_seed(seed)
    for posed in random_problems(seed, 6):
        for ranked in grad_input_nchw_to_nhwc.ranked(posed, H200, 3):
            layouts, tolerance = (False, False), TOLERANCE[posed.dtype]
            mask = (True, False, False)
            assert_kernel_matches(ranked.make(), posed.geometry, posed.dtype, layouts, tolerance, mask)
