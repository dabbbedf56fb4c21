"""The sizes that represent all sizes of a layer where the kernels of its forward implicit GEMM are selected. No GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from size_cases import H200, LAYERS

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import schedules
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, make_problem, of_any_size
from tconv_swap.kernels.forward.selection import LARGE_MAPS, ONE_PIXEL_BATCHES, kernels_of, representatives
from tconv_swap.kernels.grad_input.implicit_gemm import as_forward

BY_NAME = {layer.name: layer.geometry for layer in LAYERS}
Size = tuple[int, int, int]


def layer_of(geometry: Geometry, channels_last: bool = False) -> TileProblem:
    return of_any_size(
        make_problem(geometry, torch.float16, "ieee", channels_last, channels_last, has_bias=False)
    )


def maps(layer: TileProblem) -> Iterator[tuple[Size, float]]:
    for size, weight in zip(*representatives(layer), strict=True):
        assert of_any_size(size) == layer
        yield (size.geometry.batch, size.geometry.height, size.geometry.width), weight


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(("name", "usual"), [("cyclegan1", range(8, 129)), ("dcgan2", range(4, 65))])
def test_the_weights_of_representative_sizes(name: str, usual: range, channels_last: bool) -> None:
    """Unusual columns and single images count less."""
    ragged = () if channels_last else schedules.RAGGED_SIZES
    assert list(maps(layer_of(BY_NAME[name], channels_last))) == [
        (
            size,
            (1.0 if size[2] in usual else schedules.UNUSUAL) * (schedules.SINGLE if size[0] == 1 else 1.0),
        )
        for size in (*schedules.SIZES, *schedules.MORE_SIZES, *schedules.FURTHER_SIZES)
    ] + [(size, schedules.UNUSUAL) for size in (*ragged, *schedules.FEW_IMAGES)]


def test_rows_pixels_and_patches_have_sizes_of_their_own() -> None:
    for last in (False, True):
        rows = layer_of(BY_NAME["hifigan_up1"], last)
        assert list(maps(rows)) == [
            (size, schedules.SINGLE if size[0] == 1 else 1.0)
            for size in (*schedules.SIZES_OF_ONE_ROW, *schedules.MORE_SIZES_OF_ONE_ROW)
        ]
        pixel = layer_of(BY_NAME["dcgan1"], last)
        assert pixel.one_pixel
        assert list(maps(pixel)) == [((batch, 1, 1), weight) for batch, weight in ONE_PIXEL_BATCHES.items()]
        assert (schedules.PATCHES, 1.0) in maps(layer_of(BY_NAME["unet4"], last))


def test_layers_without_strides_have_large_maps() -> None:
    for last in (False, True):
        strided = dict(maps(layer_of(Geometry(1, 64, 32, 32, 64, (3, 3), (2, 2), (1, 1)), last)))
        plain = dict(maps(layer_of(Geometry(1, 64, 32, 32, 64, (3, 3), (1, 1), (1, 1)), last)))
        assert {size: weight for size, weight in plain.items() if size not in LARGE_MAPS} == strided
        assert set(LARGE_MAPS) <= plain.keys()


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_the_maps_of_grad_output_are_those_of_inputs_and_what_the_layer_makes_of_them(
    channels_last: bool,
) -> None:
    """In NCHW, where other kernels load rows that are not aligned; in channels_last all rows are alike."""
    for padding in ((0, 0), (1, 1)):
        layer = Geometry(1, 48, 32, 32, 64, (3, 5), (1, 1), padding)
        posed = as_forward(plan.Problem(layer, torch.float16, "ieee", channels_last, channels_last))
        found = dict(maps(of_any_size(posed)))
        # Smaller ones have no input.
        usual = [size for size in schedules.SIZES if size[2] >= 8]
        outputs = {(b, h + 2 - 2 * padding[0], w + 4 - 2 * padding[1]) for b, h, w in usual}
        assert found.keys() >= set(usual)
        assert (found.keys() >= outputs) == (not channels_last)
        assert found[16, 32, 32] == (1.0 if channels_last else 0.5)


def test_sizes_without_outputs_do_not_count() -> None:
    """With 8 rows and columns of padding, maps of 7 have none."""
    layer = layer_of(Geometry(1, 64, 32, 32, 64, (3, 3), (2, 2), (8, 8)))
    every = [size for size, _ in maps(layer)]
    further = (*schedules.FURTHER_SIZES, *schedules.RAGGED_SIZES, *schedules.FEW_IMAGES)
    given = (*schedules.SIZES, *schedules.MORE_SIZES, *further)
    assert every == [size for size in given if min(size[1:]) >= 8]
    assert kernels_of(layer, H200).implicit_gemm[0].computes_any_size


def test_a_layer_whose_kernel_has_one_row_may_be_padded_across() -> None:
    """It is no layer of one dimension: maps of one row have no output."""
    for last in (False, True):
        layer = layer_of(Geometry(2, 64, 16, 16, 64, (1, 4), (1, 2), (1, 1)), last)
        assert {size for size, _ in maps(layer)} >= {(16, 32, 32), (8, 64, 64)}
