"""Where two networks part: the first module whose output differs, looked for once something has failed."""

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
    """Hands over every floating-point tensor that a module without children returns, as it is returned."""
    calls: Counter[str] = Counter()

    def hook(name: str) -> Callable[..., None]:
        def heard(_: nn.Module, args: Any, output: Any) -> None:
            calls[name] += 1
            for path, tensor in flatten(output).tensors.items():
                # Inside of torch.vmap a tensor is no longer one once the transform is over.
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
        self.parted: str | None = None

    def record(self, module: nn.Module) -> Any:
        """Keeps what the modules return within."""

        def keep(place: Place, tensor: Tensor) -> None:
            self.outputs[place] = tensor.cpu().clone()

        return _listening(module, keep)

    def widen(self, module: nn.Module) -> Any:
        """What a run within differs by is noise."""

        def measure(place: Place, tensor: Tensor) -> None:
            kept = self.outputs.get(place)
            if kept is not None and kept.shape == tensor.shape:
                norms = compare.distance(tensor.cpu(), kept, kept)
                self.noise[place] = norms.larger(self.noise.get(place, Norms()))

        return _listening(module, measure)

    def follow(self, module: nn.Module) -> Any:
        """Says in `parted` where a run within first differs by more than noise."""
        kinds = {name: type(m).__name__ for name, m in module.named_modules()}

        def compared(place: Place, tensor: Tensor) -> None:
            kept = self.outputs.get(place)
            if self.parted is not None or kept is None:
                return
            name = f"{place[0] or '(root)'} ({kinds[place[0]]})"
            if wrong := compare.mismatch(tensor.cpu(), kept):
                self.parted = f"{name}: its output {wrong}"
                return
            error = compare.difference(tensor.cpu(), kept, kept)
            floor = compare.allowed_without_error(compare.roundoff(kept.dtype, tensor.device), kept.numel())
            allowed = self.noise.get(place, Norms()).times(4.0).larger(floor)
            if not (error.norms.maximum <= allowed.maximum and error.norms.l2 <= allowed.l2):
                where = error.describe(kept.shape)
                self.parted = f"{name}: its output is {error.norms.maximum:.2e} (max) off; {where}"

        return _listening(module, compared)
