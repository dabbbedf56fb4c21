"""Compares the bits of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Returns whether shapes, dtypes and bits are equal: a NaN equals itself, and 0 does not equal -0.

    Sparse and nested tensors are equal if all their parts are: indices, values, components. If there are no bits to
    compare (tensors on the meta device), the result is False.
    """
    if (first.dtype, first.layout, first.is_nested) != (second.dtype, second.layout, second.is_nested):
        return False
    if first.is_meta or second.is_meta:
        return False
    if first.is_nested or first.layout != torch.strided:
        ours, theirs = _parts(first), _parts(second)
        same_shape = first.is_nested or first.shape == second.shape
        return same_shape and len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    if first.shape != second.shape:
        return False
    if first.device != second.device:
        first, second = first.cpu(), second.cpu()
    # A quantized tensor also has a scale and a zero point.
    return torch.equal(first, second) if first.is_quantized else torch.equal(_bits(first), _bits(second))


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the strided tensors that a sparse or nested tensor consists of."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])
