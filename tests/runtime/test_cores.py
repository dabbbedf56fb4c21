"""How many cores a process uses."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tconv_swap.runtime import ahead, cores


@pytest.mark.parametrize(
    ("ranks", "share"),
    [(None, 12), ("1", 12), ("4", 3), ("5", 2), ("64", 1), ("0", 12), ("", 12), ("no", 12)],
)
def test_processes_of_a_distributed_run_share_the_cores(
    ranks: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: 12)
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores.share() == share
    assert ahead._threads() == max(1, share - 1)
    planners: list[int] = []
    monkeypatch.setattr(ahead, "_planners", lambda threads: planners.append(threads) or ThreadPoolExecutor(1))
    assert ahead.make_all([]) == []
    assert planners == [share]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a process has no cores of its own here")
def test_cores_that_belong_to_other_processes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5} if process == 0 else set())
    assert cores.usable() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.usable() == 1
