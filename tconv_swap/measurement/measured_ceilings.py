"""Measures the two ceilings of a GPU in the way layers are measured: interleaved, from a cold L2 cache, the median."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tconv_swap.measurement.modes import MODES, Mode
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.measurement.timing import time_interleaved

#: The size of each of the two buffers of the copy: far larger than any cache.
COPY_BYTES = 4 << 30
MATRIX = 8192
ITERS = 20


def measure_ceilings(
    device: torch.device,
    copy_bytes: int = COPY_BYTES,
    matrix: int = MATRIX,
    iters: int = ITERS,
    modes: Collection[str] = tuple(MODES),
) -> Ceilings:
    """Copies one large buffer to another, counting bytes read plus bytes written; multiplies square matrices of random
    numbers through ``torch.matmul``, in each of the modes. On a small GPU the buffers take a quarter of its memory."""
    if device.type == "cuda":
        copy_bytes = min(copy_bytes, torch.cuda.get_device_properties(device).total_memory // 8)
    source = torch.randint(0, 256, (copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    products = {mode.name: _product(mode, matrix, device) for mode in map(MODES.__getitem__, modes)}
    timings = time_interleaved(
        {"copy": lambda: target.copy_(source), **products}, device=device, warmup=3, iters=iters
    )
    rates = {name: 2 * matrix**3 / timings[name].median_ms * 1e-9 for name in products}
    return Ceilings(2 * copy_bytes / timings["copy"].median_ms * 1e-6, rates)


def _product(mode: Mode, size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(mode.dtype) for _ in range(2))
    result = torch.empty_like(a)

    def product() -> None:
        with mode.switched_on():
            torch.matmul(a, b, out=result)

    return product
