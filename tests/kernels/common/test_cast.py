"""The casts of an autocast by one launch: the plan, and the kernel compared with PyTorch's casts."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch

from tconv_swap.cuda import call
from tconv_swap.kernels.common.cast import plan_cast
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.runtime.program import Output

PAIRS = list(permutations(DTYPES, 2))


def test_each_tensor_has_blocks_of_its_own() -> None:
    shapes = (8, 8, 3, 3), (5000,), (1,)
    made = plan_cast([Output(shape, dtype=torch.float16) for shape in shapes], torch.float32)
    assert made is not None
    (launch,) = made.launches
    assert launch.grid == 1 + 3 + 1
    assert launch.structs == ((576, 5000, 1, 1, 4, 5),)


def test_one_kernel_for_all_sizes() -> None:
    kernels = set()
    for count in (1, 7, 100_000):
        made = plan_cast([Output((count,), dtype=torch.float16)], torch.float32)
        assert made is not None
        kernels.add(made.launches[0].kernel)
    assert len(kernels) == 1


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((0,), torch.float32, torch.float16),
        ((3,), torch.float64, torch.float32),
        ((3,), torch.float32, torch.float64),
        ((1 << 31,), torch.float32, torch.float16),
    ],
)
def test_what_the_kernel_does_not_take(
    shape: tuple[int, ...], source: torch.dtype, target: torch.dtype
) -> None:
    assert plan_cast([Output(shape, dtype=target)], source) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_casts_as_pytorch_does(source: torch.dtype, target: torch.dtype) -> None:
    rng = random.Random(0)
    generator = torch.Generator("cuda").manual_seed(0)
    for count in (1, 2, 3):
        tensors = []
        for _ in range(count):
            shape = [rng.choice((1, 3, 8, rng.randint(1, 70))) for _ in range(rng.choice((1, 4)))]
            # Numbers of every magnitude: some overflow, are subnormal, or lie between two numbers of the target.
            exponents = torch.randint(-30, 30, shape, device="cuda", generator=generator)
            tensor = torch.randn(shape, device="cuda", generator=generator) * 2.0**exponents
            tensor.view(-1)[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")], device="cuda")[
                : tensor.numel()
            ]
            tensor = tensor.to(source)
            if tensor.dim() == 4 and rng.random() < 0.5:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            tensors.append(tensor)
        handle = call.plan_cast_call([*tensors, *[None] * (3 - count)], target)[2]
        assert handle >= 0
        for _ in range(2):
            copies = torch.ops.tconv_swap.launch(handle, tensors)
            for copy, tensor in zip(copies, tensors, strict=True):
                expected = tensor.to(target)
                assert copy.dtype == target
                assert copy.stride() == expected.stride()
                torch.testing.assert_close(copy, expected, rtol=0, atol=0, equal_nan=True)
