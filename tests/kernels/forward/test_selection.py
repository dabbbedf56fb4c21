"""The selection of kernels over all families of the forward pass, and the one that computes a size. No GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sampling import sampled
from size_cases import AMPERE, H200, MODES

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.dtypes import TF32
from tconv_swap.kernels.forward.implicit_gemm_layout import as_problem, of_any_size
from tconv_swap.kernels.forward.plan import part_candidates, posed, ranked
from tconv_swap.kernels.forward.selection import FAMILIES, kernels_of, representatives

RGB = Geometry(8, 64, 64, 64, 3, (4, 4), (2, 2), (1, 1))
HEAD = Geometry(4, 56, 96, 96, 1, (9, 9), (4, 4), (4, 4), (3, 3))
NARROW = Geometry(4, 32, 64, 64, 16, (2, 2), (2, 2))
GROUPED = Geometry(4, 32, 64, 64, 64, (4, 4), (2, 2), (1, 1), groups=4)
DEPTHWISE = Geometry(2, 64, 64, 64, 64, (4, 4), (2, 2), (1, 1), groups=64)
GENERATOR = Geometry(64, 100, 1, 1, 256, (4, 4))
ODD = Geometry(4, 33, 20, 20, 48, (3, 3), (2, 2), (1, 1))
LAYERS = (RGB, HEAD, NARROW, GROUPED, DEPTHWISE, GENERATOR, ODD)
CASES = list(itertools.product(LAYERS, MODES, (False, True)))


def sizes_of(layer: Geometry) -> list[Geometry]:
    if layer.height == 1:
        return [layer.with_batch(batch) for batch in (1, 100, 700)]
    return [
        layer._replace(batch=batch, height=height, width=width)
        for batch, height, width in ((1, 8, 8), (7, 33, 41), (16, 64, 96))
    ]


@pytest.mark.parametrize(("layer", "mode", "channels_last"), sampled(CASES, 5), ids=str)
def test_the_kernel_with_the_fewest_expected_clocks_computes_a_size(
    layer: Geometry, mode: tuple[torch.dtype, str], channels_last: bool
) -> None:
    for size in sizes_of(layer):
        problem = plan.Problem(size, *mode, channels_last, channels_last)
        found = ranked(posed(problem, True), H200)
        assert found, size
        best = min(found, key=lambda one: one.clocks)
        assert found[0].clocks == best.clocks < math.inf
        made = plan.plan_forward(problem, True, H200)
        assert made.family in (best.make().family, "tiny")
        for name, family in FAMILIES.items():
            tiles = getattr(kernels_of(of_any_size(posed(problem, True)), H200), name)
            for (expected,) in family.clocks([as_problem(posed(problem, True))], tiles, H200):
                assert expected >= best.clocks


@pytest.mark.parametrize("device", sampled([H200, AMPERE], 2), ids=lambda device: device.architecture)
@pytest.mark.parametrize("layer", sampled(LAYERS, 2), ids=str)
def test_tuning_reaches_the_best_of_every_family(layer: Geometry, device: plan.Device) -> None:
    for mode, last in itertools.product(MODES, (False, True)):
        problem = posed(plan.Problem(layer, *mode, last, last), True)
        of_size = {name for name, family in FAMILIES.items() if family.of_size(as_problem(problem), device)}
        candidates = {part.family for part in part_candidates(problem, device, 8)}
        assert of_size - {"narrow_ffma"} <= candidates
        assert "narrow_ffma" in candidates or "narrow_ffma" not in of_size


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(
    "layer", [GROUPED, NARROW._replace(in_channels=16, dilation=(2, 2)), NARROW._replace(in_channels=12)]
)
def test_nothing_is_rounded_where_cudnn_computes_in_float32(layer: Geometry, channels_last: bool) -> None:
    """It does so with groups, dilation and fewer than 16 channels even where TF32 is allowed."""
    rounded = plan.Problem(NARROW, torch.float32, "tf32", channels_last, channels_last)
    assert posed(rounded, True).precision == "TF32"
    exact = rounded._replace(geometry=layer)
    assert posed(exact, True).precision == "IEEE"
    for made in plan.forward_candidates(exact, True, H200, 12):
        for launch in made.launches:
            constants = dict(launch.kernel.constants)
            assert constants.get("PRECISION") != TF32
            assert constants.get("PARTS", 3) == 3


def test_heads_have_large_maps() -> None:
    """Layers with few output channels are often the last of a network."""
    for outputs, largest in ((8, 1024), (9, 512)):
        problem = plan.Problem(RGB._replace(out_channels=outputs), torch.float16, "ieee", True, True)
        sizes, _ = representatives(of_any_size(posed(problem, True)))
        assert max(size.geometry.width for size in sizes) == largest
