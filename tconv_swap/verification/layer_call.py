"""Computes one call of a swapped layer with PyTorch's layer, with the swapped layer, and in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from tconv_swap.layer import SWAPPED, Plain, Swapped, has_own_forward, original_class, plain_class
from tconv_swap.verification import compare
from tconv_swap.verification.compare import ErrorSum, Tolerance
from tconv_swap.verification.report import Kind
from tconv_swap.verification.slope import Slope

GRADIENTS: tuple[Kind, ...] = ("layer_grad_input", "layer_grad_weight", "layer_grad_bias")

#: The gradients of input, weight and bias.
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]

_PIECE_ELEMENTS = 1 << 25


def layer_roundoff(layer: nn.Module, output: Tensor) -> float:
    """Returns the largest error, relative to its terms, with which this layer computes an element of its output; of
    a layer that sums no products, that of its last rounding."""
    unit = compare.roundoff(output.dtype, output.device)
    if isinstance(layer, nn.Linear):
        return accumulated(unit, layer.in_features, output.dtype)
    if not isinstance(layer, _ConvNd):
        return unit
    terms = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return accumulated(unit, terms, output.dtype)


def sum_roundoff(terms: int, dtype: torch.dtype) -> float:
    """Returns the error of a mean of so many elements, relative to their size."""
    return accumulated(0.0, terms, dtype)


def accumulated(unit: float, terms: int, dtype: torch.dtype) -> float:
    """Adds the error that a sum of this many terms makes in the accumulator, at worst one term after the other."""
    accumulator = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    return unit + 0.5 * math.sqrt(terms) * accumulator


@dataclass
class LayerCall:
    """One call of a swapped layer. `weight` is the one that was used: a parametrization may change it.

    `same_strides`: whether `input` has the strides that it had for the layer. `extra`: whether the same call was
    compared before, in another way, so that only faults are kept.
    """

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
    same_strides: bool = True
    extra: bool = False

    def output(self, cls: type[Plain]) -> Tensor:
        """Returns the result of a layer of this class for this call."""
        with torch.no_grad(), self.autocast():
            layer = isolated(self.layer, cls, self.weight, self.bias)
            return layer.forward(self.input, self.output_size)  # type: ignore[no-any-return]

    def differentiable_output(self) -> Tensor:
        """Returns the result of the swapped layer for this call if all gradients are needed."""
        # In inference_mode nothing can be differentiated.
        with torch.inference_mode(False), torch.enable_grad():
            return Differentiated(self, own_class(self.layer)).output(differentiable=True).detach()

    def gradients(self, cls: type[Plain], grad_output: Tensor) -> Gradients:
        """Returns the gradients of input, weight and bias; None for one that does not exist."""
        return Differentiated(self, cls).gradients(grad_output)


class Differentiated:
    """A layer of some class with its own copies of the tensors; it lives as long as this object, over several calls."""

    def __init__(self, call: LayerCall, cls: type[Plain]) -> None:
        self._call = call
        self._input, weight = _leaf(call.input), _leaf(call.weight)
        bias = None if call.bias is None else _leaf(call.bias)
        self._targets = [self._input, weight] if bias is None else [self._input, weight, bias]
        self._layer = isolated(call.layer, cls, weight, bias)

    def output(self, *, differentiable: bool) -> Tensor:
        """Returns the layer's result for the call."""
        with torch.set_grad_enabled(differentiable), self._call.autocast():
            return self._layer.forward(self._input, self._call.output_size)  # type: ignore[no-any-return]

    def gradients(self, grad_output: Tensor, output: Tensor | None = None) -> Gradients:
        """Returns the gradients of input, weight and bias; None for one that does not exist.

        Args:
            output: the result of `output`, if it is computed already.
        """
        y = self.output(differentiable=True) if output is None else output
        if not y.requires_grad:
            return (None, None, None)
        found = torch.autograd.grad(y, self._targets, grad_output, allow_unused=True)
        return (found[0], found[1], found[2] if len(found) > 2 else None)


def _leaf(tensor: Tensor) -> Tensor:
    return (tensor.clone() if tensor.is_inference() else tensor.detach()).requires_grad_()


def own_class(layer: Swapped) -> type[Swapped]:
    """Returns the layer's class, without the class that a parametrization put in front of it."""
    cls = type(layer)
    return cls.__bases__[0] if parametrize.is_parametrized(layer) else cls


def keeps_own_forward(layer: Swapped) -> bool:
    """Returns whether it was swapped although its class has a `forward` that computes more than ours."""
    original = original_class(own_class(layer))
    return not issubclass(original, SWAPPED) and has_own_forward(original)


def weights(layer: Plain) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias as the last forward used them.

    It reads them in eval mode: reading a parametrized weight computes it, and in train mode spectral_norm would change
    its state.
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
    """Returns the layer as `cls`, without hooks and parametrizations, with the given tensors; it shares the rest.

    Methods that were set on the layer itself are left out: a `forward` would be compared with itself.
    """
    if any(hasattr(getattr(cls, name, None), "__set__") for name in ("weight", "bias")):
        # A property (a weight that is scaled at run time) would hide the entry in the instance's dictionary.
        cls = type(cls.__name__, (cls,), {"weight": None, "bias": None})
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = {*vars(bare), "forward", "tconv_operands"}
    vars(bare).update({key: value for key, value in vars(layer).items() if key not in own})
    vars(bare).update(weight=weight, bias=bias)
    return bare


@dataclass
class Errors:
    """The errors of PyTorch's result and of ours against float64: per element, and as a scale of the whole."""

    original: ErrorSum = field(default_factory=ErrorSum)
    swapped: ErrorSum = field(default_factory=ErrorSum)
    original_slope: Slope = field(default_factory=Slope)
    swapped_slope: Slope = field(default_factory=Slope)


class Truth:
    """One call in float64, a few samples at a time, and the errors of two results against it.

    The unit of an error is what the rounding of its terms may do: `hypot(truth, root of the sum of the squared terms)`,
    which the same layer computes from squared inputs, weights and gradients. Elements whose terms are all far smaller
    than usual count as a twentieth of the usual: algorithms that transform whole tiles (Winograd, FFT) spread rounding
    over the tile.
    """

    def __init__(self, call: LayerCall, grad_output: Tensor | None, dtype: torch.dtype, unit: float) -> None:
        self.call = call
        self.device = torch.device("cpu") if call.input.device.type == "mps" else call.input.device
        self.input = self._batched(call.input)
        self.grad_output = None if grad_output is None else self._batched(grad_output)
        info = torch.finfo(dtype)
        # The spacing of the smallest numbers of the dtype.
        self.absolute = info.smallest_normal * info.eps / unit

    def _batched(self, tensor: Tensor) -> Tensor:
        unbatched = tensor.dim() == len(self.call.layer.kernel_size) + 1
        return tensor.unsqueeze(0) if unbatched else tensor

    def outputs(self, original: Tensor, swapped: Tensor) -> Errors:
        errors = Errors()
        original, swapped = self._batched(original), self._batched(swapped)
        for rows in self._rows():
            with torch.no_grad(), self._exactly():
                truth = self._compute(self._wide(self.input[rows]), *self._parameters())
                squares = self._compute(self._wide(self.input[rows], 2), *self._parameters(2))
            self._add(errors, truth, squares, original[rows], swapped[rows])
        return errors

    def gradients(self, values: dict[Kind, tuple[Tensor, Tensor]]) -> dict[Kind, Errors]:
        assert self.grad_output is not None
        errors = {kind: Errors() for kind in values}
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
        errors: Errors,
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
        errors.original_slope.add(first, exact, scale)
        errors.swapped_slope.add(second, exact, scale)
        if tolerance := self.call.tolerance:
            scale = tolerance.atol + tolerance.rtol * exact.abs()
        errors.original.add(first, exact, first, scale, scale)
        errors.swapped.add(second, exact, first, scale, scale)

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
