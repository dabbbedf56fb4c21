"""Computes transposed convolutions on the CPU: checks the tensors and calls the formulation that the plan chooses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tconv_swap.checks import check_backward, check_forward, output_memory_format
from tconv_swap.cpu import backward, forward
from tconv_swap.dispatch import without_autocast
from tconv_swap.geometry import Arguments


def output(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Tensor:
    """Returns ``[batch, out_channels, out_height, out_width]`` in PyTorch's memory format.

    Raises:
        RuntimeError: the tensors or arguments do not fit together.
    """
    geometry = check_forward(input, weight, bias, arguments)
    with without_autocast():
        return forward.forward(input, weight, bias, geometry, output_memory_format(input, weight))


def gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor, arguments: Arguments, mask: Sequence[bool]
) -> list[Tensor]:
    """Returns the gradients of input, weight and bias for which ``mask`` is true, in that order.

    Raises:
        RuntimeError: as ``output``.
    """
    geometry = check_backward(grad_output, input, weight, arguments)
    memory_format = output_memory_format(input, weight)
    with without_autocast():
        return backward.backward(grad_output, input, weight, geometry, memory_format, tuple(mask))
