"""The plans of reflection padding: what they support, the kernel's arithmetic against PyTorch's, and that every kernel
compiles."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from emulated_pad import emulate
from planned_kernels import one_of_each
from sampling import sampled

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.pad.reflection_pad import Pad, plan_backward, plan_forward
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.program import Kernel

HOPPER = Device("sm_90a", 132, 227 << 10)
DEVICES = (HOPPER, Device("sm_80", 108, 163 << 10), Device("sm_75", 40, 64 << 10))
#: A GPU that few threads fill, so that a thread computes several planes.
SMALL = Device("sm_90a", 0, 227 << 10)
SHAPES = {
    "large": (8, 256, 64, 64),
    "few channels": (64, 3, 256, 256),
    "even channels": (64, 6, 256, 256),
    "tiny": (2, 12, 5, 7),
}


def kernels_for(device: Device) -> dict[Kernel, int]:
    """Returns every kernel for ``SHAPES``, with the threads of its blocks."""
    found = {}
    for shape, channels_last, dtype in product(SHAPES.values(), (False, True), DTYPES):
        pad = Pad(shape, channels_last, dtype, (1, 2, 3, 0))
        for made in (plan_forward(pad, device), plan_backward(pad, device)):
            assert made is not None
            found |= {launch.kernel: launch.block for launch in made.launches}
    return found


@pytest.mark.parametrize("device", sampled(DEVICES, 3), ids=lambda device: device.architecture)
def test_kernels_compile_without_spills(device: Device, request: pytest.FixtureRequest) -> None:
    kernels = kernels_for(device)
    for kernel in kernels if request.config.getoption("all_architectures") else one_of_each(kernels):
        _, log = jit.compile_with_log(kernel, device.architecture)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
        assert spilled, log
        assert not any(spilled), f"{kernel} spills: {log}"


def test_every_source_is_planned() -> None:
    used = {kernel.source for kernel in kernels_for(HOPPER)}
    assert used == {f"pad/{path.name}" for path in (csrc_directory() / "kernels" / "pad").glob("*.cu")}


def test_sizes_are_not_compiled_in() -> None:
    kernels = set()
    sizes = list(product((1, 4, 9), (16, 64, 256), (8, 33, 200), ((1, 1, 1, 1), (0, 3, 2, 7))))
    for (batch, channels, side, padding), channels_last in product(sizes, (False, True)):
        pad = Pad((batch, channels, side, side + 1), channels_last, torch.float16, padding)
        for made in (plan_forward(pad, HOPPER), plan_backward(pad, HOPPER)):
            assert made is not None
            kernels |= {launch.kernel for launch in made.launches}
    # Forward and backward, two layouts, one plane of a thread or several.
    assert len(kernels) == 8


def test_accesses_are_as_wide_as_the_channels_allow() -> None:
    for channels, dtype, channels_last, values in (
        (64, torch.float16, True, 8),
        (64, torch.float32, True, 4),
        (12, torch.bfloat16, True, 4),
        (3, torch.float16, True, 1),
        (64, torch.float16, False, 1),
    ):
        made = plan_forward(Pad((2, channels, 8, 8), channels_last, dtype, (1,) * 4), HOPPER)
        assert made is not None
        assert dict(made.launches[0].kernel.constants)["VALUES"] == values


def test_what_the_kernel_does_not_claim() -> None:
    good = Pad((2, 3, 8, 9), False, torch.float32, (1, 2, 3, 4))
    assert plan_forward(good, HOPPER) is not None
    huge = 2**31 // (64 * 64)
    for shape, dtype, padding in (
        (good.shape, torch.float64, good.padding),
        (good.shape, torch.int32, good.padding),
        ((0, 3, 8, 9), good.dtype, good.padding),
        ((3, 8), good.dtype, good.padding),
        ((1, 2, 3, 8, 9), good.dtype, good.padding),
        (good.shape, good.dtype, (9, 0, 0, 0)),
        (good.shape, good.dtype, (0, 9, 0, 0)),
        (good.shape, good.dtype, (0, 0, 8, 0)),
        (good.shape, good.dtype, (0, 0, 0, 8)),
        (good.shape, good.dtype, (-1, 0, 0, 0)),
        (good.shape, good.dtype, (1, 1)),
        ((1, huge, 62, 62), good.dtype, (1,) * 4),
    ):
        pad = Pad(shape, False, dtype, padding)
        assert plan_forward(pad, HOPPER) is None
        assert plan_backward(pad, HOPPER) is None
    # 16 bytes of channels count as one.
    assert plan_forward(Pad((1, huge, 62, 62), True, torch.float32, (1,) * 4), HOPPER) is not None


def cases() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns shapes and paddings: named ones, where reflections about both edges meet, and random ones."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((2, 3, 4, 5), (1, 1, 1, 1)),
        ((2, 8, 4, 5), (4, 4, 3, 3)),
        ((3, 4, 1, 1), (0, 0, 0, 0)),
        ((1, 8, 2, 2), (1, 1, 1, 1)),
        ((5, 16, 7, 3), (0, 2, 6, 0)),
        ((4, 6, 9), (2, 1, 0, 3)),
    ]
    rng = random.Random(0)
    for _ in range(12):
        height, width = rng.randint(1, 9), rng.randint(1, 9)
        most = (width, width, height, height)
        shape = (rng.randint(1, 9), rng.choice((1, 3, 4, 6, 8, 24)), height, width)
        found.append((shape, tuple(rng.randrange(size) for size in most)))
    return found


@pytest.mark.parametrize("device", [HOPPER, SMALL], ids=["one plane", "several planes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "padding"), cases(), ids=str)
def test_the_kernels_arithmetic_is_pytorchs(
    shape: tuple[int, ...], padding: tuple[int, ...], dtype: torch.dtype, device: Device
) -> None:
    torch.manual_seed(0)
    image = torch.randn(shape).to(dtype)
    for channels_last in (False, True) if len(shape) == 4 else (False,):
        form = torch.channels_last if channels_last else torch.contiguous_format
        pad = Pad(shape, channels_last, dtype, padding)
        forward, backward = plan_forward(pad, device), plan_backward(pad, device)
        assert forward is not None
        assert backward is not None
        exact = image.double().requires_grad_()
        expected = F.pad(exact, padding, "reflect")
        output = emulate(forward, image.contiguous(memory_format=form))
        assert torch.equal(output, expected.detach().to(dtype))
        grad = torch.randn(expected.shape).to(dtype)
        (truth,) = torch.autograd.grad(expected, exact, grad.double())
        found = emulate(backward, grad.contiguous(memory_format=form))
        assert found.shape == shape
        # Nine numbers are added in float32, and rounded once.
        error = (found.double() - truth).abs()
        assert bool((error <= torch.finfo(dtype).eps / 2 * truth.abs() + 9 * 2**-24 * 20).all())
