"""Plans that convert NCHW tensors to channels_last, and the kernel that converts them on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cuda_cases import conv_transpose2d

from tconv_swap.checks import check_forward
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
OPTIONS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
#: Odd widths, batch tails, groups, dilation, maps of one row; the plans of all convert to channels_last.
CASES = [
    dict(x=(3, 256, 9, 13), w=(256, 136, 3, 3), stride=2, padding=1, output_padding=1),
    dict(x=(5, 512, 7, 7), w=(512, 256, 2, 2), stride=2),
    dict(x=(2, 512, 5, 21), w=(512, 256, 4, 4), stride=2, padding=1, groups=2),
    dict(x=(3, 256, 6, 10), w=(256, 512, 3, 2), stride=(3, 2)),
    dict(x=(9, 264, 4, 4), w=(264, 128, 4, 4), stride=2, padding=1),
    dict(x=(2, 256, 1, 70), w=(256, 128, 1, 16), stride=(1, 8), padding=(0, 4)),
    dict(x=(2, 256, 11, 37), w=(256, 136, 4, 4), stride=4),
    dict(x=(1, 384, 3, 5), w=(384, 128, 5, 5), stride=2, padding=2, dilation=(1, 2), output_padding=(1, 0)),
    dict(x=(3, 96, 9, 14), w=(96, 48, 3, 3), stride=2, padding=1, output_padding=1),
]


def problem(geometry: Geometry = WIDE, dtype: torch.dtype = torch.float16) -> plan.Problem:
    return plan.Problem(geometry, dtype, "tf32", False, False)


def test_a_gradient_of_the_input_that_boxes_cannot_load_is_planned_without_copies() -> None:
    """Strides of 10 are too long for the boxes of grad_output if its columns are not whole strides, and no other
    kernel needs a copy."""
    posed = problem(Geometry(12, 768, 1, 174, 384, (1, 20), (1, 10), (0, 5), (0, 1)))
    assert gradients_nchw_to_nhwc.nhwc_grad_input(posed, H200) is None
    assert plan.plan_backward(posed, (True, False, False), H200).family == "implicit_gemm"


def by_way_of_channels_last(mask: tuple[bool, ...], copies_for_grad_input: bool = True) -> Plan:
    pieces = []
    if mask[0] and copies_for_grad_input:
        pieces.append(gradients_nchw_to_nhwc.nhwc_grad_input(problem(), H200))
    elif mask[0]:
        pieces.append(gradients_nchw_to_nhwc.direct_grad_input(problem(), H200))
    if mask[1]:
        pieces.append(gradients_nchw_to_nhwc.nhwc_grad_weight(problem(), H200))
    made = [piece for piece in pieces if piece is not None]
    assert len(made) == len(pieces)
    return gradients_nchw_to_nhwc.assembled(problem(), made, mask[2], H200)


def conversions(made: Plan, source: ArgumentKind) -> list[Launch]:
    return [
        one for one in made.launches if one.kernel.entry == "nchw_to_nhwc" and one.arguments[0].kind == source
    ]


def workspace_places(made: Plan) -> list[int]:
    return [a.value for one in made.launches for a in one.operands if a.kind == ArgumentKind.WORKSPACE]


@pytest.mark.parametrize("copies_for_grad_input", [False, True])
@pytest.mark.parametrize(
    "mask", [(True, True, True), (True, True, False), (False, True, True), (False, True, False)]
)
def test_each_tensor_is_copied_once_and_each_gradient_written(
    mask: tuple[bool, ...], copies_for_grad_input: bool
) -> None:
    made = by_way_of_channels_last(mask, copies_for_grad_input)
    shapes = (WIDE.input_shape, WIDE.weight_shape, (WIDE.out_channels,))
    assert [o.shape for o in made.outputs] == [s for s, wanted in zip(shapes, mask, strict=True) if wanted]
    assert not any(o.channels_last for o in made.outputs)
    written = {a.value for one in made.launches for a in one.operands if a.kind == ArgumentKind.OUTPUT}
    assert written == set(range(len(made.outputs)))
    brought = [one.arguments[0].value for one in conversions(made, ArgumentKind.INPUT)]
    assert brought == ([0, 1, 2] if mask[0] and copies_for_grad_input else [0, 1])
    assert not made.launches[0].overlaps_previous
    # The kernel that multiplies reads what several launches wrote, so it waits for all of them. So does the launch that
    # converts a gradient back.
    first = next(i for i, one in enumerate(made.launches) if "implicit_gemm_tma" in one.kernel.entry)
    assert not made.launches[first].overlaps_previous


def test_copies_and_the_workspace_of_parts_do_not_overlap() -> None:
    made = by_way_of_channels_last((True, True, True))
    places = workspace_places(made)
    assert all(place % 256 == 0 for place in places)
    sizes = [2 * math.prod(shape) for shape in (WIDE.output_shape, WIDE.input_shape, WIDE.weight_shape)]
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
    "geometry", [WIDE.with_batch(0), WIDE.with_batch(2048), replace(WIDE, stride=(1, 1))]
)
def test_not_every_problem_pays(geometry: Geometry) -> None:
    """An empty batch, tensors of more than 1 GiB, no stride."""
    assert not gradients_nchw_to_nhwc.pays(problem(geometry), (True, True, True), H200)
    assert not gradients_nchw_to_nhwc.pays(replace(problem(), channels_last=True), (True, True, True), H200)


@pytest.mark.parametrize(
    ("geometry", "families"),
    [
        (WIDE, "nchw_to_nhwc, im2col, implicit_gemm_tma"),
        (replace(WIDE, height=31, width=31), "nchw_to_nhwc, implicit_gemm_tma"),
        (replace(WIDE, kernel=(2, 2), padding=(0, 0)), "nchw_to_nhwc, im2col, implicit_gemm_tma"),
        (
            replace(WIDE, in_channels=128, out_channels=128, kernel=(2, 2), padding=(0, 0)),
            "im2col, implicit_gemm",
        ),
        (replace(WIDE, out_channels=40), "im2col, implicit_gemm"),
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
        (Geometry(6, 96, 99, 192, 48, (3, 3), (2, 2), (1, 1), (1, 1)), True),
        (Geometry(8, 96, 64, 64, 40, (4, 4), (2, 2), (1, 1)), False),  # too few channels
        (Geometry(64, 256, 64, 64, 64, (2, 2), (2, 2)), False),  # too few products for each converted element
        (Geometry(2, 64, 32, 32, 64, (16, 16), (8, 8), (4, 4)), False),  # kernels of many taps
    ],
    ids=str,
)
def test_which_gradients_of_the_weight_go_that_way_alone(geometry: Geometry, converted: bool) -> None:
    made = plan.plan_backward(problem(geometry), (False, True, False), H200)
    assert ("nchw_to_nhwc" in made.family) == converted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cases_below_go_by_way_of_channels_last(case: dict) -> None:
    x, w = (torch.empty(case[k], device="meta") for k in "xw")
    pairs = [case.get(k, default) for k, default in OPTIONS.items() if k != "groups"]
    stride, padding, output_padding, dilation = (v if isinstance(v, tuple) else (v, v) for v in pairs)
    arguments = (stride, padding, output_padding, case.get("groups", 1), dilation)
    geometry = check_forward(x, w, None, arguments)
    assert "nchw_to_nhwc" in plan.plan_backward(problem(geometry), (True, True, True), H200).family


def test_a_block_has_few_columns_where_blocks_are_few() -> None:
    few, many = Matrices(1, 64, 4096, torch.float16), Matrices(64, 512, 4096, torch.float16)
    assert block_for(few, H200).columns < block_for(many, H200).columns


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
    launches[0] = replace(launches[0], overlaps_previous=False)

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
    handle = launch.add_plan(made, dtype, x.device, plan_architecture())
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
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=str,
)
def test_gradients_by_way_of_channels_last(case: dict, dtype: torch.dtype, bias: bool) -> None:
    """Compares with float64, with memory that held NaN, and checks that the same bits come twice."""
    torch.manual_seed(0)
    options = {k: v for k, v in case.items() if k not in "xw"}
    x = torch.randn(case["x"], device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(case["w"], device="cuda", dtype=dtype, requires_grad=True)
    b = torch.randn(case["w"][1] * case.get("groups", 1), device="cuda", dtype=dtype, requires_grad=True)
    leaves = (x, w, b) if bias else (x, w)
    y = conv_transpose2d(x, w, b if bias else None, **options)
    grad = torch.randn_like(y)
    results = []
    for _ in range(2):
        torch.full((1 << 24,), float("nan"), device="cuda")  # freed: where the workspace will lie
        results.append(torch.autograd.grad(y, leaves, grad, retain_graph=True))
    truths = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.backends.cudnn.flags(enabled=False):
        expected = torch.nn.functional.conv_transpose2d(*truths, **options)
        wanted = torch.autograd.grad(expected, truths, grad.double())
    for first, second, truth in zip(*results, wanted, strict=True):
        assert torch.equal(first, second)
        assert first.is_contiguous()
        assert (first.double() - truth).norm() <= torch.finfo(dtype).eps * truth.norm()


def plan_architecture() -> str:
    from tconv_swap.cuda import call

    return call.device_facts(torch.cuda.current_device()).architecture
