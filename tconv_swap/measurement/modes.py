"""The modes a layer is measured in: the arithmetic (dtype, and TF32 on or off) and the memory layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mode:
    """``precision`` is what ``torch.backends`` calls ``fp32_precision``: ``"tf32"`` or ``"ieee"``."""

    name: str
    dtype: torch.dtype
    precision: str

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding to ``dtype``; TF32 results are stored as float32."""
        return torch.finfo(self.dtype).eps / 2

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """PyTorch's switches set for this mode, for convolutions and matrix products, and set back."""
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
    """PyTorch at its best: cuDNN tries its algorithms and keeps the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
