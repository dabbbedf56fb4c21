"""Layers, devices and random sizes for tests of kernels that take their sizes at the launch, and the division of
csrc/kernels/common/sizes.cuh."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from sampling import sampled

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import sizes
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.measurement.suite import Layer, load_suite

H200 = plan.Device("sm_90a", 132, 227 << 10)
AMPERE = plan.Device("sm_80", 108, 163 << 10)


def sizes_for(device: plan.Device) -> int:
    """Returns the number of random sizes of a layer that a test plans for a device: most for the one that has all
    families."""
    return 200 if device == H200 else 30


#: dtype and precision.
MODES = ((torch.float32, "tf32"), (torch.float16, "ieee"), (torch.float32, "ieee"))


def some_modes(layer: Layer) -> list[tuple[torch.dtype, str]]:
    """Returns the mode in which each commit plans many sizes of a layer."""
    return [MODES[sum(map(ord, layer.name)) % 2]]


def on_devices(layers: Sequence[Layer], *others: plan.Device) -> list[Any]:
    """Returns each layer with each device; on each commit only every fourth on the others, which have fewer
    families."""
    pairs = itertools.product(others, layers)
    return [*((layer, H200) for layer in layers), *sampled(((layer, device) for device, layer in pairs), 4)]


#: The layers of the suite that have channels enough for tensor cores.
LAYERS = [layer for layer in load_suite().layers if layer.geometry.out_channels_per_group >= 8]
#: Relative L2 errors against float64.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_sizes(rng: random.Random, layer: Geometry, limit: int = 200) -> Geometry:
    """Returns the layer with a random batch, height and width, small and large; with one row if it has one dimension.

    Args:
        limit: of height and width.
    """
    while True:
        height, width = (
            rng.choice((rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, limit))) for _ in "hw"
        )
        one_row = layer.height == layer.kernel[0] == 1
        found = layer._replace(
            batch=rng.choice((1, 2, 8, rng.randint(1, 256))),
            height=1 if one_row else height,
            width=width,
        )
        image = found.in_channels * found.height * found.width
        if min(found.out_height, found.out_width) > 0 and found.batch * image * 4 <= MAX_COPY_BYTES:
            return found


def with_output_padding(rng: random.Random, layer: Geometry) -> Geometry:
    """Returns the layer with a random size and a random output_padding, which calls may change as well."""
    geometry = random_sizes(rng, layer)
    largest = [max(s, d) - 1 for s, d in zip(layer.stride, layer.dilation, strict=True)]
    return geometry._replace(output_padding=(rng.randint(0, largest[0]), rng.randint(0, largest[1])))


def any_size(rng: random.Random, layer: Geometry) -> Geometry:
    """Returns the same, or sometimes the layer's map of one pixel."""
    found = with_output_padding(rng, layer)
    one_pixel = found._replace(height=1, width=1, output_padding=(0, 0))
    if rng.random() < 0.05 and min(one_pixel.out_height, one_pixel.out_width) > 0:
        return one_pixel
    return found


def quotient(words: sizes.Words, n: int) -> int:
    """Returns what ``Divisor::quotient`` of common/sizes.cuh computes in 32 bits."""
    _, magic, shift = words
    return ((n << 1 & 0xFFFFFFFF) * (magic & 0xFFFFFFFF) >> 32) >> shift


def random_output_padding(
    rng: random.Random, stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Returns rows and columns of output_padding, which have to be fewer than the stride or the dilation."""
    rows, columns = (rng.randint(0, max(both) - 1) for both in zip(stride, dilation, strict=True))
    return rows, columns


def random_layer(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 2, 3))
        kernel, stride = ((rng.randint(1, 5), rng.randint(1, 5)) for _ in "ks")
        dilation = (rng.choice((1, 1, 2)), rng.choice((1, 1, 2)))
        made = Geometry(
            1,
            groups * rng.choice((1, 3, 8, 16, 20)),
            rng.randint(6, 12),
            rng.randint(6, 12),
            groups * rng.choice((1, 2, 3, 7, 16)),
            kernel,
            stride,
            (rng.randint(0, 2), rng.randint(0, 2)),
            random_output_padding(rng, stride, dilation),
            dilation,
            groups,
        )
        if min(made.out_height, made.out_width) > 0:
            return made
