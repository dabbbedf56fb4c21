"""Transposed convolution on CUDA: plan, compile and launch (being written)."""

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
    raise RuntimeError("being written")


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    memory_format: torch.memory_format,
    output_mask: tuple[bool, bool, bool],
) -> list[Tensor]:
    raise RuntimeError("being written")
