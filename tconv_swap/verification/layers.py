"""Compares every swapped layer by itself, on the inputs and output gradients that reach it in the network.

A normalisation behind a layer hides a wrong scale from the network's output, and a deep network hides many other
faults; a layer alone hides nothing. It is one linear map, so the effect of rounding on each element is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.layer import SWAPPED, ConvTranspose2d, Swapped, plain_class
from tconv_swap.layer_state import Operands
from tconv_swap.verification.judge import LayerJudge, first_line
from tconv_swap.verification.layer_call import LayerCall, isolated, keeps_own_forward, own_class, weights
from tconv_swap.verification.repeated import call_in_turn
from tconv_swap.verification.report import Check
from tconv_swap.verification.runs import eagerly, normal

MAX_CALLS = 8
MAX_EQUAL_CALLS = 2
# `layer.forward(x)` runs no hook: such a call shows in the network's output, but is not observed.
UNSEEN = (
    "no call was seen (the inputs do not reach it, or its forward is called without hooks or in a transform)"
)


def swapped_layers(module: nn.Module) -> dict[str, Swapped]:
    """Returns every swapped layer by its (first) dotted name, in the order of registration."""
    return {name: m for name, m in module.named_modules() if isinstance(m, SWAPPED)}


@dataclass
class LayerChecks:
    """Checks the swapped layers of a network while it runs inside `watch`."""

    network: nn.Module
    backward: bool
    seed: int
    judge: LayerJudge
    _in_turn: dict[str, LayerCall] = field(default_factory=dict)
    _called_in_turn: set[str] = field(default_factory=set)
    _seen_changed: set[tuple[str, str]] = field(default_factory=set)
    _pending: dict[str, tuple[LayerCall, Tensor]] = field(default_factory=dict)

    @property
    def checks(self) -> list[Check]:
        """Returns the checks in the order in which the layers were called."""
        return [check for _, check in sorted(self.judge.found, key=lambda entry: entry[0])]

    @contextmanager
    def watch(self, mode: str) -> Iterator[None]:
        """Compares every call inside: its output at once, its gradients during the backward pass or at the end."""
        self._pending.clear()
        with self._watch(lambda name: self._hook(name, mode)):
            yield
        for name, (call, output) in self._pending.items():
            self._compare_own_gradient(name, call, output)
        self._pending.clear()
        for name in [name for name in self._in_turn if name not in self._called_in_turn]:
            self._compare_in_turn_once(name)

    def _compare_in_turn_once(self, name: str) -> None:
        self._called_in_turn.add(name)
        call, key = self._in_turn[name], f"{self.seed} {name}"
        self._guarded(call, lambda: call_in_turn(call, self.backward, key, self.judge))

    def watch_again(self, mode: str, way: str) -> AbstractContextManager[None]:
        """Compares again the calls of an earlier run, in a way that needs less: keeps only results that then differ."""
        return self._watch(lambda name: self._hook_again(name, mode, way))

    def watch_changed(self, mode: str, way: str) -> AbstractContextManager[None]:
        """Compares calls with other weights than before: the layer has to compute PyTorch's result for these."""
        return self._watch(lambda name: self._hook_changed(name, mode, way))

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
            with eagerly():
                yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in recorded:
                del vars(layer)["tconv_operands"]
            self._used.clear()

    def _recording(self, name: str, layer: Swapped) -> Callable[..., Operands]:
        """Records the operands of a call: reading a parametrized weight again may give another (drop-connect, power
        iteration)."""
        operands = layer.tconv_operands

        def record(*args: Any, **kwargs: Any) -> Operands:
            found = operands(*args, **kwargs)
            weight = found[1] if isinstance(layer, ConvTranspose2d) else found[1].squeeze(-2)
            self._used[name] = weight, found[2]
            return found

        return record

    def probe_unreached(self, mode: str = "probe") -> None:
        """Compares the layers of which no call was seen on random numbers, so that no swapped layer is left
        unchecked."""
        self._counts, self._used = {}, {}
        for name, layer in swapped_layers(self.network).items():
            if name in self.judge.reached or keeps_own_forward(layer):
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
                    continue  # the padding is larger than this small output
                if reference.numel():
                    break
            else:
                self.judge.notes.append(f"layer {shown}: {UNSEEN}, and it is not compared by itself")
                continue
            self.judge.notes.append(f"layer {shown}: {UNSEEN}; compared on random numbers")
            try:
                with torch.no_grad():
                    output = isolated(layer, own_class(layer), *weights(layer))(x)
            except Exception as error:
                self.judge.add_broken(name, mode, "layer_output", next(self.judge.order), first_line(error))
                continue
            self._hook(name, mode)(layer, (x,), {}, output)
            if name in self._in_turn and name not in self._called_in_turn:
                self._compare_in_turn_once(name)
            if name not in self.judge.reached:
                self.judge.notes.append(f"layer {shown} could not be compared")

    def _note_own_forward(self, name: str, layer: Swapped) -> None:
        # Its own computation may not be linear, so only the network as a whole can be compared.
        self._note(
            f"layer {name or '(root)'} has a forward of its own ({type(layer).__name__}): "
            "it is compared within the network only"
        )

    def _note(self, note: str) -> None:
        if note not in self.judge.notes:
            self.judge.notes.append(note)

    def _hook(self, name: str, mode: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call(name, mode, layer, args, kwargs, output)
            if call is None:
                return
            self._guarded(call, lambda: self.judge.compare_output(call, output))
            if isinstance(output, Tensor) and output.numel():
                # The comparison runs later: checkpointing would count the tensors that it saves for backward as the
                # network's own.
                self._in_turn.setdefault(name, replace(call, input=call.input.to("meta")))
            if not isinstance(output, Tensor) or not self.backward:
                return
            if output.requires_grad:
                self._pending.setdefault(name, (call, output.detach()))
                output.register_hook(lambda gradient: self._compare_arriving(call, gradient))
            else:
                self._compare_own_gradient(name, call, output)

        return hook

    def _compare_arriving(self, call: LayerCall, gradient: Tensor) -> None:
        # Zeros show no error: gradients for a random one follow at the end.
        if bool(gradient.detach().any()):
            self._pending.pop(call.name, None)
            self._guarded(call, lambda: self.judge.compare_gradients(call, gradient))

    def _compare_own_gradient(self, name: str, call: LayerCall, output: Tensor) -> None:
        """Compares the gradients for a random gradient of the output, if none arrives (behind an argmax, without
        gradients)."""
        gradient = normal(output.shape, output.device, f"{self.seed} {name} {call.order}")
        self._guarded(call, lambda: self.judge.compare_gradients(call, gradient.to(output.dtype)))

    def _hook_changed(self, name: str, mode: str, way: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call(name, mode, layer, args, kwargs, output)
            if call is None or not isinstance(output, Tensor) or (name, mode) in self._seen_changed:
                return
            swapped, plain = call.layer, plain_class(call.layer)
            self._seen_changed.add((name, mode))
            call = replace(call, described=f"{way}, {call.described}", extra=True)

            def compare_with_pytorch() -> None:
                right = self.judge.output(call, output.detach(), call.output(plain))
                if not (right and self.backward):
                    return
                gradient = normal(output.shape, output.device, f"{self.seed} {name} changed").to(output.dtype)
                theirs, ours = (call.gradients(cls, gradient) for cls in (plain, own_class(swapped)))
                self.judge.gradients(call, gradient, ours, theirs)

            self._guarded(call, compare_with_pytorch)

        return hook

    def _hook_again(self, name: str, mode: str, way: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self._call(name, mode, layer, args, kwargs, output)
            if call is None:
                return
            call.described = f"{way}, {call.described}"

            def compare_what_differs() -> None:
                if not isinstance(output, Tensor) or not torch.equal(output, call.differentiable_output()):
                    self.judge.compare_output(call, output)

            if not self.judge.is_known(call, "layer_output"):
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
        """Returns the call that a hook observed; None if enough such calls were compared, or if it has no numbers."""
        assert isinstance(layer, SWAPPED)
        x = args[0] if args else kwargs["input"]
        size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            self._used.pop(name, None)
            self._note(
                f"layer {name or '(root)'} is called inside torch.vmap or a similar transform: that call is compared "
                "within the network only"
            )
            return None
        counts = self._counts.setdefault(name, Counter())
        signature = (x.shape, x.stride(), x.dtype, None if size is None else tuple(size))
        counts[signature] += 1
        counts["calls"] += 1
        if counts["calls"] > MAX_CALLS or counts[signature] > MAX_EQUAL_CALLS:
            return None
        weight, bias = self._used.pop(name) if name in self._used else weights(layer)
        kind = x.device.type
        kept = _kept(x, output, overwritable=torch.is_autocast_enabled(kind) or not weight.requires_grad)
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return LayerCall(
            name,
            layer,
            mode,
            next(self.judge.order),
            kept,
            weight.detach(),
            None if bias is None else bias.detach(),
            None if size is None else list(size),
            f"call {counts['calls']}, input " + "x".join(map(str, x.shape)),
            lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False),
            self.judge.tolerance,
            kept.stride() == x.stride(),
        )

    def _guarded(self, call: LayerCall, comparison: Callable[[], None]) -> None:
        # PyTorch's own layer may run out of memory here, which is not the swapped layer's fault.
        try:
            comparison()
        except Exception as error:
            self.judge.notes.append(
                f"{call.mode}: layer {call.name or '(root)'}, {call.described}, is not compared by itself: "
                f"{first_line(error)}"
            )


def _kept(x: Tensor, output: Any, *, overwritable: bool) -> Tensor:
    """Returns the input as it is until backward; autograd prevents that it is overwritten if the layer saved it."""
    lasting = not isinstance(output, Tensor) or not output.requires_grad or not overwritable
    return x.detach() if lasting else x.detach().clone()
