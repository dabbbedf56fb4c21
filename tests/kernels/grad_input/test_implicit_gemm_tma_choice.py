"""grad_input/implicit_gemm_tma: when the planner takes the family, and which tiles it takes."""

from __future__ import annotations

import math

import pytest
import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma_shape as grad_input_tma_shape
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution, of_any_size
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.selection import kernels_for, kernels_of

H200 = plan.Device("sm_90a", 132, 227 << 10)
MODES = ((torch.float16, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee"))


def layer_tiles(posed: StridedProblem) -> list[TmaTile]:
    """Returns the tiles of the layer's kernels, the one that is expected to be the fastest first."""
    found = kernels_of(of_any_size(posed), H200).implicit_gemm_tma
    return [tile for _, tile in grad_input_tma_choice.ranked(found, posed, H200)]


def every_tile(posed: StridedProblem) -> list[TmaTile]:
    """Returns all tiles that may compute a size, in all shapes, in the same order."""
    found = kernels_for(posed, H200).implicit_gemm_tma
    return [tile for _, tile in grad_input_tma_choice.ranked(found, posed, H200)]


def test_the_family_comes_first_where_it_computes_the_problem() -> None:
    geometry = Geometry(8, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1))
    problem = plan.Problem(geometry, torch.float16, "ieee", True, True)
    parts = grad_input_implicit_gemm.part_candidates(problem, H200, 12)
    families = [part.family for part in parts]
    of_layer = len(grad_input_implicit_gemm.ranked(problem, H200))
    assert families[:of_layer] == [grad_input_tma.FAMILY] * of_layer
    others = {grad_input_implicit_gemm.FAMILY, grad_input_im2col.FAMILY}
    assert {*families} == {grad_input_tma.FAMILY, *others}
    for other in (
        problem._replace(channels_last=False, weight_channels_last=False),
        problem._replace(geometry=geometry._replace(out_channels=62)),
        problem._replace(dtype=torch.float32),
    ):
        found = {part.family for part in grad_input_implicit_gemm.part_candidates(other, H200, 8)}
        assert found
        assert grad_input_tma.FAMILY not in found


#: A layer with 64 output channels whose kernel meets 9 of 25 pixels, and one row with a stride of 8, which limits a
#: box to
#: 32 columns.
GAPS = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
ONE_ROW = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))


@pytest.mark.parametrize(
    ("geometry", "mode", "fetched", "phase_major"),
    [
        (GAPS, MODES[0], 128, False),  # no tap reads the pixel beside a pixel
        (GAPS, MODES[1], 256, True),  # the other 128 bytes are the second chunk of the pixel
        (
            Geometry(4, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)),
            MODES[0],
            256,
            False,
        ),  # they are a pixel of the other phase
        (Geometry(4, 128, 16, 16, 64, (4, 4), (2, 2), (1, 1)), MODES[1], 128, False),
        (Geometry(4, 128, 16, 16, 256, (2, 2), (2, 2)), MODES[0], 128, False),
    ],
    ids=str,
)
def test_the_l2_fetches_256_bytes_where_both_halves_are_read_soon(
    geometry: Geometry, mode: tuple[torch.dtype, str], fetched: int, phase_major: bool
) -> None:
    posed = as_convolution(plan.Problem(geometry, *mode, True, True))
    every = grad_input_tma_choice.candidates(of_any_size(posed), H200)
    found = grad_input_tma.ranked(every, posed, H200)
    assert found
    for part in (one.make() for one in found):
        assert part.launches[0].tensor_maps[0].fetched_bytes == fetched
        assert dict(part.launches[0].kernel.constants)["PHASE_MAJOR"] == phase_major


def test_a_box_of_too_many_columns_gets_a_dimension_for_their_phases() -> None:
    for mode in MODES:
        posed = as_convolution(plan.Problem(ONE_ROW, *mode, True, True))
        tiles = every_tile(posed)
        assert any(tile.phase_dimension and tile.images <= ONE_ROW.batch for tile in tiles)
        ragged = ONE_ROW._replace(output_padding=(0, 1))
        posed = as_convolution(plan.Problem(ragged, *mode, True, True))
        assert not any(tile.phase_dimension for tile in every_tile(posed))


def test_of_strides_above_8_only_whole_ones_are_loaded() -> None:
    layer = Geometry(4, 512, 1, 100, 256, (1, 16), (1, 10), (0, 3))
    for mode in MODES:
        tiles = every_tile(as_convolution(plan.Problem(layer, *mode, True, True)))
        assert tiles
        assert all(tile.phase_dimension for tile in tiles)
        for other in (
            layer._replace(output_padding=(0, 1)),
            layer._replace(groups=2),
            layer._replace(kernel=(10, 4), stride=(10, 1), padding=(0, 0)),
        ):
            assert not grad_input_tma.supports(as_convolution(plan.Problem(other, *mode, True, True)), H200)


def test_two_consumers_get_no_tile_that_is_larger_than_the_map() -> None:
    """Half of such a tile is empty, but the number of work tiles looks large enough for both consumers."""
    geometry = Geometry(8, 256, 1, 1000, 128, (1, 8), (1, 4), (0, 2))
    posed = as_convolution(plan.Problem(geometry, *MODES[1], True, True))
    first, *others = every_tile(posed)
    assert first.consumers == 1 or first.rows == 1
    assert any(tile.consumers > 1 and tile.rows > 1 for tile in others)


def test_others_compute_layers_that_fill_half_of_a_chunk() -> None:
    geometry = Geometry(8, 32, 128, 128, 32, (2, 2), (2, 2))
    families = [
        plan.plan_backward(plan.Problem(geometry, *mode, True, True), (True, False, False), H200).family
        for mode in MODES
    ]
    assert [family == grad_input_tma.FAMILY for family in families] == [False, True, False]


def test_a_block_has_192_channels_if_the_layer_has_192() -> None:
    geometry = Geometry(16, 192, 56, 56, 96, (2, 2), (2, 2))
    for mode in MODES:
        best = layer_tiles(as_convolution(plan.Problem(geometry, *mode, True, True)))[0]
        assert (best.positions, best.channels) == (128, 192)


def test_one_kernel_takes_the_shape_that_fits_each_map() -> None:
    """A tile of several images would be mostly empty with one image, a wide one with narrow maps."""
    kernels, shapes = set(), set()
    for batch, side in ((1, 256), (1, 400), (4, 128), (64, 32), (256, 16), (512, 8)):
        geometry = Geometry(batch, 256, side, side, 256, (3, 3), (2, 2), groups=2)
        posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))
        tile = layer_tiles(posed)[0]
        part = grad_input_tma.lower(posed, tile)
        kernels.add(part.launches[0].kernel)
        shapes.add((tile.images, tile.rows, tile.cols))
        multiplied = math.prod(grad_input_tma_shape.tile_counts(posed, tile)) * tile.positions
        assert multiplied <= 1.1 * batch * side * side
    assert len(kernels) <= 2
    assert len(shapes) > len(kernels)


def test_dense_tiles_read_one_group_and_corners_of_a_byte() -> None:
    def dense_kernels(geometry: Geometry) -> list[TmaTile]:
        posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))
        return [
            tile
            for tile in grad_input_tma_tile.tiles(posed, H200)
            if tile.dense and grad_input_tma_tile.legal(posed, tile)
        ]

    of_groups = Geometry(16, 128, 14, 14, 128, (4, 4), (2, 2), (1, 1), groups=2)
    assert dense_kernels(of_groups)
    assert not dense_kernels(of_groups._replace(in_channels=96, out_channels=96))
    assert not dense_kernels(of_groups._replace(groups=1, height=8, width=300)), (
        "wider than a stage has room for"
    )
    of_padding = Geometry(4, 64, 1, 300, 64, (1, 4), (1, 2), (0, 1))
    assert dense_kernels(of_padding)
    assert not dense_kernels(of_padding._replace(padding=(0, 129)))


@pytest.mark.parametrize(("channels", "kernel"), [(256, 2), (256, 3), (256, 4), (512, 4)])
def test_the_first_kernel_of_a_layer_computes_wide_maps(channels: int, kernel: int) -> None:
    geometry = Geometry(2, channels, 5, 600, 128, (kernel, kernel), (2, 2), (kernel // 2 - kernel % 2,) * 2)
    for mode in MODES:
        posed = as_convolution(plan.Problem(geometry, *mode, True, True))
        first = kernels_of(of_any_size(posed), H200).implicit_gemm_tma[0]
        assert grad_input_tma_tile.legal(posed, grad_input_tma_choice.in_best_shape(first, posed, H200))
