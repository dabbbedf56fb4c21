"""Makes the original and the swapped network of a request."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from tconv_swap.cli.request import NetworkRequest, RequestError
from tconv_swap.computed import deep_copy
from tconv_swap.files.fileformat import first_line
from tconv_swap.memory import free_bytes
from tconv_swap.surgery import SwapPlan, SwapWarning, plan_swap, swap_layers, unswap_layers

#: No block is left out.
NO_BLOCKS: Mapping[str, str] = MappingProxyType({})


def original_and_swapped(
    model: nn.Module, request: NetworkRequest, device: torch.device, left_out: Mapping[str, str] = NO_BLOCKS
) -> tuple[nn.Module, nn.Module]:
    """Returns the original and the swapped network on `device`, with the same parameters. The network of the file may
    be swapped already.

    The weights are in memory twice: as the file has them, and here. They are there only once if they are already on
    a GPU that has no room for a copy. (Verification and timing do not change parameters.)

    Raises:
        RequestError: the network cannot be moved to `device`.
    """
    original = deep_copy(model, _sharing_parameters(model) if _leaves_no_room(model, device, request) else {})
    try:
        original.to(device=device, dtype=request.dtype)
        if request.channels_last:
            original.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:  # no memory, the meta device; integer dtypes
        raise RequestError(f"the network cannot be moved to {device} ({first_line(error)})") from error
    swapped = swap_for(deep_copy(original, _sharing_parameters(original)), request, left_out)
    return unswap_layers(original), swapped


def _sharing_parameters(model: nn.Module) -> dict[int, object]:
    """Returns a memo for `deep_copy` that makes the copy share the parameters."""
    return {id(parameter): parameter for parameter in model.parameters()}


def _leaves_no_room(model: nn.Module, device: torch.device, request: NetworkRequest) -> bool:
    """Returns whether the network is already on this GPU, in the dtype and layout in which it runs, and a copy would
    not fit beside it."""
    if device.type != "cuda" or request.dtype is not None or request.channels_last:
        return False
    held = list(model.parameters())
    free = free_bytes(device)
    size = sum(parameter.numel() * parameter.element_size() for parameter in held)
    return (
        free is not None
        and size > free / 2
        and {p.device for p in held} == {torch.empty(0, device=device).device}
    )


def plan_for(model: nn.Module, request: NetworkRequest, left_out: Mapping[str, str] = NO_BLOCKS) -> SwapPlan:
    """Returns the plan of the swap that is requested; `left_out`: the reasons, by the names of the blocks' norms."""
    return plan_swap(
        model,
        include=request.include or None,
        exclude=request.exclude,
        include_1d=request.include_1d,
        fuse=request.fuse,
        leave_blocks=left_out,
    )


def swap_for(model: nn.Module, request: NetworkRequest, left_out: Mapping[str, str]) -> nn.Module:
    """Swaps the layers in place as requested, and returns the network."""
    with warnings.catch_warnings():
        # The report shows the plan, which says the same as the warning.
        warnings.simplefilter("ignore", SwapWarning)
        return swap_layers(
            model,
            include=request.include or None,
            exclude=request.exclude,
            backend=request.backend,
            include_1d=request.include_1d,
            fuse=request.fuse,
            leave_blocks=left_out,
        )
