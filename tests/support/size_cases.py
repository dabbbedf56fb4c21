"""What tests of all sizes of a layer share: GPUs, dtypes, layers of the suite and their random sizes."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import sizes
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.measurement.suite import load_suite

H200 = plan.Device("sm_90a", 132, 227 << 10)
AMPERE = plan.Device("sm_80", 108, 163 << 10)
MODES = ((torch.float32, "tf32"), (torch.float16, "ieee"), (torch.float32, "ieee"))
LAYERS = [layer for layer in load_suite().layers if layer.geometry.out_channels_per_group >= 8]
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_sizes(rng: random.Random, layer: Geometry, most: int = 200) -> Geometry:
    """Any batch, height and width, small and large; one row where the layer has one dimension."""
    while True:
        height, width = (
            rng.choice((rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, most))) for _ in "hw"
        )
        one_row = layer.height == layer.kernel[0] == 1
        found = replace(
            layer,
            batch=rng.choice((1, 2, 8, rng.randint(1, 256))),
            height=1 if one_row else height,
            width=width,
        )
        image = found.in_channels * found.height * found.width
        if min(found.out_height, found.out_width) > 0 and found.batch * image * 4 <= MAX_COPY_BYTES:
            return found


def quotient(words: sizes.Words, n: int) -> int:
    """``Divisor::quotient`` of common/sizes.cuh, in 32 bits."""
    _, magic, shift = words
    return ((n << 1 & 0xFFFFFFFF) * (magic & 0xFFFFFFFF) >> 32) >> shift
