"""Chooses the formulation that computes a transposed convolution fastest on the CPU: a pure function of the
geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from tconv_swap.geometry import Geometry, phase_taps

Formulation = Literal[
    "plain", "channels_last", "pieces", "outer", "products", "pixel_products", "phases", "stacked_phases"
]


#: For each formulation, one clause that says what it is and where it is the fastest.
WHY: dict[str, str] = {
    "plain": "PyTorch's own call: nothing is known to be faster",
    "channels_last": "computed in channels_last, then converted by copies of whole rows: large images",
    "pieces": "a few groups at a time: the output of each piece needs no newly mapped pages",
    "outer": "one product: the input is a single pixel",
    "products": "matrix products, spread over the output: taps do not overlap, or output channels are few",
    "pixel_products": "a product for each input pixel: few pixels under large filters",
    "phases": "a dense convolution for each phase of the stride: dilation",
    "stacked_phases": "the phases as channels of one convolution: a large stride",
}

MIN_MACS = 1 << 20  # below, the calls themselves (about 50 us) take longer than the arithmetic
LARGE_WEIGHT = 1 << 20  # elements: 4 MB, larger than the second-level cache
SMALL_PLANE = 1 << 11  # elements: below, oneDNN's result is converted to NCHW at the speed of a copy
MAPPED_OUTPUT = 1 << 23  # elements: 32 MB, from which on every allocation maps new pages
LARGE_IMAGE = 1 << 19  # elements: 2 MB, larger than the second-level cache of a core


class Phase(NamedTuple):
    """The stride-1 convolution that computes every ``stride``-th output position of one axis."""

    taps: slice  #: those of the kernel
    dilation: int
    padding: int
    computed: slice  #: the part of the convolution's output that is used
    output: slice  #: the positions of the output that it is written to


class Axis(NamedTuple):
    """One spatial axis of a transposed convolution: ``output = input * stride + tap * dilation - padding``."""

    size: int
    out_size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @classmethod
    def of(cls, g: Geometry, axis: int) -> Axis:
        size, out_size = (g.height, g.out_height) if axis == 0 else (g.width, g.out_width)
        return cls(size, out_size, g.kernel[axis], g.stride[axis], g.padding[axis], g.dilation[axis])

    @property
    def overlapping(self) -> bool:
        """Returns whether two taps can reach the same output position."""
        residues = {tap * self.dilation % self.stride for tap in range(self.kernel)}
        return self.size > 1 and len(residues) < self.kernel

    @property
    def tiled(self) -> bool:
        """Returns whether taps that do not overlap reach every output position."""
        places = (self.tap(tap, slice(0, self.size))[1] for tap in range(self.kernel))
        return self._positions(places) == self.out_size

    @property
    def covered(self) -> bool:
        """Returns whether the convolutions of the phases reach every output position."""
        return self._positions(phase.output for phase in self.phases) == self.out_size

    def _positions(self, places: Iterable[slice]) -> int:
        return sum(len(range(*place.indices(self.out_size))) for place in places)

    @property
    def phases(self) -> list[Phase]:
        """Returns the phases that at least one tap reaches."""
        return list(_phases(self))

    @property
    def cells(self) -> int:
        """Returns the number of cells, of ``stride`` positions each, that hold the output and what padding cuts off
        before it."""
        reached = self.size + (self.kernel - 1) * self.dilation // self.stride
        return max(reached, -(-(self.out_size + self.padding) // self.stride))

    @property
    def shifts(self) -> list[tuple[slice, slice, int]]:
        """Returns groups of taps that take an input to the same cell: the taps, their phases there, and the cell's
        distance from the input's own."""
        if self.dilation == 1:
            starts = range(0, self.kernel, self.stride)
            ends = [min(start + self.stride, self.kernel) for start in starts]
            return [
                (slice(a, b), slice(0, b - a), a // self.stride) for a, b in zip(starts, ends, strict=True)
            ]
        places = [divmod(tap * self.dilation, self.stride) for tap in range(self.kernel)]
        return [(slice(t, t + 1), slice(r, r + 1), cell) for t, (cell, r) in enumerate(places)]

    def phase_cells(self, phase: int) -> tuple[slice, slice]:
        """Returns the cells whose position ``phase`` lies in the output, and these positions of the output."""
        first = (phase - self.padding) % self.stride
        count = len(range(first, self.out_size, self.stride))
        cell = (first + self.padding) // self.stride
        return slice(cell, cell + count), slice(first, None, self.stride)

    def reaching(self, outputs: slice, output_padding: int) -> tuple[slice, int]:
        """Returns the inputs that reach ``outputs``, and where ``outputs`` begin in the transposed convolution of only
        those inputs with the arguments of the whole."""
        extent = self.dilation * (self.kernel - 1) + 1
        start = -((extent - 1 - self.padding - outputs.start) // self.stride)
        start = max(0, min(start, outputs.start // self.stride, self.size - 1))
        shortfall = outputs.stop - extent + 2 * self.padding - output_padding
        last = max((outputs.stop - 1 + self.padding) // self.stride, -(-shortfall // self.stride))
        return slice(start, min(last + 1, self.size)), outputs.start - start * self.stride

    def tap(self, tap: int, inputs: slice) -> tuple[slice, slice]:
        """Returns the part of ``inputs`` that ``tap`` takes into the output, and the positions that it takes them
        to."""
        shift = tap * self.dilation - self.padding
        start = max(inputs.start, -(shift // self.stride))
        stop = min(inputs.stop, (self.out_size - 1 - shift) // self.stride + 1)
        if stop <= start:
            return slice(0, 0), slice(0, 0)
        first = start * self.stride + shift
        return slice(start, stop), slice(first, first + (stop - start - 1) * self.stride + 1, self.stride)


@lru_cache(maxsize=4096)
def _phases(axis: Axis) -> tuple[Phase, ...]:
    common = math.gcd(axis.stride, axis.dilation)
    found = []
    for residue in range(axis.stride):
        taps = phase_taps(axis.kernel, axis.stride, axis.dilation, residue)
        if not taps:
            continue
        nearest, farthest = taps[0] * axis.dilation // axis.stride, taps[-1] * axis.dilation // axis.stride
        # output = stride * q + residue - padding; tap reads input q - tap * dilation // stride
        first = max(nearest, -((residue - axis.padding) // axis.stride))
        last = min(axis.size - 1 + farthest, (axis.out_size - 1 + axis.padding - residue) // axis.stride)
        if last < first:
            continue
        padding = max(0, farthest - first, last - axis.size + 1 - nearest)
        start = first - farthest + padding
        output = axis.stride * first + residue - axis.padding
        found.append(
            Phase(
                slice(taps[0], None, axis.stride // common),
                axis.dilation // common,
                padding,
                slice(start, start + last - first + 1),
                slice(output, output + (last - first) * axis.stride + 1, axis.stride),
            )
        )
    return tuple(found)


def supports(formulation: Formulation, g: Geometry, dtype: torch.dtype) -> bool:
    """Returns whether a formulation computes this geometry with the accuracy of ``dtype``."""
    unpadded = g.padding == (0, 0) == g.output_padding
    if formulation == "outer":
        return g.height == g.width == 1 and unpadded and g.groups == 1 and g.dilation == (1, 1)
    if formulation == "products":
        # It adds several products in the output's dtype, but float16 and bfloat16 must accumulate in float32.
        return not _overlapping(g) or dtype in (torch.float32, torch.float64)
    if formulation == "pixel_products":
        return g.groups == 1 and dtype in (torch.float32, torch.float64)
    if formulation == "stacked_phases":
        return (
            g.groups == 1
            and g.dilation == (1, 1)
            and g.output_padding == (0, 0)
            and all(k % s == 0 for k, s in zip(g.kernel, g.stride, strict=True))
            and all(2 * p % s == 0 for p, s in zip(g.padding, g.stride, strict=True))
        )
    return True


def _overlapping(g: Geometry) -> bool:
    return Axis.of(g, 0).overlapping or Axis.of(g, 1).overlapping


def products_are_rounded(dtype: torch.dtype) -> bool:
    """Returns whether PyTorch's switch lets matrix products of this dtype be less exact than its convolutions:
    ``torch.set_float32_matmul_precision("medium")`` on CPUs that multiply bfloat16.
    """
    return dtype == torch.float32 and torch._C._get_fp32_precision_getter("mkldnn", "matmul") in (
        "bf16",
        "tf32",
    )


def choose(g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format) -> Formulation:
    """Returns the fastest formulation that, with the present switches, is as exact as PyTorch's plain call."""
    return "plain" if products_are_rounded(dtype) else fastest(g, dtype, memory_format)


@lru_cache(maxsize=4096)
def fastest(g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format) -> Formulation:
    """Returns the first formulation that applies; PyTorch's plain call if nothing is known to be faster.

    oneDNN computes transposed convolutions in channels_last, near the machine's peak for most geometries. What can be
    saved is the work around it: conversions, padded channels, and the geometries for which it has no good kernel.
    """
    if g.batch > 0 and supports("outer", g, dtype):
        return "outer"
    # oneDNN does not compute float64, and what 16-bit types gain depends on the machine's instructions for them.
    if dtype != torch.float32 or g.macs < MIN_MACS or g.stride == (1, 1):
        return "plain"
    planar = memory_format == torch.contiguous_format
    plane = g.out_height * g.out_width
    weights, outputs = math.prod(g.weight_shape), math.prod(g.output_shape)
    if g.in_channels_per_group < 8:  # depthwise: oneDNN has a kernel of its own, without conversions
        return "pieces" if planar and outputs >= MAPPED_OUTPUT else "plain"
    # No two taps reach the same output pixel: there is nothing to add, and the output needs no conversion.
    if planar and plane >= SMALL_PLANE and not _overlapping(g):
        return "products"
    # Few pixels under large filters: oneDNN would take longer to reorder the weight than to compute.
    pixels = g.batch * g.height * g.width
    if pixels < g.in_channels and weights > LARGE_WEIGHT and g.out_channels >= 64 and g.groups == 1:
        return "pixel_products"
    if g.dilation != (1, 1):
        return "phases"  # oneDNN has no fast kernel with both a stride and a dilation
    # The formulations below reorder the weight and save time on the output.
    if not planar or outputs < weights:
        return "plain"
    # Rows of phases that are long enough to be copied whole, where oneDNN would compute many small convolutions.
    if g.stride[1] >= 16 and supports("stacked_phases", g, dtype):
        return "stacked_phases"
    # oneDNN computes 16 output channels at a time, needed or not; here taps take the places of channels.
    if g.out_channels <= 4 and g.groups == 1:
        return "products"
    # Neighbouring channels are pages apart: PyTorch's conversion of the output takes as long as the convolution.
    if plane >= SMALL_PLANE and g.out_channels * plane >= LARGE_IMAGE:
        return "channels_last"
    return "plain"


def choose_backward(
    g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format
) -> Literal["plain", "products", "outer"]:
    """Returns PyTorch's own gradients, which convert better than its forward pass, except for kernels that tile the
    output and for 1x1 inputs, whose output is one kernel."""
    if products_are_rounded(dtype):
        return "plain"
    if g.batch > 0 and supports("outer", g, dtype):
        return "outer"
    tiled = g.kernel == g.stride and g.padding == (0, 0) == g.output_padding and g.dilation == (1, 1)
    if tiled and g.groups == 1 and choose(g, dtype, memory_format) == "products":
        return "products"
    return "plain"
