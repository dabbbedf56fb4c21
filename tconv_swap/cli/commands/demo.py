"""`tconv-swap demo` shows a swap on a network that the command builds itself."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from tconv_swap.cli import demo_network, options
from tconv_swap.cli.commands.swap import run_request
from tconv_swap.cli.declare import expanded
from tconv_swap.cli.outcome import ExitCode, Failure, Output, check_targets, finish
from tconv_swap.cli.request import Request
from tconv_swap.files.fileformat import first_line
from tconv_swap.files.saving import SaveError


@dataclass(frozen=True)
class DemoRequest:
    """Says where the demonstration writes its files, and what it does."""

    directory: options.Directory = None
    device: options.Device = None
    backward: options.Backward = True
    benchmark: options.Benchmark = True
    seed: options.Seed = 0
    warmup: options.Warmup = None
    iters: options.Iters = None


@expanded()
def demo(settings: DemoRequest, output: Output) -> NoReturn:
    """Build and save a DCGAN generator, then run what `tconv-swap dcgan.pt --out dcgan-fast.pt` runs."""
    device = settings.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory = settings.directory
    try:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="tconv-swap-demo-"))
        directory.mkdir(parents=True, exist_ok=True)
        model, out = directory / "dcgan.pt", directory / "dcgan-fast.pt"
        check_targets(output, [("--dir", model)], ("--dir", out))
        demo_network.write_generator(model, settings.seed, output.invocation.finished.append)
    except (OSError, SaveError) as error:
        finish(Failure(ExitCode.CANNOT_WRITE, f"{directory}: {first_line(error)}"), output)
    request = Request(
        model=model,
        out=out,
        input_shapes=(demo_network.input_shape(device),),
        device=device,
        backward=settings.backward,
        benchmark=settings.benchmark,
        seed=settings.seed,
        warmup=settings.warmup,
        iters=settings.iters,
    )
    run_request(request, output)
