"""The network of `tconv-swap demo`: a DCGAN generator with random weights, saved as a user would save it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tconv_swap.files.saving import save_model

LATENT = 100
CHANNELS = (512, 256, 128, 64)


def dcgan_generator() -> nn.Sequential:
    """Returns the generator from 100 x 1 x 1 noise to a 3 x 64 x 64 image (Radford et al., 2016), with the paper's
    initial weights.

    It consists of PyTorch's own layers only, so that its file loads without trust.
    """
    layers: list[nn.Module] = [nn.ConvTranspose2d(LATENT, CHANNELS[0], 4, bias=False)]
    for before, after in itertools.pairwise(CHANNELS):
        layers += [nn.BatchNorm2d(before), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(CHANNELS[-1]), nn.ReLU(inplace=True)]
    layers += [nn.ConvTranspose2d(CHANNELS[-1], 3, 4, stride=2, padding=1, bias=False), nn.Tanh()]
    for layer in layers:
        if isinstance(layer, nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0.0, 0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
    return nn.Sequential(*layers)


def input_shape(device: torch.device) -> tuple[int, ...]:
    """Returns the shape of a training batch on a GPU; on a CPU, that of a batch which two cores compute in seconds."""
    return (128 if device.type == "cuda" else 8, LATENT, 1, 1)


def write_generator(path: Path, seed: int, placed: Callable[[Path], None] | None = None) -> None:
    """Saves the generator, its weights drawn with `seed`; the global random state does not change.

    Args:
        path: the file.
        seed: the seed of the weights.
        placed: called with `path` once the file is in its place.

    Raises:
        SaveError: the file could not be written.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_model(dcgan_generator(), path, placed=placed)
