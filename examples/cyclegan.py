"""CycleGAN (Zhu et al. 2017): two ResNet generators, one for each direction, each with two transposed convolutions.

python examples/cyclegan.py
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

import tconv_swap

CYCLE_WEIGHT = 10.0


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
            nn.ReLU(),
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.layers(x)
        return x + residual


def build_generator(width: int, blocks: int) -> nn.Sequential:
    """Maps ``[batch, 3, size, size]`` to the same shape; as published: width 64, 9 blocks (256 pixels)."""
    layers: list[nn.Module] = [
        nn.ReflectionPad2d(3),
        nn.Conv2d(3, width, 7),
        nn.InstanceNorm2d(width),
        nn.ReLU(),
    ]
    for channels in (width, 2 * width):
        layers += [
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.InstanceNorm2d(2 * channels),
            nn.ReLU(),
        ]
    layers += [ResidualBlock(4 * width) for _ in range(blocks)]
    for channels in (2 * width, width):
        layers += [
            nn.ConvTranspose2d(2 * channels, channels, 3, stride=2, padding=1, output_padding=1),
            nn.InstanceNorm2d(channels),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


class CycleGenerators(nn.Module):
    """Both generators, and the cycles that both have to invert."""

    def __init__(self, width: int = 64, blocks: int = 9) -> None:
        super().__init__()
        self.a_to_b = build_generator(width, blocks)
        self.b_to_a = build_generator(width, blocks)
        self.apply(common.init_gan_weights)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        fake_b, fake_a = self.a_to_b(a), self.b_to_a(b)
        return {
            "fake_a": fake_a,
            "fake_b": fake_b,
            "cycled_a": self.b_to_a(fake_b),
            "cycled_b": self.a_to_b(fake_a),
        }


def batch_of_both(batch: int, size: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns unpaired images of two domains: disks, and the negatives of other disks."""
    return common.disks(batch, size, 2 * seed, device)[0], -common.disks(batch, size, 2 * seed + 1, device)[0]


def train(generators: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the generators' loss (adversarial and cycle) at every step."""
    torch.manual_seed(0)
    generators.train()
    judge_a = common.patch_discriminator(3, args.width, nn.InstanceNorm2d).to(args.device)
    judge_b = common.patch_discriminator(3, args.width, nn.InstanceNorm2d).to(args.device)
    judges = itertools.chain(judge_a.parameters(), judge_b.parameters())
    optimizer_g = torch.optim.Adam(generators.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(judges, lr=2e-4, betas=(0.5, 0.999))

    def gan_loss(judge: nn.Module, images: Tensor, real: bool) -> Tensor:
        return common.gan_loss(judge(images), real, mse_loss)

    losses = []
    for step in range(args.steps):
        a, b = batch_of_both(args.batch, args.size, step, args.device)
        made = generators(a, b)

        optimizer_g.zero_grad()
        loss_g = gan_loss(judge_a, made["fake_a"], real=True) + gan_loss(judge_b, made["fake_b"], real=True)
        loss_g += CYCLE_WEIGHT * (l1_loss(made["cycled_a"], a) + l1_loss(made["cycled_b"], b))
        loss_g.backward()
        optimizer_g.step()

        optimizer_d.zero_grad()
        for judge, real, fake in ((judge_a, a, made["fake_a"]), (judge_b, b, made["fake_b"])):
            loss_d = gan_loss(judge, real, real=True) + gan_loss(judge, fake.detach(), real=False)
            (loss_d / 2).backward()
        optimizer_d.step()
        losses.append(loss_g.item())
    return losses


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=3, size=64, width=32, batch=1)
    torch.manual_seed(0)
    original = CycleGenerators(args.width, blocks=6).to(args.device)
    a, b = batch_of_both(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, (a, b))
    timing = tconv_swap.benchmark(original, swapped, (a, b), warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args,
        "cyclegan",
        outcome,
        (a, b),
        lambda: {"input": a, "original": original(a, b)["fake_b"], "swapped": swapped(a, b)["fake_b"]},
    )
    return outcome


if __name__ == "__main__":
    main()
