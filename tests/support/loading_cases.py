"""Shared by the tests of loading and saving: a generator, and pickles that would execute something."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

LEGACY = {"_use_new_zipfile_serialization": False}


def generator() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(4, 3, 4), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 2, 2))


class RunsCommand:
    """If it is unpickled, it creates the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
