"""Derivatives and autocasts of calls, computed by csrc/call.cpp on a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_gpu import (
    CHANNELS_LAST,
    GEOMETRY,
    GPU,
    NCHW,
    grad_output,
    operands,
    pretended_gpu,
)
from torch import Tensor

from tconv_swap.cuda import call, expected
from tconv_swap.geometry import Geometry, as_list
from tconv_swap.kernels.common.layer_sizes import other_sizes
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime import jit, launch

FOLLOWERS = expected.followers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    with MODES["fp32"].switched_on(), pretended_gpu(monkeypatch) as pretended:
        yield pretended


# Derivatives of every kind


@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=3) if any(one)], ids=str)
def test_gradients_that_are_wanted(gpu: GPU, needs: tuple[bool, ...]) -> None:
    for _ in range(3):
        leaves = [one.requires_grad_(wanted) for one, wanted in zip(operands(), needs, strict=True)]
        check_derivatives(gpu, leaves)
    assert gpu.planned == ["output", "gradients"]
    assert len(gpu.launched) >= 6


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["eager", "autocast"])
@pytest.mark.parametrize("needs", [one for one in product([False, True], repeat=3) if any(one)], ids=str)
def test_gradients_that_are_wanted_are_planned_with_the_forward_pass(
    gpu: GPU, needs: tuple[bool, ...], dtype: torch.dtype | None
) -> None:
    leaves = [one.requires_grad_(wanted) for one, wanted in zip(operands(), needs, strict=True)]
    y = gpu.differentiable(*leaves) if dtype is None else gpu.under_autocast(*leaves, dtype)
    (make_plans,) = gpu.begun
    before = len(gpu.launched)
    y.backward(torch.ones_like(y))
    computed = [
        made for made, _ in map(gpu._plans.__getitem__, gpu.launched[before:]) if made.family != "cast"
    ]
    assert [made.kernels_digest for made in make_plans()] == [made.kernels_digest for made in computed]
    assert len(gpu.begun) == 1


def test_a_new_layer_is_planned_for_other_sizes(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has few kernels, which are compiled before another size needs them."""
    monkeypatch.setattr(call, "other_sizes", other_sizes)
    gpu.compiles = True
    x, w, b = operands()
    y = gpu.differentiable(x, w.requires_grad_(), b)
    of_gradients, of_other_sizes = gpu.begun
    y.backward(torch.ones_like(y))
    *_, gradients_of_other_sizes = gpu.begun
    for make_plans in (of_other_sizes, gradients_of_other_sizes):
        sizes = {made.outputs[0].shape for made in make_plans()}
        kernels = {one.kernel for made in make_plans() for one in made.launches}
        assert 2 <= len(kernels) < 25
        if make_plans is of_other_sizes:
            assert len(sizes) > 12
    assert len(of_gradients()) == 1
    assert len(gpu.begun) == 3
    gpu.compiles = False
    gpu.differentiable(x[:1], w.detach(), b)
    assert len(gpu.begun) == 3


def test_the_layer_behind_is_planned_with_the_first_call(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "followers", FOLLOWERS)
    monkeypatch.setattr(jit, "is_on_disk", lambda kernel, architecture: False)
    x, w, b = operands()
    shape = dict(batch=x.shape[0], in_channels=x.shape[1], height=1, width=1, out_channels=w.shape[1])
    of_layer = Geometry(**shape, kernel=(4, 4), stride=(2, 2), padding=(1, 1))
    behind = of_layer._replace(in_channels=of_layer.out_channels, out_channels=24)
    expected.expect([expected.ExpectedLayer(behind, has_bias=False)])
    y = gpu.differentiable(x, w.requires_grad_(), b)
    forward_behind, gradients_behind, gradients = ([*make_plans()] for make_plans in gpu.begun)
    assert [one.outputs[0].shape for one in forward_behind] == [
        (y.shape[0], 24, 2 * y.shape[2], 2 * y.shape[3])
    ]
    assert [one.shape for made in gradients for one in made.outputs] == [w.shape]
    shapes = {one.shape for made in gradients_behind for one in made.outputs}
    assert shapes == {y.shape, (y.shape[1], 24, 4, 4)}
    with monkeypatch.context() as patched:
        patched.setattr(jit, "is_on_disk", lambda kernel, architecture: True)
        gpu.differentiable(x[:1], w, b)
        assert len(gpu.begun) == 4
    monkeypatch.setattr(launch, "missing_kernels", lambda made, architecture: [])
    gpu.differentiable(x[:, :, 1:], w, b)  # whose kernels are loaded
    assert len(gpu.begun) == 5


def test_no_gradients_are_planned_where_none_are_wanted(gpu: GPU) -> None:
    x, w, b = operands()
    gpu.differentiable(x, w, b)
    with torch.no_grad():
        gpu.differentiable(x[:1], w.requires_grad_(), b)
    assert not gpu.begun


def check_derivatives(gpu: GPU, leaves: list[Tensor], create_graph: bool = False) -> None:
    needing = [one for one in leaves if one.requires_grad]
    y, expected = gpu.differentiable(*leaves), F.conv_transpose2d(*leaves, 2, 1)  # type: ignore[arg-type]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(y).requires_grad_(create_graph)
    found, wanted = (
        torch.autograd.grad(output, needing, grad, create_graph=create_graph) for output in (y, expected)
    )
    if create_graph:
        found, wanted = (
            torch.autograd.grad(sum(one.square().sum() for one in first), [*needing[:2], grad])  # type: ignore[arg-type]
            for first in (found, wanted)
        )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


def test_gradients_of_gradients_are_pytorchs(gpu: GPU) -> None:
    check_derivatives(gpu, [one.requires_grad_() for one in operands()], create_graph=True)
    assert gpu.planned == ["output"]


def test_a_pass_that_is_all_pytorchs_has_pytorchs_node(gpu: GPU) -> None:
    x, w, b = operands()
    y = gpu.differentiable(x, w.requires_grad_(), b, "native")
    assert y.grad_fn is not None
    assert "Convolution" in y.grad_fn.name()
    assert gpu.differentiable(x, w, b).grad_fn.name() == "ConvTranspose2dBackward"  # type: ignore[union-attr]


def test_nothing_is_differentiated_that_need_not_be(gpu: GPU) -> None:
    x, w, b = operands()
    w.requires_grad_()
    with torch.no_grad():
        assert gpu.differentiable(x, w, b).grad_fn is None
    with torch.inference_mode():
        assert gpu.differentiable(x, w, b).is_inference()
    assert gpu.differentiable(x, w.detach(), b).grad_fn is None
    assert gpu.planned == ["output"]


def test_what_was_saved_is_watched(gpu: GPU) -> None:
    x, w, b = (one.requires_grad_() for one in operands())
    y = gpu.differentiable(x, w, b)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()
    y = gpu.differentiable(x, w, b)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    packed: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
    ):
        gpu.differentiable(x, w, b).sum().backward()
    assert packed == [x.shape, w.shape]


def test_gradients_of_gradients_inside_the_gradients_op(gpu: GPU) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    op = torch.ops.tconv_swap.conv_transpose2d_gradients.default
    x, w, _ = (one.requires_grad_() for one in operands())
    grad = grad_output().requires_grad_()
    found = op.redispatch(keys, grad, x, w, GEOMETRY, [True, False, True], "kernel")
    expected = torch.autograd.grad(F.conv_transpose2d(x, w, None, 2, 1), x, grad, create_graph=True)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    second = torch.autograd.grad(found[0].square().sum(), (grad, w))
    wanted = torch.autograd.grad(expected[0].square().sum(), (grad, w))
    for ours, theirs in zip(second, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
    assert gpu.planned == []


def test_sizes_and_arguments_reach_the_whole_op(gpu: GPU) -> None:
    """In forward mode the call goes through the op that tracers see. All its numbers differ, so that none can be
    mixed up."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 2)
    arguments: tuple[Any, ...] = ((3, 4), (2, 1), (1, 2), 2, (2, 5))
    op = torch.ops.tconv_swap.conv_transpose2d_output.default
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y = op.redispatch(keys, dual, w, None, as_list(arguments), "auto")
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent, F.conv_transpose2d(torch.ones_like(x), w, None, *arguments))


# Autocast

HALF = torch.float16


@pytest.mark.parametrize("given", [(torch.float32,) * 3, (HALF, torch.float32, torch.float32), (HALF,) * 3])
def test_an_autocast_casts_what_pytorchs_would(gpu: GPU, given: tuple[torch.dtype, ...]) -> None:
    tensors = [one.to(dtype) for one, dtype in zip(operands(), given, strict=True)]
    expected = F.conv_transpose2d(*(one.to(HALF).float() for one in tensors), 2, 1)
    for _ in range(2):
        found = gpu.under_autocast(*tensors, HALF)
        assert (found.dtype, found.requires_grad) == (HALF, False)
        torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-2)
    assert gpu.planned == ["output"]
    weight = tensors[1].requires_grad_()
    with torch.no_grad():
        assert gpu.under_autocast(*tensors, HALF).grad_fn is None
    trained = gpu.under_autocast(*tensors, HALF)
    (gradient,) = torch.autograd.grad(trained.float().sum(), weight)
    assert gradient.dtype == weight.dtype
    with torch.inference_mode():
        assert gpu.under_autocast(*tensors, HALF).is_inference()


def test_an_autocast_sees_a_weight_that_changes_inside_of_it(gpu: GPU) -> None:
    x, w, _ = operands()
    w.requires_grad_()
    first = gpu.under_autocast(x, w, None, HALF)
    w.data.mul_(2)
    torch.testing.assert_close(gpu.under_autocast(x, w, None, HALF), first * 2, rtol=1e-2, atol=1e-2)


def test_gradients_through_an_autocast_lead_to_what_was_cast(gpu: GPU) -> None:
    """Weight and bias are cast below autograd: dtypes, numbers, and a second derivative."""

    def derivatives(call: Any) -> list[torch.Tensor]:
        x, w, b = leaves = [one.requires_grad_() for one in operands()]
        y = call(x, w * 1.0, b)
        first = torch.autograd.grad(y.float().square().mean(), leaves, create_graph=True)
        loss = sum(gradient.square().mean() for gradient in first)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return [y, *first, *(one.grad for one in leaves if one.grad is not None)]

    found = derivatives(lambda x, w, b: gpu.under_autocast(x, w, b, torch.bfloat16))
    expected = derivatives(
        lambda x, w, b: F.conv_transpose2d(*(one.bfloat16().float() for one in (x, w, b)), 2, 1).bfloat16()
    )
    assert len(found) == len(expected) == 7
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < 2e-2


@pytest.mark.parametrize("form", [NCHW, CHANNELS_LAST])
def test_an_autocast_casts_by_one_launch(gpu: GPU, form: torch.memory_format) -> None:
    """A forward pass casts input, weight and bias where needed, a backward pass the gradients of weight and bias."""
    x, w, b = operands(form)
    leaves = w.requires_grad_(), b.requires_grad_()
    for given, casts in ((x, 2), (x.half(), 4)):
        y = gpu.under_autocast(given, w, b, HALF)
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert [gradient.dtype for gradient in found] == [torch.float32] * 2
        assert gpu.casts == casts
        assert found[0].is_contiguous(memory_format=form)
    transposed = w.detach().permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    found_y = gpu.under_autocast(x, transposed, b, HALF)  # lies in neither format
    assert gpu.casts == casts
    torch.testing.assert_close(found_y, y, rtol=2e-3, atol=2e-2)


def test_an_autocast_saves_copies_that_outlive_a_change(gpu: GPU) -> None:
    """PyTorch saves the copy of a weight, which an optimizer may change before the backward pass."""
    x, w, b = (one.requires_grad_() for one in operands())
    packed: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (packed.append(tensor.dtype), tensor)[1], lambda tensor: tensor
    ):
        y = gpu.under_autocast(x, w, b, HALF)
    assert packed == [HALF, HALF]
    (before,) = torch.autograd.grad(y.float().sum(), x, retain_graph=True)
    with torch.no_grad():
        w.mul_(2)
    (after,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.equal(before, after)


def test_an_autocast_leaves_float64_alone(gpu: GPU) -> None:
    x, w, b = (one.double() for one in operands())
    assert gpu.under_autocast(x, w, b, HALF).dtype == torch.float64
    with pytest.raises(RuntimeError, match="should be the same"):
        gpu.under_autocast(x, w.float(), b, HALF)
