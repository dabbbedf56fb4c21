"""What tests of calls of a norm share: a small norm and image, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CHANNELS_LAST = torch.channels_last


def norm(cls: type[nn.Module] = nn.BatchNorm2d, **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    made = cls(4, affine=True, **arguments)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    nn.init.normal_(made.bias)
    return made


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 4, 5, 6), generator=torch.Generator().manual_seed(1))


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, one element past an aligned address."""
    return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)


def gradients(output: Tensor, of: list[Tensor], grad: Tensor | None = None) -> tuple[Tensor, ...]:
    if grad is None:
        grad = torch.linspace(-1, 1, output.numel()).view_as(output)
    return torch.autograd.grad(output, of, grad)


class RecordedOperators(TorchDispatchMode):
    """Records the names of the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
