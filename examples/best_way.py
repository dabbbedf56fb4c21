"""Finds the best way to run a DCGAN generator: layouts, CUDA graphs, torch.compile.

It times the ways, verifies the fastest, and trains with it. The first table is for a forward pass, the second for a
training step; then come the losses of a network that runs as today, and of one that runs in its best way, from the same
weights.

python examples/best_way.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import results
import torch
from common import arguments
from dcgan import build_generator
from torch import Tensor, nn

import tconv_swap


def train(network: nn.Module, call: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> list[float]:
    """Returns the losses of an optimizer's steps; `call` runs `network`."""
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-4)
    losses = []
    for noise in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = (call(noise) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Outcome(NamedTuple):
    """Both reports, and the losses of every step: today's and the best way's."""

    serving: tconv_swap.WaysReport
    training: tconv_swap.WaysReport
    losses: list[tuple[float, float]]


def main(argv: Sequence[str] | None = None) -> Outcome:
    options = arguments(__doc__, argv, steps=5, size=64, batch=16, width=16, with_ways=True)
    torch.manual_seed(0)
    network = build_generator(options.size, options.width).to(options.device)
    batches = [torch.randn(options.batch, 100, 1, 1, device=options.device) for _ in range(options.steps)]
    # Compiling takes a minute on a CPU, so only the layouts are tried there.
    layouts = ["ours", "pytorch+channels_last", "ours+channels_last"]
    ways = options.ways or (None if options.device.startswith("cuda") else layouts)
    serving = tconv_swap.optimize(network, batches[0], ways=ways)
    print(serving.report)
    training = tconv_swap.optimize(network, batches[0], training=True, ways=ways)
    print(training.report)
    eager = copy.deepcopy(network).train()
    today = train(eager, eager, batches)
    best = train(training.model, training.run, batches)
    losses = list(zip(today, best, strict=True))
    for step, (before, after) in enumerate(losses, start=1):
        print(f"step {step}: loss {before:.6f} today, {after:.6f} as {training.run.way}")
    if options.save is not None:
        both = tconv_swap.WaysReport(
            [*serving.report.stages, *training.report.stages],
            training.report.environment,
            training.report.method,
        )
        results.save_report(
            options.save / "best_way.md",
            "examples/best_way.py",
            tconv_swap.plan_swap(eager),
            batches[0],
            both.chosen.verification,
            ways=both,
        )
        with torch.no_grad():
            rows = {"today": eager(batches[0]), "best way": training.model(batches[0])}
        results.save_picture(options.save / "best_way.png", rows)
    return Outcome(serving.report, training.report, losses)


if __name__ == "__main__":
    main()
