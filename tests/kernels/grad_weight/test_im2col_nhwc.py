"""The gradient of the weight in TF32 and channels_last (csrc/kernels/grad_weight/im2col_nhwc.cu): the limits of its
tiles, and random tiles on random geometries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grad_weight_cases import (
    H200,
    ODD,
    STRIDED,
    UNET,
    WIDE,
    assert_random_tile_matches,
    nhwc_tiles,
    tf32_problem,
)

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight import im2col_nhwc
from tconv_swap.kernels.grad_weight.im2col_nhwc_clocks import pool, stage_clocks
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import (
    ANY,
    MAX_STAGES_PER_SUM,
    Tile,
    rows_are_contiguous,
    stages_of,
)
from tconv_swap.kernels.grad_weight.selection import layer_of
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_every_tile_keeps_the_limits_of_tma_and_holds_what_its_taps_read(geometry: Geometry) -> None:
    g, posed = geometry, tf32_problem(geometry, channels_last=True)
    tiles = nhwc_tiles(posed, H200)
    assert tiles
    for tile in tiles:
        made = im2col_nhwc.lower(posed, tile, H200, with_bias=False)
        step = made.launches[0]
        assert step.shared_bytes <= H200.shared_memory_per_block
        assert step.grid % tile.cluster == 0
        into, out = step.tensor_maps
        for one in (into, out):
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] * 4 == one.swizzle_bytes == 128
        p = tile.pixels
        assert p.images * p.rows * p.cols == 32
        # A tap reads every stride-th column of its box, from its shift on.
        shifts = tile.shifts(g)
        assert len(shifts) == tile.taps[1]
        assert (out.box[1] - 1) // out.steps[1] + 1 == p.cols + max(shifts)
        assert not tile.box_per_tap_col or not any(shifts)
        warp_tiles = tile.taps[0] * tile.taps[1] * tile.co_boxes
        assert warp_tiles <= 4 * tile.warpgroups
        assert tile.splits % tile.cluster == 0
        assert tile.copies * weight_bytes(g) <= max(PARTIAL_LIMIT_BYTES, weight_bytes(g))
        assert stages_of(g, p) <= tile.splits * MAX_STAGES_PER_SUM
        assert len(made.launches) == (1 if tile.copies == 1 else 2)


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_the_pixels_that_take_the_fewest_clocks_are_chosen(geometry: Geometry) -> None:
    posed = tf32_problem(geometry, channels_last=True)
    least: dict[Tile, float] = {}
    for tile in nhwc_tiles(posed, H200):
        kernel = replace(tile, pixels=ANY, splits=1)
        clocks = stages_of(geometry, tile.pixels) * stage_clocks(geometry, tile)
        least[kernel] = min(clocks, least.get(kernel, clocks))
    compared = 0
    for one in pool(layer_of(posed), H200):
        best = one.best(geometry, H200)
        if best is not None:
            _, tile = best
            assert stages_of(geometry, tile.pixels) * stage_clocks(geometry, tile) == least[one.tile]
            compared += 1
    assert compared


def test_rows_of_all_images_are_contiguous_where_kernel_is_stride_and_nothing_is_padded() -> None:
    assert rows_are_contiguous(UNET)
    assert rows_are_contiguous(ODD)
    assert not rows_are_contiguous(WIDE)  # rows of taps overlap
    assert not rows_are_contiguous(UNET._replace(output_padding=(1, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(12))
def test_random_tiles_match_float64_on_random_geometries(seed: int, with_bias: bool) -> None:
    assert_random_tile_matches(True, seed, with_bias)
