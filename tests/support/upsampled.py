"""A data set that runs a network in the processes of a data loader, which import this file alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Upsampled(Dataset[Tensor]):
    """Runs a swapped network in the worker, as augmentations do. `image`: ``[1, channels, height, width]``."""

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self.model, self.image = model.eval(), image

    def __len__(self) -> int:
        return 4

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return self.model(self.image)[0]
