"""torchvision's Mask R-CNN (He et al. 2017) with random weights: its mask head has a transposed convolution.

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


def build_model(size: int, boxes: int = 16) -> nn.Module:
    """Returns a model of two classes, so that random weights score above the threshold and the mask head gets boxes.

    It finds at most ``boxes`` in an image. Only the mask head is trained, and there are fewer proposals and detections
    than by default, so that it is fast on small machines.
    """
    model: nn.Module = maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=2,
        min_size=size,
        max_size=size,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=100,
        box_batch_size_per_image=4 * boxes,
        box_detections_per_img=boxes,
    )
    model.requires_grad_(False)
    for name in ("mask_head", "mask_predictor"):
        model.get_submodule(f"roi_heads.{name}").requires_grad_(True)
    return model


def batch_of_disks(batch: int, size: int, seed: int, device: str) -> Batch:
    """Returns images in [0, 1] with the box, label and mask of the disk in each."""
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
    """Returns ``[1, 4]``: left, top, right, bottom of the pixels in a mask ``[height, width]``."""
    rows, columns = mask.nonzero(as_tuple=True)
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    return torch.stack(edges)[None].float()


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """Returns the mask head's loss at every step."""
    torch.manual_seed(0)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    losses = []
    for step in range(args.steps):
        loss = model(**batch_of_disks(args.batch, args.size, step, args.device))["loss_mask"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def masks(model: nn.Module, inputs: Batch) -> Tensor:
    """Returns ``[batch, 1, size, size]`` in [-1, 1]: the union of the masks of all detections."""
    found = model.eval()(inputs["images"])
    return torch.stack([2 * one["masks"].amax(dim=0) - 1 for one in found])


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=2, size=96, batch=1, boxes=16)
    torch.manual_seed(0)
    original = build_model(args.size, args.boxes).to(args.device)
    inputs = batch_of_disks(args.batch, args.size, seed=0, device=args.device)

    swapped = tconv_swap.swap_layers(original, inplace=False)
    verification = tconv_swap.verify(original, swapped, inputs)
    timing = tconv_swap.benchmark(original, swapped, inputs, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(tconv_swap.plan_swap(swapped), verification, timing, losses)
    common.save(
        args,
        "mask_rcnn",
        outcome,
        inputs,
        lambda: {
            "input": 2 * torch.stack(inputs["images"]) - 1,
            "original": masks(original, inputs),
            "swapped": masks(swapped, inputs),
        },
    )
    return outcome


if __name__ == "__main__":
    main()
