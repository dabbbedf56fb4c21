"""The shape arithmetic of a transposed convolution, and the checks on its arguments.

Formulas and names follow ``torch.nn.ConvTranspose2d``'s documentation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Pair = tuple[int, int]
#: Stride, padding, output_padding, groups, dilation: hashable.
Arguments = tuple[Any, ...]


class Geometry(NamedTuple):
    """One transposed convolution: input ``[batch, in_channels, height, width]``, weight
    ``[in_channels, out_channels / groups, *kernel]``, output
    ``[batch, out_channels, out_height, out_width]``. Pairs are (vertical, horizontal)."""

    batch: int
    in_channels: int
    height: int
    width: int
    out_channels: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def out_height(self) -> int:
        (kernel, _), (stride, _), (padding, _) = self.kernel, self.stride, self.padding
        reach = self.dilation[0] * (kernel - 1)
        return (self.height - 1) * stride - 2 * padding + reach + self.output_padding[0] + 1

    @property
    def out_width(self) -> int:
        (_, kernel), (_, stride), (_, padding) = self.kernel, self.stride, self.padding
        reach = self.dilation[1] * (kernel - 1)
        return (self.width - 1) * stride - 2 * padding + reach + self.output_padding[1] + 1

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.in_channels, self.height, self.width)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.out_channels, self.out_height, self.out_width)

    @property
    def in_channels_per_group(self) -> int:
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        return self.out_channels // self.groups

    @property
    def one_row(self) -> bool:
        """Returns whether the layer is of one dimension: the rows of a map, of which PyTorch gives it one, neither
        meet nor are cropped."""
        return self.kernel[0] == self.stride[0] == 1 < self.kernel[1] and self.padding[0] == 0

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def macs(self) -> int:
        """Returns the multiply-adds if every tap of every input pixel lands inside the output: the usual count, which
        neglects the few that padding cuts off."""
        return (
            self.batch * self.height * self.width * self.in_channels * self.out_channels_per_group * self.taps
        )

    @property
    def elements(self) -> int:
        """Returns the fewest elements that must move: input and weight read once, output written once."""
        pixels_in, pixels_out = self.height * self.width, self.out_height * self.out_width
        return (
            self.batch * (self.in_channels * pixels_in + self.out_channels * pixels_out)
            + self.in_channels * self.out_channels_per_group * self.taps
        )

    @property
    def layer_constants(self) -> tuple[tuple[str, int], ...]:
        """Returns the constants that a layer fixes for every input, by the names that kernels use."""
        return (
            ("IN_CHANNELS", self.in_channels),
            ("OUT_CHANNELS", self.out_channels),
            ("GROUPS", self.groups),
            ("KERNEL_H", self.kernel[0]),
            ("KERNEL_W", self.kernel[1]),
            ("STRIDE_H", self.stride[0]),
            ("STRIDE_W", self.stride[1]),
            ("PADDING_H", self.padding[0]),
            ("PADDING_W", self.padding[1]),
            ("DILATION_H", self.dilation[0]),
            ("DILATION_W", self.dilation[1]),
        )

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """Returns the same and the sizes of the images. The batch is an argument of kernels, never a constant."""
        return (
            *self.layer_constants,
            ("HEIGHT", self.height),
            ("WIDTH", self.width),
            ("OUT_HEIGHT", self.out_height),
            ("OUT_WIDTH", self.out_width),
        )

    def with_batch(self, batch: int) -> Geometry:
        return self._replace(batch=batch)

    def __str__(self) -> str:
        def pair(value: Pair) -> str:
            return str(value[0]) if value[0] == value[1] else f"{value[0]}x{value[1]}"

        text = f"{self.in_channels}->{self.out_channels} k{pair(self.kernel)} s{pair(self.stride)}"
        if any(self.padding):
            text += f" p{pair(self.padding)}"
        if any(self.output_padding):
            text += f" op{pair(self.output_padding)}"
        if self.dilation != (1, 1):
            text += f" d{pair(self.dilation)}"
        if self.groups != 1:
            text += f" g{self.groups}"
        return text


def phase_taps(kernel: int, stride: int, dilation: int, phase: int) -> list[int]:
    """Returns the taps ``k`` of one axis that reach the output positions ``o`` with ``(o + padding) % stride ==
    phase``: those with ``k * dilation`` congruent to the phase. May be empty."""
    return [k for k in range(kernel) if k * dilation % stride == phase]


def as_pair(value: Any, name: str) -> Pair:
    """Returns ``value`` as a (vertical, horizontal) pair, as PyTorch reads it.

    Raises:
        TypeError: not an integer or a sequence of integers.
        RuntimeError: a sequence that does not have one or two entries.
    """
    if type(value) is int:
        return (value, value)
    # A layer passes tuples of integers at every call.
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value
    entries: Iterator[Any] = iter(value) if isinstance(value, Sequence) else iter((value,))
    pair = tuple(_as_int(entry, name) for entry in entries)
    if len(pair) == 1:
        return (pair[0], pair[0])
    if len(pair) != 2:
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of 2 values to match the convolution "
            f"dimensions, but got {name}={list(pair)}"
        )
    return (pair[0], pair[1])


def _as_int(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        # torch.SymInt is an integer that refuses operator.index while it is being traced.
        if type(value).__name__ == "SymInt":
            return value  # type: ignore[no-any-return]
        raise TypeError(
            f"conv_transpose2d(): argument '{name}' must be an int or a pair of ints, "
            f"not {type(value).__name__} ({value!r})"
        ) from None


def as_list(arguments: Sequence[Any]) -> list[Any]:
    """Returns stride, padding, output_padding, groups and dilation as one list of nine integers, as ops take them."""
    stride, padding, output_padding, groups, dilation = arguments
    return [*stride, *padding, *output_padding, groups, *dilation]


def from_list(geometry: Sequence[Any]) -> Arguments:
    """The inverse of ``as_list``."""
    s0, s1, p0, p1, o0, o1, groups, d0, d1 = geometry
    return (s0, s1), (p0, p1), (o0, o1), groups, (d0, d1)


def check_geometry(
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    bias_shape: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Geometry:
    """Checks the arguments of a batched transposed convolution and returns its geometry.

    Sizes may be symbolic; the batch and the number of output channels may be zero. Raises:
        RuntimeError: as PyTorch does, naming the argument, its value and what was expected.
    """
    if len(input_shape) != 4:
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv_transpose2d, but got input of size: "
            f"{list(input_shape)}"
        )
    if len(weight_shape) != 4:
        raise RuntimeError(
            f"expected weight to have 4 dimensions [in_channels, out_channels / groups, height, width], "
            f"but got weight of size {list(weight_shape)}"
        )
    for name, pair, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("output_padding", output_padding, 0),
        ("dilation", dilation, 1),
    ):
        if pair[0] < least or pair[1] < least:
            kind = "non-positive" if least else "negative"
            raise RuntimeError(
                f"{kind} {name} is not supported: got {name}={list(pair)}, expected >= {least}"
            )
    if groups < 1:
        raise RuntimeError(f"non-positive groups is not supported: got groups={groups}, expected >= 1")

    batch, in_channels, height, width = input_shape
    if weight_shape[0] < groups or weight_shape[0] % groups != 0:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0 "
            f"(in_channels), but got weight of size {list(weight_shape)} instead"
        )
    if weight_shape[2] < 1 or weight_shape[3] < 1:
        raise RuntimeError(
            f"expected weight to have a kernel of at least 1x1, but got weight of size {list(weight_shape)}"
        )
    if in_channels != weight_shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight_shape)}, expected input{list(input_shape)} to "
            f"have {weight_shape[0]} channels, but got {in_channels} channels instead"
        )
    if height < 1 or width < 1:
        raise RuntimeError(
            f"Only zero batch inputs are supported, but got input shape: {list(input_shape)}, "
            f"expected height and width >= 1"
        )
    out_channels = weight_shape[1] * groups
    if bias_shape is not None and (len(bias_shape) != 1 or bias_shape[0] != out_channels):
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight_shape)}, expected bias to be 1-dimensional "
            f"with {out_channels} elements, but got bias of size {list(bias_shape)} instead"
        )
    for axis in (0, 1):
        if output_padding[axis] >= stride[axis] and output_padding[axis] >= dilation[axis]:
            raise RuntimeError(
                f"output padding must be smaller than either stride or dilation, but got "
                f"output_padding={list(output_padding)} stride={list(stride)} dilation={list(dilation)}"
            )
    geometry = Geometry(
        batch,
        in_channels,
        height,
        width,
        out_channels,
        (weight_shape[2], weight_shape[3]),
        (stride[0], stride[1]),
        (padding[0], padding[1]),
        (output_padding[0], output_padding[1]),
        (dilation[0], dilation[1]),
        groups,
    )
    if geometry.out_height < 1 or geometry.out_width < 1:
        raise RuntimeError(
            f"Given input size per channel: ({height} x {width}). Calculated output size per channel: "
            f"({geometry.out_height} x {geometry.out_width}). Output size is too small "
            f"(padding={list(padding)})"
        )
    return geometry


#: The same for plain integers, with a cache: a layer repeats the same few geometries at every call.
cached_geometry = lru_cache(maxsize=4096)(check_geometry)
