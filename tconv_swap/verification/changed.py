"""Writes other numbers into the same parameters, so that values which a layer kept of the old ones become visible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tconv_swap.layer import SWAPPED


def change_weights(module: nn.Module, layers: Sequence[str]) -> None:
    """Writes other numbers into every floating-point parameter of the named layers, in place.

    It writes through `.data`, which leaves the version counter unchanged, so that a layer which relies on this counter
    is caught too. Only a frozen layer (`tconv_swap.freeze`), which promises to notice ordinary writes only, gets an
    ordinary write.
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
    """Returns numbers of the same size without a symmetry to the old ones: a norm would hide a sign or a scale.

    A vector (a bias) changes by 1, so that the change is visible beside the sum that it is added to.
    """
    value = parameter.detach()
    wide = value.double() if value.dtype == torch.float64 else value.float()
    size = wide.square().mean().sqrt()
    shift = 0.25 * torch.where(size > 0, size, torch.ones_like(size)) if wide.dim() > 1 else 1.0
    return wide.roll(1) * 0.75 + shift


def _can_be_written(parameter: Tensor) -> bool:
    """Returns whether a parameter can be written: PyTorch refuses this for expanded tensors, and other layouts have no
    `roll`."""
    return (
        parameter.is_floating_point()
        and parameter.layout == torch.strided
        and not parameter.is_meta
        and not any(
            stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
    )
