"""Shared by the tests of timing: a network with every kind of state, and a snapshot of everything that may change in
it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

# --- the state of networks -----------------------------------------------------


class Generator(nn.Module):
    """Small, with every kind of state: BatchNorm, dropout, in-place activation, frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up1 = nn.ConvTranspose2d(6, 8, 4)
        self.norm = nn.BatchNorm2d(8)
        self.up2 = nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("spread", torch.arange(3.0)[None].expand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1  # a buffer that is replaced, not written to
        random.random()
        return torch.tanh(self.drop(self.up2(torch.relu_(self.norm(self.up1(x))))))


def prepared_generator() -> Generator:
    torch.manual_seed(0)
    model = Generator()
    model.norm.eval()
    model.up1.bias.requires_grad_(False)
    model.up2(torch.randn(1, 8, 4, 4)).sum().backward()
    return model


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    state: list[tuple[Any, ...]] = [
        (
            name,
            id(t),
            t.requires_grad,
            id(t.grad),
            t.tolist(),
            None if t.grad is None else t.grad.tolist(),
        )
        for name, t in tensors
    ]
    return [*state, *((name, module.training) for name, module in model.named_modules())]
