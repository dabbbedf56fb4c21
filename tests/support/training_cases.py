"""What tests of blocks in training share: a block, and one step of it with everything that it changes."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import tconv_swap
from tconv_swap.blocks import call


def block(norm: nn.Module, activation: nn.Module | None = None, **arguments: object) -> nn.Sequential:
    """A layer of PyTorch's, a norm whose parameters and statistics differ from channel to channel, and an activation,
    in training."""
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    layer = nn.ConvTranspose2d(16, norm.num_features, 4, 2, 1, **arguments)  # type: ignore[arg-type]
    for name, one in (*norm.named_parameters(), *norm.named_buffers()):
        if one.is_floating_point():
            nn.init.uniform_(one, 0.5, 1.5) if name in ("weight", "running_var") else nn.init.normal_(one)
    return nn.Sequential(*(one for one in (layer, norm, activation) if one is not None))


def swapped(made: nn.Module) -> nn.Sequential:
    """The same with ours, computed by our kernels also where "auto" would use PyTorch's operator."""
    return tconv_swap.swap_layers(made, fuse="blocks", inplace=False, backend="kernel")  # type: ignore[return-value]


def images(device: str = "cpu", batch: int = 3) -> Tensor:
    return torch.randn(batch, 16, 5, 6, generator=torch.Generator().manual_seed(1)).to(device)


def step(made: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """Returns the output, the gradients of ``x`` and of all parameters that want one, and the buffers after it."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
    with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
        output = made(x)
    of = {name: one for name, one in (("x", x), *made.named_parameters()) if one.requires_grad}
    grad = torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output)
    gradients = torch.autograd.grad(output, tuple(of.values()), grad.to(output.dtype))
    buffers = {name: one.clone() for name, one in made.named_buffers()}
    return {"output": output, **dict(zip(of, gradients, strict=True)), **buffers}


def node(output: Tensor) -> str:
    assert output.grad_fn is not None
    return output.grad_fn.name()


def separately(patch: pytest.MonkeyPatch) -> None:
    """From now on a layer and its norm are two ops with a node each."""
    patch.setattr(call, "trained", lambda *_: (None, False))
