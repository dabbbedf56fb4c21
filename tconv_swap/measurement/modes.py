"""Defines the modes in which a layer is measured: the arithmetic (dtype, and TF32 on or off) and the memory layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mode:
    """``precision`` is the value of ``fp32_precision`` in ``torch.backends``: ``"tf32"`` or ``"ieee"``."""

    name: str
    dtype: torch.dtype
    precision: str

    @property
    def roundoff(self) -> float:
        """Returns the largest relative error of rounding to ``dtype``; TF32 results are stored as float32."""
        return torch.finfo(self.dtype).eps / 2

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Sets PyTorch's switches for this mode, for convolutions and matrix products, and restores them."""
        switches = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
        before = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = self.precision
            yield
        finally:
            for switch, setting in zip(switches, before, strict=True):
                switch.fp32_precision = setting


MODES = {
    mode.name: mode
    for mode in (
        Mode("tf32", torch.float32, "tf32"),
        Mode("fp16", torch.float16, "ieee"),
        Mode("bf16", torch.bfloat16, "ieee"),
        Mode("fp32", torch.float32, "ieee"),
    )
}

LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Lets cuDNN try its algorithms and keep the fastest, so that PyTorch runs at its best."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
