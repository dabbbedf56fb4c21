"""Every block (a norm, and the activation behind it) compared by itself while the network runs: output, running
statistics and gradients, against float64 and beside the error of PyTorch's modules on the very same input."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.blocks import call
from tconv_swap.blocks.form import activate, activation_of
from tconv_swap.blocks.modules import original_class
from tconv_swap.verification import compare
from tconv_swap.verification.compare import Tolerance, mismatch
from tconv_swap.verification.layer_call import accumulated
from tconv_swap.verification.report import Check, Kind

#: Of one block in one mode.
MAX_CALLS = 2
# However inexact PyTorch itself is, a block is excused no further (see compare.excused).
EXCUSABLE_ERROR = 0.02

_GRADIENTS: tuple[Kind, ...] = ("layer_grad_input", "layer_grad_weight", "layer_grad_bias")


def fused_modules(network: nn.Module) -> list[str]:
    """The dotted names of the modules that a swap with ``fuse`` gave another class."""
    return [name for name, module in network.named_modules() if original_class(type(module)) is not None]


@dataclass(frozen=True)
class _Call:
    """``norm``: a copy of the module as it was before the call."""

    name: str
    mode: str
    norm: nn.Module
    activation: nn.Module | None
    x: Tensor
    added: Tensor | None

    def by_pytorch(self, dtype: torch.dtype | None = None) -> tuple[list[Tensor], nn.Module, Tensor]:
        """Inputs (what is added is the second), module and output of PyTorch's own computation, which can be
        differentiated."""
        norm = copy.deepcopy(self.norm)
        if dtype is not None:
            norm = norm.to(dtype)
        inputs = self._leaves(dtype)
        applied = activation_of(self.activation)
        assert applied is not None
        with torch.enable_grad():
            cls = original_class(type(norm)) or type(norm)
            normed = cls.forward(norm, inputs[0])
            return inputs, norm, activate(normed + inputs[1] if len(inputs) > 1 else normed, *applied)

    def by_ours(self) -> tuple[list[Tensor], nn.Module, Tensor | None]:
        """The same by our kernels."""
        norm, inputs = copy.deepcopy(self.norm), self._leaves()
        with torch.enable_grad():
            return inputs, norm, call.computed(norm, self.activation, *inputs)

    def _leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        given = [one.detach() for one in (self.x, self.added) if one is not None]
        return [(one if dtype is None else one.to(dtype)).requires_grad_() for one in given]


@dataclass
class BlockChecks:
    """Checks the blocks of a network while it runs; within ``watch``. ``checks``: in the order of the calls."""

    network: nn.Module
    backward: bool
    tolerance: Tolerance | None = None
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def watch(self, mode: str) -> Iterator[None]:
        """Every block computed inside is compared: its output at once, its gradients when backward comes by."""
        names = {id(module): name for name, module in self.network.named_modules()}
        seen: dict[str, int] = {}

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

        call.observers.append(observe)
        try:
            yield
        finally:
            call.observers.remove(observe)

    def _guarded(self, made: _Call, comparison: Any) -> None:
        # PyTorch's own modules may run out of memory here, which is not the block's failure.
        try:
            comparison()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            self.notes.append(f"{made.mode}: block {made.name} is not compared by itself: {reason}")

    def _compare(self, made: _Call, output: Tensor, buffers: dict[str, Tensor]) -> None:
        _, theirs, original = made.by_pytorch()
        _, exact_module, exact = made.by_pytorch(torch.float64)
        self._judge(made, "layer_output", made.name, output, original.detach(), exact.detach(), 1)
        originals, exacts = dict(theirs.named_buffers()), dict(exact_module.named_buffers())
        for name, value in buffers.items():
            self._judge(
                made, "buffer", f"{made.name}.{name}", value, originals[name], exacts[name], _terms(made)
            )

    def _compare_gradients(self, made: _Call, grad: Tensor) -> None:
        found = []
        for inputs, norm, output in (made.by_ours(), made.by_pytorch(), made.by_pytorch(torch.float64)):
            if output is None:
                raise RuntimeError("our kernels do not take the same call again")
            wanted = [*inputs, *(one for one in norm.parameters() if one.requires_grad)]
            found.append(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
        kinds = (_GRADIENTS[0],) * (2 if made.added is not None else 1) + _GRADIENTS[1:]
        for kind, ours, theirs, exact in zip(kinds, *found, strict=False):
            self._judge(made, kind, made.name, ours, theirs, exact, _terms(made))

    def _judge(
        self, made: _Call, kind: Kind, name: str, value: Tensor, original: Tensor, exact: Tensor, terms: int
    ) -> None:
        if wrong := mismatch(value, original):
            self.checks.append(Check(made.mode, kind, name, 0.0, math.inf, 0.0, False, wrong))
            return
        first = compare.difference(original, exact, original, self.tolerance)
        second = compare.difference(value, exact, original, self.tolerance)
        rounding = torch.finfo(value.dtype).eps / 2 if value.is_floating_point() else 0.0
        unit = accumulated(rounding, terms, value.dtype) if rounding else 0.0
        floor = compare.allowed_without_error(unit, original.numel())
        limit = compare.excused(first.norms, original.dtype, original.device, EXCUSABLE_ERROR).larger(floor)
        verdict = compare.judge(first.norms, second.norms, limit, self.tolerance)
        self.checks.append(Check.of(made.mode, kind, name, verdict, second.describe(original.shape)))


def _terms(made: _Call) -> int:
    """Values that one sum adds up."""
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
