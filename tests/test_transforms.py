"""Compares torch.func and forward-mode derivatives with PyTorch's layer: a missing rule would give a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tconv_swap import op, swap_layers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class ByOp(nn.Module):
    """Calls the torch op itself, as an exported graph does."""

    def __init__(self, layer: nn.ConvTranspose2d) -> None:
        super().__init__()
        self.weight, self.bias, self.layer = layer.weight, layer.bias, [layer]

    def forward(self, x: Tensor) -> Tensor:
        a = self.layer[0]
        function = torch.ops.tconv_swap.conv_transpose2d.default
        return function(
            x, self.weight, self.bias, a.stride, a.padding, a.output_padding, a.groups, a.dilation, "auto"
        )


@pytest.fixture(params=["layer", "formulated", "op"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test with the layer, with a CPU formulation other than PyTorch's, and with the torch op."""
    if request.param == "formulated":
        monkeypatch.setattr(op, "is_plain", lambda *_: False)
    return request.param


@pytest.fixture(params=DEVICES)
def models(request: pytest.FixtureRequest, how: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Returns PyTorch's layer, ours and an input, all float64."""
    torch.manual_seed(0)
    theirs = nn.ConvTranspose2d(4, 6, (3, 4), (2, 1), (1, 2), (1, 0), groups=2, dilation=(1, 2)).double()
    theirs.to(request.param)
    ours = ByOp(theirs) if how == "op" else swap_layers(theirs, inplace=False)
    x = torch.randn(3, 4, 3, 5, dtype=torch.float64, device=request.param)
    return theirs, ours, x


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def noise(like: Any) -> Any:
    def numbers(t: Tensor) -> Tensor:
        return torch.cos(torch.arange(1.0, t.numel() + 1, dtype=t.dtype, device=t.device) ** 2).view(t.shape)

    return torch.utils._pytree.tree_map(numbers, like)


def called(model: nn.Module, p: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, p, (x,))


def energy(model: nn.Module) -> Callable[..., Tensor]:
    return lambda p, x: called(model, p, x).tanh().square().sum()


def tangent_of_dual(model: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    with forward_ad.dual_level():
        duals = {k: forward_ad.make_dual(p, noise(p)) for k, p in parameters(model).items()}
        by_parameters = forward_ad.unpack_dual(called(model, duals, x)).tangent
        by_input = forward_ad.unpack_dual(model(forward_ad.make_dual(x, noise(x)))).tangent
    return by_parameters, by_input


def tangent_of_gradient(model: nn.Module, x: Tensor) -> Any:
    """Computes forward over reverse where the forward pass ran before the level began."""
    x = x.clone().requires_grad_()
    y = model(x)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(noise(y.detach()), noise(y.detach()) * 2)
        gradients = torch.autograd.grad(y, [x, *model.parameters()], cotangent, create_graph=True)
        return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]


def batched_cotangents(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    y = model(x)
    cotangents = noise(torch.empty(3, *y.shape, dtype=y.dtype, device=y.device))
    return torch.autograd.grad(y, [x, *model.parameters()], cotangents, is_grads_batched=True)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "functional_call": lambda m, x: called(m, {k: p * 2 for k, p in parameters(m).items()}, x),
    "vmap": lambda m, x: vmap(m)(x[:, None]),
    "vmap over unbatched": lambda m, x: vmap(lambda xi: m(xi))(x),
    "vmap over another axis": lambda m, x: vmap(m, in_dims=1, out_dims=2)(torch.stack([x, x * 2], 1)),
    "ensemble": lambda m, x: vmap(lambda p: called(m, p, x))(
        {k: torch.stack([p, p * 2]) for k, p in parameters(m).items()}
    ),
    "per-sample gradients": lambda m, x: vmap(grad(energy(m)), (None, 0))(parameters(m), x[:, None]),
    "jvp": lambda m, x: jvp(m, (x,), (noise(x),)),
    "jvp of parameters": lambda m, x: jvp(
        lambda p: called(m, p, x), (parameters(m),), (noise(parameters(m)),)
    ),
    "vjp": lambda m, x: vjp(m, x)[1](noise(m(x).detach())),
    "jacrev": lambda m, x: jacrev(m)(x[:1]),
    "jacfwd": lambda m, x: jacfwd(m)(x[:1]),
    "hessian": lambda m, x: hessian(energy(m), argnums=1)(parameters(m), x[:1]),
    "forward mode": tangent_of_dual,
    "forward over reverse": tangent_of_gradient,
    "batched cotangents": batched_cotangents,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_give_pytorchs_results(
    models: tuple[nn.Module, nn.Module, Tensor], transform: str
) -> None:
    theirs, ours, x = models
    expected = TRANSFORMS[transform](theirs, x)
    leaves = torch.utils._pytree.tree_leaves(expected)
    assert leaves
    assert all(leaf is not None and bool(leaf.any()) for leaf in leaves)
    actual = TRANSFORMS[transform](ours, x)
    assert torch.utils._pytree.tree_structure(actual) == torch.utils._pytree.tree_structure(expected)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["jvp", "per-sample gradients", "jacrev"])
def test_compiled_transforms_give_pytorchs_results(transform: str) -> None:
    theirs = nn.ConvTranspose2d(4, 3, 3, 2)
    ours = swap_layers(theirs, inplace=False)
    x = torch.randn(2, 4, 3, 3)
    function = TRANSFORMS[transform]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), function(theirs, x))


def test_gradients_can_be_differentiated_again() -> None:
    """gradcheck with forward mode and batched gradients uses the rules above, of the op and of its backward."""
    torch.manual_seed(0)
    x, w, b = (
        torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((1, 2, 2, 2), (2, 1, 2, 3), (2,))
    )
    function = torch.ops.tconv_swap.conv_transpose2d.default

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return function(x, w, b, [2, 1], [0, 1], [0, 0], 2, [1, 1], "auto")

    assert torch.autograd.gradcheck(
        call, (x, w, b), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    x, w = x[..., :1].detach().requires_grad_(), w[..., :1, :].detach().requires_grad_()
    assert torch.autograd.gradgradcheck(call, (x, w, b), check_fwd_over_rev=True)
