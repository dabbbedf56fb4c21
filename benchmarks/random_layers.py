"""Draws random layers beside the suite, of the classes that real networks have; the same for the same seed.

They show the worth of a rule or a cost that was fitted to the suite on other layers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.measurement.suite import Layer

SEED = 19
#: With so many of each class there are at least 60 in all.
OF_EACH_CLASS = 6
#: Elements of the largest tensor: 100 MB of float32.
MAX_ELEMENTS = 25_000_000
#: Multiply-adds: a few tenths of a millisecond on the tensor cores of an H200.
MAX_MACS = 60e9

#: A kernel with at least this many taps counts as large.
LARGE_KERNEL_TAPS = 100
#: A layer with at most this many output channels is a head: an image, a depth, a waveform.
FEW_CHANNELS = 4
#: Mask heads run on regions: many small maps.
REGIONS, REGION_PIXELS = 32, 28 * 28

OTHER = "other"


def class_of(geometry: Geometry) -> str:
    """Returns the class of a layer by its geometry: one of ``CLASSES``, or ``"other"``."""
    g = geometry
    kernel_is_stride = g.kernel == g.stride
    is_k4s2 = g.kernel == (4, 4) and g.stride == (2, 2)
    rules = (
        ("gemm", g.height == g.width == 1),
        ("depthwise", 1 < g.groups == g.in_channels == g.out_channels),
        ("grouped", g.groups > 1),
        ("vocoder", g.height == g.kernel[0] == 1),
        ("large_kernel", g.taps >= LARGE_KERNEL_TAPS),
        ("few output channels", g.out_channels <= FEW_CHANNELS),
        ("stride 1", g.stride == (1, 1)),
        ("mask head", kernel_is_stride and g.batch >= REGIONS and g.height * g.width <= REGION_PIXELS),
        ("kernel equals stride", kernel_is_stride),
        ("k3s2", g.kernel == (3, 3) and g.stride == (2, 2)),
        ("pose", is_k4s2 and g.height != g.width),
        ("k4s2", is_k4s2),
    )
    return next((name for name, holds in rules if holds), OTHER)


def random_layers(of_each_class: int = OF_EACH_CLASS, seed: int = SEED) -> tuple[Layer, ...]:
    """Returns ``of_each_class`` distinct layers of every class, in turn.

    The first layers of a larger number are those of a smaller number.
    """
    found: dict[str, list[Layer]] = {}
    for name, draw in CLASSES.items():
        # Each class has its own generator, so it does not depend on how often another class drew.
        source = random.Random(f"{seed} {name}")
        geometries: dict[Geometry, bool] = {}
        while len(geometries) < of_each_class:
            geometry = fitted(draw(source))
            if class_of(geometry) == name and _is_moderate(geometry):
                geometries[geometry] = source.random() < 0.5
        found[name] = [
            Layer(f"{name} {number}".replace(" ", "_"), f"drawn at random: {name}", geometry, bias, False)
            for number, (geometry, bias) in enumerate(geometries.items(), start=1)
        ]
    return tuple(layers[turn] for turn in range(of_each_class) for layers in found.values())


def fitted(geometry: Geometry) -> Geometry:
    """Returns the geometry with as many images as ``MAX_ELEMENTS`` and ``MAX_MACS`` allow, but at least one."""
    image = geometry.with_batch(1)
    most = min(MAX_ELEMENTS // _largest(image), int(MAX_MACS / image.macs))
    return geometry.with_batch(max(1, min(geometry.batch, most)))


def _is_moderate(geometry: Geometry) -> bool:
    return _largest(geometry) <= MAX_ELEMENTS and geometry.macs <= MAX_MACS


def _largest(geometry: Geometry) -> int:
    """Returns the number of elements of the larger of input and output."""
    return max(math.prod(geometry.input_shape), math.prod(geometry.output_shape))


def _size(source: random.Random, least: int, most: int) -> int:
    """Returns the size of a map: half of the time a multiple of 8 if there is one, otherwise any."""
    multiples = range(-(-least // 8) * 8, most + 1, 8)
    return source.choice(multiples) if multiples and source.random() < 0.5 else source.randint(least, most)


def _channels(source: random.Random, usual: Iterable[int]) -> int:
    """Returns a usual number, or in a third of the cases another one near it: networks are widened and pruned."""
    channels = source.choice(list(usual))
    if source.random() < 2 / 3:
        return channels
    return max(1, channels + source.choice((-2, 1, 2, 4, 8, 12, channels // 4, channels // 2)))


def _batch(source: random.Random, most: int) -> int:
    """Returns the larger of two draws: small batches leave a large GPU idle whatever computes them."""
    sizes = [n for n in (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 64, 100, 128) if n <= most]
    return max(source.choice(sizes), source.choice(sizes))


def _oblong(source: random.Random, least: int, most: int) -> Pair:
    return _size(source, least, most), _size(source, least, most)


def _one_pixel(source: random.Random) -> Geometry:
    side = source.choice((2, 3, 4, 4, 4, 5, 7, 8))
    inputs = _channels(source, (64, 100, 128, 256, 512))
    outputs = _channels(source, (64, 128, 256, 512, 1024))
    return Geometry(_batch(source, 128), inputs, 1, 1, outputs, (side, side))


def _depthwise(source: random.Random) -> Geometry:
    channels = _channels(source, (19, 21, 32, 64, 128, 256))
    stride = source.choice((1, 2, 2, 2, 4, 8))
    kernel = 3 if stride == 1 else 2 * stride
    padding = 1 if stride == 1 else stride // 2
    size = _oblong(source, 7, 256 // stride)
    return _geometry(_batch(source, 16), channels, size, channels, kernel, stride, padding, groups=channels)


def _grouped(source: random.Random) -> Geometry:
    groups = source.choice((2, 3, 4, 8, 16, 32))
    inputs, outputs = (groups * source.choice((4, 8, 12, 16, 20, 32, 64, 96)) for _ in range(2))
    kernel, stride, padding = source.choice(((4, 2, 1), (3, 2, 1), (2, 2, 0), (3, 1, 1)))
    return _geometry(
        _batch(source, 16), inputs, _oblong(source, 9, 96), outputs, kernel, stride, padding, groups=groups
    )


def _vocoder(source: random.Random) -> Geometry:
    stride = source.choice((2, 2, 3, 4, 5, 6, 8, 8, 10))
    kernel = 2 * stride
    inputs = _channels(source, (64, 128, 256, 512, 768, 1024, 1536))
    width = _size(source, 50, 8192 * 8 // inputs * 8)
    return Geometry(
        _batch(source, 32),
        inputs,
        1,
        width,
        max(1, inputs // 2),
        (1, kernel),
        (1, stride),
        (0, stride // 2),
        (0, stride % 2),
    )


def _large_kernel(source: random.Random) -> Geometry:
    stride = source.choice((4, 6, 8, 16, 32))
    kernel = max(10, 2 * stride)
    channels = _channels(source, (8, 19, 21, 32, 64))
    size = _oblong(source, 5, max(8, 320 // stride))
    return _geometry(_batch(source, 8), channels, size, channels, kernel, stride, stride // 2)


def _few_output_channels(source: random.Random) -> Geometry:
    kernel, stride, padding, extra = source.choice(
        ((9, 2, 4, 1), (9, 3, 4, 2), (9, 4, 4, 3), (4, 2, 1, 0), (5, 2, 2, 1), (3, 2, 1, 1), (2, 2, 0, 0))
    )
    inputs = _channels(source, (12, 32, 48, 56, 64, 128))
    outputs = source.choice((1, 1, 2, 3, 3, 4))
    size = _oblong(source, 30, 270)
    return _geometry(_batch(source, 32), inputs, size, outputs, kernel, stride, padding, extra)


def _stride_1(source: random.Random) -> Geometry:
    kernel, padding = source.choice((((3, 3), (1, 1)), ((5, 5), (2, 2)), ((3, 7), (1, 3)), ((3, 3), (0, 0))))
    inputs, outputs = (_channels(source, (16, 32, 64, 128, 256)) for _ in range(2))
    return Geometry(_batch(source, 16), inputs, *_oblong(source, 13, 400), outputs, kernel, padding=padding)


def _mask_head(source: random.Random) -> Geometry:
    regions = source.choice((37, 64, 100, 128, 200, 256))
    size = source.choice((7, 14, 14, 14, 28))
    inputs = _channels(source, (128, 256, 256, 512))
    return _geometry(regions, inputs, (size, size), _channels(source, (128, 256)), 2, 2, 0)


def _kernel_equals_stride(source: random.Random) -> Geometry:
    side = source.choice((2, 2, 2, 2, 3, 4))
    inputs = _channels(source, (32, 64, 128, 256, 512, 1024))
    return _geometry(_batch(source, 8), inputs, _oblong(source, 12, 256), max(16, inputs // 2), side, side, 0)


def _k3s2(source: random.Random) -> Geometry:
    inputs = _channels(source, (32, 64, 96, 128, 256, 512))
    size = _oblong(source, 8, 200)
    return _geometry(_batch(source, 16), inputs, size, max(8, inputs // 2), 3, 2, 1, source.choice((0, 1, 1)))


def _pose(source: random.Random) -> Geometry:
    height, width = source.choice(((8, 6), (16, 12), (32, 24), (12, 9), (24, 18), (15, 20), (17, 30)))
    inputs = _channels(source, (256, 512, 1024, 2048))
    return _geometry(_batch(source, 64), inputs, (height, width), _channels(source, (128, 256)), 4, 2, 1)


def _k4s2(source: random.Random) -> Geometry:
    size = source.choice((4, 8, 16, 32, 64, 128, 5, 7, 14, 20, 28, 37, 50))
    inputs = _channels(source, (32, 64, 128, 256, 512, 1024))
    return _geometry(_batch(source, 128), inputs, (size, size), max(8, inputs // 2), 4, 2, 1)


def _geometry(
    batch: int,
    in_channels: int,
    size: Pair,
    out_channels: int,
    kernel: int,
    stride: int,
    padding: int,
    output_padding: int = 0,
    groups: int = 1,
) -> Geometry:
    return Geometry(
        batch,
        in_channels,
        *size,
        out_channels,
        (kernel, kernel),
        (stride, stride),
        (padding, padding),
        (output_padding, output_padding),
        groups=groups,
    )


#: The function that draws a layer of each class.
CLASSES: dict[str, Callable[[random.Random], Geometry]] = {
    "k4s2": _k4s2,
    "kernel equals stride": _kernel_equals_stride,
    "k3s2": _k3s2,
    "pose": _pose,
    "vocoder": _vocoder,
    "few output channels": _few_output_channels,
    "mask head": _mask_head,
    "depthwise": _depthwise,
    "grouped": _grouped,
    "stride 1": _stride_1,
    "large_kernel": _large_kernel,
    "gemm": _one_pixel,
}
