"""Verifies that a swapped network computes what the original computes, forward and backward: a proof that can fail.

Both networks run on the same inputs, random numbers and buffers. If possible, a float64 run of the original is the
truth, and the error of the swapped network is compared with the original's. If that is not enough, the effect of
rounding in the transposed convolutions is measured by adding some: a right swap must not fail because the original
happens to be exact, or because a gradient is zero except for rounding. During these runs, `layers` compares every
swapped layer by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import nn

from tconv_swap.inputs import Inputs
from tconv_swap.verification.blocks import fused_modules
from tconv_swap.verification.compare import Tolerance
from tconv_swap.verification.layers import swapped_layers
from tconv_swap.verification.repeated import CALLS_IN_TURN
from tconv_swap.verification.report import Check, VerifyReport
from tconv_swap.verification.runs import CHANGED, Runner, Subject, devices_of, untouched
from tconv_swap.verification.session import Session
from tconv_swap.verification.weights import differing_weights

__all__ = ["Check", "VerifyReport", "verify"]

AUTOCAST_DTYPES = (torch.float16, torch.bfloat16)


def verify(
    original: nn.Module,
    swapped: nn.Module,
    inputs: Any,
    *,
    modes: Sequence[Literal["eval", "train"]] = ("eval", "train"),
    backward: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    reference: Literal["float64", "original"] | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    require_swapped: bool = True,
    require_layouts: bool = True,
    is_compiled: bool = False,
) -> VerifyReport:
    """Compares outputs, gradients, buffers and every swapped layer of `swapped` with those of `original`.

    Restores both networks (buffers, gradients, training flags, tensors such as the `weight` that
    `torch.nn.utils.weight_norm` computes) and all random states. Runs under the caller's autocast state; with
    `autocast`, also under that one. The same arguments give the same report, which says what was tried and what was
    not.

    Args:
        original: the network before the swap; may share its parameters with `swapped`.
        swapped: the network after `swap_layers`.
        inputs: whatever `Inputs.of` takes, on the networks' device.
        modes: the modes in which the networks are compared; a mode that the original cannot run is noted.
        backward: whether gradients are compared too: those of every floating-point input and of every parameter that
            requires grad, for random gradients of the outputs.
        atol, rtol: replace all automatic limits: `|value - reference| <= atol + rtol * |reference|` for every element;
            one that is not given is 0.
        reference: `"float64"`: anything that prevents a float64 run is a failure. `"original"`: the original is the
            truth. None: float64 if memory and operators allow it.
        autocast: `torch.float16` or `torch.bfloat16`: also compares everything under `torch.autocast` of that dtype.
        seed: the seed of the random numbers of the networks and the output gradients.
        require_swapped: whether it is a failure that `swapped` has no layer of ours; False allows the original, run in
            another way.
        require_layouts: whether it is a failure that an output has another memory format than the original's.
        is_compiled: whether `swapped` is compiled. A compiler may round every operator differently, not only our
            layers: while a result is in doubt, runs of the original with rounding added everywhere show what that does.

    Raises:
        TypeError: `Inputs.of` does not accept `inputs`.
        Exception: memory ran out; the exception is the one that was raised.
        ValueError: an unknown mode, reference or dtype of autocast, no mode at all, or a tolerance that is negative,
            infinite or NaN.
    """
    if not modes or (unknown := [mode for mode in modes if mode not in ("eval", "train")]):
        raise ValueError(f"modes must be some of 'eval' and 'train', not {unknown if modes else modes!r}")
    if reference not in (None, "float64", "original"):
        raise ValueError(f"reference must be 'float64', 'original' or None, not {reference!r}")
    if autocast is not None and autocast not in AUTOCAST_DTYPES:
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, not {autocast!r}")
    if not all(0 <= tolerance < math.inf for tolerance in (atol or 0, rtol or 0)):
        raise ValueError(f"atol and rtol must be finite and not negative, but are {atol} and {rtol}")
    tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
    inputs = Inputs.of(inputs)
    report = VerifyReport()
    layers = swapped_layers(swapped)
    if require_swapped and not layers and not fused_modules(swapped):
        report.failures.append("nothing is swapped: the network has no layer of tconv_swap")
    if both := sorted([*swapped_layers(original), *fused_modules(original)]):
        report.failures.append(
            f"the original holds swapped layers itself ({', '.join(name or '(root)' for name in both)}): "
            "nothing to compare with; swap with inplace=False"
        )
    if len({type(network).__name__ == "OptimizedModule" for network in (original, swapped)}) > 1:
        report.failures.append(
            "one of the networks is compiled, and its parameters have other names: verify before torch.compile"
        )
    if any(_is_shared_by_processes(network) for network in (original, swapped)):
        report.failures.append(
            "a network is in DistributedDataParallel, whose backward pass waits for other processes: verify before it "
            "is wrapped"
        )
    if report.failures:
        return report
    report.failures += differing_weights(original, swapped)
    devices = devices_of(original, swapped, inputs)
    names = list(layers)
    before = Subject(original, changing=names)
    after, runner = Subject(swapped, before, changing=names), Runner(inputs, devices, seed)
    kinds = sorted({device.type for device in devices if device.type != "meta"})
    with untouched([before, after], devices):
        # The caller's own autocast state comes first.
        for dtype in dict.fromkeys((None, autocast)):
            under = "" if dtype is None else f" under {_name(dtype)} autocast"
            with ExitStack() as stack:
                for kind in kinds if dtype is not None else ():
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                found = VerifyReport()
                session = Session(
                    found,
                    before,
                    after,
                    runner,
                    tolerance,
                    reference,
                    backward,
                    under,
                    require_layouts,
                    is_compiled,
                )
                verified = session.run(modes)
            _record_tried(found, session, verified, under)
            report.add(found)
        on = [_name(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    if on:
        report.tried.append(f"under the caller's {on[0]} autocast")
    elif autocast is None:
        report.not_tried.append("under autocast")
    return report


def _is_shared_by_processes(network: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in network.modules())


def _record_tried(report: VerifyReport, session: Session, verified: list[str], under: str) -> None:
    """Writes into the report what was tried, and which of the usual ways were not."""
    if not verified:
        return
    if under:
        report.tried.append(under.strip())
        return
    report.tried += [f"{mode} mode" for mode in verified]
    report.not_tried += [f"{mode} mode" for mode in ("eval", "train") if mode not in verified]
    ways = session.ways if session.gradients else ["without gradients", *session.ways]
    (report.tried if session.gradients else report.not_tried).append("gradients")
    for way in ("without gradients", "under inference_mode", CHANGED):
        (report.tried if way in ways else report.not_tried).append(way)
    report.tried.append(f"{CALLS_IN_TURN} calls of each layer in turn")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
