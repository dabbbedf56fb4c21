"""Finds out whether two tensors share memory."""

from __future__ import annotations

import torch
from torch import Tensor


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors exist and share memory, at least in part."""
    if one.device != other.device or not one.numel() or not other.numel() or one.is_meta:
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    (start, end), (other_start, other_end) = _reach(one), _reach(other)
    return start < other_end and other_start < end


def _reach(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()
