"""Every swapped layer by itself, on the inputs and output gradients that really reach it in the network.

A normalisation behind a layer hides a wrong scale from the network's output, and a deep network hides much
else; a layer alone hides nothing. It is one linear map, so what rounding may do to each element is known.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tconv_swap import compare
from tconv_swap.compare import ErrorSum, Norms, Tolerance
from tconv_swap.layer import ConvTranspose2d
from tconv_swap.verify_report import Check, Kind
from tconv_swap.verify_runs import normal

MAX_CALLS = 8
MAX_CALLS_ALIKE = 2
# However inexact PyTorch itself is, a layer is excused no further (see compare.excused).
EXCUSABLE_ERROR = 0.02

_PIECE_ELEMENTS = 1 << 25
_GRADIENTS: tuple[Kind, ...] = ("layer_grad_input", "layer_grad_weight", "layer_grad_bias")


def swapped_layers(module: nn.Module) -> dict[str, ConvTranspose2d]:
    """Every swapped layer by its (first) dotted name, in the order of registration."""
    return {name: m for name, m in module.named_modules() if isinstance(m, ConvTranspose2d)}


def layer_roundoff(layer: nn.Module, output: Tensor) -> float:
    """The largest error, relative to its terms, with which this layer computes an element of its output."""
    assert isinstance(layer, nn.ConvTranspose2d)
    terms = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return _accumulated(compare.roundoff(output.dtype, output.device), terms, output.dtype)


def _accumulated(unit: float, terms: int, dtype: torch.dtype) -> float:
    """Adds what a sum of so many terms loses in the accumulator, at the worst one after the other."""
    accumulator = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    return unit + 0.5 * math.sqrt(terms) * accumulator


@dataclass
class _Call:
    """One call of a swapped layer. The weight is the one that was used: a parametrization may change it."""

    name: str
    layer: ConvTranspose2d
    mode: str
    order: int
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    output_size: list[int] | None
    described: str
    autocast: Callable[[], torch.autocast]
    tolerance: Tolerance | None


@dataclass
class LayerChecks:
    """Checks the swapped layers of a network while it runs; within `watch`.

    Attributes:
        reached: names of the layers that were compared on an input with elements in it.
        notes: what could not be compared, and why.
    """

    network: nn.Module
    backward: bool
    seed: int
    tolerance: Tolerance | None = None
    reached: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _found: list[tuple[int, Check]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def checks(self) -> list[Check]:
        """In the order in which the layers were called."""
        return [check for _, check in sorted(self._found, key=lambda entry: entry[0])]

    @contextmanager
    def watch(self, mode: str) -> Iterator[None]:
        """Every call inside is compared: its output at once, its gradients when backward comes by."""
        self._counts: dict[str, Counter[Any]] = {}
        handles = []
        for name, layer in swapped_layers(self.network).items():
            handles.append(
                layer.register_forward_hook(self._hook(name, mode), with_kwargs=True, prepend=True)
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def probe_unreached(self) -> None:
        """Layers that no input reached are compared on random numbers: nothing swapped goes unseen."""
        self._counts = {}
        for name, layer in swapped_layers(self.network).items():
            if name in self.reached:
                continue
            shown = name or "(root)"
            for size in (8, 16, 32, 64, 128):
                shape = torch.Size((2, layer.in_channels, size, size))
                parameter = next(layer.parameters())
                x = normal(shape, parameter.device, f"{self.seed} {name}").to(parameter.dtype)
                try:
                    with torch.no_grad():
                        reference = _isolated(layer, nn.ConvTranspose2d, *_weights(layer))(x)
                except RuntimeError:
                    continue  # the padding eats an output this small
                if reference.numel():
                    break
            else:
                self.notes.append(f"layer {shown} was not reached, and not compared")
                continue
            self.notes.append(f"layer {shown} was not reached by the inputs; compared on random numbers")
            try:
                with torch.no_grad():
                    output = _isolated(layer, _own_class(layer), *_weights(layer))(x)
            except Exception as error:
                self._broken(name, "probe", "layer_output", next(self._order), _reason(error))
                continue
            self._hook(name, "probe")(layer, (x,), {}, output)
            if name not in self.reached:
                self.notes.append(f"layer {shown} could not be compared")

    def _hook(self, name: str, mode: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            assert isinstance(layer, ConvTranspose2d)
            x = args[0] if args else kwargs["input"]
            size = args[1] if len(args) > 1 else kwargs.get("output_size")
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return
            counts = self._counts.setdefault(name, Counter())
            signature = (x.shape, x.stride(), x.dtype, None if size is None else tuple(size))
            counts[signature] += 1
            counts["calls"] += 1
            if counts["calls"] > MAX_CALLS or counts[signature] > MAX_CALLS_ALIKE:
                return
            weight, bias = _weights(layer)
            kind = x.device.type
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            call = _Call(
                name,
                layer,
                mode,
                next(self._order),
                _kept(x, output, overwritable=enabled or not weight.requires_grad),
                weight.detach(),
                None if bias is None else bias.detach(),
                None if size is None else list(size),
                f"call {counts['calls']}, input " + "x".join(map(str, x.shape)),
                lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False),
                self.tolerance,
            )
            self._guarded(call, lambda: self._compare_output(call, output))
            if not isinstance(output, Tensor) or not self.backward:
                return
            if output.requires_grad:
                output.register_hook(
                    lambda gradient: self._guarded(call, lambda: self._compare_gradients(call, gradient))
                )
            else:
                gradient = normal(output.shape, output.device, f"{self.seed} {name} {call.order}")
                self._guarded(call, lambda: self._compare_gradients(call, gradient.to(output.dtype)))

        return hook

    def _guarded(self, call: _Call, comparison: Callable[[], None]) -> None:
        # PyTorch's own layer may run out of memory here, which is not the swapped layer's failure.
        try:
            comparison()
        except Exception as error:
            self.notes.append(
                f"{call.mode}: layer {call.name or '(root)'}, {call.described}, is not compared by itself: "
                f"{_reason(error)}"
            )

    def _compare_output(self, call: _Call, output: Any) -> None:
        original = _run(call, nn.ConvTranspose2d)
        if wrong := mismatch(output, original):
            self._broken(call.name, call.mode, "layer_output", call.order, f"{wrong} ({call.described})")
            return
        if output.numel() == 0:
            return
        self.reached.add(call.name)
        unit = layer_roundoff(call.layer, original)
        try:
            errors = _Truth(call, None, original.dtype, unit).outputs(original, output.detach())
        except RuntimeError as error:
            self._without_truth(call, "layer_output", original, output.detach(), unit, error)
            return
        self._judge(call, "layer_output", original, errors, unit)

    def _compare_gradients(self, call: _Call, grad_output: Tensor) -> None:
        grad_output = grad_output.detach()
        with torch.enable_grad():
            reference = _gradients(call, nn.ConvTranspose2d, grad_output)
            try:
                gradients = _gradients(call, _own_class(call.layer), grad_output)
            except Exception as error:
                self._broken(call.name, call.mode, "layer_grad_input", call.order, _reason(error))
                return
        values: dict[Kind, tuple[Tensor, Tensor]] = {}
        for kind, original, swapped in zip(_GRADIENTS, reference, gradients, strict=True):
            if original is None:
                continue
            if swapped is None:
                self._broken(call.name, call.mode, kind, call.order, f"is missing ({call.described})")
            elif wrong := mismatch(swapped, original):
                self._broken(call.name, call.mode, kind, call.order, f"{wrong} ({call.described})")
            elif original.numel() and grad_output.numel():
                values[kind] = (original, swapped)
        if not values:
            return
        layer, pixels = call.layer, grad_output.numel() // grad_output.shape[-3]
        terms = {
            "layer_grad_input": layer.out_channels // layer.groups * math.prod(layer.kernel_size),
            "layer_grad_weight": call.input.numel() // layer.in_channels,
            "layer_grad_bias": pixels,
        }
        base = max(
            compare.roundoff(t.dtype, t.device) for t in (grad_output, *(v for v, _ in values.values()))
        )
        units = {kind: _accumulated(base, terms[kind], grad_output.dtype) for kind in values}
        try:
            errors = _Truth(call, grad_output, grad_output.dtype, base).gradients(values)
        except RuntimeError as error:
            for kind, (original, swapped) in values.items():
                self._without_truth(call, kind, original, swapped, units[kind], error)
            return
        for kind, pair in errors.items():
            self._judge(call, kind, values[kind][0], pair, units[kind])

    def _judge(
        self, call: _Call, kind: Kind, original: Tensor, errors: tuple[ErrorSum, ErrorSum], unit: float
    ) -> None:
        first, second = errors
        floor = compare.allowed_without_error(unit, original.numel())
        excused = compare.excused(first.norms, original.dtype, original.device, EXCUSABLE_ERROR)
        verdict = compare.judge(first.norms, second.norms, excused.larger(floor), call.tolerance)
        where = second.describe(original.shape)
        detail = f"{call.described}; {where}" if where else call.described
        self._add(call.order, call.mode, kind, call.name, verdict, detail)

    def _without_truth(
        self, call: _Call, kind: Kind, original: Tensor, swapped: Tensor, unit: float, error: Exception
    ) -> None:
        self.notes.append(
            f"{call.mode}: {kind} of {call.name or '(root)'} is compared with PyTorch's own: {_reason(error)}"
        )
        second = compare.difference(swapped, original, original, call.tolerance)
        floor = compare.allowed_without_error(2 * unit, original.numel())
        verdict = compare.judge(Norms(), second.norms, floor, call.tolerance)
        self._add(call.order, call.mode, kind, call.name, verdict, second.describe(original.shape))

    def _add(
        self, order: int, mode: str, kind: Kind, name: str, verdict: compare.Verdict, detail: str
    ) -> None:
        check = Check(
            mode,
            kind,
            name,
            verdict.error_original,
            verdict.error_swapped,
            verdict.limit,
            verdict.passed,
            detail,
            verdict.norm,
        )
        self._found.append((order, check))

    def _broken(self, name: str, mode: str, kind: Kind, order: int, detail: str) -> None:
        self._found.append((order, Check(mode, kind, name, 0.0, math.inf, 0.0, False, detail)))


class _Truth:
    """One call in float64, a few samples at a time, and the errors of two results against it.

    An error is measured in units of what the rounding of its terms may do: `hypot(truth, root of the sum of
    the squared terms)`, which the same layer computes out of squared inputs, weights and gradients. Elements
    whose terms are all far smaller than usual count as a twentieth of the usual: algorithms that transform
    whole tiles (Winograd, FFT) spread rounding over the tile.
    """

    def __init__(self, call: _Call, grad_output: Tensor | None, dtype: torch.dtype, unit: float) -> None:
        self.call = call
        self.device = torch.device("cpu") if call.input.device.type == "mps" else call.input.device
        self.input = self._batched(call.input)
        self.grad_output = None if grad_output is None else self._batched(grad_output)
        info = torch.finfo(dtype)
        # The spacing of the smallest numbers that the dtype has.
        self.absolute = info.smallest_normal * info.eps / unit

    @staticmethod
    def _batched(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0) if tensor.dim() == 3 else tensor

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
        for kind, truth, squares in zip(_GRADIENTS[1:], *sums, strict=False):
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
            error.add(value, exact, first, scale, scale.square())

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
        size = None if self.call.output_size is None else self.call.output_size[-2:]
        layer = _isolated(self.call.layer, nn.ConvTranspose2d, weight, bias)
        return layer.forward(x, size)  # type: ignore[no-any-return]


def mismatch(value: Any, original: Any) -> str:
    """What is wrong with the value before any number is looked at; empty if nothing."""
    if not isinstance(value, Tensor):
        return f"is {type(value).__name__}, expected a tensor"
    if value.shape != original.shape:
        return f"has shape {list(value.shape)}, expected {list(original.shape)}"
    if value.dtype != original.dtype:
        return f"has dtype {value.dtype}, expected {original.dtype}"
    if value.device != original.device:
        return f"is on {value.device}, expected {original.device}"
    return ""


def _run(call: _Call, cls: type[nn.ConvTranspose2d]) -> Tensor:
    with torch.no_grad(), call.autocast():
        layer = _isolated(call.layer, cls, call.weight, call.bias)
        return layer.forward(call.input, call.output_size)  # type: ignore[no-any-return]


def _gradients(
    call: _Call, cls: type[nn.ConvTranspose2d], grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = (t.detach().requires_grad_() for t in (call.input, call.weight))
    bias = None if call.bias is None else call.bias.detach().requires_grad_()
    with call.autocast():
        y = _isolated(call.layer, cls, weight, bias).forward(x, call.output_size)
    targets = [x, weight] if bias is None else [x, weight, bias]
    if not y.requires_grad:
        return (None, None, None)
    gradients = torch.autograd.grad(y, targets, grad_output, allow_unused=True)
    return (gradients[0], gradients[1], gradients[2] if bias is not None else None)


def _kept(x: Tensor, output: Any, *, overwritable: bool) -> Tensor:
    """The input as it is until backward; autograd keeps it from being overwritten if the layer saved it."""
    lasting = not isinstance(output, Tensor) or not output.requires_grad or not overwritable
    return x.detach() if lasting else x.detach().clone()


def _own_class(layer: ConvTranspose2d) -> type[nn.ConvTranspose2d]:
    """The layer's class, without what a parametrization put in front of it."""
    cls = type(layer)
    return cls.__bases__[0] if parametrize.is_parametrized(layer) else cls


def _weights(layer: nn.ConvTranspose2d) -> tuple[Tensor, Tensor | None]:
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


def _isolated(
    layer: nn.ConvTranspose2d, cls: type[nn.ConvTranspose2d], weight: Tensor, bias: Tensor | None
) -> Any:
    """The layer as `cls`, without hooks and parametrizations, over the given tensors; shares the rest."""
    bare = cls.__new__(cls)
    nn.Module.__init__(bare)
    own = vars(bare).keys()
    vars(bare).update({key: value for key, value in vars(layer).items() if key not in own})
    vars(bare).update(weight=weight, bias=bias)
    return bare


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
