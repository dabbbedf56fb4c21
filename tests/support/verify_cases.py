"""Networks to verify, and kernels that are right, or wrong in one way each."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tconv_swap import op
from tconv_swap.surgery import swap_layers
from tconv_swap.verification import Check, VerifyReport, verify

Kernel = Callable[..., Tensor]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
Pair = namedtuple("Pair", ["image", "mask"])


def generator(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 12, 4, 1, 0, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.2),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.2),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, 1),
        nn.Tanh(),
    ).to(dtype)


def latent(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 8, 2, 2).to(dtype)


class SegmentationNet(nn.Module):
    """Has a skip connection, one layer under two names and called twice, and returns a dict with an argmax and a
    scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, 2, 1)
        self.deeper = nn.Conv2d(6, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.again = self.up
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, image: Tensor, *, weight: Tensor | None = None) -> dict[str, Any]:
        a = F.relu(self.down(image))
        b = F.relu(self.deeper(a))
        c = self.norm(self.up(b)) + a
        logits = self.head(F.relu(self.again(c)))
        logits = logits if weight is None else logits * weight
        return {"logits": logits, "extra": [logits.argmax(1), (logits.float().square().mean(), "v1", 3)]}


def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """Makes every swapped layer compute with this kernel instead of the operator."""
    monkeypatch.setattr(op, "conv_transpose2d", kernel)


def checks_of(report: VerifyReport, *kinds: str, failed: bool = True) -> list[Check]:
    return [c for c in report.checks if c.kind in kinds and c.passed != failed]


def swapped_copy(model: nn.Module) -> nn.Module:
    return swap_layers(model, inplace=False)


def flipped_tap(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    wrong = w.clone()
    wrong[..., 0, 0], wrong[..., -1, -1] = w[..., -1, -1], w[..., 0, 0]
    return F.conv_transpose2d(x, wrong, *rest)


class Edit(torch.autograd.Function):
    """Changes the output, and passes the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, edit: Callable[[Tensor], None]) -> Tensor:
        y = y.clone()
        edit(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def edited(edit: Callable[[Tensor], None]) -> Kernel:
    return lambda *args: Edit.apply(F.conv_transpose2d(*args), edit)


def put(value: float) -> Callable[[Tensor], None]:
    def edit(y: Tensor) -> None:
        y[-1, -1, -1, -1] = value

    return edit


def scaled_gradient(which: int, factor: float) -> Kernel:
    def kernel(*args: Any) -> Tensor:
        changed = list(args)
        if changed[which] is not None:
            changed[which] = ScaleGradient.apply(changed[which], factor)
        return F.conv_transpose2d(*changed)

    return kernel


WRONG: dict[str, tuple[Kernel, str]] = {
    "flipped tap": (flipped_tap, "layer_output"),
    "unwritten pixel, poisoned": (edited(put(math.nan)), "layer_output"),
    "infinite pixel": (edited(put(math.inf)), "layer_output"),
    "unwritten pixel, zero": (edited(put(0.0)), "layer_output"),
    "lost bias": (lambda x, w, b, *rest: F.conv_transpose2d(x, w, None, *rest), "layer_output"),
    "scale": (edited(lambda y: y.mul_(1.05)), "layer_output"),
    "grad_input off": (scaled_gradient(0, 1.05), "layer_grad_input"),
    "grad_weight off": (scaled_gradient(1, 1.05), "layer_grad_weight"),
    "grad_bias off": (scaled_gradient(2, 1.05), "layer_grad_bias"),
    "grad_weight zero": (scaled_gradient(1, 0.0), "layer_grad_weight"),
    "grad_input NaN": (scaled_gradient(0, math.nan), "layer_grad_input"),
    "grad_weight missing": (lambda x, w, *r: F.conv_transpose2d(x, w.detach(), *r), "layer_grad_weight"),
}


def reordered(x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, g: int, d: Any) -> Tensor:
    """Right, but adds in another order."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    x = x[:, order].contiguous(memory_format=torch.channels_last)
    return F.conv_transpose2d(x, w[order], b, s, p, o, g, d).contiguous()


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.make = nn.ConvTranspose2d(3, 4, 2, 2), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.up(x))


def compare_outputs(
    before: Callable[[Tensor], Any], after: Callable[[Tensor], Any], **options: Any
) -> VerifyReport:
    model, swapped = Returns(before), Returns(after)
    swapped.load_state_dict(model.state_dict())
    return verify(model, swap_layers(swapped), torch.randn(2, 3, 4, 4), modes=("eval",), **options)
