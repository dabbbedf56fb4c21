"""Shared by the tests that search ways."""

from __future__ import annotations

import pytest

from tconv_swap.ways.optimize import WaySearch


def time_ways_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each timing of a search milliseconds, where it does not matter which way is the fastest."""
    for budget in ("timing_s", "final_s"):
        monkeypatch.setitem(WaySearch.__init__.__kwdefaults__, budget, 0.02)
