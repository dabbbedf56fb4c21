"""pix2pix (Isola et al. 2017): a U-Net generator that makes an image from a label map, trained with a PatchGAN and L1.

python examples/pix2pix.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

import tconv_swap

L1_WEIGHT = 100.0


class UNetGenerator(nn.Module):
    """Halves the map down to one pixel and doubles it again, with a skip connection at every level.

    ``[batch, 3, size, size]`` -> the same shape. 8 levels (256 pixels) and width 64 are as published.
    """

    def __init__(self, levels: int = 8, width: int = 64) -> None:
        super().__init__()
        self.downs = nn.ModuleList()
        self.ups = nn.ModuleList()
        outer = 3
        for level in range(levels):
            outermost, innermost = level == 0, level == levels - 1
            inner = width * min(2**level, 8)
            down: list[nn.Module] = [] if outermost else [nn.LeakyReLU(0.2)]
            down.append(nn.Conv2d(outer, inner, 4, 2, 1, bias=False))
            if not (outermost or innermost):
                down.append(nn.BatchNorm2d(inner))
            # The input from the level below is concatenated with the skip connection; the innermost level has no level
            # below.
            from_below = inner if innermost else 2 * inner
            up = [nn.ReLU(), nn.ConvTranspose2d(from_below, outer, 4, 2, 1, bias=outermost)]
            up.append(nn.Tanh() if outermost else nn.BatchNorm2d(outer))
            if 4 <= level < levels - 1:
                up.append(nn.Dropout(0.5))
            self.downs.append(nn.Sequential(*down))
            self.ups.append(nn.Sequential(*up))
            outer = inner
        self.apply(common.init_gan_weights)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = self.ups[-1](skips.pop())
        for up in reversed(self.ups[:-1]):
            x = up(torch.cat([skips.pop(), x], dim=1))
        return x


def batch_of_pairs(batch: int, size: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns the label map of a disk (black and white, in RGB) and its image."""
    images, masks = common.disks(batch, size, seed, device)
    labels = 2 * masks[:, None].float().expand(-1, 3, -1, -1) - 1
    return labels, images


def train(generator: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the generator's loss (adversarial and L1) at every step."""
    torch.manual_seed(0)
    generator.train()
    discriminator = common.patch_discriminator(6, args.width, nn.BatchNorm2d).to(args.device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def gan_loss(labels: Tensor, images: Tensor, real: bool) -> Tensor:
        return common.gan_loss(discriminator(torch.cat([labels, images], dim=1)), real)

    losses = []
    for step in range(args.steps):
        labels, images = batch_of_pairs(args.batch, args.size, step, args.device)
        fakes = generator(labels)

        optimizer_d.zero_grad()
        loss_d = (gan_loss(labels, images, real=True) + gan_loss(labels, fakes.detach(), real=False)) / 2
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = gan_loss(labels, fakes, real=True) + L1_WEIGHT * l1_loss(fakes, images)
        loss_g.backward()
        optimizer_g.step()
        losses.append(loss_g.item())
    return losses


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=5, size=256, width=16, batch=1)
    torch.manual_seed(0)
    original = UNetGenerator(levels=int(math.log2(args.size)), width=args.width).to(args.device)
    labels, _ = batch_of_pairs(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, labels)
    timing = tconv_swap.benchmark(original, swapped, labels, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args,
        "pix2pix",
        outcome,
        labels,
        lambda: {"input": labels, "original": original(labels), "swapped": swapped(labels)},
    )
    return outcome


if __name__ == "__main__":
    main()
