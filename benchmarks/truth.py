"""Computes the correct result of a layer from its definition as float64 matrix products, and the errors of results.

No convolution of any library is used: every tap of every input pixel is one entry of a matrix product, and ``fold``
adds the entries where they land (``unfold``, its transpose, collects them for the gradients). Images are processed a
few at a time, so that any layer fits into memory; all images are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap.geometry import Geometry

#: The bytes of the float64 products of the images that are computed together; one image may need more.
COLUMN_BYTES = 4 << 30

Whose = TypeVar("Whose")

GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


class Data(NamedTuple):
    """A layer's tensors: input, weight, bias or None, and the gradient of the output."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    grad_output: Tensor


@dataclass(frozen=True, slots=True)
class Error:
    """``l2``: the norm of the error over the norm of the truth. ``largest``: the largest error over the largest
    truth."""

    l2: float
    largest: float

    def to_dict(self) -> dict[str, float]:
        return {"l2": self.l2, "max": self.largest}

    @classmethod
    def from_dict(cls, entry: Mapping[str, float]) -> Error:
        return cls(entry["l2"], entry["max"])


def errors(name: str, results: Mapping[Whose, Tensor], geometry: Geometry, data: Data) -> dict[Whose, Error]:
    """Returns how far each of several results is from the truth; NaN if a result contains one.

    Args:
        name: what they are: ``output``, ``grad_input``, ``grad_weight`` or ``grad_bias``.
        results: the results, by the side that computed them.

    Raises:
        ValueError: a result does not have the right shape.
    """
    for whose, result in results.items():
        shape = _shape(name, geometry)
        if tuple(result.shape) != shape:
            raise ValueError(f"{name} of {whose} has the shape {list(result.shape)}, expected {list(shape)}")
    sums = {whose: _ErrorSum() for whose in results}
    for part, truth in _truth(name, geometry, data):
        for whose, result in results.items():
            sums[whose].add(result[part].double(), truth)
    return {whose: error_sum.error() for whose, error_sum in sums.items()}


class _ErrorSum:
    """Sums errors on the device and reads them once, so that nothing waits for the parts."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, result: Tensor, truth: Tensor) -> None:
        difference = result - truth
        self._parts.append(
            torch.stack(
                [difference.square().sum(), truth.square().sum(), difference.abs().max(), truth.abs().max()]
            )
        )

    def error(self) -> Error:
        table = torch.stack(self._parts)
        squares, largest = table[:, :2].sum(0).tolist(), table[:, 2:].amax(0).tolist()
        return Error(_ratio(squares[0], squares[1]) ** 0.5, _ratio(*largest))


def _ratio(difference: float, truth: float) -> float:
    """Returns the quotient; for a truth of zeros 0 if the result is exact, and infinity if it is not."""
    if truth == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / truth


def _shape(name: str, geometry: Geometry) -> tuple[int, ...]:
    return {
        "output": geometry.output_shape,
        "grad_input": geometry.input_shape,
        "grad_weight": geometry.weight_shape,
        "grad_bias": (geometry.out_channels,),
    }[name]


def _truth(name: str, g: Geometry, data: Data) -> Iterator[tuple[slice, Tensor]]:
    """Yields the truth in parts, each with its place in the first dimension."""
    if name == "output":
        return _output(g, data)
    if name == "grad_input":
        return _grad_input(g, data)
    if name == "grad_weight":
        return iter([(slice(None), _grad_weight(g, data))])
    return iter([(slice(None), data.grad_output.sum((0, 2, 3), dtype=torch.float64))])


def _output(g: Geometry, data: Data) -> Iterator[tuple[slice, Tensor]]:
    matrices = _matrices(g, data.weight).transpose(1, 2)
    for part in _images(g):
        columns = matrices @ _pixels(g, data.input[part])
        output = F.fold(
            columns.flatten(1, 2), (g.out_height, g.out_width), g.kernel, g.dilation, g.padding, g.stride
        )
        yield part, output if data.bias is None else output + data.bias.double().view(-1, 1, 1)


def _grad_input(g: Geometry, data: Data) -> Iterator[tuple[slice, Tensor]]:
    matrices = _matrices(g, data.weight)
    for part in _images(g):
        pixels = matrices @ _columns(g, data.grad_output[part])
        yield part, pixels.view(-1, *g.input_shape[1:])


def _grad_weight(g: Geometry, data: Data) -> Tensor:
    total = torch.zeros(g.weight_shape, dtype=torch.float64, device=data.weight.device)
    for part in _images(g):
        products = _pixels(g, data.input[part]) @ _columns(g, data.grad_output[part]).transpose(2, 3)
        total += products.sum(0).view(g.weight_shape)
    return total


def _images(g: Geometry) -> Iterator[slice]:
    per_image = 8 * g.height * g.width * g.out_channels * g.taps
    together = max(1, COLUMN_BYTES // per_image)
    for first in range(0, g.batch, together):
        yield slice(first, min(first + together, g.batch))


def _matrices(g: Geometry, weight: Tensor) -> Tensor:
    """``[groups, Ci / groups, Co / groups * KH * KW]``"""
    return weight.double().reshape(g.groups, g.in_channels_per_group, -1)


def _pixels(g: Geometry, images: Tensor) -> Tensor:
    """``[images, groups, Ci / groups, H * W]``"""
    return images.double().reshape(-1, g.groups, g.in_channels_per_group, g.height * g.width)


def _columns(g: Geometry, grad_output: Tensor) -> Tensor:
    """Returns for every input pixel the gradients of the outputs that its taps reach: ``[images, groups, Co / groups *
    KH * KW, H * W]``."""
    columns = F.unfold(grad_output.double().contiguous(), g.kernel, g.dilation, g.padding, g.stride)
    return columns.view(-1, g.groups, g.out_channels_per_group * g.taps, g.height * g.width)
