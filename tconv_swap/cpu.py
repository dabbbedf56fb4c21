"""Transposed convolution on the CPU, out of PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from tconv_swap.geometry import Geometry


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    memory_format: torch.memory_format,
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]`` in ``memory_format``."""
    output = torch.nn.functional.conv_transpose2d(
        input,
        weight,
        bias,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.groups,
        geometry.dilation,
    )
    return output.contiguous(memory_format=memory_format)


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    memory_format: torch.memory_format,
    output_mask: tuple[bool, bool, bool],
) -> list[Tensor]:
    """The gradients ``output_mask`` asks for (input, weight, bias), in that order."""
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        [geometry.out_channels],
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        True,
        geometry.output_padding,
        geometry.groups,
        output_mask,
    )
    return [
        g if g.dim() == 1 else g.contiguous(memory_format=memory_format)
        for g, wanted in zip(gradients, output_mask, strict=True)
        if wanted
    ]
