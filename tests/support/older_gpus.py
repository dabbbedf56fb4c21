"""Layers whose plans for older GPUs are run on the GPU of this machine, and those plans."""

from __future__ import annotations

import torch

from tconv_swap.cuda.choice import FORWARD, Mask
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime.program import Plan

DEVICES = (plan.Device("sm_75", 40, 64 << 10), plan.Device("sm_80", 108, 163 << 10))
GEOMETRIES = {
    "dcgan": Geometry(2, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
    "everything": Geometry(2, 32, 10, 11, 48, (3, 5), (2, 3), (1, 2), (1, 0), (2, 1), 4),
    "odd channels": Geometry(3, 130, 17, 19, 66, (3, 3), (2, 2), (1, 1), (1, 1)),
    "square": Geometry(2, 64, 30, 33, 64, (3, 3)),
    "rgb": Geometry(2, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1)),
    "large rgb": Geometry(2, 48, 40, 50, 3, (9, 9), (1, 1), (4, 4)),
    "depthwise": Geometry(2, 21, 20, 19, 21, (8, 8), (4, 4), (2, 2), groups=21),
    "pixel": Geometry(64, 100, 1, 1, 512, (4, 4)),
    "large cells": Geometry(2, 21, 16, 16, 21, (32, 32), (16, 16), (8, 8)),
    "tiny": Geometry(2, 32, 3, 3, 24, (2, 2)),
    "one row": Geometry(2, 136, 1, 70, 24, (1, 16), (1, 8), (0, 4)),
}
MODES = {
    "fp64": (torch.float64, "ieee"),
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp32": (torch.float32, "ieee"),
}
MASKS: tuple[Mask, ...] = (FORWARD, (True, True, True), (True, False, False), (False, True, True))


def plans(posed: plan.Problem, device: plan.Device) -> list[tuple[Mask, Plan]]:
    """Returns the plans of the output and of the gradients, together and separately."""
    forward = plan.plan_forward(posed, True, device)
    return [(mask, plan.plan_backward(posed, mask, device) if mask else forward) for mask in MASKS]
