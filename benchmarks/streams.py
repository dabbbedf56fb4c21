"""Defines streams of calls with changing sizes, as in segmentation, detection, speech and at the end of an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """Calls ``network`` with an input of each of ``shapes`` in turn; if ``trains``, trains it. ``warm_up`` is another
    shape. ``tiny`` selects a network and sizes that are fast enough for a test on a CPU."""

    name: str
    network: Callable[[bool], nn.Module]
    shapes: Callable[[bool], Sequence[Shape]]
    warm_up: Callable[[bool], Shape]
    trains: bool = False


class UNet(nn.Module):
    """Three levels down and three up, starting with ``channels``, with skip connections; images are multiples of 8."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(4)]
        self.first = _convolutions(3, widths[0])
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.joined = nn.ModuleList(_convolutions(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for convolutions in self.down:
            skips.append(x)
            x = convolutions(F.max_pool2d(x, 2))
        for up, convolutions, skip in zip(
            reversed(self.up), reversed(self.joined), reversed(skips), strict=True
        ):
            x = convolutions(torch.cat((up(x), skip), 1))
        y: Tensor = self.last(x)
        return y


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
    )


def _mask_head(tiny: bool) -> nn.Module:
    """Returns the mask head of Mask R-CNN, which starts from the 14 x 14 features of each box."""
    channels = 16 if tiny else 256
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())),
        nn.ConvTranspose2d(channels, channels, 2, 2),
        nn.ReLU(),
        nn.Conv2d(channels, 91, 1),
    )


def _upsampling(tiny: bool) -> nn.Module:
    """Returns the upsampling part of HiFi-GAN (V1), without its residual blocks."""
    channels = 32 if tiny else 512
    layers: list[nn.Module] = [nn.Conv1d(80, channels, 7, padding=3)]
    for kernel, stride in ((16, 8), (16, 8), (4, 2), (4, 2)):
        up = nn.ConvTranspose1d(channels, channels // 2, kernel, stride, (kernel - stride) // 2)
        layers += [nn.LeakyReLU(0.1), up]
        channels //= 2
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh())


def _generator(tiny: bool) -> nn.Module:
    """Returns the generator of DCGAN for images of 64 x 64."""
    channels = 16 if tiny else 512
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, channels, 4, bias=False)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(channels), nn.ReLU(True)]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False))
        channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(True), nn.ConvTranspose2d(channels, 3, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers)


def _images(count: int, batch: int) -> Callable[[bool], Sequence[Shape]]:
    def shapes(tiny: bool) -> Sequence[Shape]:
        rng = random.Random(count)
        least, most = (1, 4) if tiny else (10, 40)
        sizes = [(16 * h, 16 * w) for h in range(least, most + 1) for w in range(least, most + 1)]
        return [(batch, 3, *size) for size in rng.sample(sizes, 4 if tiny else count)]

    return shapes


def _boxes(tiny: bool) -> Sequence[Shape]:
    counts = random.Random(3).sample(range(1, 101), 4 if tiny else 40)
    return [(count, 16 if tiny else 256, 14, 14) for count in counts]


def _lengths(tiny: bool) -> Sequence[Shape]:
    lengths = random.Random(4).sample(range(8, 16) if tiny else range(40, 600), 4 if tiny else 60)
    return [(1, 80, length) for length in lengths]


def _epoch(tiny: bool) -> Sequence[Shape]:
    """Returns full batches, and one with the remaining images."""
    return [(4 if tiny else 64, 100, 1, 1)] * (3 if tiny else 30) + [(3 if tiny else 37, 100, 1, 1)]


STREAMS: Mapping[str, Stream] = {
    stream.name: stream
    for stream in (
        Stream(
            "unet-images",
            lambda tiny: UNet(4 if tiny else 32),
            _images(40, 1),
            lambda tiny: (1, 3, 88, 88) if tiny else (1, 3, 168, 168),
        ),
        Stream(
            "unet-steps",
            lambda tiny: UNet(4 if tiny else 32),
            _images(20, 2),
            lambda tiny: (2, 3, 88, 88) if tiny else (2, 3, 168, 168),
            trains=True,
        ),
        Stream("mask-head", _mask_head, _boxes, lambda tiny: (101, 16 if tiny else 256, 14, 14)),
        Stream("hifigan", _upsampling, _lengths, lambda tiny: (1, 80, 17 if tiny else 601)),
        Stream("last-batch", _generator, _epoch, lambda tiny: (5 if tiny else 63, 100, 1, 1), trains=True),
    )
}
