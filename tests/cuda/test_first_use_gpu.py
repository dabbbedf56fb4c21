"""Timing at first use on any GPU, which is treated as one for which nothing was measured."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_cases import relative_error
from torch import nn

import tconv_swap
from tconv_swap.cuda import call, first_use, tuned
from tconv_swap.measurement.modes import MODES
from tconv_swap.runtime.cache import cache_directory

pytestmark = pytest.mark.gpu

ARGUMENTS = dict(stride=2, padding=1)


class Counted:
    """Records which stages are timed, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[Any] = []
        (measure,) = first_use.measures

        def measured(problem: Any, mask: Any, *more: Any) -> Any:
            self.masks.append(mask)
            return measure(problem, mask, *more)

        monkeypatch.setattr(first_use, "measures", [measured])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Counted]:
    monkeypatch.delenv(first_use.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(first_use, "MEASURED", frozenset())
    monkeypatch.setattr(first_use, "_untimed", set())
    monkeypatch.setattr(tuned, "cache_directory", lambda: tmp_path)
    tuned.winners.cache_clear()
    call.forget()
    yield Counted(monkeypatch)
    tuned.winners.cache_clear()
    call.forget()


def tensors(dtype: torch.dtype, size: int = 9) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((4, 64, size, size + 2), (64, 40, 4, 4), (40,))
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def check(dtype: torch.dtype, tolerance: float, size: int = 9) -> None:
    """Compares the output and all gradients by "auto" with float64."""
    x, w, b = (one.requires_grad_() for one in tensors(dtype, size))
    truths = [one.detach().double().requires_grad_() for one in (x, w, b)]
    y = tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS)
    expected = torch.nn.functional.conv_transpose2d(*truths, **ARGUMENTS)
    assert relative_error(y, expected) <= tolerance
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, w, b), grad)
    for one, truth in zip(found, torch.autograd.grad(expected, truths, grad.double()), strict=True):
        assert relative_error(one, truth) <= tolerance


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_what_was_chosen_is_right_and_is_timed_once(mode: Any, counted: Counted) -> None:
    tolerance = {"fp16": 2e-3, "bf16": 1.5e-2, "tf32": 2e-3, "fp32": 1e-5}[mode.name]
    with mode.switched_on():
        for _ in range(2):
            check(mode.dtype, tolerance)
            assert counted.masks == [(), (True, False, False), (False, True, True)]
        check(mode.dtype, tolerance, 10)
        assert len(counted.masks) == 3, "of the same class"
        layer = tconv_swap.ConvTranspose2d(64, 40, 4, 2, 1, device="cuda", dtype=mode.dtype)
        stages = tconv_swap.explain(layer, tensors(mode.dtype)[0]).layers[0].stages
    assert all("timed at first use, 4x64x9x11:" in stage.why for stage in stages)
    assert all(winner.why for winner in tuned.winners(0).values())
    assert len(tuned.winners(0)) == 3


def test_neither_random_numbers_nor_switches_change(counted: Counted) -> None:
    x, w, b = tensors(torch.float16)
    before = torch.cuda.get_rng_state(), torch.get_rng_state(), torch.backends.cudnn.benchmark
    with torch.inference_mode():
        tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS)
    assert counted.masks == [()]
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.backends.cudnn.benchmark == before[2]


def test_rules_time_nothing(counted: Counted) -> None:
    x, w, b = tensors(torch.float16)
    tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS, backend="rules")
    assert counted.masks == []


def test_a_capture_is_not_disturbed(counted: Counted) -> None:
    x, w, b = tensors(torch.float16)
    # Loads the kernels and cuBLAS, which a capture must not.
    tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS, backend="rules")
    torch.nn.functional.conv_transpose2d(x, w, b, **ARGUMENTS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS)
    assert counted.masks == []
    graph.replay()
    found = tconv_swap.conv_transpose2d(x, w, b, **ARGUMENTS)
    assert counted.masks == [()]
    torch.testing.assert_close(captured, found, rtol=1e-2, atol=1e-2)


def test_too_little_memory_leaves_it_to_the_rules(
    counted: Counted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(first_use, "measures", [full])
    with caplog.at_level(logging.INFO, logger="tconv_swap"):
        check(torch.float16, 2e-3)
    assert "not timed at first use, so chosen by rule: CUDA out of memory" in caplog.text


def test_tuning_does_not_time_twice(counted: Counted) -> None:
    model = nn.Sequential(tconv_swap.ConvTranspose2d(64, 40, 4, 2, 1)).cuda().half()
    report = tconv_swap.tune(model, tensors(torch.float16)[0], candidates=2, budget_s=0.02)
    assert counted.masks == []
    model(tensors(torch.float16)[0])
    assert counted.masks == []
    assert len(report.problems) == 2, "the input needs no gradient"


def test_preparing_times_before_the_first_call(counted: Counted) -> None:
    model = nn.Sequential(tconv_swap.ConvTranspose2d(64, 40, 4, 2, 1)).cuda().half()
    x = tensors(torch.float16)[0]
    reported: list[str] = []
    report = tconv_swap.prepare(
        model, x, training=True, progress=lambda what, done, total: reported.append(what)
    )
    assert counted.masks == [(), (True, False, False), (False, True, True)]
    assert "timing" in reported
    assert report.layers == 1
    model(x.requires_grad_()).sum().backward()
    assert len(counted.masks) == 3
    again = tconv_swap.prepare(model, x, training=True)
    assert again.compiled == 0
    assert len(counted.masks) == 3


SCRIPT = """
import json, torch, tconv_swap
from tconv_swap.cuda import first_use
from tconv_swap.runtime import jit
first_use.MEASURED = frozenset()
measured = []
(measure,) = first_use.measures
first_use.measures[:] = [lambda *given: (measured.append(given[1]), measure(*given))[1]]
layer = tconv_swap.ConvTranspose2d(48, 32, 4, 2, 1, device="cuda", dtype=torch.float16)
layer(torch.randn(2, 48, 8, 8, device="cuda", dtype=torch.float16, requires_grad=True)).sum().backward()
print(json.dumps(measured))
"""


def test_a_second_process_does_not_time(tmp_path: Path) -> None:
    shutil.copytree(cache_directory() / "host", tmp_path / "host")
    environment = {**os.environ, "TCONV_SWAP_CACHE": str(tmp_path)}
    environment.pop(first_use.ENVIRONMENT_VARIABLE, None)

    def timed(**more: str) -> Any:
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(found.stdout)

    assert timed(**{first_use.ENVIRONMENT_VARIABLE: "0"}) == []
    assert timed() == [[], [True, False, False], [False, True, True]]
    assert timed() == []
