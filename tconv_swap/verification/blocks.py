"""Compares every block (a norm, and the activation behind it; or a padding) by itself while the network runs: output,
running statistics and gradients, against float64 and beside the error of PyTorch's modules on the same input. In
evaluation, a transposed convolution that is computed with both as one is compared too."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.form import activate, activation_of
from tconv_swap.blocks.modules import original_class
from tconv_swap.kernels.norm.shape import Activation
from tconv_swap.layer import Swapped, plain_class
from tconv_swap.verification import compare
from tconv_swap.verification.compare import Tolerance, mismatch
from tconv_swap.verification.kinks import KINKS, chosen_sides, moved, next_to_kinks
from tconv_swap.verification.layer_call import accumulated, isolated, layer_roundoff, own_class, weights
from tconv_swap.verification.report import Check, Kind

#: The largest number of compared calls of one block in one mode.
MAX_CALLS = 2
# The error of PyTorch's own modules excuses a block up to this (see compare.excused).
EXCUSABLE_ERROR = 0.02

#: The places of the output that reflection padding fills from one pixel, at most.
MAX_COPIES = 9

_GRADIENTS: tuple[Kind, ...] = ("layer_grad_input", "layer_grad_weight", "layer_grad_bias")


def fused_modules(network: nn.Module) -> list[str]:
    """Returns the dotted names of the modules that a swap with ``fuse`` gave another class."""
    return [name for name, module in network.named_modules() if original_class(type(module)) is not None]


@dataclass(frozen=True)
class _Call:
    """One call of a block. ``norm``: a copy of the norm, or of the padding, in its state before the call."""

    name: str
    mode: str
    norm: nn.Module
    activation: nn.Module | None
    x: Tensor
    added: Tensor | None

    def by_pytorch(
        self, dtype: torch.dtype | None = None, across: Tensor | None = None
    ) -> tuple[list[Tensor], nn.Module, Tensor]:
        """Returns the inputs (the added tensor is the second), the module and the output of PyTorch's own computation,
        which can be differentiated.

        Args:
            across: where the activation's input is moved to the other side of the kink that it is next to.
        """
        norm, inputs = self._module(dtype), self._leaves(dtype)
        applied = self._applied()
        with torch.enable_grad():
            normed = _normed(norm, inputs[0])
            given = normed + inputs[1] if len(inputs) > 1 else normed
            return (
                inputs,
                norm,
                activate(given if across is None else moved(given, across, applied[0]), *applied),
            )

    def next_to_kinks(self) -> Tensor | None:
        """Returns where rounding may put the activation's input on the other side of a kink; None if nowhere."""
        if self._applied()[0] not in KINKS:
            return None
        with torch.no_grad():
            exact, single = (
                _normed(self._module(dtype), self.x.detach().to(dtype))
                for dtype in (torch.float64, torch.float32)
            )
            error = float((exact - single).abs().max())
            near = next_to_kinks(exact, self.added, error, self.x.dtype, self._applied()[0])
        return near if bool(near.any()) else None

    def _module(self, dtype: torch.dtype | None) -> nn.Module:
        norm = copy.deepcopy(self.norm)
        return norm if dtype is None else norm.to(dtype)

    def _applied(self) -> tuple[Activation, float]:
        applied = activation_of(self.activation)
        assert applied is not None
        return applied

    def by_ours(self) -> tuple[list[Tensor], nn.Module, Tensor | None]:
        """Returns the same, computed by our kernels."""
        norm, inputs = copy.deepcopy(self.norm), self._leaves()
        with torch.enable_grad():
            if isinstance(norm, nn.ReflectionPad2d):
                return inputs, norm, call.padded(norm, *inputs)
            return inputs, norm, call.computed(norm, self.activation, *inputs)

    def _leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        given = [one.detach() for one in (self.x, self.added) if one is not None]
        return [(one if dtype is None else one.to(dtype)).requires_grad_() for one in given]


@dataclass(frozen=True)
class _Evaluation:
    """A call of a transposed convolution, the norm and the activation behind it, in evaluation.

    Attributes:
        name: the name of the norm; without a norm that of the layer.
        norm: a copy of the norm.
    """

    name: str
    mode: str
    layer: Swapped
    norm: nn.Module | None
    activation: nn.Module | None
    x: Tensor

    def by_ours(self) -> Tensor | None:
        """Computes the call as one program, without the hooks of observers."""
        layer = isolated(self.layer, own_class(self.layer), *weights(self.layer))
        with torch.no_grad():
            return call.evaluated(layer, self.norm, self.activation, self.x)

    def by_pytorch(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the call with PyTorch's own modules."""
        x = self.x if dtype is None else self.x.to(dtype)
        weight, bias = weights(self.layer)
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.no_grad():
            y: Tensor = isolated(self.layer, plain_class(self.layer), weight, bias).forward(x)
            if self.norm is not None:
                norm = copy.deepcopy(self.norm)
                norm = norm if dtype is None else norm.to(dtype)
                y = _normed(norm, y)
            applied = activation_of(self.activation)
            assert applied is not None
            return activate(y, *applied)

    def amplification(self, exact: Tensor) -> float:
        """Returns by how much a rounding error of the layer's output grows, relative to the block's output ``exact``;
        at least 1."""
        alone = replace(self, norm=None, activation=None).by_pytorch(torch.float64).detach()
        if self.norm is not None:
            given: Any = self.norm
            scale = (given.running_var.double() + given.eps).rsqrt()
            scale = scale if given.weight is None else scale * given.weight.detach().double()
            alone = alone * scale.view(-1, *[1] * (alone.dim() - 2))
        return max(1.0, float(alone.norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)))


@dataclass
class BlockChecks:
    """Checks the blocks of a network while it runs inside ``watch``. ``checks``: in the order of the calls."""

    network: nn.Module
    backward: bool
    tolerance: Tolerance | None = None
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def watch(self, mode: str) -> Iterator[None]:
        """Compares every block that is computed inside: its output at once, its gradients during the backward pass."""
        names = {id(module): name for name, module in self.network.named_modules()}
        seen: dict[str, int] = {}
        evaluations: dict[str, int] = {}

        def observe(
            norm: nn.Module,
            activation: nn.Module | None,
            x: Tensor,
            output: Tensor,
            before: dict[str, Tensor],
            added: Tensor | None = None,
        ) -> None:
            name = names.get(id(norm))
            if name is None or seen.get(name, 0) >= MAX_CALLS:
                return
            seen[name] = seen.get(name, 0) + 1
            buffers = {name: one for name, one in norm.named_buffers() if one is not None}
            kept = _as_it_was(norm, before)
            inputs = [
                None if one is None else one.detach().clone(memory_format=torch.preserve_format)
                for one in (x, added)
            ]
            made = _Call(name, mode, kept, activation, *inputs)  # type: ignore[arg-type]
            with _unobserved():
                self._guarded(made, lambda: self._compare(made, output.detach(), buffers))
            if self.backward and output.requires_grad:

                def compare_gradients(grad: Tensor) -> None:
                    with _unobserved():
                        self._guarded(made, lambda: self._compare_gradients(made, grad.detach()))

                output.register_hook(compare_gradients)

        def observe_evaluation(
            layer: Swapped, norm: nn.Module | None, activation: nn.Module | None, x: Tensor
        ) -> None:
            name = names.get(id(layer if norm is None else norm))
            if name is None or evaluations.get(name, 0) >= MAX_CALLS:
                return
            evaluations[name] = evaluations.get(name, 0) + 1
            made = _Evaluation(name, mode, layer, copy.deepcopy(norm), activation, x.detach())
            with _unobserved():
                self._guarded(made, lambda: self._compare_evaluation(made))

        call.observers.append(observe)
        call.block_observers.append(observe_evaluation)
        try:
            yield
        finally:
            call.observers.remove(observe)
            call.block_observers.remove(observe_evaluation)

    def _compare_evaluation(self, made: _Evaluation) -> None:
        output = made.by_ours()
        if output is None:
            return  # the modules compute it, or the layer and the block separately, which are compared separately
        original, exact = made.by_pytorch(), made.by_pytorch(torch.float64)
        # PyTorch's result may be more exact than its switches require.
        unit = layer_roundoff(made.layer, output) * made.amplification(exact)
        self._judge(made, "layer_output", made.name, output, original, exact, unit)

    def _guarded(self, made: _Call | _Evaluation, comparison: Any) -> None:
        # PyTorch's own modules may run out of memory here, which is not the block's fault.
        try:
            comparison()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            self.notes.append(f"{made.mode}: block {made.name} is not compared by itself: {reason}")

    def _compare(self, made: _Call, output: Tensor, buffers: dict[str, Tensor]) -> None:
        _, theirs, original = made.by_pytorch()
        _, exact_module, exact = made.by_pytorch(torch.float64)
        unit = _rounding(output, 1)
        self._judge(made, "layer_output", made.name, output, original.detach(), exact.detach(), unit)
        originals, exacts = dict(theirs.named_buffers()), dict(exact_module.named_buffers())
        for name, value in buffers.items():
            unit = _rounding(value, _terms(made))
            self._judge(made, "buffer", f"{made.name}.{name}", value, originals[name], exacts[name], unit)

    def _compare_gradients(self, made: _Call, grad: Tensor) -> None:
        ours, theirs, exact = (
            _gradients(*computed, grad)
            for computed in (made.by_ours(), made.by_pytorch(), made.by_pytorch(torch.float64))
        )
        exact_of_theirs, near = exact, made.next_to_kinks()
        if near is not None:
            # Both slopes of a kink are right there; each is compared with float64 on the sides that it has chosen.
            at = 0 if made.added is None else 1
            other = _gradients(*made.by_pytorch(torch.float64, near), grad)[at]
            exact_of_theirs, exact = (
                _gradients(*made.by_pytorch(torch.float64, across), grad) if bool(across.any()) else exact
                for across in (chosen_sides(near, found[at], exact[at], other) for found in (theirs, ours))
            )
        kinds = (_GRADIENTS[0],) * (2 if made.added is not None else 1) + _GRADIENTS[1:]
        for kind, value, original, truth, its in zip(
            kinds, ours, theirs, exact, exact_of_theirs, strict=False
        ):
            unit = _rounding(value, _terms(made))
            self._judge(made, kind, made.name, value, original, truth, unit, exact_of_original=its)

    def _judge(
        self,
        made: _Call | _Evaluation,
        kind: Kind,
        name: str,
        value: Tensor,
        original: Tensor,
        exact: Tensor,
        unit: float,
        exact_of_original: Tensor | None = None,
    ) -> None:
        if wrong := mismatch(value, original):
            self.checks.append(Check(made.mode, kind, name, 0.0, math.inf, 0.0, False, wrong))
            return
        truth = exact if exact_of_original is None else exact_of_original
        first = compare.difference(original, truth, original, self.tolerance)
        second = compare.difference(value, exact, original, self.tolerance)
        floor = compare.allowed_without_error(unit, original.numel())
        limit = compare.excused(first.norms, original.dtype, original.device, EXCUSABLE_ERROR).larger(floor)
        verdict = compare.judge(first.norms, second.norms, limit, self.tolerance)
        self.checks.append(Check.of(made.mode, kind, name, verdict, second.describe(original.shape)))


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Returns what PyTorch's own class of the norm computes."""
    cls = original_class(type(norm)) or type(norm)
    normed: Tensor = cls.forward(norm, x)
    return normed


def _gradients(
    inputs: list[Tensor], norm: nn.Module, output: Tensor | None, grad: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of the inputs, the weight and the bias, as far as they require one."""
    if output is None:
        raise RuntimeError("our kernels do not take the same call again")
    wanted = [*inputs, *(one for one in norm.parameters() if one.requires_grad)]
    return torch.autograd.grad(output, wanted, grad.to(output.dtype))


def _rounding(value: Tensor, terms: int) -> float:
    """Returns the error that rounding makes in a sum of this many terms, relative to them."""
    if not value.is_floating_point():
        return 0.0
    return accumulated(torch.finfo(value.dtype).eps / 2, terms, value.dtype)


def _terms(made: _Call) -> int:
    """Returns the number of values that one sum adds."""
    if isinstance(made.norm, nn.ReflectionPad2d):
        return MAX_COPIES
    return made.x.numel() // max(1, made.x.shape[1])


def _as_it_was(norm: nn.Module, before: dict[str, Tensor]) -> nn.Module:
    kept = copy.deepcopy(norm)
    with torch.no_grad():
        for name, value in before.items():
            kept._buffers[name] = value
    return kept


@contextmanager
def _unobserved() -> Iterator[None]:
    observers, call.observers[:] = list(call.observers), []
    try:
        yield
    finally:
        call.observers[:] = observers
