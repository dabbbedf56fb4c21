"""Shared by the tests of the command line: a network in a file, and calls of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import tconv_swap
from tconv_swap.cli import app

REPOSITORY = Path(tconv_swap.__file__).parents[1]


def generator() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ConvTranspose2d(4, 3, 4), nn.BatchNorm2d(3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, 2)
    )


def saved_generator() -> Path:
    """Saves a generator in the working directory."""
    torch.save(generator(), "model.pt")
    return Path("model.pt")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def swap(*arguments: object) -> Any:
    """Calls `run` without the timing, on the CPU."""
    return run(*arguments, "--no-benchmark", "--device", "cpu")


def wrong(input: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    return nn.functional.conv_transpose2d(input, weight * 1.001, *arguments)


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tconv_swap", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tconv_swap", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # If the tests were started in the background, SIGINT is ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
