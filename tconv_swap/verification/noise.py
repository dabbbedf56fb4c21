"""Adds the rounding that some layers may do to their outputs and to the gradients that reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_Generators = dict[torch.device, torch.Generator]


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, amplitude: float, draw: Callable[[Tensor], Tensor]) -> Tensor:
        return _with_rounding(value, amplitude, draw)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.amplitude, ctx.draw = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _with_rounding(gradients[0], ctx.amplitude, ctx.draw), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, value: Tensor, amplitude: float, draw: Any) -> tuple[Tensor, Any]:
        """Adds separate noise to every sample."""
        return _Jitter.apply(value, amplitude, draw), in_dims[0]  # type: ignore[no-untyped-call]


def _with_rounding(value: Tensor, amplitude: float, draw: Callable[[Tensor], Tensor]) -> Tensor:
    wide = value.double() if value.dtype == torch.float64 else value.float()
    scale = torch.hypot(wide, wide.square().mean().sqrt())
    return torch.addcmul(wide, scale, draw(wide), value=amplitude).to(value.dtype)


@contextmanager
def with_rounding(
    module: nn.Module,
    layers: list[str],
    amplitude: Callable[[nn.Module, Tensor], float],
    seed: int,
    mean_amplitude: Callable[[int, torch.dtype], float] | None = None,
) -> Iterator[None]:
    """Changes the outputs of the named layers, and the gradients that reach them, by as much as rounding may.

    The network's results then show how much the network itself amplifies rounding in these layers.

    Args:
        mean_amplitude: the error of a mean of so many elements, relative to their size; the running means of norms are
            changed by it. None: they are not.
    """
    modules = dict(module.named_modules())
    generators: _Generators = {}

    def draw(wide: Tensor) -> Tensor:
        place = wide.device if wide.device.type in ("cpu", "cuda") else torch.device("cpu")
        if place not in generators:
            generators[place] = torch.Generator(place).manual_seed(seed)
        noise = torch.rand(wide.shape, generator=generators[place], device=place, dtype=wide.dtype)
        return (noise * 2 - 1).to(wide.device)

    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0:
            return output
        if mean_amplitude is not None and isinstance(layer, _NormBase) and layer.training and args:
            _jitter_running_mean(layer, args[0].detach(), mean_amplitude, draw)
        return _Jitter.apply(output, amplitude(layer, output), draw)  # type: ignore[no-untyped-call]

    handles = [modules[n].register_forward_hook(hook, prepend=True) for n in layers if n in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _jitter_running_mean(
    norm: _NormBase,
    input: Tensor,
    amplitude: Callable[[int, torch.dtype], float],
    draw: Callable[[Tensor], Tensor],
) -> None:
    """Changes the running mean as another order of the sum may: relative to the elements, which may cancel."""
    mean = norm.running_mean
    if mean is None or not input.numel():
        return
    is_one = isinstance(norm, _InstanceNorm) and input.dim() == norm._get_no_batch_dim()
    channels = input.transpose(0, 0 if is_one else 1).reshape(mean.numel(), -1)
    elements = channels.float().square().mean(1).sqrt().to(mean.dtype)
    batches = norm.num_batches_tracked
    share = norm.momentum if norm.momentum is not None else 1 / int(batches) if batches is not None else 0.0
    # Through `data`: a backward pass has saved the mean, but does not use it in train mode.
    mean.data += share * amplitude(channels.shape[1], input.dtype) * elements * draw(elements)
