"""Computes the roofline: the shortest time that the work of a layer can take on a machine with two known ceilings.

It is the larger of two times: useful FLOPs over the rate of matrix products, and the fewest bytes over the rate of a
copy. Products that padding cuts off are not useful; the bias is neglected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tconv_swap.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``copy_gbps``: GB/s of a large copy, bytes read plus bytes written. ``tflops``: TFLOP/s of a large matrix
    product, by mode."""

    copy_gbps: float
    tflops: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Work:
    """The work that cannot be avoided: floating-point operations, and bytes through device memory."""

    flops: int
    bytes: int

    def compute_ms(self, ceilings: Ceilings, mode: str) -> float:
        return self.flops / ceilings.tflops[mode] * 1e-9

    def memory_ms(self, ceilings: Ceilings) -> float:
        return self.bytes / ceilings.copy_gbps * 1e-6

    def roof_ms(self, ceilings: Ceilings, mode: str) -> float:
        """Returns the milliseconds on that machine. In the mode fp32 the ceiling is that of PyTorch's own float32
        matrix product; a kernel that computes float32 accuracy on the tensor cores may exceed it."""
        return max(self.compute_ms(ceilings, mode), self.memory_ms(ceilings))


def work_of(geometry: Geometry, stage: str, item_bytes: int) -> Work:
    """Returns the work of one stage: ``forward`` (``frozen`` is the same), ``backward`` (all gradients: twice as much),
    or one gradient."""
    if stage == "grad_bias":
        elements = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        return Work(elements, elements * item_bytes)
    times = 2 if stage == "backward" else 1
    return Work(times * 2 * useful_macs(geometry), times * geometry.elements * item_bytes)


def useful_macs(geometry: Geometry) -> int:
    """Returns the number of multiply-adds whose result lies inside the output."""
    pairs = geometry.in_channels * geometry.out_channels_per_group
    return geometry.batch * pairs * _landing(geometry, 0) * _landing(geometry, 1)


def _landing(geometry: Geometry, axis: int) -> int:
    """Returns how many pairs of a tap and an input position of one axis land inside the output."""
    size, out_size = ((geometry.height, geometry.out_height), (geometry.width, geometry.out_width))[axis]
    stride, padding = geometry.stride[axis], geometry.padding[axis]
    return sum(
        0 <= position * stride + tap * geometry.dilation[axis] - padding < out_size
        for position in range(size)
        for tap in range(geometry.kernel[axis])
    )
