"""Shared test set-up: GPU tests say why they are skipped where there is no GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm

#: Files whose last tests read what the first have saved.
TOGETHER = ("test_foreign.py",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-architectures",
        action="store_true",
        help="Compile every planned kernel for every architecture that is named, not one of each for four of them.",
    )
    parser.addoption(
        "--soak-calls",
        type=int,
        default=1000,
        help="How many calls tests/cuda/test_soak.py makes; 100,000 take minutes.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `pytest -n`, processes share the cores: torch takes its part in each, two threads at least, which wait
    asleep."""
    processes = config.getoption("numprocesses", None)
    if processes:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(2, (os.cpu_count() or 1) // processes)))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`, a process takes the next test, or all of a file in TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if Path(path).name in TOGETHER else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_searched() -> None:
    """A collection of garbage takes a second where torch's compilers are imported, and the tests ask for thousands:
    what is alive before a file's tests is left out of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def plans_anew() -> Iterator[None]:
    """For tests that change who makes a plan: plans are remembered."""
    remembered = (
        plan.plan_backward,
        grad_input_implicit_gemm.plan_grad_input,
        grad_weight_implicit_gemm.plan_grad_weight,
    )
    for planner in remembered:
        planner.cache_clear()
    yield
    for planner in remembered:
        planner.cache_clear()


@pytest.fixture(autouse=True)
def _own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run in this process lets its working directory be imported, while the process lives."""
    monkeypatch.setattr(sys, "path", [*sys.path])
