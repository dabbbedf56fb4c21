"""Shared by the tests of the command line: a network in a file, and calls of the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from forked import CAPTURED, Forked, run_python, start_python
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


def finished(*arguments: object, stdout: int = CAPTURED, stderr: int = CAPTURED, **more: str) -> Any:
    """Runs the command in a process of its own. Returns a subprocess.CompletedProcess."""
    words = map(str, arguments)
    return run_python("-m", "tconv_swap", *words, env=environment() | more, stdout=stdout, stderr=stderr)


def process(*arguments: object, **more: str) -> Forked:
    """Starts the command in a process of its own."""
    return start_python("-m", "tconv_swap", *map(str, arguments), env=environment() | more)
