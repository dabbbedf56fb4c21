"""Shared by the tests of the operator on CUDA: geometries, tolerances, the comparison with the oracle."""

from __future__ import annotations

import functools
import random

import torch
from oracle import conv_transpose2d_reference
from torch import Tensor

from tconv_swap.op import conv_transpose2d as conv_transpose2d_of_any_backend

#: Our kernels are tested here, including the general ones, also where "auto" would take PyTorch's operator.
conv_transpose2d = functools.partial(conv_transpose2d_of_any_backend, backend="kernel")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: The allowed relative L2 error: rounding of operands and result, a few units of it for the longest sums here.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TF32_TOLERANCE = 1e-3

NAMED = {
    "dcgan1": dict(x=(8, 100, 1, 1), w=(100, 64, 4, 4)),
    "dcgan4": dict(x=(4, 128, 16, 16), w=(128, 64, 4, 4), stride=2, padding=1),
    "rgb": dict(x=(4, 64, 32, 32), w=(64, 3, 4, 4), stride=2, padding=1),
    "cyclegan": dict(x=(2, 64, 31, 33), w=(64, 32, 3, 3), stride=2, padding=1, output_padding=1),
    "unet": dict(x=(2, 128, 16, 16), w=(128, 64, 2, 2), stride=2),
    "kb75": dict(
        x=(2, 32, 12, 25), w=(32, 16, 3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=4
    ),
    "phases without taps": dict(x=(2, 32, 9, 13), w=(32, 16, 3, 3), stride=5, padding=1, dilation=2),
    "fcn32s": dict(x=(1, 21, 7, 6), w=(21, 21, 64, 64), stride=32, padding=16),
    "depthwise": dict(x=(2, 21, 20, 19), w=(21, 1, 16, 16), stride=8, padding=4, groups=21),
    "super-resolution": dict(x=(2, 24, 9, 21), w=(24, 1, 9, 9), stride=4, padding=4, output_padding=3),
    "few channels in": dict(x=(2, 3, 17, 24), w=(3, 40, 4, 4), stride=2, padding=1),
    "narrow groups": dict(x=(2, 48, 11, 18), w=(48, 3, 3, 4), stride=2, padding=1, groups=16),
    "kernel 1": dict(x=(3, 7, 5, 6), w=(7, 9, 1, 1)),
    "kernel 1, stride 3": dict(x=(3, 7, 5, 6), w=(7, 9, 1, 1), stride=3, output_padding=2),
    "odd width": dict(x=(2, 16, 9, 257), w=(16, 24, 3, 7), padding=(1, 3)),
    "one pixel out": dict(x=(2, 8, 3, 3), w=(8, 8, 3, 3), padding=2, stride=1),
    "dcgan2": dict(x=(7, 64, 4, 4), w=(64, 40, 4, 4), stride=2, padding=1),
    "padding beyond the kernel, one stride of 2": dict(
        x=(2, 24, 9, 11), w=(24, 16, 3, 2), padding=(3, 2), stride=(1, 2)
    ),
    "odd channels, k3": dict(x=(3, 33, 7, 18), w=(33, 19, 3, 3), stride=2, padding=1, output_padding=1),
    "grouped, odd channels": dict(x=(2, 27, 14, 14), w=(27, 11, 2, 2), stride=2, groups=3),
    "wide kernel, one row": dict(x=(2, 64, 1, 70), w=(64, 32, 1, 16), stride=(1, 8), padding=(0, 4)),
    "dilated, 128 channels": dict(x=(2, 128, 10, 17), w=(128, 64, 3, 3), padding=1, dilation=(3, 2)),
    "stride 1, dilated, output padded": dict(
        x=(2, 16, 9, 31), w=(16, 40, 3, 3), padding=1, dilation=2, output_padding=1
    ),
    "padding beyond the kernel": dict(x=(2, 40, 11, 21), w=(40, 24, 2, 3), padding=(2, 4)),
    "few channels in, stride 1": dict(x=(2, 24, 20, 33), w=(24, 40, 3, 5), padding=(0, 2)),
    "odd width, strided": dict(x=(2, 40, 9, 23), w=(40, 24, 3, 5), stride=(2, 3), padding=(1, 2)),
    "groups, strided and dilated": dict(
        x=(2, 144, 7, 19), w=(144, 20, 3, 3), stride=2, padding=2, dilation=3, output_padding=2, groups=2
    ),
    "many taps": dict(x=(1, 64, 9, 7), w=(64, 40, 16, 16), stride=8, padding=4),
    "wide strides": dict(x=(2, 24, 5, 6), w=(24, 16, 20, 12), stride=(10, 9), padding=2),
    "stride beyond the kernel": dict(
        x=(3, 72, 6, 11), w=(72, 16, 2, 1), stride=(3, 4), output_padding=(2, 3)
    ),
    "padding beyond the kernel, strided": dict(x=(2, 40, 9, 12), w=(40, 16, 2, 2), stride=2, padding=3),
    "rows are cropped": dict(x=(2, 64, 9, 16), w=(64, 48, 1, 3), stride=(1, 2), padding=(1, 1)),
    "most is cropped": dict(x=(1, 16, 530, 533), w=(16, 8, 3, 3), padding=260),
    "one pixel, many taps": dict(x=(33, 72, 1, 1), w=(72, 40, 4, 4), stride=2),
    "4x4 map": dict(x=(5, 136, 4, 4), w=(136, 24, 4, 4), stride=2, padding=1),
    "one row": dict(x=(2, 136, 1, 70), w=(136, 24, 1, 16), stride=(1, 8), padding=(0, 4)),
    "whole cells": dict(x=(3, 66, 14, 14), w=(66, 20, 2, 2), stride=2),
    "odd channels": dict(x=(2, 33, 8, 8), w=(33, 9, 3, 2), stride=2),
    "wide, stride 1": dict(x=(4, 64, 33, 64), w=(64, 64, 3, 3)),
    "many images": dict(x=(70001, 3, 1, 2), w=(3, 2, 2, 2), stride=2),
}


def arguments(case: dict) -> dict:
    return {k: v for k, v in case.items() if k not in ("x", "w")}


def relative_error(result: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    """Returns ||result - truth|| / ||scale||; the scale is the truth itself unless its terms may cancel."""
    truth = truth.detach().double().to(result.device)
    return float(
        (result.detach().double() - truth).norm()
        / (truth if scale is None else scale).norm().clamp_min(1e-30)
    )


def check_against_oracle(x: Tensor, w: Tensor, b: Tensor | None, kwargs: dict, tolerance: float) -> None:
    """Compares the output and all three gradients with the oracle."""
    leaves = [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for t in (x, w, b)
        if t is not None
    ]
    y = conv_transpose2d(*leaves, **kwargs)
    truths = [t.detach().double().requires_grad_() for t in leaves]
    expected = (
        conv_transpose2d_reference(*truths, **kwargs)
        if b is not None
        else conv_transpose2d_reference(*truths, None, **kwargs)
    )
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    assert relative_error(y, expected) <= tolerance
    grad = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, grad)
    wanted = torch.autograd.grad(expected, truths, grad.double())
    for name, got, truth in zip(("input", "weight", "bias"), gradients, wanted, strict=False):
        assert got.shape == truth.shape
        scale = grad.double().abs().sum((0, 2, 3)) if name == "bias" else None
        assert relative_error(got, truth, scale) <= tolerance, f"gradient of {name}"


def random_case(seed: int) -> dict:
    rng = random.Random(seed)
    while True:
        groups = rng.choice((1, 1, 1, 2, 3, 4))
        stride = [rng.randint(1, 5) for _ in range(2)]
        dilation = [rng.randint(1, 3) for _ in range(2)]
        case = dict(
            x=(
                rng.choice((1, 2, 5)),
                groups * rng.choice((1, 2, 3, 5, 8, 16, 24)),
                rng.randint(1, 24),
                rng.randint(1, 24),
            ),
            stride=tuple(stride),
            dilation=tuple(dilation),
            padding=tuple(rng.randint(0, 4) for _ in range(2)),
            output_padding=tuple(
                rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)
            ),
            groups=groups,
        )
        case["w"] = (case["x"][1], rng.choice((1, 2, 3, 8, 17, 32)), rng.randint(1, 7), rng.randint(1, 7))
        out = [
            (case["x"][2 + a] - 1) * stride[a]
            - 2 * case["padding"][a]
            + dilation[a] * (case["w"][2 + a] - 1)
            + case["output_padding"][a]
            + 1
            for a in range(2)
        ]
        if min(out) >= 1:
            return case
