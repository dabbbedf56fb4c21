"""Finds the first module whose output differs between two networks, after something has failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tconv_swap.verification import compare
from tconv_swap.verification.compare import Norms
from tconv_swap.verification.tree import flatten

# (dotted name, which call of it, path in its output)
Place = tuple[str, int, str]


@contextmanager
def _listening(module: nn.Module, listen: Callable[[Place, Tensor], None]) -> Iterator[None]:
    """Passes on every floating-point tensor that a module without children returns, at the moment it returns."""
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[..., None]:
        def heard(_: nn.Module, args: Any, output: Any) -> None:
            calls[name] += 1
            for path, tensor in flatten(output).tensors.items():
                # A tensor of torch.vmap cannot be used after the transform has ended.
                wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
                if tensor.is_floating_point() and not wrapped:
                    listen((name, calls[name], path), tensor.detach())

        return heard

    leaves = {name: m for name, m in module.named_modules() if not any(m.children())}
    handles = [m.register_forward_hook(hook(name)) for name, m in leaves.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Trace:
    """The outputs of a network's modules, kept on the CPU, and how far those of other runs are from them."""

    def __init__(self) -> None:
        self.outputs: dict[Place, Tensor] = {}
        self.noise: dict[Place, Norms] = {}
        self.divergence: str | None = None

    def record(self, module: nn.Module) -> Any:
        """Keeps the outputs of the modules that run inside."""

        def keep(place: Place, tensor: Tensor) -> None:
            self.outputs[place] = tensor.cpu().clone()

        return _listening(module, keep)

    def widen(self, module: nn.Module) -> Any:
        """Counts the differences of a run inside as noise."""

        def measure(place: Place, tensor: Tensor) -> None:
            kept = self.outputs.get(place)
            if kept is not None and kept.shape == tensor.shape:
                norms = compare.distance(tensor.cpu(), kept, kept)
                self.noise[place] = norms.larger(self.noise.get(place, Norms()))

        return _listening(module, measure)

    def follow(self, module: nn.Module) -> Any:
        """Sets `divergence` to where a run inside first differs by more than noise."""
        kinds = {name: type(m).__name__ for name, m in module.named_modules()}

        def compared(place: Place, tensor: Tensor) -> None:
            kept = self.outputs.get(place)
            if self.divergence is not None or kept is None:
                return
            name = f"{place[0] or '(root)'} ({kinds[place[0]]})"
            if wrong := compare.mismatch(tensor.cpu(), kept):
                self.divergence = f"{name}: its output {wrong}"
                return
            error = compare.difference(tensor.cpu(), kept, kept)
            floor = compare.allowed_without_error(compare.roundoff(kept.dtype, tensor.device), kept.numel())
            allowed = self.noise.get(place, Norms()).times(4.0).larger(floor)
            if not (error.norms.maximum <= allowed.maximum and error.norms.l2 <= allowed.l2):
                where = error.describe(kept.shape)
                self.divergence = f"{name}: its output is {error.norms.maximum:.2e} (max) off; {where}"

        return _listening(module, compared)
