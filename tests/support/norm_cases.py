"""Shapes, modules and errors that the GPU tests of normalisation share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SHAPES = {
    "dcgan": (128, 64, 32, 32),
    "a block to a channel": (16, 512, 4, 4),
    "clusters": (16, 40, 64, 64),
    "partly cached": (24, 16, 128, 128),
    "two launches": (8, 3, 250, 250),
    "odd": (7, 33, 7, 9),
    "one image": (1, 5, 31, 17),
    "gemm": (33, 100, 1, 1),
    "wide": (2, 72, 3, 1000),
    "no map": (64, 100),
    "signal": (4, 24, 333),
}
#: Relative error that rounding the compared tensor may add.
ROUNDING = {torch.float32: 3e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def norm_for(shape: Sequence[int], per_image: bool, **arguments: object) -> nn.Module:
    """Returns a norm for tensors of the shape, with random parameters, on the GPU."""
    batch = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    image = nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm1d
    if per_image:
        arguments = {"affine": True, **arguments}
    norm = (image if per_image else batch)(shape[1], **arguments)  # type: ignore[arg-type]
    for name, parameter in norm.named_parameters():
        nn.init.uniform_(parameter, 0.5, 1.5) if name == "weight" else nn.init.normal_(parameter)
    return norm.cuda()


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Returns ||found - truth|| / ||truth|| of each tensor."""
    assert found.keys() == truth.keys()
    return {
        name: float((found[name].double() - exact).norm() / exact.norm().clamp_min(1e-30))
        for name, exact in truth.items()
    }
