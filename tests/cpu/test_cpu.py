"""The CPU formulations, each forced on every geometry it claims, against the float64 oracle; and the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.cpu import backward as cpu_backward
from tconv_swap.cpu import forward as cpu
from tconv_swap.cpu import plan as plan_cpu
from tconv_swap.geometry import Geometry
from tconv_swap.op import conv_transpose2d

pytestmark = pytest.mark.usefixtures("two_threads")

FORMATS = (torch.contiguous_format, torch.channels_last)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(g: Geometry, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(g.input_shape, generator=generator, dtype=torch.float64)
    w = torch.randn(g.weight_shape, generator=generator, dtype=torch.float64)
    w /= max(1, g.in_channels_per_group * g.taps) ** 0.5
    b = torch.randn(g.out_channels, generator=generator, dtype=torch.float64)
    return x.to(dtype), w.to(dtype), b.to(dtype)


def arguments(g: Geometry) -> dict[str, Any]:
    return dict(
        stride=g.stride,
        padding=g.padding,
        output_padding=g.output_padding,
        groups=g.groups,
        dilation=g.dilation,
    )


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    def pair(low: int, high: int) -> tuple[int, int]:
        return (draw(st.integers(low, high)), draw(st.integers(low, high)))

    stride, dilation, kernel = pair(1, 4), pair(1, 3), pair(1, 5)
    if draw(st.booleans()):  # what stacked_phases claims is rare among random ones
        dilation, kernel = (1, 1), (stride[0] * draw(st.integers(1, 2)), stride[1] * draw(st.integers(1, 2)))
    most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    output_padding = (draw(st.integers(0, most[0])), draw(st.integers(0, most[1])))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    ci, co = draw(st.integers(1, 3)) * groups, draw(st.integers(1, 3)) * groups
    n, (h, w) = draw(st.integers(0, 3)), pair(1, 5)
    g = Geometry(n, ci, h, w, co, kernel, stride, (0, 0), output_padding, dilation, groups)
    padding = (
        draw(st.integers(0, min(4, (g.out_height - 1) // 2))),
        draw(st.integers(0, min(4, (g.out_width - 1) // 2))),
    )
    return Geometry(n, ci, h, w, co, kernel, stride, padding, output_padding, dilation, groups)


@settings(max_examples=100, deadline=None)
@given(geometries(), st.sampled_from(FORMATS), st.booleans(), st.sampled_from([1, 60, 1 << 20]))
def test_every_formulation_computes_every_geometry_it_claims(
    g: Geometry, memory_format: torch.memory_format, with_bias: bool, block: int
) -> None:
    x, w, b = operands(g)
    bias = b if with_bias else None
    expected = conv_transpose2d_reference(x, w, bias, **arguments(g))
    with pytest.MonkeyPatch.context() as patch:
        for size in ("BLOCK_ELEMENTS", "TEMPORARY_ELEMENTS", "PIECE_ELEMENTS"):
            patch.setattr(cpu, size, block)
        for name, compute in cpu.FORWARD.items():
            if plan_cpu.supports(name, g, x.dtype):
                y = compute(x.contiguous(memory_format=memory_format), w, bias, g, memory_format)
                assert_close(y, expected, torch.float64)
                assert y.is_contiguous(memory_format=memory_format), name


def test_each_formulation_is_claimed_by_something_and_products_are_not_summed_in_16_bits() -> None:
    overlapping = Geometry(1, 4, 3, 3, 4, (4, 4), (2, 2), (1, 1))
    disjoint = Geometry(1, 4, 3, 3, 4, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
    assert plan_cpu.supports("stacked_phases", overlapping, torch.float32)
    assert plan_cpu.supports("outer", Geometry(2, 4, 1, 1, 4, (4, 4)), torch.float32)
    assert plan_cpu.supports("products", overlapping, torch.float32)
    assert not plan_cpu.supports("products", overlapping, torch.bfloat16)
    assert not plan_cpu.supports("products", overlapping, torch.float16)
    assert plan_cpu.supports("products", disjoint, torch.bfloat16)


#: Geometries for each line of the rule, and what it must choose for float32 NCHW.
CHOICES = [
    ("outer", Geometry(128, 100, 1, 1, 512, (4, 4))),
    ("plain", Geometry(1, 64, 64, 64, 64, (3, 3))),
    ("plain", Geometry(1, 16, 8, 8, 8, (2, 2), (2, 2))),
    ("plain", Geometry(0, 256, 14, 14, 256, (2, 2), (2, 2))),
    ("plain", Geometry(1, 21, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)),
    ("pieces", Geometry(2, 21, 64, 64, 21, (16, 16), (8, 8), (4, 4), groups=21)),
    ("products", Geometry(1, 1024, 32, 32, 512, (2, 2), (2, 2))),
    ("plain", Geometry(5, 256, 14, 14, 256, (2, 2), (2, 2))),
    ("products", Geometry(1, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))),
    ("pixel_products", Geometry(11, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))),
    ("plain", Geometry(1, 1026, 1, 100, 1, (1, 2048), (1, 512))),
    ("phases", Geometry(1, 32, 128, 256, 64, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4)),
    ("plain", Geometry(1, 512, 32, 32, 128, (4, 4), (2, 2), (1, 1))),
    ("stacked_phases", Geometry(1, 21, 16, 16, 21, (64, 64), (32, 32), (16, 16))),
    ("products", Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))),
    ("products", Geometry(1, 56, 96, 96, 1, (9, 9), (4, 4), (4, 4), (3, 3))),
    ("channels_last", Geometry(1, 128, 128, 128, 64, (3, 3), (2, 2), (1, 1), (1, 1))),
    ("plain", Geometry(9, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))),
]


@pytest.mark.parametrize(("formulation", "g"), CHOICES, ids=lambda v: str(v))
def test_the_rule(formulation: plan_cpu.Formulation, g: Geometry) -> None:
    assert plan_cpu.choose(g, torch.float32, torch.contiguous_format) == formulation
    assert plan_cpu.supports(formulation, g, torch.float32)


def test_channels_last_inputs_are_not_converted() -> None:
    g = Geometry(1, 128, 128, 128, 64, (3, 3), (2, 2), (1, 1), (1, 1))
    assert plan_cpu.choose(g, torch.float32, torch.channels_last) == "plain"


@pytest.mark.parametrize(("formulation", "g"), CHOICES, ids=lambda v: str(v))
def test_plain_calls_are_made_to_pytorch(formulation: plan_cpu.Formulation, g: Geometry) -> None:
    arguments = (g.stride, g.padding, g.output_padding, g.groups, g.dilation)
    x, w, b = (torch.empty(1).expand(s) for s in (g.input_shape, g.weight_shape, (g.out_channels,)))
    x, w = x.contiguous(), w.contiguous()
    assert cpu.is_plain(x, w, b, arguments) == (formulation == "plain")
    assert not cpu.is_plain(x, w, b.double(), arguments)
    assert not cpu.is_plain(x, w, x.new_empty(g.out_channels + 1), arguments)


@settings(max_examples=100, deadline=None)
@given(geometries(), st.sampled_from(list(TOLERANCE)), st.sampled_from(FORMATS))
def test_the_rule_chooses_only_formulations_that_claim_the_geometry(
    g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    wide = Geometry(
        g.batch, g.in_channels * 8, g.height * 64, g.width * 64, g.out_channels * 16, g.kernel, g.stride,
        g.padding, g.output_padding, g.dilation, g.groups,
    )  # fmt: skip
    for geometry in (g, wide):
        assert plan_cpu.supports(plan_cpu.choose(geometry, dtype, memory_format), geometry, dtype)


@pytest.mark.parametrize("formulation", sorted(cpu.FORWARD))
def test_formulations_leave_their_arguments_alone_and_give_the_same_bits(
    formulation: plan_cpu.Formulation,
) -> None:
    size = 1 if formulation == "outer" else 6
    g = Geometry(2, 4, size, size, 4, (4, 4), (1, 1) if size == 1 else (2, 2), (0, 0))
    tensors = operands(g, torch.float32)
    copies = [t.clone() for t in tensors]
    first = cpu.FORWARD[formulation](*tensors, g, torch.contiguous_format)
    second = cpu.FORWARD[formulation](*tensors, g, torch.contiguous_format)
    assert torch.equal(first, second)
    assert all(map(torch.equal, tensors, copies))
    assert first.data_ptr() not in {t.data_ptr() for t in tensors}


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other element of a larger tensor, with the last axes exchanged."""
    larger = torch.zeros(*tensor.shape[:-2], 2 * tensor.shape[-1], tensor.shape[-2], dtype=tensor.dtype)
    view = larger[..., ::2, :].transpose(-1, -2)
    view.copy_(tensor)
    return view


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": strided,
    "expanded": lambda t: t[:, :1].expand_as(t),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("g", [g for _, g in CHOICES if 0 < g.macs < 40e6 and g.elements < 2e6], ids=str)
def test_dtypes(g: Geometry, dtype: torch.dtype) -> None:
    x, w, b = operands(g.with_batch(min(g.batch, 2)), dtype)
    y = conv_transpose2d(x, w, b, **arguments(g))
    assert y.dtype == dtype
    assert_close(y, conv_transpose2d_reference(x, w, b, **arguments(g)), dtype)


@pytest.mark.parametrize("layout_x", LAYOUTS)
@pytest.mark.parametrize("layout_w", LAYOUTS)
def test_layouts_of_input_weight_and_gradient(layout_x: str, layout_w: str) -> None:
    """Values, gradients, and the memory format PyTorch gives out."""
    g = Geometry(2, 16, 24, 24, 20, (2, 2), (2, 2))  # products, unless input or weight are channels_last
    x, w, b = operands(g, torch.float32)
    x, w = LAYOUTS[layout_x](x).requires_grad_(), LAYOUTS[layout_w](w).requires_grad_()
    y, native = conv_transpose2d(x, w, b, stride=2), F.conv_transpose2d(x, w, b, stride=2)
    assert y.stride() == native.stride()
    assert_close(y, conv_transpose2d_reference(x, w, b, stride=2), torch.float32)
    grad = strided(torch.randn_like(y))
    ours = torch.autograd.grad(y, (x, w), grad)
    truth = torch.autograd.grad(conv_transpose2d_reference(x, w, b, stride=2), (x, w), grad.double())
    for gradient, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(gradient, expected.to(gradient.dtype), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "g",
    [Geometry(3, 5, 1, 1, 4, (4, 3)), Geometry(3, 16, 24, 20, 2, (2, 2), (2, 2))],
    ids=["gemm", "few channels"],
)
def test_gradients_by_matrix_products_have_pytorchs_layout(g: Geometry, channels_last: bool) -> None:
    leaves = operands(g, torch.float32)
    if channels_last:
        leaves = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in leaves]
    x, w, b = (leaf.requires_grad_() for leaf in leaves)
    y, native = conv_transpose2d(x, w, b, **arguments(g)), F.conv_transpose2d(x, w, b, **arguments(g))
    grad = torch.randn_like(native)
    truth = torch.autograd.grad(conv_transpose2d_reference(x, w, b, **arguments(g)), (x, w, b), grad.double())
    theirs = torch.autograd.grad(native, (x, w, b), grad)
    for ours, their, expected in zip(torch.autograd.grad(y, (x, w, b), grad), theirs, truth, strict=True):
        assert ours.stride() == their.stride()
        torch.testing.assert_close(ours, expected.to(ours.dtype), rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(geometries(), st.sets(st.sampled_from([0, 1, 2]), min_size=1), st.booleans())
def test_gradients_for_every_mask(g: Geometry, wanted: set[int], last: bool) -> None:
    leaves = operands(g)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    x, w, b = leaves
    inputs = [leaves[i] for i in sorted(wanted)]
    y = conv_transpose2d(x.contiguous(memory_format=torch.channels_last) if last else x, w, b, **arguments(g))
    expected = conv_transpose2d_reference(x, w, b, **arguments(g))
    grad = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 4)] * 7),
    st.tuples(*[st.booleans()] * 3),
    st.sampled_from([1, 60, 1 << 20]),
    st.sampled_from(["contiguous", "channels_last", "strided", "expanded"]),
)
def test_gradients_as_products(
    sizes: tuple[int, ...], mask: tuple[bool, bool, bool], block: int, layout: str
) -> None:
    n, ci, h, wd, co, kh, kw = sizes
    g = Geometry(n, ci, h, wd, co, (kh, kw), (kh, kw))
    x, w, b = (leaf.requires_grad_() for leaf in operands(g))
    y = conv_transpose2d_reference(x, w, b, stride=(kh, kw))
    grad = LAYOUTS[layout](torch.randn_like(y))
    expected = torch.autograd.grad(y, (x, w, b), grad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_ELEMENTS", block)
        patch.setattr(cpu_backward, "choose_backward", lambda *_: "products")
        ours = cpu_backward.backward(grad, x.detach(), w.detach(), g, torch.contiguous_format, mask)
    assert len(ours) == sum(mask)
    for gradient, truth in zip(ours, [e for e, m in zip(expected, mask, strict=True) if m], strict=True):
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-10)


def test_which_gradients_are_products() -> None:
    tiled = Geometry(1, 128, 64, 64, 64, (2, 2), (2, 2))
    planar, last = torch.contiguous_format, torch.channels_last
    assert plan_cpu.choose_backward(tiled, torch.float32, planar) == "products"
    assert plan_cpu.choose_backward(tiled, torch.float32, last) == "plain"
    assert plan_cpu.choose_backward(tiled, torch.float64, planar) == "plain"
    for g in (
        Geometry(1, 128, 64, 64, 64, (2, 2), (2, 2), (1, 1)),
        Geometry(1, 128, 64, 64, 64, (2, 2), (3, 3)),
        Geometry(1, 128, 64, 64, 64, (2, 2), (2, 2), (0, 0), (1, 1)),
        Geometry(1, 128, 64, 64, 64, (2, 2), (2, 2), groups=2),
        Geometry(1, 56, 96, 96, 1, (9, 9), (4, 4), (4, 4), (3, 3)),
    ):
        assert plan_cpu.choose_backward(g, torch.float32, planar) == "plain"


@pytest.mark.parametrize("formulation", sorted(cpu.FORWARD))
def test_first_and_second_derivatives(formulation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every formulation as the forward, which double backward calls as well."""
    size = 1 if formulation == "outer" else 2
    kwargs = {} if formulation == "outer" else dict(stride=2, groups=1)
    monkeypatch.setattr(cpu, "choose", lambda *_: formulation)
    x = torch.randn(1, 2, size, size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(*tensors: Tensor) -> Tensor:
        return conv_transpose2d(*tensors, **kwargs)

    assert torch.autograd.gradcheck(function, (x, w, b))
    assert torch.autograd.gradgradcheck(function, (x, w, b))


# What naive versions of a transposed convolution get wrong, each told apart from what is right.


@pytest.mark.parametrize(
    "formulation", ["plain", "channels_last", "pieces", "products", "pixel_products", "phases"]
)
def test_taps_are_divided_among_the_phases(formulation: plan_cpu.Formulation) -> None:
    """One pixel of one reaches every stride-th place only: its image is the kernel, spread by the dilation."""
    g = Geometry(1, 1, 3, 3, 1, (3, 3), (3, 3), dilation=(2, 2))
    x = torch.zeros(g.input_shape, dtype=torch.float64)
    x[0, 0, 1, 1] = 1
    w = torch.arange(1.0, 10.0, dtype=torch.float64).view(1, 1, 3, 3)
    y = cpu.FORWARD[formulation](x, w, None, g, torch.contiguous_format)
    expected = torch.zeros_like(y)
    expected[0, 0, 3:8:2, 3:8:2] = w[0, 0]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("formulation", ["plain", "channels_last", "pieces", "products", "phases"])
def test_the_weight_is_in_channels_first_then_out_channels_of_the_group(
    formulation: plan_cpu.Formulation,
) -> None:
    g = Geometry(1, 4, 1, 1, 6, (2, 2), (2, 2), groups=2)
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64).view(1, 4, 1, 1)
    w = torch.arange(48, dtype=torch.float64).view(4, 3, 2, 2)
    b = torch.tensor([0.5, 0, 0, 0, 0, 0.25], dtype=torch.float64)
    y = cpu.FORWARD[formulation](x, w, b, g, torch.contiguous_format)
    expected = torch.cat([w[0] + 10 * w[1], 100 * w[2] + 1000 * w[3]]) + b.view(-1, 1, 1)
    assert torch.equal(y[0], expected)


@pytest.mark.parametrize("formulation", ["plain", "channels_last", "products", "phases"])
def test_outputs_without_a_tap_are_the_bias(formulation: plan_cpu.Formulation) -> None:
    g = Geometry(1, 2, 2, 2, 2, (1, 1), (3, 3), output_padding=(2, 2))
    x, w, b = operands(g)
    y = cpu.FORWARD[formulation](x, w, b, g, torch.contiguous_format)
    reached = torch.zeros(y.shape[2:], dtype=torch.bool)
    reached[::3, ::3] = True
    assert torch.equal(y[..., ~reached], b.view(1, -1, 1).expand(1, 2, int((~reached).sum())))
    assert_close(y, conv_transpose2d_reference(x, w, b, **arguments(g)), torch.float64)


def test_infinities_and_nans_do_not_spread() -> None:
    """No formulation may multiply a pixel by the zeros that it fills up with."""
    g = Geometry(1, 2, 4, 4, 2, (3, 3), (2, 2), (1, 1))
    x, w, b = operands(g)
    x[0, 0, 1, 1], x[0, 1, 3, 3] = float("inf"), float("nan")
    finite = torch.isfinite(F.conv_transpose2d(x, w, b, **arguments(g)))
    for name, compute in cpu.FORWARD.items():
        if plan_cpu.supports(name, g, x.dtype):
            assert torch.equal(torch.isfinite(compute(x, w, b, g, torch.contiguous_format)), finite), name


def test_unbatched_and_empty() -> None:
    g = Geometry(1, 16, 40, 40, 20, (2, 2), (2, 2))
    x, w, b = operands(g, torch.float32)
    assert_close(
        conv_transpose2d(x[0], w, b, stride=2),
        conv_transpose2d_reference(x, w, b, stride=2)[0],
        torch.float32,
    )
    empty = conv_transpose2d(x[:0].requires_grad_(), w.requires_grad_(), b, stride=2)
    assert empty.shape == (0, 20, 80, 80)
    empty.sum().backward()
    assert w.grad is not None
    assert not w.grad.any()
