"""Calls PyTorch's own operator, for what it computes faster than our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any]) -> Tensor:
    stride, padding, output_padding, groups, dilation = arguments
    return torch.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, arguments: Sequence[Any], mask: Sequence[bool]
) -> list[Tensor]:
    stride, padding, output_padding, groups, dilation = arguments
    out_channels = [weight.shape[1] * groups]
    gradients = torch.ops.aten.convolution_backward.default(
        grad_output,
        input,
        weight,
        out_channels,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
        mask,
    )
    return [gradient for gradient, wanted in zip(gradients, mask, strict=True) if wanted]
