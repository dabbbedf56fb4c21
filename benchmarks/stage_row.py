"""Defines what the rows of all sweeps have in common: one stage of one layer in one mode and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.random_layers import class_of
from tconv_swap.measurement.suite import Layer


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of one layer in one mode and layout. ``of_suite``: whether the layer is of the suite, or random."""

    layer: str
    geometry: str
    layer_class: str
    of_suite: bool
    mode: str
    layout: str
    stage: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.layer, self.mode, self.layout, self.stage


def stage_fields(layer: Layer, of_suite: bool, mode: str, layout: str, stage: str) -> dict[str, Any]:
    """Returns the fields of a ``StageRow``."""
    return {
        "layer": layer.name,
        "geometry": str(layer),
        "layer_class": class_of(layer.geometry),
        "of_suite": of_suite,
        "mode": mode,
        "layout": layout,
        "stage": stage,
    }
