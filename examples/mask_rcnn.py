"""torchvision's Mask R-CNN (He et al. 2017), random weights: its mask head has a transposed convolution.

python examples/mask_rcnn.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import common
import torch
from torch import Tensor, nn
from torchvision.models.detection import maskrcnn_resnet50_fpn

import tconv_swap

Batch = dict[str, list[Any]]  # "images": one tensor each; "targets": one dict each


def build_model(size: int) -> nn.Module:
    """Two classes, so that random weights score above the threshold and the mask head has something to do."""
    return maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=2,
        min_size=size,
        max_size=size,
        box_detections_per_img=16,
    )


def batch_of_disks(batch: int, size: int, seed: int, device: str) -> Batch:
    """Images in [0, 1] with the box, label and mask of the disk in each."""
    images, masks = common.disks(batch, size, seed, device)
    return {
        "images": list((images + 1) / 2),
        "targets": [
            {
                "boxes": box_of(mask),
                "labels": torch.ones(1, dtype=torch.long, device=device),
                "masks": mask[None],
            }
            for mask in masks
        ],
    }


def box_of(mask: Tensor) -> Tensor:
    """``[1, 4]``: left, top, right, bottom of the pixels in a mask ``[height, width]``."""
    rows, columns = mask.nonzero(as_tuple=True)
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    return torch.stack(edges)[None].float()


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """The sum of the detector's five losses at every step."""
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for step in range(args.steps):
        loss = sum(model(**batch_of_disks(args.batch, args.size, step, args.device)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=2, size=128, batch=2)
    torch.manual_seed(0)
    original = build_model(args.size).to(args.device)
    inputs = batch_of_disks(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, inputs)
    timing = tconv_swap.benchmark(original, swapped, inputs, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    return common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)


if __name__ == "__main__":
    main()
