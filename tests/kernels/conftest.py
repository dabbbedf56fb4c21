"""Tests of planners that replace no part of them share what is searched."""

from __future__ import annotations

import inspect

import pytest


@pytest.fixture(autouse=True)
def _searched_once(request: pytest.FixtureRequest) -> None:
    """What one process of `pytest -n` has searched, the others read. Tests that may replace a part of a planner neither
    read nor keep it; fixtures here replace nothing that a search depends on."""
    if "monkeypatch" not in inspect.signature(request.function).parameters:
        request.getfixturevalue("searched_once")
