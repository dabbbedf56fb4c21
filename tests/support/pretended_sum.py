"""Kernels of a norm, a sum and an activation that a CPU computes, beside those of ``pretended_norm``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from pretended_norm import Pretended, pretended
from torch import Tensor

from tconv_swap.blocks import summed
from tconv_swap.blocks.form import activate, by_pytorch
from tconv_swap.blocks.summed import Sum


class PretendedSums:
    """``forwards``, ``backwards``: how often each was asked for. ``of``: those of norms, with one ``spoil``."""

    def __init__(self, of: Pretended) -> None:
        self.of = of
        self.forwards = self.backwards = 0

    def prepare(self, how: Sum) -> bool:
        return True

    def forward(self, how: Sum, x: Tensor, added: Tensor, of: summed._Of) -> list[Tensor]:
        self.forwards += 1
        weight, bias, running_mean, running_var, batches = of
        images = (2, *range(3, x.dim())) if how.form.per_image else (0, *range(2, x.dim()))
        wide = x.double()
        mean, variance = wide.mean(images, keepdim=True), wide.var(images, unbiased=False, keepdim=True)
        view = (-1, *[1] * (x.dim() - 2))
        if not how.form.trains:
            assert running_mean is not None
            assert running_var is not None
            mean, variance = running_mean.double().view(view), running_var.double().view(view)
        inverse = (variance + how.form.eps).rsqrt()
        y = (wide - mean) * inverse
        y = y if weight is None or bias is None else y * weight.view(view) + bias.view(view)
        total = y + self.of.spoil("added", added.double())
        z = torch.empty_like(x).copy_(activate(total, how.form.activation, how.form.slope))
        if how.updates:
            assert running_mean is not None
            assert running_var is not None
            assert batches is not None
            part = 1 / float(batches) if how.momentum is None else how.momentum
            batches += how.momentum is not None
            count = x.numel() // x.shape[1]
            running_mean.mul_(1 - part).add_(part * mean.flatten().to(running_mean.dtype))
            unbiased = count / (count - 1) * variance.flatten()
            running_var.mul_(1 - part).add_(part * unbiased.to(running_var.dtype))
        return [z, torch.stack([mean.flatten(), inverse.flatten()]).float()][: 1 + how.saves]

    def backward(
        self,
        how: Sum,
        grad: Tensor,
        x: Tensor,
        saved: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        output: Tensor,
        of_parameters: bool,
    ) -> list[Tensor]:
        self.backwards += 1
        of_sum = summed._activation_backward(how.form.activation)(grad.double(), output.double())
        with torch.enable_grad():
            of = [one.detach().double().requires_grad_() for one in (x, weight, bias) if one is not None]
            form = summed.Form(how.form.per_image, how.form.trains, how.form.eps, summed.Activation.IDENTITY)
            y = by_pytorch(*(of if len(of) == 3 else (of[0], None, None)), saved.double(), form)
            first, *others = torch.autograd.grad(y, of, of_sum)
        others = others if of_parameters else []
        found = [first, *others, self.of.spoil("grad_added", of_sum)]
        return [one.to(x.dtype) for one in found]


@contextmanager
def pretended_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedSums]:
    """Blocks on the CPU go by pretended kernels meanwhile, those with a sum too."""
    with pretended(monkeypatch) as norms, monkeypatch.context() as patch:
        made = PretendedSums(norms)
        patch.setattr(summed, "_sums", {})
        for name in ("prepare", "forward", "backward"):
            patch.setattr(summed, name, getattr(made, name))
        yield made
