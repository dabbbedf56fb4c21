"""Reads the suite of layers and the targets from layers.toml."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tconv_swap.geometry import Geometry, as_pair, check_geometry

# tomllib came with Python 3.11; for Python 3.10 we install tomli, which is the same.
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

SUITE_FILE = Path(__file__).with_name("layers.toml")

#: On a CPU the batch of a layer is reduced until it needs no more multiply-adds than this, or is one image.
MAX_CPU_MACS = 400e6
#: Stride-1 layers whose single image needs more multiply-adds than this are left out on a CPU.
MAX_CPU_MACS_PER_IMAGE = 3e9


@dataclass(frozen=True, slots=True)
class Layer:
    """One transposed convolution of a well-known network. ``baseline``: it belongs to the layers with which the suite
    began, which ``benchmarks.cpu`` measures."""

    name: str
    network: str
    geometry: Geometry
    bias: bool
    baseline: bool

    def for_cpu(self) -> Layer | None:
        """Returns the layer with a batch small enough for a CPU; None if even one image is too large."""
        image = self.geometry.with_batch(1)
        if image.stride == (1, 1) and image.macs > MAX_CPU_MACS_PER_IMAGE:
            return None
        batch = max(1, min(self.geometry.batch, int(MAX_CPU_MACS / image.macs)))
        return replace(self, geometry=image.with_batch(batch))

    def __str__(self) -> str:
        batch, _, height, width = self.geometry.input_shape
        return f"{batch}x{height}x{width}, {self.geometry}" + (" bias" if self.bias else "")


@dataclass(frozen=True, slots=True)
class Targets:
    """The numbers that the results are compared with; layers.toml explains each."""

    least_speedup: float
    error_factor: float
    own_share: float
    fallbacks: tuple[str, ...]
    speedup: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By direction, dtype and layout."""
    roof: Mapping[str, float]
    """By direction."""


@dataclass(frozen=True, slots=True)
class Suite:
    layers: tuple[Layer, ...]
    targets: Targets

    def select(self, names: Iterable[str]) -> tuple[Layer, ...]:
        """Returns the layers of these names, in the order of the suite.

        Raises:
            ValueError: no layer has one of the names.
        """
        wanted = set(names)
        if unknown := wanted - {layer.name for layer in self.layers}:
            known = ", ".join(layer.name for layer in self.layers)
            raise ValueError(f"no such layer: {', '.join(sorted(unknown))}; the suite has {known}")
        return tuple(layer for layer in self.layers if layer.name in wanted)


def load_suite(path: Path = SUITE_FILE) -> Suite:
    """Reads a suite and checks every geometry.

    Raises:
        ValueError: a key is not known, or a name is used twice.
        RuntimeError: PyTorch would refuse a geometry.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    layers = tuple(_layer(entry) for entry in document["layer"])
    names = [layer.name for layer in layers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path.name}: two layers have the name {', '.join(twice)}")
    return Suite(layers, _targets(document["targets"]))


def _layer(entry: dict[str, Any]) -> Layer:
    left = dict(entry)
    name = left.pop("name")
    batch, in_channels, height, width = left.pop("input")
    out_channels, groups = left.pop("out_channels"), left.pop("groups", 1)
    if out_channels % groups:
        raise ValueError(
            f"layer {name}: {out_channels} output channels are not a multiple of {groups} groups"
        )
    kernel = as_pair(left.pop("kernel"), "kernel")
    bias = left.pop("bias", False)
    layer = Layer(
        name=name,
        network=left.pop("network"),
        geometry=check_geometry(
            (batch, in_channels, height, width),
            (in_channels, out_channels // groups, *kernel),
            (out_channels,) if bias else None,
            as_pair(left.pop("stride", 1), "stride"),
            as_pair(left.pop("padding", 0), "padding"),
            as_pair(left.pop("output_padding", 0), "output_padding"),
            groups,
            as_pair(left.pop("dilation", 1), "dilation"),
        ),
        bias=bias,
        baseline=left.pop("baseline", False),
    )
    if left:
        raise ValueError(f"layer {name}: unknown {', '.join(sorted(left))}")
    return layer


def _targets(entry: dict[str, Any]) -> Targets:
    directions = {name: dict(value) for name, value in entry.items() if isinstance(value, dict)}
    roof = {name: float(value.pop("roof")) for name, value in directions.items()}
    return Targets(
        least_speedup=float(entry["least_speedup"]),
        error_factor=float(entry["error_factor"]),
        own_share=float(entry["own_share"]),
        fallbacks=tuple(entry["fallbacks"]),
        speedup=directions,
        roof=roof,
    )
