"""The sizes that represent all sizes of a layer where the kernels of the gradient of its input are selected. No GPU."""

from __future__ import annotations

import pytest
import torch
from size_cases import H200, LAYERS

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import schedules
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution, of_any_size
from tconv_swap.kernels.grad_input.selection import kernels_of, representatives

STRIDED = {layer.name: layer.geometry for layer in LAYERS if max(layer.geometry.stride) > 1}
#: Batch, rows and columns of the representative sizes.
MAPS = (*schedules.SIZES, *schedules.MORE_SIZES)
ROWS = (*schedules.SIZES_OF_ONE_ROW, *schedules.MORE_SIZES_OF_ONE_ROW)


def layer_of(geometry: Geometry, channels_last: bool = False) -> StridedProblem:
    problem = plan.Problem(geometry, torch.float16, "ieee", channels_last, channels_last)
    return of_any_size(as_convolution(problem))


def maps(size: StridedProblem) -> tuple[int, int, int]:
    return (size.geometry.batch, *size.positions)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize(("name", "usual"), [("cyclegan1", range(8, 129)), ("dcgan2", range(4, 65))])
def test_the_weights_of_representative_sizes(name: str, usual: range, channels_last: bool) -> None:
    """Unusual columns and single images count less; a size with two widths counts once."""
    layer = layer_of(STRIDED[name], channels_last=channels_last)
    found: dict[tuple[int, int, int], float] = {}
    for size, weight in zip(*representatives(layer), strict=True):
        assert of_any_size(size) == layer
        found[maps(size)] = found.get(maps(size), 0.0) + weight
    assert found == pytest.approx(
        {
            size: (1.0 if size[2] in usual else schedules.UNUSUAL)
            * (schedules.SINGLE if size[0] == 1 else 1.0)
            for size in MAPS
        }
        | ({} if channels_last else dict.fromkeys(schedules.RAGGED_SIZES, schedules.UNUSUAL))
    )


def test_nchw_has_both_widths_where_the_smallest_is_not_whole_strides() -> None:
    """With a kernel of 3 columns the smallest grad_output of 32 columns has 63, with one of 4 it has 64."""
    for name, both in (("cyclegan1", True), ("dcgan3", False)):
        for channels_last in (False, True):
            sizes, _ = representatives(layer_of(STRIDED[name], channels_last=channels_last))
            two = both and not channels_last
            every = (*MAPS, *(() if channels_last else schedules.RAGGED_SIZES))
            assert [maps(one) for one in sizes] == [one for one in every for _ in range(1 + two)]
            widths = {size.geometry.width for size in sizes if size.positions == (32, 32)}
            assert widths == ({63, 64} if two else {63} if both else {64})


def test_rows_pixels_and_patches_have_sizes_of_their_own() -> None:
    for channels_last in (False, True):
        rows, weights = representatives(layer_of(STRIDED["hifigan_up1"], channels_last=channels_last))
        assert [maps(one) for one in rows] == list(ROWS)
        assert all(one.geometry.width % one.step[1] == 0 for one in rows)
        assert weights == [schedules.SINGLE if batch == 1 else 1.0 for batch, _, _ in ROWS]
        pixel = Geometry(9, 512, 1, 1, 256, (4, 4), (2, 2))
        layer = layer_of(pixel, channels_last)
        (size,), weights = representatives(layer)
        assert layer.one_pixel
        assert (maps(size), weights) == (schedules.ONE_PIXEL[0], [1.0])
        found = kernels_of(layer, H200)
        assert len(found.implicit_gemm) + len(found.implicit_gemm_tma) + len(found.im2col) == 1
    assert schedules.PATCHES in map(maps, representatives(layer_of(STRIDED["dpt_k4s4"]))[0])
