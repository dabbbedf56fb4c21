"""Runs DCGAN with blocks: on a GPU, one kernel computes a batch norm and the activation behind it.

The list says for each norm whether it is computed with an activation. Without a GPU, PyTorch's modules compute both.

python examples/blocks.py
"""

from __future__ import annotations

from collections.abc import Sequence

import common
import torch
from dcgan import LATENT, build_generator, train

import tconv_swap


def main(argv: Sequence[str] | None = None) -> common.Outcome:
    args = common.arguments(__doc__, argv, steps=5, size=64, width=64, batch=16)
    torch.manual_seed(0)
    original = build_generator(args.size, args.width).to(args.device)
    latent = torch.randn(args.batch, LATENT, 1, 1, device=args.device)

    plan = tconv_swap.plan_swap(original, fuse="blocks")
    swapped = tconv_swap.swap_layers(original, fuse="blocks", inplace=False)
    verification = tconv_swap.verify(original, swapped, latent)
    timing = tconv_swap.benchmark(original, swapped, latent, warmup=args.warmup, iters=args.iters)

    losses = {"original": train(original, args), "swapped": train(swapped, args)}
    outcome = common.summarise(plan, verification, timing, losses)
    common.save(
        args, "blocks", outcome, latent, lambda: {"original": original(latent), "swapped": swapped(latent)}
    )
    return outcome


if __name__ == "__main__":
    main()
