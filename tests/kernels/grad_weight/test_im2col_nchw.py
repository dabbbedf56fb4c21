"""The gradient of the weight in TF32 and NCHW with grad_output read where it lies
(csrc/kernels/grad_weight/im2col_nchw.cu): the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from grad_weight_cases import H200, STRIDED, assert_random_tile_matches, tf32_problem

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight import im2col_nchw
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import MAX_MULTIPLIES, columns_of, pixels_of
from tconv_swap.kernels.grad_weight.pixel_rows_tile import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.runtime import jit


def test_the_kernel_for_rows_of_any_length_does_not_spill() -> None:
    posed = tf32_problem(Geometry(32, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1)))
    (part,) = im2col_nchw.part_candidates(posed, H200, False, 1)
    (kernel,) = (one.kernel for one in part.launches if one.kernel.entry == "grad_weight_im2col_nchw")
    _, log = jit.compile_with_log(kernel, H200.architecture)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_every_tile_keeps_the_limits_of_tma_and_holds_what_its_taps_read(geometry: Geometry) -> None:
    g, posed = geometry, tf32_problem(geometry)
    tiles = im2col_nchw.tiles_for(posed, H200, with_bias=False)
    assert tiles
    for tile in tiles:
        made = im2col_nchw.lower(posed, tile, H200, with_bias=False)
        step = next(step for step in made.launches if step.kernel.entry == "grad_weight_im2col_nchw")
        assert step.shared_bytes <= H200.shared_memory_per_block
        for one in step.tensor_maps:
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] % 4 == 0
        pixels, columns = tile.pixels, columns_of(g, tile.pixels)
        assert columns.left_halo % 4 == 0
        end = columns.boxes * columns.box_cols - columns.left_halo
        last = (pixels.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] - g.padding[1]
        if columns.whole:
            assert end >= g.out_width
        else:
            assert pixels.cols * g.stride[1] % 4 == 0
            assert columns.left_halo >= g.padding[1]
            assert end > last
        assert tile.splits * weight_bytes(g) <= max(PARTIAL_LIMIT_BYTES, weight_bytes(g))
        assert pixels.stages(g) * pixels.count <= tile.splits * 8 * MAX_MULTIPLIES


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_stages_reach_over_an_edge_only_where_grad_output_ends(geometry: Geometry) -> None:
    g = geometry
    for pixels in pixels_of(g):
        below = -(-g.height // pixels.rows) * pixels.rows > g.height
        right = -(-g.width // pixels.cols) * pixels.cols > g.width
        assert not below or g.height * g.stride[0] - g.padding[0] >= g.out_height
        assert not right or g.width * g.stride[1] - g.padding[1] >= g.out_width
        assert pixels.images == 1 or pixels.rows * pixels.cols % pixels.box == 0
        assert not pixels.has_halo or pixels.cols % pixels.box == 0
        assert pixels.count % 8 == 0


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_columns_outside_of_grad_output_are_tested_or_filled_with_zeros(geometry: Geometry) -> None:
    """The kernel tests four pixels' columns where one of them may lie outside of the boxes that hold whole rows;
    columns of a box after grad_output's last are zero."""
    g, posed = geometry, tf32_problem(geometry)
    done = 0
    for tile in im2col_nchw.tiles_for(posed, H200, with_bias=False):
        made = im2col_nchw.lower(posed, tile, H200, with_bias=False)
        step = next(step for step in made.launches if step.kernel.entry == "grad_weight_im2col_nchw")
        constants = dict(step.kernel.constants)
        cols, limit = tile.pixels.cols, constants["MIN_OUT_WIDTH"]
        if not constants["WHOLE_ROWS"]:
            continue
        assert isinstance(limit, int)
        held = step.tensor_maps[1].box[0] * int(constants["OUT_BOXES"])
        assert g.out_width <= held
        assert step.tensor_maps[1].sizes[0] == g.out_width
        for quad in range(0, cols, 4) if cols % 4 == 0 else ():
            reached = [
                (quad + pixel) * g.stride[1] + tap * g.dilation[1] - g.padding[1]
                for pixel in range(4)
                for tap in range(g.kernel[1])
            ]
            tested = quad * g.stride[1] < g.padding[1] or max(reached) >= limit
            assert tested or (min(reached) >= 0 and max(reached) < held)
            done += 1
    assert done or not any(
        columns_of(g, pixels).whole and pixels.cols % 4 == 0 for pixels in pixels_of(geometry)
    )


def test_one_kernel_computes_all_widths_up_to_its_pitch() -> None:
    """Of rows whose boxes hold as many columns: 9 to 16 pixels, of which 2 x 2 taps read 18 to 32 columns."""
    layer = Geometry(256, 256, 16, 16, 256, (2, 2), (2, 2))
    kernels = set()
    for width in range(9, 17):
        posed = tf32_problem(replace(layer, height=width - width % 2, width=width))
        tiles = im2col_nchw.tiles_for(posed, H200, with_bias=False)
        tile = next(
            tile
            for tile in tiles
            if (tile.pixels.images, tile.pixels.rows, tile.pixels.cols, tile.pixels.has_halo)
            == (1, 2, 16, False)
            and (tile.warpgroups, tile.m_tiles, tile.cols) == (2, 1, 256)
        )
        launches = im2col_nchw.lower(posed, tile, H200, with_bias=False).launches
        kernels.update(one.kernel for one in launches if one.kernel.entry == "grad_weight_im2col_nchw")
    assert len(kernels) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(12))
def test_random_tiles_match_float64_on_random_geometries(seed: int, with_bias: bool) -> None:
    assert_random_tile_matches(im2col_nchw, False, seed, with_bias)
