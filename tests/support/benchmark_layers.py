"""Shared by the tests of the benchmark: the suite, a small version of it, and a GPU that this machine lacks."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.kernels import plan
from tconv_swap.measurement.roof import Ceilings
from tconv_swap.measurement.suite import Layer, load_suite

SUITE = load_suite()
TARGETS = SUITE.targets
H200 = plan.Device("sm_90", multiprocessors=132, shared_memory_per_block=232448)

#: Measured on one H200.
CEILINGS = Ceilings(
    4283.931915069964,
    {
        "tf32": 365.13292756327985,
        "fp16": 747.1620076319383,
        "bf16": 766.2657319361803,
        "fp32": 51.303253871516645,
    },
)


def small(layer: Layer) -> Layer:
    """Returns the same layer with few channels and pixels, two images, and no more than 256 taps."""
    g = layer.geometry
    if g.taps > 256:
        kernel, stride, padding = ((a // 8, b // 8) for a, b in (g.kernel, g.stride, g.padding))
        g = g._replace(kernel=kernel, stride=stride, padding=padding)
    per_group = (min(g.in_channels_per_group, 3), min(g.out_channels_per_group, 2))
    groups = min(g.groups, 2)
    geometry = g._replace(
        batch=2,
        in_channels=per_group[0] * groups,
        out_channels=per_group[1] * groups,
        groups=groups,
        height=min(g.height, 4),
        width=min(g.width, 3),
    )
    return replace(layer, geometry=geometry)


SMALL = [small(layer) for layer in SUITE.layers]
BY_NAME = {layer.name: layer for layer in SUITE.layers}
SMALL_BY_NAME = {layer.name: layer for layer in SMALL}
