"""The arithmetic of a block, a normalisation and the activation behind it, and its computation by PyTorch's
operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tconv_swap.kernels.norm.shape import FROM_OUTPUT, Activation

#: For each norm of torch.nn: the dimensions of its input, and whether it normalises every image by itself.
NORMS: dict[type[nn.Module], tuple[tuple[int, ...], bool]] = {
    nn.BatchNorm1d: ((2, 3), False),
    nn.BatchNorm2d: ((4,), False),
    nn.InstanceNorm1d: ((3,), True),
    nn.InstanceNorm2d: ((4,), True),
}


#: The module that defines our classes of activations, whose second base is PyTorch's class.
HANDED = "tconv_swap.blocks.handed"


@dataclass(frozen=True, slots=True)
class Form:
    """The arithmetic of a block, without sizes and tensors.

    Attributes:
        per_image: whether every image has statistics of its own.
        trains: whether it normalises by the batch's statistics, else by the running ones.
        slope: the slope of a leaky ReLU.
    """

    per_image: bool
    trains: bool
    eps: float
    activation: Activation
    slope: float = 0.0


def activation_of(module: nn.Module | None) -> tuple[Activation, float] | None:
    """Returns the activation that a module computes, and the slope of a leaky ReLU. Without a module it is the
    identity; returns None if our kernels lack the activation."""
    if module is None:
        return Activation.IDENTITY, 0.0
    kind = type(module)
    if kind.__module__ == HANDED:
        kind = kind.__bases__[1]
    if kind is nn.LeakyReLU:
        return Activation.LEAKY_RELU, module.negative_slope  # type: ignore[return-value]
    if kind is nn.GELU:
        return (Activation.GELU_TANH if module.approximate == "tanh" else Activation.GELU), 0.0
    found = _ACTIVATIONS.get(kind)
    return None if found is None else (found, 0.0)


def takes_sum(module: nn.Module) -> bool:
    """Returns whether there are kernels for a norm, a sum and this activation."""
    applied = activation_of(module)
    return applied is not None and applied[0] in FROM_OUTPUT


_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation.RELU,
    nn.ReLU6: Activation.RELU6,
    nn.Tanh: Activation.TANH,
    nn.Sigmoid: Activation.SIGMOID,
    nn.SiLU: Activation.SILU,
}


def activate(x: Tensor, activation: Activation, slope: float) -> Tensor:
    """Applies the activation by PyTorch's function."""
    match activation:
        case Activation.RELU:
            return F.relu(x)
        case Activation.LEAKY_RELU:
            return F.leaky_relu(x, slope)
        case Activation.RELU6:
            return F.relu6(x)
        case Activation.TANH:
            return torch.tanh(x)
        case Activation.SIGMOID:
            return torch.sigmoid(x)
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
    return x


def by_pytorch(x: Tensor, weight: Tensor | None, bias: Tensor | None, saved: Tensor, form: Form) -> Tensor:
    """Computes a block by PyTorch's operators, which have derivatives of every order.

    Args:
        x: ``[batch, channels, ...]``.
        saved: ``[2, channels]``, means and ``1 / sqrt(variance + eps)``; only read if the form does not train.
    """
    if not form.trains:
        mean, inverse = (one.view(-1, *[1] * (x.dim() - 2)) for one in saved)
        scale = inverse if weight is None else inverse * weight.view_as(inverse)
        normed = (x - mean) * scale
        y = normed if bias is None else normed + bias.view_as(inverse)
        y = y.to(x.dtype)
    elif form.per_image:
        y = F.instance_norm(x, None, None, weight, bias, True, 0.0, form.eps)
    else:
        y = F.batch_norm(x, None, None, weight, bias, True, 0.0, form.eps)
    return activate(y, form.activation, form.slope)
