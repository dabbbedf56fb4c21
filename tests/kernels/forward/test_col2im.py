"""The plans of csrc/kernels/forward/col2im.cu, and on a GPU its results on random geometries."""

from __future__ import annotations

import random

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import random_output_padding

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.forward import col2im as forward_col2im
from tconv_swap.kernels.forward import col2im_choice as forward_col2im_choice
from tconv_swap.kernels.forward import col2im_tile as forward_col2im_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import of_any_size
from tconv_swap.kernels.forward.plan import posed
from tconv_swap.kernels.forward.selection import kernels_of

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
PIX2PIX = Geometry(16, 128, 128, 128, 3, (4, 4), (2, 2), (1, 1))
FSRCNN = Geometry(4, 56, 270, 480, 1, (9, 9), (4, 4), (4, 4), (3, 3))
LAYERS = (DCGAN, PIX2PIX, FSRCNN)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: As in test_cuda_op.py.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float16, channels_last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_every_tile_fits_a_multiprocessor(
    geometry: Geometry, channels_last: bool, dtype: torch.dtype
) -> None:
    posed = problem(geometry, dtype, channels_last)
    tiles = list(forward_col2im_choice.candidates(posed, H200))
    assert tiles
    for tile in tiles:
        shared = forward_col2im_tile.shared_bytes(posed, tile)
        assert tile.blocks_per_multiprocessor * (shared + 1024) <= 228 << 10
        assert shared <= H200.shared_memory_per_block
        assert tile.warps <= 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_rgb_heads_have_col2im_where_a_pixel_has_few_products(
    channels_last: bool, dtype: torch.dtype
) -> None:
    wide = DCGAN._replace(kernel=(6, 6))  # 108 products a pixel
    for geometry, expected in ((DCGAN, True), (PIX2PIX, True), (wide, False)):
        layer = of_any_size(posed(problem(geometry, dtype, channels_last), True))
        assert bool(kernels_of(layer, H200).col2im) == expected


def test_a_kernel_serves_many_batches() -> None:
    kernels = {
        one.kernel
        for batch in range(1, 200, 7)
        for one in plan.plan_forward(problem(PIX2PIX.with_batch(batch)), True, H200).launches
    }
    assert len(kernels) <= 4


def test_row_tiles_fill_the_gpu() -> None:
    for geometry in LAYERS:
        for batch in (1, 3, 16, 128, 1000):
            posed = problem(geometry.with_batch(batch))
            for tile in forward_col2im_choice.of_size(posed, H200)[:3]:
                row_tiles = forward_col2im_tile.row_tiles(posed, tile, H200)
                assert 1 <= row_tiles <= forward_col2im_tile.MAX_ROW_TILES
                assert forward_col2im.lower(posed, True, tile, H200).launches[0].grid <= (
                    132 * tile.blocks_per_multiprocessor
                )


def test_tensor_maps_are_legal() -> None:
    for geometry in LAYERS:
        for dtype in DTYPES:
            for channels_last in (False, True):
                posed = problem(geometry, dtype, channels_last)
                for tile in forward_col2im_choice.candidates(posed, H200):
                    (map_,) = forward_col2im.lower(posed, True, tile, H200).launches[-1].tensor_maps
                    assert all(stride % 16 == 0 for stride in map_.strides)
                    assert all(1 <= size <= 256 for size in map_.box)
                    assert map_.box[0] * dtype.itemsize == map_.swizzle_bytes


@pytest.mark.parametrize(
    "other",
    [
        DCGAN._replace(groups=2, out_channels=4),
        DCGAN._replace(out_channels=16),
        DCGAN._replace(in_channels=4),
        DCGAN._replace(kernel=(9, 9)),  # 243 products a pixel
    ],
    ids=str,
)
def test_other_problems_are_not_claimed(other: Geometry) -> None:
    assert forward_col2im.supports(problem(DCGAN), H200)
    assert not forward_col2im.supports(problem(other), H200)
    assert not forward_col2im.supports(problem(DCGAN), plan.Device("sm_80", 108, 163 << 10))


def test_rows_that_the_copy_engine_cannot_load_are_copied_to_longer_ones() -> None:
    posed = problem(DCGAN._replace(width=31))
    tile = forward_col2im.of_size(posed, H200)[0]
    pad, main = forward_col2im.lower(posed, False, tile, H200).launches
    assert (pad.kernel.entry, main.kernel.entry) == ("pad_rows", "forward_col2im")
    (map_,) = main.tensor_maps
    assert map_.sizes[0] == 31
    assert map_.strides[0] == 32 * posed.dtype.itemsize
    aligned = problem(DCGAN)
    ((clocks, without_copy),) = forward_col2im.clocks([posed, aligned], [tile], H200)
    assert clocks > without_copy
    # A larger copy would take too much memory.
    assert forward_col2im.supports(problem(DCGAN.with_batch(40_000)), H200)
    assert not forward_col2im.supports(problem(DCGAN._replace(width=31, batch=40_000)), H200)


def random_geometry(rng: random.Random, item: int, channels_last: bool) -> Geometry:
    line = 16 // item
    while True:
        kernel = (rng.randint(1, 6), rng.randint(1, 6))
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        dilation = (rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3)))
        geometry = Geometry(
            rng.randint(1, 4),
            line * rng.randint(1, 14) if channels_last else rng.choice((8, 16, 21, 33, 64, 100)),
            rng.randint(1, 30),
            rng.randint(1, 150) if channels_last or rng.random() < 0.3 else line * rng.randint(1, 30),
            rng.choice((1, 2, 3, 5)),
            kernel,
            stride,
            (rng.randint(0, 5), rng.randint(0, 5)),
            random_output_padding(rng, stride, dilation),
            dilation,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(48))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Every problem that the kernel supports is computed right by a random tile, in poisoned memory, with the same bits
    twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 3]
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the kernel is made for sm_90a")
    while True:
        channels_last = rng.random() < 0.5
        geometry = random_geometry(rng, dtype.itemsize, channels_last)
        posed = plan.Problem(geometry, dtype, "ieee", channels_last, rng.random() < 0.5)
        tiles = (
            list(forward_col2im_choice.candidates(posed, facts))
            if forward_col2im.supports(posed, facts)
            else []
        )
        if tiles:
            break
    with_bias = rng.random() < 0.5
    made = forward_col2im.lower(posed, with_bias, rng.choice(tiles), facts)
    layouts = (posed.channels_last, posed.weight_channels_last)
    assert_kernel_matches(made, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=with_bias)
