"""Finds where rounding decides on which side of a kink an activation computes.

The derivative of a ReLU jumps where its input is zero. If the exact input is next to zero, rounding may give it either
sign, and both derivatives are right. In float32, on a CPU, that was one of 252 million sums of a norm and another
tensor, in PyTorch's computation and in another order of the same; a training step of a ResNet has as many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tconv_swap.kernels.norm.shape import Activation

#: Where the derivative of an activation jumps.
KINKS: dict[Activation, tuple[float, ...]] = {
    Activation.RELU: (0.0,),
    Activation.LEAKY_RELU: (0.0,),
    Activation.RELU6: (0.0, 6.0),
}
# An error of rounding, of the norm and of a sum, may be this many times PyTorch's, or as many roundings.
_ERRORS, _ROUNDINGS = 2.0, 4.0
# The distance to a kink of an input that was moved across it: far below any rounding of float32.
_BESIDE = 1e-12


def next_to_kinks(
    normed: Tensor, added: Tensor | None, error: float, dtype: torch.dtype, activation: Activation
) -> Tensor:
    """Returns where rounding may put the activation's input on the other side of a kink.

    Args:
        normed: the exact result of the norm, in float64.
        added: what is added to it.
        error: the largest error of the norm in float32.
        dtype: the dtype of the block, to which PyTorch rounds the norm and the sum.
    """
    size = normed.abs()
    if added is not None:
        normed, size = normed + added, size + added.abs()
    room = _ERRORS * error + _ROUNDINGS * torch.finfo(dtype).eps / 2 * size
    return (normed - _nearest_kink(normed, activation)).abs() <= room


def moved(input: Tensor, across: Tensor, activation: Activation) -> Tensor:
    """Returns an activation's input, in float64, that is moved to the other side of the nearest kink where ``across``
    is true. Its gradient is that of the input."""
    with torch.no_grad():
        kink = _nearest_kink(input, activation)
        other = kink + torch.where(input > kink, -_BESIDE, _BESIDE)
        step = torch.where(across, other - input, 0.0)
    return input + step


def chosen_sides(near: Tensor, gradient: Tensor, exact: Tensor, other: Tensor) -> Tensor:
    """Returns where a gradient was computed on the other side of a kink than the exact one.

    Args:
        near: where rounding decides.
        gradient, exact: the gradient of the norm's input or of what is added to it.
        other: the exact gradient if the activation's input lies on the other side wherever rounding decides.
    """
    value = gradient.double()
    return near & ((value - other).abs() < (value - exact).abs())


def _nearest_kink(input: Tensor, activation: Activation) -> Tensor:
    first, *more = KINKS[activation]
    nearest = torch.full_like(input, first)
    for kink in more:
        nearest = torch.where((input - kink).abs() < (input - nearest).abs(), kink, nearest)
    return nearest
