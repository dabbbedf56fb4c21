"""Other numbers in the same parameters: what a layer kept of the old ones then shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.layer import SWAPPED


def change_weights(module: nn.Module, layers: Sequence[str]) -> None:
    """Writes other numbers into every floating-point parameter of the named layers, in place.

    Through `.data`, which leaves the version counter as it is: what is kept by that counter is caught too. Only a
    frozen layer (`tconv_swap.freeze`), which promises to see an ordinary write alone, gets an ordinary one.
    """
    modules = dict(module.named_modules())
    seen: set[int] = set()
    for name in layers:
        layer = modules.get(name)
        if layer is None:
            continue
        frozen = isinstance(layer, SWAPPED) and layer.tconv_is_frozen()
        for parameter in layer.parameters():
            if id(parameter) in seen or is_lazy(parameter) or not _can_be_written(parameter):
                continue
            seen.add(id(parameter))
            with torch.inference_mode(parameter.is_inference()), torch.no_grad():
                (parameter if frozen else parameter.data).copy_(_other(parameter))


def _other(parameter: Tensor) -> Tensor:
    """Of the same size, but with no symmetry to the old: neither a sign nor a scale that a norm would hide.

    A vector (a bias) moves by 1, so that it is seen beside the sum that it is added to.
    """
    value = parameter.detach()
    wide = value.double() if value.dtype == torch.float64 else value.float()
    size = wide.square().mean().sqrt()
    shift = 0.25 * torch.where(size > 0, size, torch.ones_like(size)) if wide.dim() > 1 else 1.0
    return wide.roll(1) * 0.75 + shift


def _can_be_written(parameter: Tensor) -> bool:
    """Expanded tensors share elements, and PyTorch refuses to write to them; other layouts have no `roll`."""
    return (
        parameter.is_floating_point()
        and parameter.layout == torch.strided
        and not parameter.is_meta
        and not any(
            stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
    )
