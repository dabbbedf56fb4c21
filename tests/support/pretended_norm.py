"""Kernels of normalisation that a CPU computes: what is around them can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tconv_swap.blocks import call, kernels
from tconv_swap.blocks.form import Form, activate, by_pytorch
from tconv_swap.blocks.kernels import Call, Running
from tconv_swap.kernels.norm.shape import Norm


class Pretended:
    """Stands in the place of ``blocks.kernels``' launches. ``forwards``, ``backwards``: how often each was asked for.

    ``spoil``: changes what a kernel writes, for tests of what notices it.
    """

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.spoil: Callable[[str, Tensor], Tensor] = lambda name, value: value
        self._running: list[Running | None] = []

    def prepare(
        self,
        x: Tensor,
        parameters: torch.dtype,
        form: Form,
        running: Running | None,
        saves: bool,
        channels_last: bool,
    ) -> Call:
        norm = Norm(
            tuple(x.shape),
            channels_last,
            x.dtype,
            parameters,
            form.per_image,
            form.eps,
            form.activation,
            form.slope,
        )
        self._running.append(running)
        return Call(len(self._running) - 1, norm, form, x.device, saves)

    def forward(self, call: Call, x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
        self.forwards += 1
        weight, bias, running_mean, running_var, batches = tensors
        form, running = call.form, self._running[call.handle]
        of = (2, *range(3, x.dim())) if form.per_image else (0, *range(2, x.dim()))
        wide = x.double()
        mean, variance = wide.mean(of, keepdim=True), wide.var(of, unbiased=False, keepdim=True)
        if not form.trains:
            assert running_mean is not None
            assert running_var is not None
            view = (-1, *[1] * (x.dim() - 2))
            mean, variance = running_mean.double().view(view), running_var.double().view(view)
        mean, variance = self.spoil("mean", mean), self.spoil("variance", variance)
        inverse = (variance + form.eps).rsqrt()
        view = (-1, *[1] * (x.dim() - 2))
        y = (wide - mean) * inverse
        y = y if weight is None or bias is None else y * weight.view(view) + bias.view(view)
        slope = float(self.spoil("slope", torch.tensor(form.slope)))
        z = torch.empty_like(x).copy_(activate(y, form.activation, slope))
        if running is not None:
            assert running_mean is not None
            assert running_var is not None
            assert batches is not None
            if running.momentum is None:
                part = 1 / float(batches)
            else:
                part = float(self.spoil("momentum", torch.tensor(running.momentum)))
                batches += 1
            count = x.numel() // x.shape[1]
            running_mean.mul_(1 - part).add_(part * mean.flatten().to(running_mean.dtype))
            running_var.mul_(1 - part).add_(
                part * count / (count - 1) * variance.flatten().to(running_var.dtype)
            )
        saved = torch.stack([mean.flatten(), inverse.flatten()]).float()
        return [z, saved] if call.saves else [z]

    def backward(
        self,
        call: Call,
        grad: Tensor,
        x: Tensor,
        saved: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wants: tuple[bool, bool],
    ) -> list[Tensor | None]:
        self.backwards += 1
        with torch.enable_grad():
            of = [one.detach().double().requires_grad_() for one in (x, weight, bias) if one is not None]
            output = by_pytorch(*(of if len(of) == 3 else (of[0], None, None)), saved.double(), call.form)
            found = torch.autograd.grad(output, of, grad.double())
        cast = [
            self.spoil("gradient", one).to(to.dtype)
            for one, to in zip(found, (x, weight, bias), strict=False)
        ]
        return [*cast, None, None][:3] if wants[1] else [cast[0], None, None]


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Blocks on the CPU go by pretended kernels meanwhile."""
    kernels_of_the_cpu = Pretended()
    with monkeypatch.context() as patch:
        patch.setattr(call, "is_on_gpu", lambda x: type(x) is Tensor)
        patch.setattr(call, "_calls", {})
        for name in ("prepare", "forward", "backward"):
            patch.setattr(kernels, name, getattr(kernels_of_the_cpu, name))
        yield kernels_of_the_cpu
