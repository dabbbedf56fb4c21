"""The sizes that represent all sizes of a layer where the kernels of the gradient of its weight are selected."""

from __future__ import annotations

import pytest
import torch
from size_cases import H200, LAYERS

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import schedules
from tconv_swap.kernels.grad_weight.selection import Kernels, kernels_of, layer_of, representatives

BY_NAME = {layer.name: layer.geometry for layer in LAYERS}


def layer(name: str, channels_last: bool = False) -> plan.Problem:
    return layer_of(plan.Problem(BY_NAME[name], torch.float16, "ieee", channels_last, channels_last))


def maps(size: Geometry) -> tuple[int, int, int]:
    return size.batch, size.height, size.width


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(("name", "usual"), [("cyclegan1", range(8, 129)), ("dcgan2", range(4, 65))])
def test_the_weights_of_representative_sizes(name: str, usual: range, channels_last: bool) -> None:
    """Unusual columns and single images count less; a size with two widths of grad_output counts once."""
    found: dict[tuple[int, int, int], float] = {}
    for size, weight in representatives(layer(name, channels_last)):
        found[maps(size)] = found.get(maps(size), 0.0) + weight
    every = (*schedules.SIZES, *schedules.MORE_SIZES, *schedules.FURTHER_SIZES)
    assert found == pytest.approx(
        {
            size: (1.0 if size[2] in usual else schedules.UNUSUAL)
            * (schedules.SINGLE if size[0] == 1 else 1.0)
            for size in every
        }
        | ({} if channels_last else dict.fromkeys(schedules.RAGGED_SIZES, schedules.UNUSUAL))
    )


def test_nchw_has_aligned_rows_and_the_smallest_grad_output() -> None:
    """With a kernel of 3 columns the smallest grad_output of 32 columns has 63, with one of 4 it has 64."""
    for name, both in (("cyclegan1", True), ("dcgan3", False)):
        for channels_last in (False, True):
            sizes = representatives(layer(name, channels_last))
            widths = {size.out_width for size, _ in sizes if size.width == size.height == 32}
            assert widths == ({63, 64} if both and not channels_last else {64})


def test_rows_pixels_and_patches_have_sizes_of_their_own() -> None:
    for channels_last in (False, True):
        rows = representatives(layer("hifigan_up1", channels_last))
        wanted = {*schedules.SIZES_OF_ONE_ROW, *schedules.MORE_SIZES_OF_ONE_ROW}
        assert {maps(size) for size, _ in rows} == wanted
        pixel = layer("dcgan1", channels_last)
        assert [maps(size) for size, _ in representatives(pixel)] == list(schedules.ONE_PIXEL)
        kernels = kernels_of(pixel, H200)
        assert sum(len(getattr(kernels, family)) for family in Kernels.__slots__) == 1
    assert schedules.PATCHES in {maps(size) for size, _ in representatives(layer("dpt_k4s4"))}
