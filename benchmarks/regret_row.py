"""Defines a row of ``benchmarks.regret``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.ablation_rows import Row


@dataclass(frozen=True, slots=True)
class RegretRow(Row):
    """A row like the ablation's, with more ways. ``problem``: the numbers of the geometry. ``plans``: our plans by
    name: the family by its name in reports, why the planner takes it, the digest of its launches, and for each launch
    the entry, blocks, threads, bytes of shared memory, and the constants that differ between the row's plans."""

    problem: Mapping[str, Any]
    plans: Mapping[str, Mapping[str, Any]]
