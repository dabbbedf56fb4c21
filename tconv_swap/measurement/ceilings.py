"""Knows the two ceilings of GPUs that need no measurement: the rate of copies and the rate of matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tconv_swap.measurement.roof import Ceilings


@dataclass(frozen=True, slots=True)
class KnownCeilings:
    """Two ceilings and, in a few words, their source."""

    ceilings: Ceilings
    source: str


#: By the name of the GPU: measured by ``python -m benchmarks.layers``.
MEASURED = {
    "NVIDIA H200": KnownCeilings(
        Ceilings(4256, {"tf32": 417, "fp16": 770, "bf16": 802, "fp32": 50.3}),
        "measured on an H200 (benchmarks/results/h200-forward.json)",
    ),
}


def _datasheet(gpu: str, gbps: float, tf32: float, half: float, fp32: float) -> KnownCeilings:
    rates = {"tf32": tf32, "fp16": half, "bf16": half, "fp32": fp32}
    return KnownCeilings(Ceilings(gbps, rates), f"estimated: the data sheet of an {gpu}, dense")


#: For each compute capability, a GPU that has it, with the peak rates of NVIDIA's data sheet, which no program reaches.
ESTIMATED = {
    80: _datasheet("A100 SXM 80 GB", 2039, 156, 312, 19.5),
    86: _datasheet("A10", 600, 62.5, 125, 31.2),
    89: _datasheet("L40S", 864, 183, 362, 91.6),
    90: _datasheet("H100 SXM", 3350, 494, 989, 66.9),
}


def known_ceilings(name: str | None, compute_capability: int) -> KnownCeilings | None:
    """Returns the ceilings of the GPU of this name, or of one with this compute capability (90: 9.0); None if neither
    is known.

    A name of None stands for any GPU of that compute capability; a measured one comes before the others.
    """
    if name is None and compute_capability == 90:
        name = "NVIDIA H200"
    return MEASURED.get(name or "") or ESTIMATED.get(compute_capability)


def mode_of(dtype: torch.dtype, precision: str) -> str | None:
    """Returns the mode whose rate bounds products of ``dtype``, for float32 by ``precision``; None if there is none."""
    if dtype == torch.float32:
        return "tf32" if precision == "tf32" else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
