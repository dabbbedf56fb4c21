"""Shared by the tests of ``prepare``: a compiler that only records, an empty cache, and a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tconv_swap
from tconv_swap.cuda import call, choice
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.runtime import host, jit, nvrtc
from tconv_swap.runtime.cache import cache_directory
from tconv_swap.runtime.nvrtc import CompileError
from tconv_swap.runtime.program import Kernel

H200 = plan.Device("sm_90a", 132, 227 << 10)
ALL = (True, True, True)


class Compiler:
    """Replaces NVRTC; records what it has to compile, in order."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.options: list[tuple[str, ...]] = []
        self.fails = ""
        self.built = 0

    def compile(self, source: str, name: str, headers: Any, options: Any) -> tuple[bytes, str]:
        self.sources.append(source)
        self.options.append(tuple(options))
        if self.fails and self.fails in source:
            raise CompileError("it does not compile")
        return b"machine code", "log"

    def build(self) -> Path:
        self.built += 1
        return Path("tconv_swap.so")

    def knows(self, source: str, *constants: str) -> bool:
        return any(source in one and all(line in one for line in constants) for one in self.sources)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TCONV_SWAP_CACHE", str(tmp_path / "cache"))
    cache_directory.cache_clear()
    yield tmp_path / "cache"
    cache_directory.cache_clear()


@pytest.fixture
def compiler(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler()
    monkeypatch.setattr(nvrtc, "compile_cubin", found.compile)
    monkeypatch.setattr(host, "build", found.build)
    return found


def decoder(**arguments: Any) -> nn.Sequential:
    model = nn.Sequential(
        nn.ConvTranspose2d(64, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    tconv_swap.swap_layers(model, **arguments)
    return model


def kernels_of(geometry: Geometry, dtype: torch.dtype, training: bool = False) -> list[Kernel]:
    """Returns the kernels that a call in NCHW launches, by the library's choice."""
    precision = "tf32" if dtype == torch.float32 and call.precision() == "tf32" else "ieee"
    posed = plan.Problem(geometry, dtype, precision, False, False)
    steps = [choice.choose_forward(posed, True, H200, "auto")]
    if training:
        steps += choice.choose_backward(posed, ALL, H200, "auto")
    return [one.kernel for step in steps if step.plan for one in step.plan.launches]


def is_kept(kernel: Kernel) -> bool:
    return jit.is_kept(kernel, "sm_90a")
