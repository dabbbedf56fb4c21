"""Shared test set-up: GPU tests say why they are skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tconv_swap.cuda import plan


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def plans_anew() -> Iterator[None]:
    """For tests that change who makes a plan: plans are remembered."""
    plan.plan_backward.cache_clear()
    yield
    plan.plan_backward.cache_clear()
