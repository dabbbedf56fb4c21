"""DCGAN (Radford et al. 2015): every layer of the generator except the activations is a transposed convolution.

python examples/dcgan.py
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence

import common
import torch
from torch import nn

import tconv_swap

LATENT = 100


def build_generator(size: int, width: int) -> nn.Sequential:
    """Maps ``[batch, 100, 1, 1]`` to ``[batch, 3, size, size]``; 64 pixels and width 64 are as published."""
    doublings = int(math.log2(size)) - 2
    channels = [width * 2**i for i in reversed(range(doublings))]
    layers: list[nn.Module] = [nn.ConvTranspose2d(LATENT, channels[0], 4, 1, 0, bias=False)]
    for inner, outer in zip(channels, [*channels[1:], 3], strict=True):
        layers += [nn.BatchNorm2d(inner), nn.ReLU(), nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=False)]
    return nn.Sequential(*layers, nn.Tanh()).apply(common.init_gan_weights)


def build_discriminator(size: int, width: int) -> nn.Sequential:
    """Maps ``[batch, 3, size, size]`` to logits ``[batch, 1, 1, 1]``."""
    halvings = int(math.log2(size)) - 2
    channels = [width * 2**i for i in range(halvings)]
    layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for outer, inner in itertools.pairwise(channels):
        layers += [nn.Conv2d(outer, inner, 4, 2, 1, bias=False), nn.BatchNorm2d(inner), nn.LeakyReLU(0.2)]
    layers.append(nn.Conv2d(channels[-1], 1, 4, 1, 0, bias=False))
    return nn.Sequential(*layers).apply(common.init_gan_weights)


def train(generator: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the generator's loss at every step."""
    torch.manual_seed(0)
    generator.train()
    discriminator = build_discriminator(args.size, args.width).to(args.device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    losses = []
    for step in range(args.steps):
        real, _ = common.disks(args.batch, args.size, seed=step, device=args.device)
        fake = generator(torch.randn(args.batch, LATENT, 1, 1, device=args.device))

        optimizer_d.zero_grad()
        loss_d = common.gan_loss(discriminator(real), real=True)
        loss_d += common.gan_loss(discriminator(fake.detach()), real=False)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = common.gan_loss(discriminator(fake), real=True)
        loss_g.backward()
        optimizer_g.step()
        losses.append(loss_g.item())
    return losses


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=5, size=64, width=64, batch=16)
    torch.manual_seed(0)
    original = build_generator(args.size, args.width).to(args.device)
    latent = torch.randn(args.batch, LATENT, 1, 1, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, latent)
    timing = tconv_swap.benchmark(original, swapped, latent, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args, "dcgan", outcome, latent, lambda: {"original": original(latent), "swapped": swapped(latent)}
    )
    return outcome


if __name__ == "__main__":
    main()
