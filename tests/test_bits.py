"""Tests whether two tensors are recognised as having the same bits."""

from __future__ import annotations

import pytest
import torch

from tconv_swap.bits import same_bits

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_and_unequal_bits_of_every_dtype_and_layout(dtype: torch.dtype) -> None:
    x = torch.arange(24).reshape(2, 3, 2, 2).to(dtype)
    other = x.clone()
    other[1, 2, 1, 1] = 0
    for form in (torch.contiguous_format, torch.channels_last):
        assert same_bits(x, x.clone(memory_format=form))
        assert not same_bits(x, other.clone(memory_format=form))
    assert same_bits(x[:0], x[:0].clone())
    assert same_bits(x[0, 0, 0, 0], x[0, 0, 0, 0].clone())
    assert not same_bits(x, x[:1])


def test_nan_equals_itself_and_signed_zeros_differ() -> None:
    nan, zero = torch.tensor([torch.nan]), torch.zeros(1)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.int())
    z = torch.tensor([1 + 2j])
    assert same_bits(z.conj(), z.conj().resolve_conj())
    assert not same_bits(z.conj(), z)


def test_tensors_without_bits_are_not_equal() -> None:
    x = torch.empty(2, device="meta")
    assert not same_bits(x, x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_equal_if_their_parts_are(layout: torch.layout) -> None:
    x = torch.eye(3).to_sparse(layout=layout)
    assert same_bits(x, x.clone())
    assert not same_bits(x, x * 2)
    assert not same_bits(x, torch.eye(3).flip(0).to_sparse(layout=layout))
    assert not same_bits(x, torch.eye(3))
    assert not same_bits(x, torch.eye(4)[:, :3].to_sparse(layout=layout))


def test_quantized_tensors_differ_in_their_scale() -> None:
    first, second = (torch.quantize_per_tensor(torch.ones(2) * s, s, 0, torch.qint8) for s in (0.5, 0.25))
    assert torch.equal(first.int_repr(), second.int_repr())
    assert same_bits(first, first.clone())
    assert not same_bits(first, second)
