"""Checks the tensors of a call, and returns the memory format that PyTorch would give to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tconv_swap.geometry import Geometry, cached_geometry, check_geometry


def check_tensors(input: Tensor, **others: Tensor | None) -> None:
    """Checks that every tensor has the dtype of ``input`` and is on its device.

    Raises:
        RuntimeError: one of them does not; the message names it and what was expected.
    """
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"Input type ({input.dtype}) and {name} type ({tensor.dtype}) should be the same: "
                f"expected {name} of {input.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but input is on {input.device} and "
                f"{name} is on {tensor.device}"
            )


def check_forward(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any]) -> Geometry:
    """Returns the geometry of a forward call. ``arguments``: stride, padding, output_padding, groups, dilation.

    Raises:
        RuntimeError: as ``check_tensors`` and ``check_geometry``.
    """
    check_tensors(input, weight=weight, bias=bias)
    return _geometry(input, weight, bias, arguments)


def check_backward(grad_output: Tensor, input: Tensor, weight: Tensor, arguments: Sequence[Any]) -> Geometry:
    """Returns the geometry of a backward call.

    Raises:
        RuntimeError: as ``check_forward``, or ``grad_output`` does not have the shape of the output.
    """
    check_tensors(input, weight=weight, grad_output=grad_output)
    geometry = _geometry(input, weight, None, arguments)
    if tuple(grad_output.shape) != geometry.output_shape:
        raise RuntimeError(
            f"expected grad_output of size {list(geometry.output_shape)}, but got {list(grad_output.shape)}"
        )
    return geometry


def _geometry(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: Sequence[Any]) -> Geometry:
    stride, padding, output_padding, groups, dilation = arguments
    # PyTorch's operator returns an empty output on CUDA, and raises on the CPU.
    if input.device.type == "cpu" and weight.dim() == 4 and weight.shape[1] == 0:
        raise RuntimeError(
            f"expected weight to have at least one output channel, but got weight of size {list(weight.shape)}"
        )
    sizes = (
        tuple(input.shape),
        tuple(weight.shape),
        None if bias is None else tuple(bias.shape),
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        groups,
        tuple(dilation),
    )
    try:
        return cached_geometry(*sizes)
    except TypeError:  # symbolic sizes cannot be hashed
        return check_geometry(*sizes)


def output_memory_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Returns the format of PyTorch's output: channels_last if input or weight has it (with cuDNN never for
    float64)."""
    if input.device.type == "cuda" and input.dtype == torch.float64:
        return torch.contiguous_format
    if _is_channels_last(input) or _is_channels_last(weight):
        return torch.channels_last
    return torch.contiguous_format


#: The sizes of these types are plain integers; checking each size would take longer than the rest of the function.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _is_channels_last(tensor: Tensor) -> bool:
    """Returns whether ``Tensor::suggest_memory_format`` says channels_last (c10/core/MemoryFormat.h,
    is_channels_last_strides_2d)."""
    sizes, strides = tensor.shape, tensor.stride()
    if type(tensor) not in _PLAIN_TYPES and any(
        isinstance(number, torch.SymInt) for number in (*sizes, *strides)
    ):
        # PyTorch's function sets guards on symbolic sizes. It imports sympy, which takes 1.8 s at the first call.
        from torch._prims_common import suggest_memory_format

        return suggest_memory_format(tensor) == torch.channels_last
    if tensor.dim() != 4 or tensor.layout != torch.strided or strides[1] == 0:
        return False
    least = 0
    for dimension in (1, 3, 2, 0):
        if sizes[dimension] == 0 or strides[dimension] < least:
            return False
        # One pixel with one channel has both formats; PyTorch calls it contiguous.
        if dimension == 0 and least == strides[1]:
            return False
        least = strides[dimension] * sizes[dimension]
    return True
