"""Shared test set-up: GPU tests say why they are skipped on a machine without a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered import forget_plans

from tconv_swap.cuda import call, expected
from tconv_swap.runtime import disk_cache

#: How many objects are made before Python looks for cycles among them. With its usual 700 that takes a sixth of the
#: time of planning, which makes none.
GARBAGE_THRESHOLD = 50_000
#: Files whose last tests read what the first ones have saved, or have planned.
TOGETHER = ("test_foreign.py", "test_epilogue.py", "test_kernels_compile.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-architectures",
        action="store_true",
        help="Compile every planned kernel for every architecture, not one of each variant for four.",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="Also run what repeats other tests for more layers, dtypes, architectures and random cases. On by itself "
        "on a machine with a GPU, and with --all-architectures.",
    )
    parser.addoption(
        "--soak-calls",
        type=int,
        help="How many calls tests/cuda/test_soak.py makes: 1,000 with --exhaustive and 300 without; 100,000 take "
        "minutes.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `pytest -n`, processes share the cores: torch gets a share in each, and its threads sleep while they wait.

    Inductor does not ask by compiling, which takes 8 s, what vectors this CPU has: its loops are not what is tested."""
    config.addinivalue_line("markers", "exhaustive: repeats a test that runs by default (needs --exhaustive)")
    options = config.option
    options.exhaustive |= options.all_architectures or torch.cuda.is_available()
    if options.soak_calls is None:
        options.soak_calls = 1000 if options.exhaustive else 300
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    gc.set_threshold(GARBAGE_THRESHOLD)
    processes = config.getoption("numprocesses", None)
    if processes:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n`, a process takes the next test; the tests of a file in TOGETHER stay in one process, and without
    a GPU those of a function: most are so short that a message for each would take longer."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if Path(path).name in TOGETHER:
                return path
            return nodeid if torch.cuda.is_available() else nodeid.partition("[")[0]

    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.exhaustive:
        _deselect_exhaustive(config, items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _deselect_exhaustive(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a GPU stay, and say that they are skipped: they may share parameters with others."""
    left_out = [
        item for item in items if item.get_closest_marker("exhaustive") and not item.get_closest_marker("gpu")
    ]
    config.hook.pytest_deselected(items=left_out)
    found = set(left_out)
    items[:] = [item for item in items if item not in found]


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test runs all of its layers, dtypes and random cases, and not some of them."""
    return bool(request.config.option.exhaustive)


@pytest.fixture(autouse=True)
def _plans_are_not_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may replace a part of a planner, whose results must not reach other tests."""
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: Path(os.devnull))


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one process of `pytest -n` has searched, the others read. Only for tests that plan and replace no part of a
    planner: they make what all others would."""
    folder = tmp_path_factory.getbasetemp()
    # The folder of a process lies in that of the session.
    session = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    monkeypatch.setattr(disk_cache, "cache_directory", lambda: session / "searched")


@pytest.fixture(autouse=True)
def _guesses_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests have more layers than any network, and none needs the kernels of sizes that it does not have, or of
    layers that it does not call."""
    monkeypatch.setattr(call, "other_sizes", lambda layer: [])
    monkeypatch.setattr(expected, "followers", lambda called: [])


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_searched() -> None:
    """A garbage collection takes a second when torch's compilers are imported, and the tests need thousands of them.
    Objects that are alive before a file's tests are therefore excluded."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def plans_anew() -> Iterator[None]:
    """Clears remembered plans, for tests that change who makes a plan."""
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch computes with two threads, for tests of what several of them compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the search path: a command that runs in this process adds its working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
