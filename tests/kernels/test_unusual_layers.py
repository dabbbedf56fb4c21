"""Layers that no network of the suite resembles have plans of every stage."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from sampling import sampled

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
LAYERS = {
    # Their kernel has one row, but a map of one row has no output.
    "rows are cropped": Geometry(1, 6, 15, 16, 9, (1, 2), (1, 4), (2, 1), (0, 3), (2, 3), 3),
    "a row of each is cropped": Geometry(2, 64, 9, 16, 48, (1, 3), (1, 2), (1, 1)),
    # None of the sizes that represent others has an output.
    "most is cropped": Geometry(1, 16, 700, 700, 8, (3, 3), (1, 1), (300, 300)),
    "one channel, most is cropped": Geometry(1, 24, 300, 300, 1, (4, 4), (2, 2), (290, 290)),
}


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize(
    ("dtype", "channels_last"),
    sampled(
        [(torch.float32, False), (torch.float16, False), (torch.float16, True), (torch.float32, True)], 2
    ),
    ids=str,
)
@pytest.mark.parametrize("name", LAYERS)
def test_every_stage_has_a_plan(name: str, dtype: torch.dtype, channels_last: bool) -> None:
    geometry = LAYERS[name]
    assert min(geometry.out_height, geometry.out_width) > 0
    problem = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
    (output,) = plan.plan_forward(problem, True, H200).outputs
    assert output.shape == geometry.output_shape
    shapes = geometry.input_shape, geometry.weight_shape, (geometry.out_channels,)
    for mask in filter(any, product((False, True), repeat=3)):
        outputs = plan.plan_backward(problem, mask, H200).outputs
        wanted = [shape for shape, is_wanted in zip(shapes, mask, strict=True) if is_wanted]
        assert sorted(one.shape for one in outputs) == sorted(wanted)


def test_layers_of_one_dimension() -> None:
    of_vocoder = Geometry(8, 512, 1, 64, 256, (1, 16), (1, 8), (0, 4))
    assert of_vocoder.one_row
    cropped = LAYERS["rows are cropped"], LAYERS["a row of each is cropped"]
    pointwise = Geometry(8, 64, 16, 16, 32, (1, 1))
    tall = Geometry(8, 64, 16, 16, 32, (3, 16), (1, 8))
    assert not any(one.one_row for one in (*cropped, pointwise, tall))
