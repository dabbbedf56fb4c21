"""Decides which blocks a swap leaves out: those that are slower than PyTorch's modules or do not verify."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tconv_swap.cli.request import Progress, Request
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.blocks import BlockTimes, time_blocks
from tconv_swap.report.words import milliseconds, verdict_of
from tconv_swap.surgery import SwapPlan
from tconv_swap.verification import VerifyReport

_STAGES = {"forward": "evaluation", "step": "forward and backward"}


class BlockChoice:
    """The choice for one network. ``left``: by the dotted names of their norms, the blocks that are left out, and
    why."""

    def __init__(self, plan: SwapPlan) -> None:
        self.left: dict[str, str] = {}
        self._names = [block.name for block in plan.blocks if block.swap]
        self.times = BlockTimes()

    def leave_slower(
        self, original: nn.Module, swapped: nn.Module, inputs: Inputs, request: Request, progress: Progress
    ) -> bool:
        """Times the blocks by themselves, if the request times anything, and leaves out what is slower, beyond noise,
        in evaluation or in training; whether that is any, so that ``swapped`` is to be made again."""
        if not self._names:
            return False
        self.times = time_blocks(
            original,
            swapped,
            inputs,
            backward=request.backward,
            timed=request.benchmark,
            warmup=request.warmup,
            iters=request.iters,
            progress=progress,
        )
        slower: dict[str, list[str]] = {}
        for timed in self.times.comparisons:
            if verdict_of(timed.speedup, timed.interval) == "slower":
                ours, theirs = (milliseconds(t.median_ms) for t in (timed.swapped, timed.original))
                slower.setdefault(timed.name, []).append(
                    f"{_STAGES[timed.stage]} takes {ours} ms, PyTorch's {theirs} ms"
                )
        self.left |= {name: f"slower by itself: {'; '.join(why)}" for name, why in slower.items()}
        return bool(slower)

    def leave_failing(self, verification: VerifyReport) -> bool:
        """Leaves out the blocks whose own comparisons fail, or, where a network fails and none of them does, all that
        our kernels compute; whether that is any, so that there is something to verify again."""
        remaining = [name for name in self._remaining() if self._may_be_ours(name)]
        if verification.passed or not remaining:
            return False
        failing = {
            name: f"does not verify: {check.mode}, {check.kind.replace('_', ' ')} {check.name}: "
            f"error {check.error_swapped:.1e}, limit {check.limit:.1e}"
            for check in reversed(verification.checks)
            for name in remaining
            if not check.passed and check.name in (name, *_buffers(name))
        }
        why = "the network does not verify with it, and no block by itself fails"
        self.left |= failing or dict.fromkeys(remaining, why)
        return True

    def notes(self, device: torch.device) -> list[str]:
        """Returns what users should know about the times, and about blocks that our kernels do not compute on
        these inputs."""
        others = [name for name in self._remaining() if not self._may_be_ours(name)]
        if not others:
            return self.times.notes
        if device.type == "cuda":
            return [*self.times.notes, f"on these inputs PyTorch's modules compute {', '.join(others)}"]
        return [
            *self.times.notes,
            f"on {device.type} PyTorch's modules compute norms and activations; our kernels for {len(others)} of them, "
            "on CUDA alone, were neither verified nor timed",
        ]

    def _remaining(self) -> Iterator[str]:
        return (name for name in self._names if name not in self.left)

    def _may_be_ours(self, name: str) -> bool:
        return name in self.times.computed or not self.times.complete


def _buffers(norm: str) -> tuple[str, ...]:
    return tuple(f"{norm}.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
