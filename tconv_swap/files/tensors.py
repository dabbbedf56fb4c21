"""Makes the tensors that a file describes, after checking that they lie inside their storages.

PyTorch's own functions do not check much of that: sparse indices out of bounds and missing channels of a quantised
tensor are read from whatever memory they point to.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.files.containers import RefusedError

_MAX_BYTES = (1 << 63) - 1
_QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def rebuild(function: str, arguments: Sequence[Any]) -> Tensor:
    """Returns the result of a function of `torch._utils`; `shapes` has checked the types of its arguments.

    A storage is passed as ``(storage, dtype)``.

    Raises:
        RefusedError: the arguments do not fit together.
    """
    try:
        return _MAKERS[function](*arguments)
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RefusedError(f"an impossible tensor: {lines[0]:.120}") from error


def _check_inside(
    nbytes: int, itemsize: int, offset: int, size: Sequence[int], stride: Sequence[int]
) -> None:
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise RefusedError("the size and the strides of a tensor do not fit together")
    if math.prod(max(1, n) for n in size) * itemsize > _MAX_BYTES:
        raise RefusedError("a tensor is larger than any memory")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    end = offset if 0 in size else last + 1
    if end * itemsize > nbytes:
        raise RefusedError("a tensor lies outside its storage")


def _strided(
    stored: tuple[torch.UntypedStorage, torch.dtype],
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: dict[str, bool] | None = None,
) -> Tensor:
    return _untyped(stored, offset, size, stride, requires_grad, hooks, stored[1], metadata)


def _untyped(
    stored: tuple[torch.UntypedStorage, torch.dtype],
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    _: object,
    dtype: torch.dtype,
    metadata: dict[str, bool] | None = None,
) -> Tensor:
    storage = stored[0]
    if dtype in _QUANTIZED:
        raise RefusedError("a quantised tensor has no scale")
    _check_inside(storage.nbytes(), dtype.itemsize, offset, size, stride)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    tensor: Tensor = torch._utils._rebuild_tensor_v2(
        typed, offset, size, stride, requires_grad, OrderedDict(), metadata
    )
    return tensor


def _quantized(
    stored: tuple[torch.UntypedStorage, torch.dtype],
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    quantizer: tuple[Any, ...],
    requires_grad: bool,
    _: object,
) -> Tensor:
    storage, dtype = stored
    if dtype not in _QUANTIZED or requires_grad or storage.device.type == "meta":
        raise RefusedError("a quantised tensor has a dtype that is not quantised")
    _check_inside(storage.nbytes(), dtype.itemsize, offset, size, stride)
    if quantizer[0] == torch.per_tensor_affine:
        _, scale, zero_point = quantizer
        if not (math.isfinite(scale) and scale > 0 and _may_be_zero_point(zero_point, dtype)):
            raise RefusedError("the scale or the zero point of a quantised tensor is out of range")
    else:
        _check_channels(quantizer, size, dtype)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    tensor: Tensor = torch._utils._rebuild_qtensor(
        typed, offset, size, stride, quantizer, False, OrderedDict()
    )
    return tensor


def _check_channels(quantizer: tuple[Any, ...], size: Sequence[int], dtype: torch.dtype) -> None:
    scheme, scales, zero_points, axis = quantizer
    whole = scheme == torch.per_channel_affine
    if not 0 <= axis < len(size):
        raise RefusedError("a quantised tensor has no such axis")
    for values in (scales, zero_points):
        given = values if isinstance(values, Tensor) else torch.tensor(values)
        plain = given.layout is torch.strided and not given.is_quantized and not given.is_meta
        if not plain or list(given.shape) != [size[axis]] or not bool(torch.isfinite(given).all()):
            raise RefusedError("a quantised tensor does not have a scale and a zero point for each channel")
    points = zero_points.tolist() if isinstance(zero_points, Tensor) else zero_points
    if whole and not all(_may_be_zero_point(point, dtype) for point in points):
        raise RefusedError("a zero point of a quantised tensor is out of range")


def _may_be_zero_point(value: Any, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(_QUANTIZED[dtype])
    return bool(value == int(value)) and limits.min <= value <= limits.max


def _sparse(layout: torch.layout, data: tuple[Any, ...]) -> Tensor:
    parts = [part for part in data if isinstance(part, Tensor)]
    indices, values = parts[:-1], parts[-1]
    if any(part.layout is not torch.strided or part.is_quantized or part.is_meta for part in parts):
        raise RefusedError("a sparse tensor is made of tensors without numbers")
    if any(index.dtype not in (torch.int32, torch.int64) for index in indices):
        raise RefusedError("the indices of a sparse tensor are not integers")
    size = data[len(parts)]
    _check_inside(_MAX_BYTES, values.dtype.itemsize, 0, size, [0] * len(size))
    if layout is torch.sparse_coo and len(indices) == 1:
        coalesced = data[3] if len(data) == 4 else None
        _check_coalesced(indices[0], coalesced)
        return torch.sparse_coo_tensor(
            indices[0], values, size, check_invariants=True, is_coalesced=coalesced
        )
    if layout in _COMPRESSED and len(indices) == 2:
        compressed: Any = torch.sparse_compressed_tensor
        made: Tensor = compressed(*indices, values, size, layout=layout, check_invariants=True)
        return made
    raise RefusedError("a sparse tensor does not have the parts of its layout")


def _check_coalesced(indices: Tensor, coalesced: bool | None) -> None:
    """Checks that indices that a file calls coalesced are sorted and unique: operators rely on it."""
    if coalesced and (
        indices.dim() != 2 or not torch.equal(torch.unique(indices.contiguous(), dim=1, sorted=True), indices)
    ):
        raise RefusedError("the indices of a sparse tensor are not in order")


def _nested(buffer: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    tables = (sizes, strides, offsets)
    if any(t.dtype is not torch.int64 or t.layout is not torch.strided or not t.is_cpu for t in tables):
        raise RefusedError("the sizes of a nested tensor are not integers")
    plain = buffer.layout is torch.strided and not buffer.is_quantized and not buffer.is_nested
    if not plain or buffer.dim() != 1 or not buffer.is_contiguous():
        raise RefusedError("a nested tensor has no plain buffer")
    if sizes.dim() != 2 or strides.shape != sizes.shape or offsets.shape != sizes.shape[:1]:
        raise RefusedError("the sizes of a nested tensor do not fit together")
    nbytes = buffer.numel() * buffer.dtype.itemsize
    rows = zip(offsets.tolist(), sizes.tolist(), strides.tolist(), strict=True)
    for offset, size, stride in rows:
        _check_inside(nbytes, buffer.dtype.itemsize, offset, size, stride)
    if int(sizes.prod(1).sum()) != buffer.numel():
        raise RefusedError("a nested tensor does not fill its buffer")
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _meta(dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], requires_grad: bool) -> Tensor:
    _check_inside(_MAX_BYTES, dtype.itemsize, 0, size, stride)
    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


def _parameter(data: Tensor, requires_grad: bool, _: object) -> Tensor:
    return nn.Parameter(data, requires_grad)


_MAKERS: dict[str, Callable[..., Tensor]] = {
    "_rebuild_tensor": _strided,
    "_rebuild_tensor_v2": _strided,
    "_rebuild_tensor_v3": _untyped,
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_parameter": _parameter,
}
