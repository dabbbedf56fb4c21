"""U-Net (Ronneberger et al. 2015), padded and with batch normalisation, which learns to segment disks.

python examples/unet.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d

import tconv_swap


def double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Maps ``[batch, 3, size, size]`` to ``[batch, classes, size, size]``; depth 4 and width 64 are published."""

    def __init__(self, classes: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        channels = [width * 2**i for i in range(depth + 1)]
        self.downs = nn.ModuleList(double_conv(*pair) for pair in zip([3, *channels], channels, strict=False))
        pairs = list(zip(channels[:0:-1], channels[-2::-1], strict=True))
        self.up_convs = nn.ModuleList(nn.ConvTranspose2d(below, level, 2, stride=2) for below, level in pairs)
        self.ups = nn.ModuleList(double_conv(below, level) for below, level in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.downs[0](x)]
        for down in self.downs[1:]:
            skips.append(down(max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up_conv, up in zip(self.up_convs, self.ups, strict=True):
            x = up(torch.cat([skips.pop(), up_conv(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the cross-entropy at every step."""
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(args.steps):
        images, masks = common.disks(args.batch, args.size, seed=step, device=args.device)
        loss = cross_entropy(model(images), masks.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mask(model: nn.Module, images: Tensor) -> Tensor:
    """Returns ``[batch, 1, size, size]`` in [-1, 1]: the probability that a pixel belongs to the disk."""
    return 2 * model(images).softmax(dim=1)[:, 1:] - 1


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=5, size=128, width=16, batch=2)
    torch.manual_seed(0)
    original = UNet(classes=2, width=args.width).to(args.device)
    images, _ = common.disks(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, images)
    timing = tconv_swap.benchmark(original, swapped, images, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args,
        "unet",
        outcome,
        images,
        lambda: {"input": images, "original": mask(original, images), "swapped": mask(swapped, images)},
    )
    return outcome


if __name__ == "__main__":
    main()
