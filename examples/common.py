"""Shared by the examples: their options, random images, the parts of a GAN, and the summary at the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tconv_swap
from tconv_swap.measurement.environment import machine_name


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of an example's description, and adds the defaults."""


def arguments(
    description: str | None,
    argv: Sequence[str] | None,
    *,
    steps: int,
    size: int,
    batch: int,
    width: int | None = None,
    boxes: int | None = None,
    with_ways: bool = False,
) -> argparse.Namespace:
    """Returns the options of an example, with its defaults. Without ``width`` or ``boxes``, that of the network is
    no option. ``with_ways`` adds the option for the ways to try."""
    parser = argparse.ArgumentParser(description=description, formatter_class=_HelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each network")
    parser.add_argument("--size", type=int, default=size, help="height and width of the images, pixels")
    parser.add_argument("--batch", type=int, default=batch, help="images in a batch")
    if width is not None:
        parser.add_argument("--width", type=int, default=width, help="channels of the largest feature maps")
    if boxes is not None:
        parser.add_argument("--boxes", type=int, default=boxes, help="objects found in an image at most")
    parser.add_argument(
        "--iters", type=int, help="number of timed runs (default: as many as fit a time budget)"
    )
    parser.add_argument(
        "--warmup", type=int, help="number of untimed runs before each timing (default: by time)"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs"
    )
    if with_ways:
        parser.add_argument(
            "--ways", nargs="+", help="try these ways instead of all that the device supports"
        )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write a picture and the report to this directory"
    )
    return parser.parse_args(argv)


def disks(count: int, size: int, seed: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Returns coloured disks on noisy grey ground: images ``[count, 3, size, size]`` in [-1, 1], and the pixels of the
    disks ``[count, size, size]`` (bool). The same seed gives the same images on every device."""
    generator = torch.Generator().manual_seed(seed)
    centre = 0.3 + 0.4 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 0.1 + 0.15 * torch.rand(count, 1, 1, generator=generator)
    colour = 2 * torch.rand(count, 3, 1, 1, generator=generator) - 1
    ground = 0.1 * torch.rand(count, 3, size, size, generator=generator)
    line = torch.linspace(0, 1, size)
    distance = torch.hypot(line.view(1, size, 1) - centre[:, 0], line.view(1, 1, size) - centre[:, 1])
    mask = distance < radius
    return torch.where(mask[:, None], colour, ground).to(device), mask.to(device)


def init_gan_weights(module: nn.Module) -> None:
    """Sets the initial weights of DCGAN, pix2pix and CycleGAN, through ``network.apply``."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def patch_discriminator(
    in_channels: int, width: int, norm: type[nn.BatchNorm2d] | type[nn.InstanceNorm2d]
) -> nn.Sequential:
    """Returns the 70x70 PatchGAN of pix2pix and CycleGAN: one logit for every patch."""
    bias = norm is nn.InstanceNorm2d
    layers: list[nn.Module] = [nn.Conv2d(in_channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for factor, stride in ((1, 2), (2, 2), (4, 1)):
        layers += [
            nn.Conv2d(factor * width, 2 * factor * width, 4, stride, 1, bias=bias),
            norm(2 * factor * width),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1)).apply(init_gan_weights)


def gan_loss(
    scores: Tensor, real: bool, loss: Callable[[Tensor, Tensor], Tensor] = binary_cross_entropy_with_logits
) -> Tensor:
    """Returns the loss of the discriminator's scores if all images are real, or all are fake."""
    return loss(scores, torch.full_like(scores, float(real)))


@dataclass(frozen=True)
class Outcome:
    """The results of an example. The losses are (original, swapped), one pair for each training step."""

    plan: tconv_swap.SwapPlan
    verification: tconv_swap.VerifyReport
    timing: tconv_swap.BenchmarkReport
    losses: list[tuple[float, float]]


def summarise(
    plan: tconv_swap.SwapPlan,
    verification: tconv_swap.VerifyReport,
    timing: tconv_swap.BenchmarkReport,
    losses: dict[str, list[float]],
) -> Outcome:
    """Prints losses, layers, verification and speedup; ends the program with status 1 if the verification failed."""
    outcome = Outcome(
        plan, verification, timing, list(zip(losses["original"], losses["swapped"], strict=True))
    )
    print("Training loss\n  step    original     swapped")
    for step, (original, swapped) in enumerate(outcome.losses, start=1):
        print(f"  {step:4}  {original:10.6f}  {swapped:10.6f}")

    print(f"\nLayers swapped: {len(plan.swapped)}")
    for layer in plan.swapped:
        print(f"  {' = '.join(layer.names)}: {layer.geometry}")

    for block in plan.blocks:
        print(f"  {block}")

    print(f"\nMilliseconds on {machine_name(timing.environment)}")
    rows = [*timing.layers, *timing.network]
    wide = max(len(row.name) for row in rows)
    print(f"  {'':{wide}}  {'':8}  original   swapped  speedup")
    for row in rows:
        milliseconds = f"{row.original.median_ms:8.2f}  {row.swapped.median_ms:8.2f}"
        print(f"  {row.name:{wide}}  {row.stage:8}  {milliseconds}  {row.speedup:6.2f}x")

    verdict = "yes" if verification.passed else "NO"
    print(f"\nVerified: {verdict} ({len(verification.checks)} comparisons)")
    if not verification.passed:
        sys.exit("\n".join(["verification failed:", *verification.failures]))
    return outcome


def save(
    args: argparse.Namespace,
    name: str,
    outcome: Outcome,
    inputs: Any,
    rows: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Writes the picture and the report into the directory of ``--save``, if it is given.

    Args:
        args: the options.
        name: the name of both files.
        outcome: the results of the example.
        inputs: the inputs on which both networks were verified and timed.
        rows: returns the images in the rows of the picture, as ``results.save_picture`` takes them.
    """
    if args.save is None:
        return
    report = args.save / f"{name}.md"
    results.save_report(
        report, f"examples/{name}.py", outcome.plan, inputs, outcome.verification, outcome.timing
    )
    with torch.no_grad():
        results.save_picture(args.save / f"{name}.png", rows())
