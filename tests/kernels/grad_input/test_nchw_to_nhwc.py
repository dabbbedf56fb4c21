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
from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.common.ranked import Ranked
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.implicit_gemm_layout import as_convolution, of_any_size
from tconv_swap.runtime.program import output, workspace

H200 = plan.Device("sm_90a", 132, 227 << 10)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(geometry: Geometry, dtype: torch.dtype = torch.float16) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", False, False)


def supported(posed: plan.Problem) -> bool:
    return grad_input_nchw_to_nhwc.supports(as_convolution(posed), H200)


def every_kernel(posed: plan.Problem) -> tuple[grad_input_tma_choice.Schedule, ...]:
    """Returns all kernels that a layer may have which read copies."""
    layer = of_any_size(as_convolution(posed))
    return grad_input_tma_choice.candidates(grad_input_nchw_to_nhwc.convolution_of_copies(layer), H200)


def ranked(posed: plan.Problem) -> list[Ranked]:
    return grad_input_nchw_to_nhwc.ranked(every_kernel(posed), posed, H200)


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
        if min(geometry.output_shape) > 0 and supported(posed):
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


def test_copies_take_at_most_2_5_gib() -> None:
    few = Geometry(300, 256, 64, 128, 128, (3, 3), (2, 2), (1, 1), (1, 1))
    assert supported(problem(few))
    assert not supported(problem(few.with_batch(330)))
    assert not supported(problem(few.with_batch(0)))
    for posed in (problem(few.with_batch(330)), problem(few.with_batch(0))):
        assert not ranked(posed)
        assert not grad_input_nchw_to_nhwc.ranked_from_copies(every_kernel(posed), posed, H200)


def test_a_copy_that_is_there_already_counts_no_more() -> None:
    """The gradient of the weight reads the copy of grad_output, too."""
    posed = problem(Geometry(334, 256, 7, 7, 128, (3, 3), (2, 2), (1, 1), (1, 1)))
    alone = ranked(posed)
    shared = grad_input_nchw_to_nhwc.ranked_from_copies(every_kernel(posed), posed, H200)
    copied_bytes = 2 * math.prod(posed.geometry.output_shape)
    assert len(alone) == len(shared) > 1
    for one, other in zip(alone, shared, strict=True):
        assert one.clocks - other.clocks == pytest.approx(copy_clocks(2 * copied_bytes))
        # The weight is copied by another launch as well, whose clocks count.
        *copies, main = (launch.kernel.entry for launch in one.make().launches[:3])
        assert [copies, main] == [["nchw_to_nhwc"] * 2, "grad_input_implicit_gemm_tma"]
        assert other.make().launches[0].kernel == one.make().launches[2].kernel
    convolution = as_convolution(posed)
    half = grad_input_nchw_to_nhwc.expected(convolution, 1000.0, 0.5)
    of_all, of_weight = (grad_input_nchw_to_nhwc.expected(convolution, 1000.0, share) for share in (1.0, 0.0))
    assert half == pytest.approx((of_all + of_weight) / 2)
    weight_bytes = 2 * math.prod(posed.geometry.weight_shape)
    assert of_weight == pytest.approx(1000 + copy_clocks(2 * weight_bytes))


def test_copies_for_the_gradient_of_the_input_alone_follow_the_sums_of_splits() -> None:
    posed = problem(Geometry(1, 512, 5, 5, 256, (4, 4), (2, 2), (1, 1)))
    assert supported(posed)
    split = False
    for one in ranked(posed):
        part = one.make()
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
        for one in ranked(posed)[:3]:
            part = one.make()
            assert one.clocks > 0
            places = [a.value for made in part.launches for a in made.operands if a.kind.name == "WORKSPACE"]
            assert all(place % 256 == 0 and place < part.workspace_bytes for place in places)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs sm_90a"
)
@pytest.mark.parametrize("seed", range(4))
def test_random_problems_match_float64(seed: int) -> None:
    torch.manual_seed(seed)
    for posed in random_problems(seed, 6):
        for one in ranked(posed)[:3]:
            layouts, tolerance = (False, False), TOLERANCE[posed.dtype]
            mask = (True, False, False)
            assert_kernel_matches(one.make(), posed.geometry, posed.dtype, layouts, tolerance, mask)
