"""Defines the options of all sweeps, the part of the tasks that one of several GPUs measures, and the current GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.kernels import H200
from benchmarks.layers import positive
from tconv_swap.cuda import call
from tconv_swap.kernels.problem import Device

TaskT = TypeVar("TaskT")


@dataclass(frozen=True, slots=True)
class Part:
    """Every ``count``-th task, beginning with the ``index``-th: the share of one of several GPUs."""

    index: int = 0
    count: int = 1

    @classmethod
    def of_text(cls, text: str) -> Part:
        """Returns the part for a text such as ``"0/2"``.

        Raises:
            ValueError: it does not have this form, or there is no such part.
        """
        index, count = map(int, text.split("/"))
        if not 0 <= index < count:
            raise ValueError(f"no part {text}")
        return cls(index, count)

    def of(self, tasks: Sequence[TaskT]) -> Sequence[TaskT]:
        return tasks[self.index :: self.count]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def current_gpu() -> Device | None:
    """Returns what planning knows about the current GPU; None if there is none."""
    return call.device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else None


def gpu_of(options: argparse.Namespace) -> Device | None:
    """Returns what planning knows about the GPU to measure on, or to prepare for; None if there is none."""
    return H200 if options.prepare else current_gpu()


def make_parser(name: str, description: str, seconds: float) -> argparse.ArgumentParser:
    """Returns a parser with the options that all sweeps have.

    Args:
        name: the name of the benchmark's module.
        description: the text of its help.
        seconds: the default time limit.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog="Exit codes: 0 all was measured, 1 time ran out or something failed, 2 usage or no GPU.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="the file for the results")
    parser.add_argument("--resume", action="store_true", help="continue from the results in the file")
    parser.add_argument(
        "--report",
        action="store_true",
        help="measure nothing: print the conclusions from the file (needs no GPU)",
    )
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: write the rows of these files, the parts of one run, to --json",
    )
    parser.add_argument(
        "--prepare",
        type=Path,
        metavar="FILE",
        help="measure nothing: plan and compile for an H200, write FILE and the cache on disk (needs no GPU)",
    )
    parser.add_argument(
        "--prepared", type=Path, metavar="FILE", help="measure the tasks that --prepare wrote to FILE"
    )
    parser.add_argument(
        "--part",
        type=Part.of_text,
        default=Part(),
        metavar="I/N",
        help="measure the I-th of N parts, counted from 0: one for each GPU",
    )
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=seconds,
        metavar="S",
        help="stop after this many seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=positive(int),
        metavar="N",
        help="number of processes that compile (default: one for each CPU, divided among the parts)",
    )
    return parser
