"""A convolutional variational autoencoder (Kingma and Welling 2013), whose decoder has transposed convolutions.

python examples/vae.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import tconv_swap

HALVINGS = 4
KL_WEIGHT = 1e-3


class Autoencoder(nn.Module):
    """Maps ``[batch, 3, size, size]`` to its reconstruction, and the mean and log-variance ``[batch, latent]``."""

    def __init__(self, size: int, width: int = 32, latent: int = 128) -> None:
        super().__init__()
        channels = [width * 2**i for i in range(HALVINGS)]
        low = size // 2**HALVINGS
        flat = channels[-1] * low * low
        encoder: list[nn.Module] = []
        for outer, inner in zip([3, *channels], channels, strict=False):
            encoder += [nn.Conv2d(outer, inner, 3, 2, 1), nn.BatchNorm2d(inner), nn.LeakyReLU()]
        decoder: list[nn.Module] = [nn.Linear(latent, flat), nn.Unflatten(1, (channels[-1], low, low))]
        for inner, outer in zip(channels[::-1], [*channels[-2::-1], width], strict=True):
            decoder += [
                nn.ConvTranspose2d(inner, outer, 3, stride=2, padding=1, output_padding=1),
                nn.BatchNorm2d(outer),
                nn.LeakyReLU(),
            ]
        self.encoder = nn.Sequential(*encoder, nn.Flatten())
        self.mean = nn.Linear(flat, latent)
        self.log_variance = nn.Linear(flat, latent)
        self.decoder = nn.Sequential(*decoder, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.encoder(images)
        mean, log_variance = self.mean(features), self.log_variance(features)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the loss (reconstruction and Kullback-Leibler divergence) at every step."""
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(args.steps):
        images, _ = common.disks(args.batch, args.size, seed=step, device=args.device)
        reconstruction, mean, log_variance = model(images)
        divergence = 0.5 * (mean**2 + log_variance.exp() - log_variance - 1).sum(dim=1).mean()
        loss = mse_loss(reconstruction, images) + KL_WEIGHT * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=10, size=64, width=32, batch=16)
    torch.manual_seed(0)
    original = Autoencoder(args.size, args.width).to(args.device)
    images, _ = common.disks(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, images)
    timing = tconv_swap.benchmark(original, swapped, images, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args,
        "vae",
        outcome,
        images,
        lambda: {"input": images, "original": original(images)[0], "swapped": swapped(images)[0]},
    )
    return outcome


if __name__ == "__main__":
    main()
