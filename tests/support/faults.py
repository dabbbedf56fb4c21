"""Faults of a layer or of a whole swapped network, each of which verification has to find."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verify_cases import Kernel, ScaleGradient, edited, flipped_tap, put, scaled_gradient

#: Makes a kernel: each new kernel starts without the state of earlier calls.
Make = Callable[[], Kernel]


@dataclass(frozen=True)
class Fault:
    """A kernel that is wrong in one way.

    Attributes:
        make: the kernel.
        dtype: of the network.
        options: for `verify`; without them the fault need not be found.
        said: a part of the lines that say what is wrong.
    """

    make: Make
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    said: str = ""


def right(*arguments: Any) -> Tensor:
    return F.conv_transpose2d(*arguments[:8])


class Backward(torch.autograd.Function):
    """Returns the value itself; its gradient goes through a function that sees its memory layout."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(gradient), None


def where(condition: Callable[[], bool], factor: float = 1.05) -> Kernel:
    return lambda *arguments: right(*arguments) * (factor if condition() else 1.0)


def gradient_where(condition: Callable[[Tensor], bool]) -> Kernel:
    def change(gradient: Tensor) -> Tensor:
        return gradient * 1.05 if condition(gradient) else gradient

    return lambda *arguments: Backward.apply(right(*arguments), change)


def every(period: int) -> Kernel:
    calls = itertools.count(1)
    return where(lambda: next(calls) % period == 0)


def gradient_every(period: int) -> Kernel:
    calls = itertools.count(1)
    return gradient_where(lambda gradient: next(calls) % period == 0)


def raises_at_every(period: int) -> Kernel:
    calls = itertools.count(1)

    def kernel(*arguments: Any) -> Tensor:
        if next(calls) % period == 0:
            raise RuntimeError("out of luck")
        return right(*arguments)

    return kernel


def keeps_first(which: int, *, forward: bool = True) -> Kernel:
    """Keeps weight (1) or bias (2) of each shape from the first use; only for the gradients if not `forward`."""
    kept: dict[torch.Size, Tensor] = {}

    class Stale(torch.autograd.Function):
        """Has the value of one, and the gradients of the other."""

        @staticmethod
        def forward(ctx: Any, now: Tensor, then: Tensor) -> Tensor:
            return now.view_as(now)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(gradients[0]), gradients[0]

    def kernel(*arguments: Any) -> Tensor:
        changed = list(arguments)
        if arguments[which] is None:
            return right(*arguments)
        first = kept.setdefault(arguments[which].shape, arguments[which].detach().clone())
        old = first + (arguments[which] - arguments[which].detach())
        changed[which] = old
        if forward:
            return right(*changed)
        return Stale.apply(right(*arguments), right(*changed))

    return kernel


def keeps_by_version() -> Kernel:
    """Keeps the weight of the first use until its version counter says that it was written."""
    kept: dict[torch.Size, tuple[int, Tensor]] = {}

    def kernel(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        version, first = kept.setdefault(weight.shape, (weight._version, weight.detach().clone()))
        if version != weight._version:
            kept[weight.shape] = weight._version, weight.detach().clone()
            first = weight
        return right(x, first + (weight - weight.detach()), *rest)

    return kernel


def static_buffer(count: int) -> Kernel:
    """Reuses the memory of outputs of one shape after `count` calls."""
    buffers: dict[torch.Size, list[Tensor]] = {}
    calls = itertools.count()

    def kernel(*arguments: Any) -> Tensor:
        output = right(*arguments)
        if output.requires_grad:
            return output
        known = buffers.setdefault(output.shape, [torch.empty_like(output) for _ in range(count)])
        return known[next(calls) % count].copy_(output)

    return kernel


def static_gradient() -> Kernel:
    buffers: dict[torch.Size, Tensor] = {}

    def change(gradient: Tensor) -> Tensor:
        return buffers.setdefault(gradient.shape, torch.empty_like(gradient)).copy_(gradient)

    def kernel(x: Tensor, *rest: Any) -> Tensor:
        return right(Backward.apply(x, change), *rest)

    return kernel


def lies(memory_format: Any) -> Kernel:
    return lambda *arguments: right(*arguments).contiguous(memory_format=memory_format)


def turned(*arguments: Any) -> Tensor:
    return right(*arguments).transpose(-1, -2).contiguous().transpose(-1, -2)


def scaled_inside(factor: float) -> Kernel:
    """Is off by a factor before the single rounding, like a kernel with a wrong constant."""

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        wide = right(x.double(), weight.double(), None if bias is None else bias.double(), *rest)
        return (wide * factor).to(torch.result_type(x, weight))

    return kernel


def gradient_scaled_inside(which: int, factor: float) -> Kernel:
    """Does the same to a gradient."""

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        wide = [None if t is None else t.double() for t in (x, weight, bias)]
        wide[which] = ScaleGradient.apply(wide[which], factor)
        return right(*wide, *rest).to(x.dtype)

    return kernel


def only_with(kind: Callable[[Tensor, Tensor], bool], factor: float = 1.05) -> Kernel:
    return lambda x, w, *rest: right(x, w, *rest) * (factor if kind(x, w) else 1.0)


def off_in_row(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    def edit(y: Tensor) -> None:
        y[..., -1, :] *= 1.1

    return edited(edit)(x, w, *rest)


def swapped_channels(y: Tensor) -> None:
    y[:, [0, 1]] = y[:, [1, 0]]


def last_sample_again(y: Tensor) -> None:
    y[-1] = y[0]


def shifted(y: Tensor) -> None:
    y.copy_(y.roll(1, -1))


def gradient_wrong_under_autocast(*arguments: Any) -> Tensor:
    kernel = scaled_gradient(1, 1.05) if torch.is_autocast_enabled("cpu") else right
    return kernel(*arguments)


def detached(*arguments: Any) -> Tensor:
    y = right(*arguments).detach()
    return y.requires_grad_() if torch.is_grad_enabled() else y


def dtype_of_its_own(*arguments: Any) -> Tensor:
    return right(*arguments).double()


def crops(*arguments: Any) -> Tensor:
    return right(*arguments)[..., :-1]


def writes_to_its_input(x: Tensor, *rest: Any) -> Tensor:
    y = right(x, *rest)
    with torch.no_grad():
        x.data.mul_(1.5)
    return y


def keeps(kernel: Kernel) -> Make:
    """Makes a kernel that keeps nothing from call to call."""
    return lambda: kernel


HALF, BF16 = torch.float16, torch.bfloat16
UNDER = {dtype: {"autocast": dtype} for dtype in (HALF, BF16)}

FAULTS: dict[str, Fault] = {
    # Wrong numbers at every call.
    "flipped tap": Fault(keeps(flipped_tap)),
    "an output scaled by 1.05": Fault(keeps(edited(lambda y: y.mul_(1.05)))),
    "an output scaled by 1.00001": Fault(keeps(scaled_inside(1.00001))),
    "one pixel NaN": Fault(keeps(edited(put(math.nan)))),
    "one pixel infinite": Fault(keeps(edited(put(math.inf)))),
    "one pixel zero": Fault(keeps(edited(put(0.0)))),
    "a row off by a tenth": Fault(keeps(off_in_row)),
    "no bias": Fault(keeps(lambda x, w, b, *rest: right(x, w, None, *rest))),
    "two channels exchanged": Fault(keeps(edited(swapped_channels))),
    "the last sample is the first": Fault(keeps(edited(last_sample_again))),
    "shifted by a pixel": Fault(keeps(edited(shifted))),
    "a column too few": Fault(keeps(crops)),
    "another dtype": Fault(keeps(dtype_of_its_own)),
    # Wrong gradients.
    "grad_input off": Fault(keeps(scaled_gradient(0, 1.05))),
    "grad_weight off": Fault(keeps(scaled_gradient(1, 1.05))),
    "grad_bias off": Fault(keeps(scaled_gradient(2, 1.05))),
    "grad_weight zero": Fault(keeps(scaled_gradient(1, 0.0))),
    "grad_input NaN": Fault(keeps(scaled_gradient(0, math.nan))),
    "grad_weight missing": Fault(keeps(lambda x, w, *rest: right(x, w.detach(), *rest))),
    "no gradients at all": Fault(keeps(detached)),
    # Wrong only if it is run in a certain way.
    "wrong without gradients": Fault(keeps(where(lambda: not torch.is_grad_enabled()))),
    "wrong with gradients": Fault(keeps(where(torch.is_grad_enabled))),
    "wrong under inference_mode": Fault(
        keeps(where(torch.is_inference_mode_enabled)), said="under inference_mode"
    ),
    "wrong for an input without gradient": Fault(keeps(only_with(lambda x, w: not x.requires_grad))),
    "wrong under float16 autocast": Fault(
        keeps(where(lambda: torch.is_autocast_enabled("cpu"))), options=UNDER[HALF], said="float16 autocast"
    ),
    "wrong under bfloat16 autocast": Fault(
        keeps(where(lambda: torch.is_autocast_enabled("cpu"))), options=UNDER[BF16], said="bfloat16 autocast"
    ),
    "gradient wrong under autocast": Fault(
        keeps(
            lambda x, w, *rest: (scaled_gradient(1, 1.05) if torch.is_autocast_enabled("cpu") else right)(
                x, w, *rest
            )
        ),
        options=UNDER[BF16],
        said="bfloat16 autocast: layer grad_weight",
    ),
    # Wrong after other calls.
    "wrong at every 2nd call": Fault(lambda: every(2)),
    "wrong at every 29th call": Fault(lambda: every(29), said="in turn"),
    "gradient wrong at every 29th call": Fault(lambda: gradient_every(29), said="in turn"),
    "raises at every 29th call": Fault(lambda: raises_at_every(29)),
    "keeps the first weight": Fault(lambda: keeps_first(1), said="with changed weights"),
    "keeps the first bias": Fault(lambda: keeps_first(2), said="with changed weights"),
    "keeps the first weight for gradients": Fault(
        lambda: keeps_first(1, forward=False), said="with changed weights"
    ),
    "keeps the weight by its version": Fault(keeps_by_version, said="with changed weights"),
    "one output buffer": Fault(lambda: static_buffer(1), said="shares memory with an earlier output"),
    "three output buffers in turn": Fault(
        lambda: static_buffer(3), said="shares memory with an earlier output"
    ),
    "one gradient buffer": Fault(static_gradient, said="shares memory with an earlier gradient"),
    "writes to its input": Fault(keeps(writes_to_its_input)),
    # Wrong memory.
    "channels_last for contiguous": Fault(keeps(lies(torch.channels_last)), said="has strides"),
    "height and width turned": Fault(keeps(turned), said="has strides"),
    "gradient wrong unless contiguous": Fault(
        keeps(gradient_where(lambda g: not g.is_contiguous())), said="grad_output"
    ),
    "gradient wrong for gaps": Fault(
        keeps(gradient_where(lambda g: g.stride(-1) == 2)), said="grad_output with gaps"
    ),
    "gradient wrong for channels_last": Fault(
        keeps(gradient_where(lambda g: g.stride(1) == 1)), said="grad_output channels_last"
    ),
    "gradient wrong if expanded": Fault(
        keeps(gradient_where(lambda g: 0 in g.stride())), said="grad_output expanded"
    ),
    # A wrong scale in a coarse dtype: every element is off by less than rounding may change it.
    "float16 output scaled by 1.001": Fault(keeps(scaled_inside(1.001)), HALF, said="on average 1.00"),
    "float16 grad_input scaled by 1.001": Fault(
        keeps(gradient_scaled_inside(0, 1.001)), HALF, said="on average 1.00"
    ),
    "float16 grad_weight scaled by 1.001": Fault(
        keeps(gradient_scaled_inside(1, 1.001)), HALF, said="on average 1.00"
    ),
    "bfloat16 output scaled by 1.003": Fault(keeps(scaled_inside(1.003)), BF16, said="on average 1.00"),
    "bfloat16 grad_weight scaled by 0.997": Fault(
        keeps(gradient_scaled_inside(1, 0.997)), BF16, said="on average 0.99"
    ),
}


class NetworkFault(nn.Module):
    """Base of decoders that are wrong outside of their layers if `wrong` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 6, 4, 2, 1)
        self.out = nn.ConvTranspose2d(6, 3, 4, 2, 1)
        self.wrong = False

    def forward(self, x: Tensor) -> Any:
        return self.out(F.relu(self.up(x)))


class OneBuffer(NetworkFault):
    """Returns its output in the same memory every time."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).detach()
        if not self.wrong:
            return y
        self.kept = torch.empty_like(y) if self.kept is None else self.kept
        return self.kept.copy_(y)


class KeepsWeights(NetworkFault):
    """Computes with the weights of its first run."""

    def forward(self, x: Tensor) -> Any:
        if not self.wrong:
            return super().forward(x)
        if not hasattr(self, "kept"):
            self.kept = [t.detach().clone() for t in (self.out.weight, self.out.bias)]
        weight, bias = (
            old + (p - p.detach()) for old, p in zip(self.kept, (self.out.weight, self.out.bias), strict=True)
        )
        return F.conv_transpose2d(F.relu(self.up(x)), weight, bias, 2, 1)


class Served(NetworkFault):
    """Uses another factor under inference_mode."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.05 if self.wrong and torch.is_inference_mode_enabled() else 1.0)


class LiesOtherwise(NetworkFault):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.contiguous(memory_format=torch.channels_last) if self.wrong else y


NETWORK_FAULTS: dict[str, tuple[type[NetworkFault], str]] = {
    "an output buffer of its own": (OneBuffer, "of one run shares memory with that of the next"),
    "weights kept by the network": (KeepsWeights, "with changed weights"),
    "wrong under inference_mode": (Served, "under inference_mode"),
    "lies otherwise": (LiesOtherwise, "has strides"),
}
