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
    """The choice for one network. ``left_out``: the reasons, by the dotted names of the blocks' norms."""

    def __init__(self, plan: SwapPlan) -> None:
        self.left_out: dict[str, str] = {}
        self._names = [block.name for block in plan.blocks if block.swap]
        self.times = BlockTimes()

    def leave_slower(
        self, original: nn.Module, swapped: nn.Module, inputs: Inputs, request: Request, progress: Progress
    ) -> bool:
        """Times each block by itself, if the request times anything. Leaves out blocks that are slower, beyond noise,
        in evaluation or in training. Returns whether there are any, so that ``swapped`` has to be made again."""
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
        self.left_out |= {name: f"slower by itself: {'; '.join(why)}" for name, why in slower.items()}
        return bool(slower)

    def leave_failing(self, verification: VerifyReport) -> bool:
        """Leaves out the blocks whose own comparisons fail; if a network fails and none of its blocks does, all that
        our kernels compute. Returns whether there are any, so that the network has to be verified again."""
        remaining = [name for name in self._remaining() if self._may_be_ours(name)]
        if verification.passed or not remaining:
            return False
        failing = {
            name: f"does not verify: {check.mode}, {check.kind.replace('_', ' ')} {check.name}: "
            f"error {check.error_swapped:.1e}, limit {check.limit:.1e}"
            for check in reversed(verification.checks)
            for name in remaining
            # Outputs and inputs of the network may have the names of blocks.
            if not check.passed
            and check.kind not in ("output", "grad_input")
            and check.name in (name, *_buffers(name))
        }
        why = "the network does not verify with it, and no block by itself fails"
        self.left_out |= failing or dict.fromkeys(remaining, why)
        return True

    def notes(self, device: torch.device) -> list[str]:
        """Returns notes for the user on the times, and on blocks that our kernels do not compute on these inputs."""
        others = [name for name in self._remaining() if not self._may_be_ours(name)]
        if not others:
            return self.times.notes
        if device.type == "cuda":
            return [*self.times.notes, f"on these inputs PyTorch's modules compute {', '.join(others)}"]
        return [
            *self.times.notes,
            f"on {device.type} PyTorch's modules compute norms and activations; our kernels for {len(others)} of them, "
            "on CUDA only, were neither verified nor timed",
        ]

    def _remaining(self) -> Iterator[str]:
        return (name for name in self._names if name not in self.left_out)

    def _may_be_ours(self, name: str) -> bool:
        return name in self.times.computed or not self.times.complete


def _buffers(norm: str) -> tuple[str, ...]:
    return tuple(f"{norm}.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
