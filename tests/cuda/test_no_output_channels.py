"""A layer without output channels: PyTorch gives an empty output on CUDA and on the meta device, none on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tconv_swap import conv_transpose2d
from tconv_swap.cuda.choice import choose_backward, choose_forward
from tconv_swap.geometry import check_geometry
from tconv_swap.kernels.problem import Device, Problem

GIVEN = ((2, 4, 5, 6), (4, 0, 3, 3), None, (2, 2), (1, 1), (0, 0), 1, (1, 1))


def _both(device: str, backend: str, **how: Any) -> list[Any]:
    """Returns output and gradients of PyTorch's operator and of ours, or the class of the exception."""

    def run(operator: Callable[..., Tensor]) -> Any:
        tensors = [torch.ones(GIVEN[0]), torch.ones(GIVEN[1]), torch.ones(0)]
        x, weight, bias = (tensor.to(device).requires_grad_() for tensor in tensors)
        try:
            output = operator(x, weight, bias, stride=2, padding=1, **how)
            gradients = torch.autograd.grad(output.sum(), (x, weight, bias), allow_unused=True)
        except RuntimeError as error:
            return type(error)
        return output.shape, [None if one is None else (one.shape, float(one.sum())) for one in gradients]

    def ours(*arguments: Any, **others: Any) -> Tensor:
        return conv_transpose2d(*arguments, **others, backend=backend)  # type: ignore[arg-type]

    return [run(functional.conv_transpose2d), run(ours)]


def test_on_the_meta_device_as_pytorch() -> None:
    x, weight = (torch.empty(shape, device="meta") for shape in GIVEN[:2])
    expected = functional.conv_transpose2d(x, weight, stride=2, padding=1)
    assert conv_transpose2d(x, weight, stride=2, padding=1).shape == expected.shape == (2, 0, 9, 11)


@pytest.mark.parametrize("backend", ["auto", "kernel", "native"])
def test_on_the_cpu_as_pytorch(backend: str) -> None:
    theirs, ours = _both("cpu", backend)
    assert theirs is ours is RuntimeError


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "kernel", "native"])
def test_on_cuda_as_pytorch(backend: str) -> None:
    theirs, ours = _both("cuda", backend)
    assert theirs == ours
    with torch.no_grad():
        x, weight = (torch.ones(shape, device="cuda") for shape in GIVEN[:2])
        for _ in range(2):  # the second call may go the way that the first has found
            assert conv_transpose2d(x, weight, backend=backend).shape == (2, 0, 7, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "kernel"])
def test_no_kernel_of_ours_is_planned_for_it(backend: str) -> None:
    problem = Problem(check_geometry(*GIVEN), torch.float16, "fp16", False, False)
    device = Device("sm_90a", 132, 227 << 10)
    assert choose_forward(problem, False, device, backend).plan is None
    (step,) = choose_backward(problem, (True, True, False), device, backend)
    assert step.plan is None
    assert step.mask == (True, True, False)
