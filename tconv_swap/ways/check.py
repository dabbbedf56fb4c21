"""Checks that a network that runs in a way computes what it computes today."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tconv_swap.computed import deep_copy
from tconv_swap.inputs import Inputs, model_device
from tconv_swap.preserving import preserved
from tconv_swap.verification import VerifyReport, verify
from tconv_swap.ways.run import Running, WayWarning
from tconv_swap.ways.way import PYTORCH, Way, in_layout, inputs_in_layout

#: The tolerance between two layouts in float64: far above rounding, far below any other difference.
LAYOUT_ATOL, LAYOUT_RTOL = 1e-9, 1e-6


def verify_way(today: nn.Module, running: Running, inputs: Inputs, *, seed: int = 0) -> VerifyReport:
    """Compares a network that runs in a way with what it computes today, in the mode that the way was built for.

    Compares outputs, gradients and buffers as `tconv_swap.verify` does, against float64 if possible. PyTorch's own
    operators round differently in another layout. The error of a way in channels_last is therefore compared with that
    of today's network in channels_last; a comparison in float64, where rounding is negligible, shows that these two are
    the same network.

    Args:
        today: the network with PyTorch's layers, in its own layout.
        running: the same network, running in a way.
        inputs: the inputs of one call.
        seed: the seed of the random numbers.
    """
    mode: Literal["train", "eval"] = "train" if running.for_training else "eval"
    backward, layout = running.for_training, running.way.layout
    failures: list[str] = []
    if layout == "channels_last":
        laid_out = in_layout(deep_copy(today), layout)
        failures = _layout_failures(today, laid_out, inputs, mode, seed)
        today, inputs = laid_out, inputs_in_layout(inputs, layout)
    before = running.calls
    with warnings.catch_warnings():
        # Calls that the way was not built for run eagerly; they are verified too.
        warnings.simplefilter("ignore", WayWarning)
        report = verify(
            today,
            running,
            inputs,
            modes=(mode,),
            backward=backward,
            seed=seed,
            require_swapped=False,
            is_compiled=running.way.compiled,
        )
    running.warned = False
    if running.calls == before:
        failures.append(f"{mode}: no call of the verification ran in the way {running.way}")
    report.failures += failures
    return report


def _layout_failures(
    today: nn.Module, laid_out: nn.Module, inputs: Inputs, mode: Literal["train", "eval"], seed: int
) -> list[str]:
    """Returns how the network differs in another layout; empty if it does not, or if it has no float64 form, so that
    nothing can be compared."""
    first, second = (
        _deterministic(deep_copy(one, dtype=torch.float64).double()) for one in (today, laid_out)
    )
    wide = inputs.to(dtype=torch.float64)
    running = Running(second, Way(PYTORCH.name, "channels_last"), for_training=mode == "train")
    with torch.autocast(model_device(today).type, enabled=False):
        report = verify(
            first,
            running,
            wide,
            modes=(mode,),
            backward=mode == "train",
            atol=LAYOUT_ATOL,
            rtol=LAYOUT_RTOL,
            reference="original",
            seed=seed,
            require_swapped=False,
            require_layouts=False,
        )
    lines = report.failures if report.checks else []
    if lines and mode == "train" and _draws(first, wide):
        # Random numbers are drawn in memory order, so another layout gets other numbers at the same place.
        return _layout_failures(today, laid_out, inputs, "eval", seed)
    return [f"in channels_last it is another network: {line}" for line in lines]


def _deterministic(network: nn.Module) -> nn.Module:
    """Returns `network` itself without dropout: its mask is drawn in memory order."""
    for module in network.modules():
        if isinstance(module, _DropoutNd):
            object.__setattr__(module, "forward", _as_it_is)
    return network


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _draws(network: nn.Module, inputs: Inputs) -> bool:
    """Returns whether a forward pass in train mode draws random numbers on the network's device."""
    device = model_device(network)

    def state() -> Tensor:
        return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    with preserved(network), torch.no_grad():
        before = state()
        inputs.map(torch.clone)(network.train())
        return not torch.equal(before, state())
