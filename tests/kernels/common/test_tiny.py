"""The tiny family (forward/tiny.cu, gradients/tiny.cu): when the planner takes it, its plans, and operands with any
strides, which it reads without a copy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import TOLERANCE, conv_transpose2d, relative_error
from harness import assert_kernel_matches
from oracle import conv_transpose2d_reference
from pretended_gpu import GPU, pretended_gpu
from size_cases import random_output_padding
from torch import Tensor

from tconv_swap.cuda import call, choice
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import tiny as tiny_family
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime.program import ArgumentKind

H200 = plan.Device("sm_90a", 132, 227 << 10)
TURING = plan.Device("sm_75", 30, 64 << 10)
SMALL = Geometry(2, 8, 4, 4, 8, (2, 2), (2, 2))
#: No other family computes its output or a gradient in one launch.
WIDE = Geometry(2, 32, 3, 3, 24, (2, 2))
MASKS = [mask for mask in product((False, True), repeat=3) if any(mask)]


def problem(
    geometry: Geometry = SMALL, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


# Plans


@pytest.mark.parametrize("channels_last", [False, True])
def test_one_launch_computes_everything(channels_last: bool) -> None:
    posed = problem(WIDE, channels_last=channels_last)
    made = plan.plan_forward(posed, True, H200)
    assert (made.family, len(made.launches), made.workspace_bytes) == ("tiny", 1, 0)
    for mask in MASKS:
        for backend in ("auto", "kernel"):
            (step,) = choice.choose_backward(posed, mask, H200, backend)
            assert step.plan is not None
            assert (step.family, len(step.plan.launches), step.plan.workspace_bytes) == ("tiny", 1, 0)
            shapes = WIDE.input_shape, WIDE.weight_shape, (WIDE.out_channels,)
            assert [one.shape for one in step.plan.outputs] == [
                shape for shape, wanted in zip(shapes, mask, strict=True) if wanted
            ]


def test_another_family_that_needs_one_launch_comes_first() -> None:
    """It is faster: it has as many launches, and its kernels are compiled for the layer."""
    assert tiny_family.supports(problem())
    for device in (H200, TURING):
        assert plan.plan_forward(problem(), True, device).family == "narrow_ffma"
    assert plan.plan_backward(problem(), (True, False, False), TURING).family == "general"
    assert plan.plan_backward(problem(), (True, True, True), TURING).family == "tiny"


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_gradient_has_the_threads_that_it_needs(mask: tuple[bool, ...]) -> None:
    """A thread for each element of grad_input, a warp for each of the others, none for gradients outside of the
    mask."""
    made = tiny_family.plan_backward(problem(), mask)
    assert made is not None
    (launch,) = made.launches
    counts, ends = launch.structs[0][20:23], launch.structs[0][23:25]
    needed = (2 * 8 * 4 * 4, 8 * 8 * 2 * 2, 8)
    assert counts == tuple(count if wanted else 0 for count, wanted in zip(needed, mask, strict=True))
    blocks = ends[0], ends[1] - ends[0], launch.grid - ends[1]
    assert blocks == tuple(
        -(-count // per_block) for count, per_block in zip(counts, (128, 4, 4), strict=True)
    )
    written = [one.value for one in launch.arguments if one.kind is ArgumentKind.OUTPUT]
    assert [index for index, wanted in zip(written, mask, strict=True) if wanted] == list(range(sum(mask)))


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": 9},
        {"in_channels": 40},
        {"out_channels": 40},
        {"kernel": (5, 4)},
        {"batch": 8, "in_channels": 32, "out_channels": 32},
    ],
    ids=str,
)
def test_the_family_does_not_compute_larger_problems(change: dict) -> None:
    larger = problem(SMALL._replace(**change))
    assert tiny_family.supports(problem())
    assert not tiny_family.supports(larger)
    assert plan.plan_forward(larger, True, H200).family != "tiny"
    assert plan.plan_backward(larger, (True, True, True), H200).family != "tiny"


def test_the_family_does_not_compute_large_outputs_of_few_products() -> None:
    sparse = Geometry(1, 4096, 1, 1, 4096, (1, 1), (16, 16), output_padding=(15, 15), groups=4096)
    assert sparse.macs < tiny_family.MAX_MACS
    assert not tiny_family.supports(problem(sparse))


def test_the_family_does_not_compute_float64() -> None:
    assert not tiny_family.supports(problem(dtype=torch.float64))


def test_one_kernel_computes_every_geometry_and_layout() -> None:
    geometries = SMALL, SMALL._replace(batch=1, kernel=(3, 1)), Geometry(1, 6, 5, 7, 9, (2, 3), groups=3)
    posed = [problem(g, channels_last=last) for g, last in product(geometries, (False, True))]
    plans = [
        *(tiny_family.plan_forward(one) for one in posed),
        *(tiny_family.plan_backward(one, mask) for one in posed for mask in MASKS),
    ]
    assert len({one.launches[0].kernel for one in plans if one is not None}) == 2
    assert None not in plans


def test_the_strides_of_an_operand_become_arguments_of_the_launch() -> None:
    made = tiny_family.plan_backward(problem(), (True, True, True))
    assert made is not None
    assert made.read_as_they_lie == {0, 1, 2}
    with_other_strides = made.with_strides({0: (0, 0, 0, 0), 2: (1, 2, 3, 4)})
    before, after = made.launches[0].structs, with_other_strides.launches[0].structs
    assert after == (before[0], (0, 0, 0, 0), before[2], (1, 2, 3, 4), *before[4:])
    assert before[1] == torch.empty(SMALL.output_shape).stride()
    assert plan.plan_forward(problem(SMALL.with_batch(64)), True, H200).read_as_they_lie == frozenset()


# Calls


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


def tensors(size: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 8, size, size), torch.randn(8, 8, 4, 4), torch.randn(8)


def test_an_expanded_gradient_is_not_copied(gpu: GPU) -> None:
    """The gradient of a sum is one number with strides of 0."""
    x, w, _ = tensors()
    expanded = torch.ones(()).expand(1, 8, 4, 4)
    for grad in (expanded, expanded.clone(), expanded):
        found = gpu.gradients(grad, x, w, [True, True, True])
        wanted = F.conv2d(expanded, w, stride=2, padding=1)
        torch.testing.assert_close(found[0], wanted)
        assert gpu.received[-1][0] == (grad.data_ptr(), grad.stride())
    assert gpu.planned == ["gradients"] * 2
    assert len(set(gpu.launched)) == 2


def test_an_expanded_gradient_of_a_larger_problem_is_copied(gpu: GPU) -> None:
    x, w, _ = tensors(16)
    expanded = torch.ones(()).expand(1, 8, 32, 32)
    gpu.gradients(expanded, x, w, [True, True, True])
    assert gpu.received[-1][0] != (expanded.data_ptr(), expanded.stride())


@pytest.fixture
def only_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tiny family replace others that need one launch, too."""
    monkeypatch.setattr(tiny_family, "replaces", lambda made: True)


@pytest.mark.usefixtures("only_tiny")
def test_operands_are_not_copied(gpu: GPU) -> None:
    x, w, b = tensors()
    operands = (
        x.transpose(2, 3).contiguous().transpose(2, 3),
        w.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        b,
    )
    torch.testing.assert_close(gpu.output(*operands), F.conv_transpose2d(x, w, b, 2, 1), rtol=1e-4, atol=1e-4)
    assert gpu.received[-1][:2] == [(one.data_ptr(), one.stride()) for one in operands[:2]]


@pytest.mark.usefixtures("only_tiny")
def test_a_bias_with_gaps_is_copied(gpu: GPU) -> None:
    x, w, b = tensors()
    gaps = torch.stack((b, b), 1)[:, 0]
    torch.testing.assert_close(
        gpu.output(x, w, gaps), F.conv_transpose2d(x, w, b, 2, 1), rtol=1e-4, atol=1e-4
    )
    assert gpu.received[-1][2] is not None
    assert gpu.received[-1][2][1] == (1,)


def test_strides_of_more_than_32_bits_make_a_copy_necessary() -> None:
    made = tiny_family.plan_backward(problem(), (True, True, True))
    assert made is not None
    far = torch.empty(2, 1, 1, 1, device="meta").as_strided((2, 1, 1, 1), (1 << 31, 1, 1, 1))
    near = far.as_strided((2, 1, 1, 1), ((1 << 31) - 1, 1, 1, 1))
    assert not call.can_read_strides(made, 0, far)
    assert call.can_read_strides(made, 0, near)
    assert not call.can_read_strides(made, 3, near)


# On a GPU


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 2, 3))
        stride, dilation = ((rng.randint(1, 4), rng.randint(1, 4)) for _ in range(2))
        made = Geometry(
            rng.randint(1, 4),
            groups * rng.randint(1, 9),
            rng.randint(1, 9),
            rng.randint(1, 9),
            groups * rng.randint(1, 9),
            (rng.randint(1, 5), rng.randint(1, 5)),
            stride,
            (rng.randint(0, 3), rng.randint(0, 3)),
            random_output_padding(rng, stride, dilation),
            dilation,
            groups,
        )
        if min(made.out_height, made.out_width) >= 1 and tiny_family.supports(problem(made)):
            return made


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_random_geometries_match_float64(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    geometry, dtype = random_geometry(rng), DTYPES[seed % 3]
    layouts = rng.random() < 0.5, rng.random() < 0.5
    posed = plan.Problem(geometry, dtype, "ieee", *layouts)
    forward = tiny_family.plan_forward(posed)
    assert forward is not None
    assert_kernel_matches(forward, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=seed % 2 == 0)
    mask = rng.choice(MASKS)
    backward = tiny_family.plan_backward(posed, mask)
    assert backward is not None
    assert_kernel_matches(backward, geometry, dtype, layouts, TOLERANCE[dtype], mask)


def _strided(one: Tensor) -> Tensor:
    return torch.stack((one, one), -1)[..., 0]


def _misaligned(one: Tensor) -> Tensor:
    return torch.cat((one.new_zeros(1), one.flatten()))[1:].view(one.shape)


def _transposed(one: Tensor) -> Tensor:
    return one.transpose(-1, -2).contiguous().transpose(-1, -2) if one.dim() == 4 else one


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "misaligned": _misaligned,
    "transposed": _transposed,
    "expanded": lambda one: one.flatten()[0].expand(one.shape),
}


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_any_strides_match_float64(layout: str, index: int) -> None:
    """One of input, weight, bias and grad_output has the layout."""
    torch.manual_seed(0)
    shapes = (2, 6, 4, 5), (6, 4, 3, 3), (4,), (2, 4, 7, 9)
    given = [torch.randn(shape, device="cuda") for shape in shapes]
    given[index] = LAYOUTS[layout](given[index])
    *operands, grad = given
    leaves = [one.detach().requires_grad_() for one in operands]
    assert leaves[index % 3].stride() == operands[index % 3].stride()
    wide = [one.detach().double().requires_grad_() for one in operands]
    y, exact = conv_transpose2d(*leaves, 2, 1), conv_transpose2d_reference(*wide, stride=2, padding=1)
    found = [y, *torch.autograd.grad(y, leaves, grad)]
    truths = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for one, truth in zip(found, truths, strict=True):
        assert relative_error(one, truth) <= 1e-5
