"""Plans that convert NCHW tensors to channels_last, and the kernel that converts them on a GPU."""

from __future__ import annotations

import math
import random

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import quotient

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.common.nchw_to_nhwc import (
    Matrices,
    block_for,
    reduce_row_sums,
    row_sums_bytes,
    transpose,
)
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.runtime.program import (
    Argument,
    ArgumentKind,
    Launch,
    Output,
    Plan,
    input_,
    output,
    with_operands,
    workspace,
)

H200 = plan.Device("sm_90a", 132, 227 << 10)
WIDE = Geometry(8, 512, 32, 32, 256, (4, 4), (2, 2), (1, 1))
#: Rows whose gradient of the input boxes load from a copy, too.
ODD = WIDE._replace(height=31, width=31)
#: Odd widths, batch tails, groups, dilation, maps of one row, few channels.
CASES = (
    Geometry(3, 256, 9, 13, 136, (3, 3), (2, 2), (1, 1), (1, 1)),
    Geometry(5, 512, 7, 7, 256, (2, 2), (2, 2)),
    Geometry(2, 512, 5, 21, 512, (4, 4), (2, 2), (1, 1), groups=2),
    Geometry(3, 256, 6, 10, 512, (3, 2), (3, 2)),
    Geometry(9, 264, 4, 4, 128, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 256, 1, 70, 128, (1, 16), (1, 8), (0, 4)),
    Geometry(2, 256, 11, 37, 136, (4, 4), (4, 4)),
    Geometry(1, 384, 3, 5, 128, (5, 5), (2, 2), (2, 2), (1, 0), (1, 2)),
    Geometry(3, 96, 9, 14, 48, (3, 3), (2, 2), (1, 1), (1, 1)),
)


def problem(geometry: Geometry = WIDE, dtype: torch.dtype = torch.float16) -> plan.Problem:
    return plan.Problem(geometry, dtype, "tf32", False, False)


def test_a_gradient_of_the_input_that_boxes_cannot_load_is_planned_without_copies() -> None:
    """Strides of 10 are too long for the boxes of grad_output if its columns are not whole strides; im2col copies its
    rows to longer ones."""
    posed = problem(Geometry(12, 768, 1, 174, 384, (1, 20), (1, 10), (0, 5), (0, 1)))
    assert not list(gradients_nchw_to_nhwc.plan_candidates(posed, (True, True, True), H200))
    assert plan.plan_backward(posed, (True, False, False), H200).family == "im2col"


def by_way_of_channels_last(geometry: Geometry, mask: tuple[bool, ...]) -> Plan:
    """Returns the first plan that reads copies, whether or not others are faster."""
    return next(gradients_nchw_to_nhwc.plan_candidates(problem(geometry), mask, H200))


def conversions(made: Plan, source: ArgumentKind) -> list[Launch]:
    return [
        one for one in made.launches if one.kernel.entry == "nchw_to_nhwc" and one.arguments[0].kind == source
    ]


def workspace_places(made: Plan) -> list[int]:
    return [a.value for one in made.launches for a in one.operands if a.kind == ArgumentKind.WORKSPACE]


@pytest.mark.parametrize("geometry", [WIDE, ODD], ids=["grad_input as it lies", "grad_input from copies"])
@pytest.mark.parametrize(
    "mask", [(True, True, True), (True, True, False), (False, True, True), (False, True, False)]
)
def test_each_tensor_is_copied_once_and_each_gradient_written(
    mask: tuple[bool, ...], geometry: Geometry
) -> None:
    made = by_way_of_channels_last(geometry, mask)
    shapes = (geometry.input_shape, geometry.weight_shape, (geometry.out_channels,))
    assert [o.shape for o in made.outputs] == [s for s, wanted in zip(shapes, mask, strict=True) if wanted]
    assert not any(o.channels_last for o in made.outputs)
    written = {a.value for one in made.launches for a in one.operands if a.kind == ArgumentKind.OUTPUT}
    assert written == set(range(len(made.outputs)))
    brought = [one.arguments[0].value for one in conversions(made, ArgumentKind.INPUT)]
    assert brought == ([0, 1, 2] if mask[0] and geometry == ODD else [0, 1])
    assert not made.launches[0].overlaps_previous
    # The kernel that multiplies reads what several launches wrote, so it waits for all of them. So does the launch that
    # converts a gradient back.
    first = next(i for i, one in enumerate(made.launches) if "implicit_gemm_tma" in one.kernel.entry)
    assert not made.launches[first].overlaps_previous


def test_copies_and_the_workspace_of_parts_do_not_overlap() -> None:
    made = by_way_of_channels_last(ODD, (True, True, True))
    places = workspace_places(made)
    assert all(place % 256 == 0 for place in places)
    sizes = [2 * math.prod(shape) for shape in (ODD.output_shape, ODD.input_shape, ODD.weight_shape)]
    converted = conversions(made, ArgumentKind.INPUT)
    for one, size in zip(converted, sizes, strict=True):
        begin = one.arguments[1].value
        assert not any(begin < place < begin + size for place in places)
        assert begin + size <= made.workspace_bytes
    back = conversions(made, ArgumentKind.WORKSPACE)
    assert all(one.arguments[1].kind == ArgumentKind.OUTPUT and not one.overlaps_previous for one in back)
    most = sum(sizes) + sizes[2] * len(back) + general.WORKSPACE_LIMIT_BYTES + (1 << 20)
    assert max(places) <= made.workspace_bytes <= most


@pytest.mark.parametrize(
    "posed",
    [
        problem(WIDE.with_batch(0)),
        problem(WIDE.with_batch(2048)),
        problem(dtype=torch.float32),
        problem(WIDE._replace(out_channels=252)),
        problem()._replace(channels_last=True),
    ],
    ids=["empty batch", "too many bytes", "32 bits", "pixels of no whole 16 bytes", "channels_last"],
)
def test_not_every_problem_can_go_that_way(posed: plan.Problem) -> None:
    mask = (True, True, True)
    assert list(gradients_nchw_to_nhwc.plan_candidates(problem(), mask, H200))
    assert not list(gradients_nchw_to_nhwc.plan_candidates(posed, mask, H200))
    assert "nchw_to_nhwc" not in plan.plan_backward(posed, mask, H200).family


@pytest.mark.parametrize(
    ("geometry", "families"),
    [
        (WIDE, "nchw_to_nhwc, im2col, implicit_gemm_tma"),
        (ODD, "nchw_to_nhwc, implicit_gemm_tma"),
        # The few products of a copied element are expected to take as long as the copies.
        (
            WIDE._replace(in_channels=128, out_channels=64, kernel=(2, 2), padding=(0, 0)),
            "im2col, implicit_gemm",
        ),
    ],
    ids=str,
)
def test_which_problems_go_by_way_of_channels_last(geometry: Geometry, families: str) -> None:
    assert plan.plan_backward(problem(geometry), (True, True, True), H200).family == families
    ampere = plan.Device("sm_80", 108, 163 << 10)
    assert "nchw_to_nhwc" not in plan.plan_backward(problem(geometry), (True, True, True), ampere).family


@pytest.mark.parametrize(
    ("geometry", "converted"),
    [
        (WIDE, True),
        (WIDE._replace(stride=(1, 1)), True),
        (Geometry(64, 256, 64, 64, 64, (2, 2), (2, 2)), False),  # too few products for each converted element
    ],
    ids=str,
)
def test_which_gradients_of_the_weight_go_that_way_alone(geometry: Geometry, converted: bool) -> None:
    for with_bias in (False, True):
        made = plan.plan_backward(problem(geometry), (False, True, with_bias), H200)
        assert ("nchw_to_nhwc" in made.family) == converted


@pytest.mark.parametrize("geometry", CASES, ids=str)
def test_the_cases_below_can_go_by_way_of_channels_last(geometry: Geometry) -> None:
    for mask in ((True, True, True), (False, True, False)):
        assert by_way_of_channels_last(geometry, mask).family.startswith("nchw_to_nhwc, ")


def test_a_block_has_few_columns_where_blocks_are_few() -> None:
    few, many = Matrices(1, 64, 4096, torch.float16), Matrices(64, 512, 4096, torch.float16)
    assert block_for(few, H200).columns < block_for(many, H200).columns


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_blocks_that_transpose_miss_nothing(dtype: torch.dtype, exhaustive: bool) -> None:
    """Each column of each matrix is in one block, and no block has more pieces than its threads load."""
    rng = random.Random(3)
    for _ in range(300 if exhaustive else 100):
        piece = 16 // dtype.itemsize
        of = Matrices(
            rng.randint(1, 40),
            piece * rng.randint(1, 40),
            rng.choice((rng.randint(1, 40), rng.randint(1, 999))),
            dtype,
        )
        made = transpose(of, input_(0), output(0), H200)
        constants, (words,) = dict(made.kernel.constants), made.structs
        batch, columns, matrices, positions = words[:4]
        block_columns, column_blocks, row_pieces = words[4:7], words[7:10], words[10:13]
        assert (batch, columns, positions) == (of.batch, of.columns, matrices * block_columns[0])
        most = int(constants["MAX_POSITIONS"])
        max_pieces = -(-((piece - 1 if constants["RAGGED"] else 0) + most) // piece)
        assert positions <= most
        assert matrices * row_pieces[0] <= max_pieces
        assert column_blocks[0] == 1 or block_columns[0] % piece == 0
        row_blocks = -(-of.rows // int(constants["BLOCK_ROWS"]))
        seen = set()
        for block in range(made.grid // row_blocks):
            group = quotient(column_blocks, block)
            first = (block - group * column_blocks[0]) * block_columns[0]
            for position in range(positions):
                matrix = quotient(block_columns, position)
                at = group * matrices + matrix, first + position - matrix * block_columns[0]
                if at[0] < batch and at[1] < columns:
                    assert at not in seen
                    seen.add(at)
        assert len(seen) == batch * columns


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "rows", "columns"),
    [
        (3, 64, 37 * 37),
        (70, 128, 16),
        (5, 72, 49),
        (300, 40, 9),
        (33, 96, 1),
        (2, 104, 300),
        (1, 64, 514 * 514),
        (3, 1369, 72),
        (5, 4 * 49, 64),
        (40, 4, 512),
        (40, 9, 128),
        (2, 7, 256),
    ],
)
def test_matrices_are_transposed_and_their_rows_added_up(
    batch: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    from tconv_swap.runtime import launch

    of = Matrices(batch, rows, columns, dtype)
    with_sums = rows % of.piece == 0
    launches = [transpose(of, input_(0), workspace(0), H200, 256 if with_sums else None)]
    if with_sums:
        launches.append(reduce_row_sums(of, 256, 1, H200))
    launches[0] = launches[0]._replace(overlaps_previous=False)

    def placed(argument: Argument) -> Argument:
        return output(0) if argument == workspace(0) else argument

    made = Plan(
        "nchw_to_nhwc",
        "",
        (Output((batch, columns, rows)), Output((rows,))),
        tuple(with_operands(one, placed) for one in launches),
        256 + (row_sums_bytes(of, H200) if with_sums else 0),
    )
    torch.manual_seed(0)
    x = torch.randn(batch, rows, columns, device="cuda").to(dtype)
    handle = launch.add_plan(made, dtype, x.device, call.device_facts(0).architecture)
    for _ in range(2):
        torch.full((4 * x.numel() + 1000,), float("nan"), device="cuda")  # freed: where the results will lie
        transposed, sums = torch.ops.tconv_swap.launch.default(handle, [x, x, None])
        assert torch.equal(transposed, x.transpose(1, 2))
        if with_sums:
            truth = x.double().sum((0, 2))
            assert (sums.double() - truth).norm() <= (torch.finfo(dtype).eps / 2 + 3e-7) * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", CASES, ids=str)
def test_gradients_by_way_of_channels_last(geometry: Geometry, dtype: torch.dtype, bias: bool) -> None:
    """By two kernels of the layer that read copies: poisoned memory, the same bits twice, against float64."""
    torch.manual_seed(0)
    device = call.device_facts(0)
    if device.architecture != "sm_90a":
        pytest.skip("needs sm_90a (TMA)")
    for mask in ((True, True, bias), (False, True, bias)):
        for weight_last in (False, True):
            posed = problem(geometry, dtype)._replace(weight_channels_last=weight_last)
            made = list(gradients_nchw_to_nhwc.plan_candidates(posed, mask, device))
            assert made
            for one in dict.fromkeys((made[0], made[-1])):
                layouts = (False, weight_last)
                assert_kernel_matches(one, geometry, dtype, layouts, torch.finfo(dtype).eps, mask)
