"""One call of a swapped layer: as PyTorch computes it, as the swapped layer does, and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tconv_swap.layer import SWAPPED, Plain, Swapped, has_own_forward, original_class, plain_class
from tconv_swap.verification import compare
from tconv_swap.verification.compare import ErrorSum, Tolerance
from tconv_swap.verification.report import Kind

GRADIENTS: tuple[Kind, ...] = ("layer_grad_input", "layer_grad_weight", "layer_grad_bias")

_PIECE_ELEMENTS = 1 << 25


def layer_roundoff(layer: nn.Module, output: Tensor) -> float:
    """The largest error, relative to its terms, with which this layer computes an element of its output."""
    assert isinstance(layer, nn.ConvTranspose2d | nn.ConvTranspose1d)
    terms = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return accumulated(compare.roundoff(output.dtype, output.device), terms, output.dtype)


def accumulated(unit: float, terms: int, dtype: torch.dtype) -> float:
    """Adds what a sum of so many terms loses in the accumulator, at the worst one after the other."""
    accumulator = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    return unit + 0.5 * math.sqrt(terms) * accumulator


@dataclass
class LayerCall:
    """One call of a swapped layer. The weight is the one that was used: a parametrization may change it."""

    name: str
    layer: Swapped
    mode: str
    order: int
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    output_size: list[int] | None
    described: str
    autocast: Callable[[], torch.autocast]
    tolerance: Tolerance | None

    def output(self, cls: type[Plain]) -> Tensor:
        """What a layer of this class returns for this call."""
        with torch.no_grad(), self.autocast():
            layer = isolated(self.layer, cls, self.weight, self.bias)
            return layer.forward(self.input, self.output_size)  # type: ignore[no-any-return]

    def differentiable_output(self) -> Tensor:
        """What the swapped layer returns for this call where the gradients of all that it reads are wanted."""
        with torch.enable_grad(), self.autocast():
            bias = None if self.bias is None else _leaf(self.bias)
            layer = isolated(self.layer, own_class(self.layer), _leaf(self.weight), bias)
            return layer.forward(_leaf(self.input), self.output_size).detach()  # type: ignore[no-any-return]

    def gradients(
        self, cls: type[Plain], grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of the input, the weight and the bias; None where there is none."""
        x, weight = _leaf(self.input), _leaf(self.weight)
        bias = None if self.bias is None else _leaf(self.bias)
        with torch.enable_grad(), self.autocast():
            y = isolated(self.layer, cls, weight, bias).forward(x, self.output_size)
        if not y.requires_grad:
            return (None, None, None)
        targets = [x, weight] if bias is None else [x, weight, bias]
        found = torch.autograd.grad(y, targets, grad_output, allow_unused=True)
        return (found[0], found[1], found[2] if bias is not None else None)


def _leaf(tensor: Tensor) -> Tensor:
    return (tensor.clone() if tensor.is_inference() else tensor.detach()).requires_grad_()


def own_class(layer: Swapped) -> type[Swapped]:
    """The layer's class, without what a parametrization put in front of it."""
    cls = type(layer)
    return cls.__bases__[0] if parametrize.is_parametrized(layer) else cls


def keeps_own_forward(layer: Swapped) -> bool:
    """Whether it was swapped although its class computes something of its own around what ours does."""
    original = original_class(own_class(layer))
    return not issubclass(original, SWAPPED) and has_own_forward(original)


def weights(layer: Plain) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as the last forward used them.

    In eval mode: reading a parametrized weight computes it, and spectral_norm would step on in train mode.
    """
    parametrizations = [m for m in layer.modules() if m is not layer and m.training]
    for module in parametrizations:
        module.training = False
    try:
        return layer.weight, layer.bias
    finally:
        for module in parametrizations:
            module.training = True


def isolated(layer: Plain, cls: type[Plain], weight: Tensor, bias: Tensor | None) -> Any:
    """The layer as `cls`, without hooks and parametrizations, over the given tensors; shares the rest.

    Methods that were set on the layer itself are left out: a `forward` would be compared with itself.
    """
    if any(hasattr(getattr(cls, name, None), "__set__") for name in ("weight", "bias")):
        # A property (a weight that is scaled at run time) would come before what is put into the instance.
        cls = type(cls.__name__, (cls,), {"weight": None, "bias": None})
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = {*vars(bare), "forward", "tconv_operands"}
    vars(bare).update({key: value for key, value in vars(layer).items() if key not in own})
    vars(bare).update(weight=weight, bias=bias)
    return bare


class Truth:
    """One call in float64, a few samples at a time, and the errors of two results against it.

    An error is measured in units of what the rounding of its terms may do: `hypot(truth, root of the sum of
    the squared terms)`, which the same layer computes out of squared inputs, weights and gradients. Elements
    whose terms are all far smaller than usual count as a twentieth of the usual: algorithms that transform
    whole tiles (Winograd, FFT) spread rounding over the tile.
    """

    def __init__(self, call: LayerCall, grad_output: Tensor | None, dtype: torch.dtype, unit: float) -> None:
        self.call = call
        self.device = torch.device("cpu") if call.input.device.type == "mps" else call.input.device
        self.input = self._batched(call.input)
        self.grad_output = None if grad_output is None else self._batched(grad_output)
        info = torch.finfo(dtype)
        # The spacing of the smallest numbers that the dtype has.
        self.absolute = info.smallest_normal * info.eps / unit

    def _batched(self, tensor: Tensor) -> Tensor:
        unbatched = tensor.dim() == len(self.call.layer.kernel_size) + 1
        return tensor.unsqueeze(0) if unbatched else tensor

    def outputs(self, original: Tensor, swapped: Tensor) -> tuple[ErrorSum, ErrorSum]:
        errors = ErrorSum(), ErrorSum()
        original, swapped = self._batched(original), self._batched(swapped)
        for rows in self._rows():
            with torch.no_grad(), self._exactly():
                truth = self._compute(self._wide(self.input[rows]), *self._parameters())
                squares = self._compute(self._wide(self.input[rows], 2), *self._parameters(2))
            self._add(errors, truth, squares, original[rows], swapped[rows])
        return errors

    def gradients(self, values: dict[Kind, tuple[Tensor, Tensor]]) -> dict[Kind, tuple[ErrorSum, ErrorSum]]:
        assert self.grad_output is not None
        errors = {kind: (ErrorSum(), ErrorSum()) for kind in values}
        sums: list[list[Tensor]] = [[], []]
        for rows in self._rows():
            parts = []
            for power in (1, 2):
                with torch.enable_grad(), self._exactly():
                    x = self._wide(self.input[rows], power).requires_grad_()
                    parameters = [p.requires_grad_() for p in self._parameters(power) if p is not None]
                    y = self._compute(x, parameters[0], parameters[1] if len(parameters) > 1 else None)
                    gradient = self._wide(self.grad_output[rows], power)
                    parts.append(torch.autograd.grad(y, [x, *parameters], gradient))
            if pair := values.get("layer_grad_input"):
                original, swapped = (self._batched(t)[rows] for t in pair)
                self._add(errors["layer_grad_input"], parts[0][0], parts[1][0], original, swapped)
            for total, part in zip(sums, parts, strict=True):
                total[:] = [a + b for a, b in zip(total, part[1:], strict=True)] if total else part[1:]
        for kind, truth, squares in zip(GRADIENTS[1:], *sums, strict=False):
            if kind in values:
                self._add(errors[kind], truth, squares, *values[kind])
        return errors

    def _add(
        self,
        errors: tuple[ErrorSum, ErrorSum],
        truth: Tensor,
        squares: Tensor,
        original: Tensor,
        swapped: Tensor,
    ) -> None:
        exact = truth.detach().reshape(-1)
        spread = squares.detach().clamp_min(0).sqrt().reshape(-1)
        typical = spread.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
        scale = torch.hypot(exact, spread) + 0.05 * typical + self.absolute
        first, second = (t.detach().to(self.device).double().reshape(-1) for t in (original, swapped))
        if tolerance := self.call.tolerance:
            scale = tolerance.atol + tolerance.rtol * exact.abs()
        for error, value in zip(errors, (first, second), strict=True):
            error.add(value, exact, first, scale, scale)

    def _rows(self) -> Iterator[slice]:
        batch = self.input.shape[0]
        if batch == 0:
            return
        stride = math.prod(self.call.layer.stride)
        sample = max(self.input.numel(), self.input.numel() * stride * self._widening()) // batch
        step = max(1, _PIECE_ELEMENTS // max(1, int(sample)))
        for start in range(0, batch, step):
            yield slice(start, start + step)

    def _widening(self) -> float:
        return self.call.layer.out_channels / self.call.layer.in_channels

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        with torch.autocast(self.device.type, enabled=False):
            yield

    def _wide(self, tensor: Tensor, power: int = 1) -> Tensor:
        wide = tensor.detach().to(self.device).double()
        return wide.square() if power == 2 else wide.clone() if wide is tensor else wide

    def _parameters(self, power: int = 1) -> tuple[Tensor, Tensor | None]:
        bias = self.call.bias
        return self._wide(self.call.weight, power), None if bias is None else self._wide(bias, power)

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        size = self.call.output_size
        size = None if size is None else size[-len(self.call.layer.kernel_size) :]
        layer = isolated(self.call.layer, plain_class(self.call.layer), weight, bias)
        return layer.forward(x, size)  # type: ignore[no-any-return]
