"""Whether two tensors hold the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether shapes, dtypes and bits agree: a NaN is the same as itself, and 0 is not the same as -0.

    Where no bits can be looked at (sparse tensors, those on the meta device) the answer is no.
    """
    if (first.shape, first.dtype, first.layout) != (second.shape, second.dtype, second.layout):
        return False
    if first.layout != torch.strided or first.is_meta or second.is_meta:
        return False
    if first.device != second.device:
        first, second = first.cpu(), second.cpu()
    # A quantized tensor is more than its integers.
    return torch.equal(first, second) if first.is_quantized else torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
