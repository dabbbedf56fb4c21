"""The networks that the tests of the surgery operate on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.layer import ConvTranspose2d


def up(in_channels: int = 4, out_channels: int = 4, **arguments: Any) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(in_channels, out_channels, **{"kernel_size": 2, "stride": 2, **arguments})


class Net(nn.Module):
    """Has layers in every kind of container, one of them shared under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.decoder = nn.ModuleDict({"up": up(), "block": nn.Sequential(up(), nn.Dropout(0.1))})
        self.heads = nn.ModuleList([up(4, 2), up(4, 2, bias=False)])
        self.shared = self.decoder["up"]
        self.alias = nn.Sequential(self.shared)

    def forward(self, x: Tensor) -> Tensor:
        x = self.decoder["block"](self.decoder["up"](self.encoder(x)))
        x = self.alias(x)
        y: Tensor = self.heads[0](x) + self.heads[1](x)
        return y


NAMES = ["decoder.up", "decoder.block.0", "heads.0", "heads.1"]


def swapped_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ConvTranspose2d)]


def images() -> Tensor:
    return torch.randn(2, 3, 3, 3)
