"""Which of many alike parameters of a test run by default; the others run with ``pytest --exhaustive``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(parameters: Iterable[Any], keep: int) -> list[Any]:
    """Marks all but every ``keep``-th parameter exhaustive. A plain tuple is the arguments of a test that has several;
    one with names, as a layer, is a single argument."""
    return [
        parameter if place % keep == 0 else _exhaustive(parameter)
        for place, parameter in enumerate(parameters)
    ]


def _exhaustive(parameter: Any) -> Any:
    several = parameter if type(parameter) is tuple else (parameter,)
    return pytest.param(*several, marks=pytest.mark.exhaustive)
