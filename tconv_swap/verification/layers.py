"""Every swapped layer by itself, on the inputs and output gradients that really reach it in the network.

A normalisation behind a layer hides a wrong scale from the network's output, and a deep network hides much
else; a layer alone hides nothing. It is one linear map, so what rounding may do to each element is known.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.layer import SWAPPED, ConvTranspose2d, Swapped, plain_class
from tconv_swap.layer_state import Operands
from tconv_swap.verification import compare
from tconv_swap.verification.compare import ErrorSum, Norms, Tolerance, mismatch
from tconv_swap.verification.layer_call import (
    GRADIENTS,
    LayerCall,
    Truth,
    accumulated,
    isolated,
    keeps_own_forward,
    layer_roundoff,
    own_class,
    weights,
)
from tconv_swap.verification.report import Check, Kind
from tconv_swap.verification.runs import normal

MAX_CALLS = 8
MAX_CALLS_ALIKE = 2
# However inexact PyTorch itself is, a layer is excused no further (see compare.excused).
EXCUSABLE_ERROR = 0.02

# `layer.forward(x)` runs no hook: such a call counts in the network's output, and is not seen.
UNSEEN = "no call was seen (the inputs do not reach it, or its forward is called past the hooks)"


def swapped_layers(module: nn.Module) -> dict[str, Swapped]:
    """Every swapped layer by its (first) dotted name, in the order of registration."""
    return {name: m for name, m in module.named_modules() if isinstance(m, SWAPPED)}


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

    def watch(self, mode: str) -> AbstractContextManager[None]:
        """Every call inside is compared: its output at once, its gradients when backward comes by."""
        return self._watch(lambda name: self._hook(name, mode))

    def watch_again(self, mode: str, way: str) -> AbstractContextManager[None]:
        """Calls that were compared before, in a run that asks for less: only what a layer then gives otherwise is."""
        return self._watch(lambda name: self._hook_again(name, mode, way))

    @contextmanager
    def _watch(self, hook: Callable[[str], Callable[..., None]]) -> Iterator[None]:
        self._counts: dict[str, Counter[Any]] = {}
        self._used: dict[str, tuple[Tensor, Tensor | None]] = {}
        handles, recorded = [], []
        for name, layer in swapped_layers(self.network).items():
            if keeps_own_forward(layer):
                self._note_own_forward(name, layer)
                continue
            handles.append(layer.register_forward_hook(hook(name), with_kwargs=True, prepend=True))
            vars(layer)["tconv_operands"] = self._recording(name, layer)
            recorded.append(layer)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in recorded:
                del vars(layer)["tconv_operands"]
            self._used.clear()

    def _recording(self, name: str, layer: Swapped) -> Callable[..., Operands]:
        """A parametrized weight that is read again may be another: dropped connections, a power iteration."""
        operands = layer.tconv_operands

        def record(*args: Any, **kwargs: Any) -> Operands:
            found = operands(*args, **kwargs)
            weight = found[1] if isinstance(layer, ConvTranspose2d) else found[1].squeeze(-2)
            self._used[name] = weight, found[2]
            return found

        return record

    def probe_unreached(self) -> None:
        """Layers of which no call was seen are compared on random numbers: nothing swapped goes unchecked."""
        self._counts, self._used = {}, {}
        for name, layer in swapped_layers(self.network).items():
            if name in self.reached or keeps_own_forward(layer):
                continue
            shown = name or "(root)"
            for size in (8, 16, 32, 64, 128):
                shape = torch.Size((2, layer.in_channels, *[size] * len(layer.kernel_size)))
                parameter = next(layer.parameters())
                x = normal(shape, parameter.device, f"{self.seed} {name}").to(parameter.dtype)
                try:
                    with torch.no_grad():
                        reference = isolated(layer, plain_class(layer), *weights(layer))(x)
                except RuntimeError:
                    continue  # the padding eats an output this small
                if reference.numel():
                    break
            else:
                self.notes.append(f"layer {shown}: {UNSEEN}, and it is not compared by itself")
                continue
            self.notes.append(f"layer {shown}: {UNSEEN}; compared on random numbers")
            try:
                with torch.no_grad():
                    output = isolated(layer, own_class(layer), *weights(layer))(x)
            except Exception as error:
                self._broken(name, "probe", "layer_output", next(self._order), _reason(error))
                continue
            self._hook(name, "probe")(layer, (x,), {}, output)
            if name not in self.reached:
                self.notes.append(f"layer {shown} could not be compared")

    def _note_own_forward(self, name: str, layer: Swapped) -> None:
        # What it computes around ours is not known to be linear: only the network as a whole can tell.
        note = (
            f"layer {name or '(root)'} has a forward of its own ({type(layer).__name__}): "
            "compared within the network alone"
        )
        if note not in self.notes:
            self.notes.append(note)

    def _hook(self, name: str, mode: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call(name, mode, layer, args, kwargs, output)
            if call is None:
                return
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

    def _hook_again(self, name: str, mode: str, way: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call(name, mode, layer, args, kwargs, output)
            if call is None:
                return
            known = any(
                check.mode == mode
                and check.name == name
                and check.kind == "layer_output"
                and not check.passed
                for _, check in self._found
            )
            call.described = f"{way}, {call.described}"

            def compare_what_differs() -> None:
                if not isinstance(output, Tensor) or not torch.equal(output, call.differentiable_output()):
                    self._compare_output(call, output)

            if not known:
                self._guarded(call, compare_what_differs)

        return hook

    def _call(
        self,
        name: str,
        mode: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> LayerCall | None:
        """What a hook is told of a call; None for one more of those that were compared, or of no numbers."""
        assert isinstance(layer, SWAPPED)
        x = args[0] if args else kwargs["input"]
        size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        counts = self._counts.setdefault(name, Counter())
        signature = (x.shape, x.stride(), x.dtype, None if size is None else tuple(size))
        counts[signature] += 1
        counts["calls"] += 1
        if counts["calls"] > MAX_CALLS or counts[signature] > MAX_CALLS_ALIKE:
            return None
        weight, bias = self._used.pop(name) if name in self._used else weights(layer)
        kind = x.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return LayerCall(
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

    def _guarded(self, call: LayerCall, comparison: Callable[[], None]) -> None:
        # PyTorch's own layer may run out of memory here, which is not the swapped layer's failure.
        try:
            comparison()
        except Exception as error:
            self.notes.append(
                f"{call.mode}: layer {call.name or '(root)'}, {call.described}, is not compared by itself: "
                f"{_reason(error)}"
            )

    def _compare_output(self, call: LayerCall, output: Any) -> None:
        original = call.output(plain_class(call.layer))
        if wrong := mismatch(output, original):
            self._broken(call.name, call.mode, "layer_output", call.order, f"{wrong} ({call.described})")
            return
        if output.numel() == 0:
            return
        self.reached.add(call.name)
        unit = layer_roundoff(call.layer, original)
        try:
            errors = Truth(call, None, original.dtype, unit).outputs(original, output.detach())
        except RuntimeError as error:
            self._without_truth(call, "layer_output", original, output.detach(), unit, error)
            return
        self._judge(call, "layer_output", original, errors, unit)

    def _compare_gradients(self, call: LayerCall, grad_output: Tensor) -> None:
        grad_output = grad_output.detach()
        reference = call.gradients(plain_class(call.layer), grad_output)
        try:
            gradients = call.gradients(own_class(call.layer), grad_output)
        except Exception as error:  # whatever a broken layer raises
            self._broken(call.name, call.mode, "layer_grad_input", call.order, _reason(error))
            return
        values: dict[Kind, tuple[Tensor, Tensor]] = {}
        for kind, original, swapped in zip(GRADIENTS, reference, gradients, strict=True):
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
        layer = call.layer
        pixels = grad_output.numel() // layer.out_channels
        terms = {
            "layer_grad_input": layer.out_channels // layer.groups * math.prod(layer.kernel_size),
            "layer_grad_weight": call.input.numel() // layer.in_channels,
            "layer_grad_bias": pixels,
        }
        base = max(
            compare.roundoff(t.dtype, t.device) for t in (grad_output, *(v for v, _ in values.values()))
        )
        units = {kind: accumulated(base, terms[kind], grad_output.dtype) for kind in values}
        try:
            errors = Truth(call, grad_output, grad_output.dtype, base).gradients(values)
        except RuntimeError as error:
            for kind, (original, swapped) in values.items():
                self._without_truth(call, kind, original, swapped, units[kind], error)
            return
        for kind, pair in errors.items():
            self._judge(call, kind, values[kind][0], pair, units[kind])

    def _judge(
        self, call: LayerCall, kind: Kind, original: Tensor, errors: tuple[ErrorSum, ErrorSum], unit: float
    ) -> None:
        first, second = errors
        floor = compare.allowed_without_error(unit, original.numel())
        excused = compare.excused(first.norms, original.dtype, original.device, EXCUSABLE_ERROR)
        verdict = compare.judge(first.norms, second.norms, excused.larger(floor), call.tolerance)
        where = second.describe(original.shape)
        detail = f"{call.described}; {where}" if where else call.described
        self._add(call.order, call.mode, kind, call.name, verdict, detail)

    def _without_truth(
        self, call: LayerCall, kind: Kind, original: Tensor, swapped: Tensor, unit: float, error: Exception
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
        check = Check.of(mode, kind, name, verdict, detail)
        self._found.append((order, check))

    def _broken(self, name: str, mode: str, kind: Kind, order: int, detail: str) -> None:
        self._found.append((order, Check(mode, kind, name, 0.0, math.inf, 0.0, False, detail)))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def _kept(x: Tensor, output: Any, *, overwritable: bool) -> Tensor:
    """The input as it is until backward; autograd keeps it from being overwritten if the layer saved it."""
    lasting = not isinstance(output, Tensor) or not output.requires_grad or not overwritable
    return x.detach() if lasting else x.detach().clone()
