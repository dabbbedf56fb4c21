"""Defines a row of ``benchmarks.regret``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ablation_rows import Row


@dataclass(frozen=True, slots=True)
class RegretRow(Row):
    """A row like the ablation's, with more ways. ``problem``: the numbers of the geometry. ``plans``: our plans by
    name: the family by its name in reports, why the planner takes it, the digest of its launches, and for each launch
    the entry, blocks, threads, bytes of shared memory, and the constants that differ between the row's plans.
    ``of_layer``: the names of those by kernels that the layer has for all its sizes; None in older files."""

    problem: Mapping[str, Any]
    plans: Mapping[str, Mapping[str, Any]]
    of_layer: Sequence[str] | None = None

    @property
    def regret_of_choice(self) -> float | None:
        """Returns the part of the regret that is due to the choice among the layer's kernels: the time of what the rule
        takes over that of the fastest of these. None where PyTorch's operator is taken, or they are not known."""
        taken = self.microseconds.get(self.chosen)
        if taken is None or self.of_layer is None or self.chosen not in self.plans:
            return None
        own = (self.microseconds[name] for name in self.of_layer if name in self.microseconds)
        return taken / min(taken, *own)
