"""Shared by the tests of the ablation: layers, and invented rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.ablation_rows import Row
from benchmarks.families import PYTORCH
from benchmarks.random_layers import random_layers
from tconv_swap.geometry import Geometry
from tconv_swap.measurement.suite import Layer, load_suite

SUITE = load_suite().layers
DRAWN = random_layers()
#: A prime stride has too many groups of phases for the tiles of tensor cores.
GENERAL_ALONE = Layer("stride 11", "", Geometry(16, 256, 1, 100, 128, (1, 22), (1, 11), (0, 5)), True, False)


def made_up(times: Mapping[str, float], *, taken: str = PYTORCH, **changes: Any) -> Row:
    """Returns a row with these times."""
    made = Row("layer", "1x1", "k4s2", True, "tf32", "nchw", "forward", taken, times, {})
    return replace(made, **changes)


class Clock:
    """Stands for ``perf_counter``: each reading is a millisecond after the one before, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now
