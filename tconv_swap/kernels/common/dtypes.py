"""The dtypes of the fast kernels, and what csrc/kernels and tensor maps call them."""

from __future__ import annotations

import torch

from tconv_swap.runtime.program import ElementKind

HALF_DTYPES = (torch.float16, torch.bfloat16)
#: Only the general kernels compute float64, too.
DTYPES = (torch.float32, *HALF_DTYPES)
#: The products of tensor cores, as csrc/kernels/common/mma.cuh numbers them. IEEE: three products of TF32 parts.
TF32, FP16, BF16, IEEE = range(4)
#: Those of a dtype where float32 is rounded to TF32, and where it is not.
TF32_PRECISIONS = {torch.float32: TF32, torch.float16: FP16, torch.bfloat16: BF16}
PRECISIONS = {**TF32_PRECISIONS, torch.float32: IEEE}
#: The elements of tensor maps, likewise.
TF32_ELEMENT_KINDS = {
    torch.float32: ElementKind.TFLOAT32,
    torch.float16: ElementKind.FLOAT16,
    torch.bfloat16: ElementKind.BFLOAT16,
}
ELEMENT_KINDS = {**TF32_ELEMENT_KINDS, torch.float32: ElementKind.FLOAT32}
