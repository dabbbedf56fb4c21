"""Which formulation computes a transposed convolution fastest on the CPU: a pure function of the geometry."""

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


#: In a clause, what each is and where it is the fastest.
WHY: dict[str, str] = {
    "plain": "PyTorch's own call: nothing is known to be faster",
    "channels_last": "computed in channels_last and converted by copies of whole rows: large images",
    "pieces": "a few groups at a time: each piece's output stays below what is mapped anew",
    "outer": "one product: the input is a single pixel",
    "products": "matrix products, spread over the output: taps do not overlap, or output channels are few",
    "pixel_products": "a product for each input pixel: few pixels under large filters",
    "phases": "a dense convolution for each phase of the stride: dilation",
    "stacked_phases": "the phases as channels of one convolution: a large stride",
}

FEWEST_MACS = 1 << 20  # below, the calls themselves (some 50 us) take longer than the arithmetic
LARGE_WEIGHT = 1 << 20  # elements: 4 MB, larger than the second-level cache
SMALL_PLANE = 1 << 11  # elements: below, oneDNN's result is converted to NCHW at the speed of a copy
MAPPED_OUTPUT = 1 << 23  # elements: 32 MB, from which on every allocation is mapped anew
LARGE_IMAGE = 1 << 19  # elements: 2 MB, larger than the second-level cache of a core


class Phase(NamedTuple):
    """The stride-1 convolution that computes every ``stride``-th output position of one axis."""

    taps: slice  #: of the kernel
    dilation: int
    padding: int
    computed: slice  #: of the convolution's output
    output: slice  #: where it goes


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
        """Whether two taps can meet in an output position."""
        residues = {tap * self.dilation % self.stride for tap in range(self.kernel)}
        return self.size > 1 and len(residues) < self.kernel

    @property
    def tiled(self) -> bool:
        """Whether taps that do not overlap leave no output position out."""
        places = (self.tap(tap, slice(0, self.size))[1] for tap in range(self.kernel))
        return self._positions(places) == self.out_size

    @property
    def covered(self) -> bool:
        """Whether the phases' convolutions leave no output position out."""
        return self._positions(phase.output for phase in self.phases) == self.out_size

    def _positions(self, places: Iterable[slice]) -> int:
        return sum(len(range(*place.indices(self.out_size))) for place in places)

    @property
    def phases(self) -> list[Phase]:
        """The phases that get a tap at all."""
        return list(_phases(self))

    @property
    def cells(self) -> int:
        """How many cells of ``stride`` positions hold the output and what padding cuts off before it."""
        reached = self.size + (self.kernel - 1) * self.dilation // self.stride
        return max(reached, -(-(self.out_size + self.padding) // self.stride))

    @property
    def shifts(self) -> list[tuple[slice, slice, int]]:
        """Taps that take an input to the same cell, their phases there, and how many cells further that is."""
        if self.dilation == 1:
            starts = range(0, self.kernel, self.stride)
            ends = [min(start + self.stride, self.kernel) for start in starts]
            return [
                (slice(a, b), slice(0, b - a), a // self.stride) for a, b in zip(starts, ends, strict=True)
            ]
        places = [divmod(tap * self.dilation, self.stride) for tap in range(self.kernel)]
        return [(slice(t, t + 1), slice(r, r + 1), cell) for t, (cell, r) in enumerate(places)]

    def phase_cells(self, phase: int) -> tuple[slice, slice]:
        """The cells whose position ``phase`` lies in the output, and where there."""
        first = (phase - self.padding) % self.stride
        count = len(range(first, self.out_size, self.stride))
        cell = (first + self.padding) // self.stride
        return slice(cell, cell + count), slice(first, None, self.stride)

    def reaching(self, outputs: slice, output_padding: int) -> tuple[slice, int]:
        """The inputs that reach ``outputs``, and where ``outputs`` begin in the transposed convolution of just
        those inputs with the arguments of the whole."""
        extent = self.dilation * (self.kernel - 1) + 1
        start = -((extent - 1 - self.padding - outputs.start) // self.stride)
        start = max(0, min(start, outputs.start // self.stride, self.size - 1))
        shortfall = outputs.stop - extent + 2 * self.padding - output_padding
        last = max((outputs.stop - 1 + self.padding) // self.stride, -(-shortfall // self.stride))
        return slice(start, min(last + 1, self.size)), outputs.start - start * self.stride

    def tap(self, tap: int, inputs: slice) -> tuple[slice, slice]:
        """The part of ``inputs`` that ``tap`` takes into the output, and where."""
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


def claims(formulation: Formulation, g: Geometry, dtype: torch.dtype) -> bool:
    """Whether a formulation computes this geometry, at the accuracy of ``dtype``."""
    unpadded = g.padding == (0, 0) == g.output_padding
    if formulation == "outer":
        return g.height == g.width == 1 and unpadded and g.groups == 1 and g.dilation == (1, 1)
    if formulation == "products":
        # Sums of several products in the output's dtype: float16 and bfloat16 must accumulate in float32.
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
    """Whether PyTorch's switch lets matrix products of such numbers be less exact than its convolutions are.

    ``torch.set_float32_matmul_precision("medium")`` on CPUs that multiply bfloat16.
    """
    return dtype == torch.float32 and torch._C._get_fp32_precision_getter("mkldnn", "matmul") in (
        "bf16",
        "tf32",
    )


def choose(g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format) -> Formulation:
    """The fastest formulation that is as exact as PyTorch's plain call, just now."""
    return "plain" if products_are_rounded(dtype) else fastest(g, dtype, memory_format)


@lru_cache(maxsize=4096)
def fastest(g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format) -> Formulation:
    """The first that applies; PyTorch's plain call where nothing is known to be faster.

    oneDNN computes transposed convolutions in channels_last, near the machine's peak for most geometries. What can
    be gained is what surrounds that: conversions, padded channels, and the geometries it has no good kernel for.
    """
    if g.batch > 0 and claims("outer", g, dtype):
        return "outer"
    # float64 is not oneDNN's, and what 16-bit types gain depends on the machine's instructions for them.
    if dtype != torch.float32 or g.macs < FEWEST_MACS or g.stride == (1, 1):
        return "plain"
    planar = memory_format == torch.contiguous_format
    plane = g.out_height * g.out_width
    weights, outputs = math.prod(g.weight_shape), math.prod(g.output_shape)
    if g.in_channels_per_group < 8:  # depthwise: oneDNN has a kernel of its own, without conversions
        return "pieces" if planar and outputs >= MAPPED_OUTPUT else "plain"
    # Every tap has its output pixels to itself: nothing to add up, and no conversion of the output.
    if planar and plane >= SMALL_PLANE and not _overlapping(g):
        return "products"
    # Few pixels under large filters: oneDNN would rearrange the weight for longer than it computes.
    pixels = g.batch * g.height * g.width
    if pixels < g.in_channels and weights > LARGE_WEIGHT and g.out_channels >= 64 and g.groups == 1:
        return "pixel_products"
    if g.dilation != (1, 1):
        return "phases"  # oneDNN has no fast kernel with both a stride and a dilation
    # What remains pays for a rearranged weight, to gain on the output.
    if not planar or outputs < weights:
        return "plain"
    # Rows of phases long enough to be copied as they are, where oneDNN would compute many small convolutions.
    if g.stride[1] >= 16 and claims("stacked_phases", g, dtype):
        return "stacked_phases"
    # oneDNN computes 16 output channels at a time, wanted or not; taps fill the places of channels.
    if g.out_channels <= 4 and g.groups == 1:
        return "products"
    # Neighbouring channels lie pages apart: PyTorch's conversion of the output takes as long as the convolution.
    if plane >= SMALL_PLANE and g.out_channels * plane >= LARGE_IMAGE:
        return "channels_last"
    return "plain"


def choose_backward(
    g: Geometry, dtype: torch.dtype, memory_format: torch.memory_format
) -> Literal["plain", "products", "outer"]:
    """PyTorch's own gradients, which convert better than its forward, but for the kernels that tile the output, the
    kernel that is the output among them."""
    if products_are_rounded(dtype):
        return "plain"
    if g.batch > 0 and claims("outer", g, dtype):
        return "outer"
    tiled = g.kernel == g.stride and g.padding == (0, 0) == g.output_padding and g.dilation == (1, 1)
    if tiled and g.groups == 1 and choose(g, dtype, memory_format) == "products":
        return "products"
    return "plain"
