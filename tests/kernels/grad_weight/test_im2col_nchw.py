"""The gradient of the weight in TF32 and NCHW with grad_output read where it lies
(csrc/kernels/grad_weight/im2col_nchw.cu): the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from grad_input_cases import words_by_name
from grad_weight_cases import (
    H200,
    SMALL_MAP,
    STRIDED,
    UNET,
    WIDE,
    assert_random_tile_matches,
    tf32_problem,
)

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight import im2col_nchw
from tconv_swap.kernels.grad_weight.im2col_nchw_classes import choose
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    BOX_PIXELS,
    COLUMN_LIMIT,
    MAX_MULTIPLIES,
    MAX_STEPS,
    STEP_PIXELS,
    expected_clocks,
    stages_of,
)
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Launch, Part

#: Maps whose rows are no multiple of 16 bytes, of one column, with rows that no stage holds, and of a large stride.
NARROW = (
    Geometry(3, 64, 7, 7, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(3, 64, 5, 1, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(3, 64, 3, 67, 64, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 64, 2, 50, 64, (3, 20), (2, 10), (1, 5)),
    Geometry(2, 64, 19, 9, 64, (3, 3), (9, 2)),
    Geometry(2, 64, 2, 64, 64, (1, 12), (1, 12)),
)


def product_of(part: Part) -> Launch:
    """Returns the launch that multiplies."""
    return next(one for one in part.launches if one.kernel.entry == "grad_weight_im2col_nchw")


@pytest.mark.parametrize("geometry", [WIDE, SMALL_MAP], ids=str)
def test_no_kernel_spills(geometry: Geometry) -> None:
    posed = tf32_problem(geometry)
    compiled = {}
    for tile in im2col_nchw.tiles_for(posed, H200, with_bias=False):
        shape = tile.kernel.warpgroups, tile.kernel.m_tiles, tile.kernel.cols
        if shape not in compiled:
            kernel = product_of(im2col_nchw.lower(posed, tile, H200, with_bias=False)).kernel
            _, log = jit.compile_with_log(kernel, H200.architecture)
            compiled[shape] = set(re.findall(r"(\d+) bytes spill", log))
    assert len(compiled) > 8
    assert all(spilled == {"0"} for spilled in compiled.values()), compiled


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_every_tile_keeps_the_limits_of_tma_and_holds_what_its_taps_read(geometry: Geometry) -> None:
    g, posed = geometry, tf32_problem(geometry)
    tiles = im2col_nchw.tiles_for(posed, H200, with_bias=False)
    assert tiles
    for tile in tiles:
        step = product_of(im2col_nchw.lower(posed, tile, H200, with_bias=False))
        assert step.shared_bytes <= H200.shared_memory_per_block
        for one in step.tensor_maps:
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] % 4 == 0
        kernel, stage = tile.kernel, tile.stage
        halo = stage.left_halo(g)
        end = stage.out_boxes(g, kernel.out_box_cols) * kernel.out_box_cols - halo
        last = (stage.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] - g.padding[1]
        if stage.has_whole_rows(g):
            assert halo == 0
            assert end >= g.out_width
        else:
            assert halo % 4 == 0
            assert halo >= g.padding[1]
            assert end > last
        assert tile.splits * weight_bytes(g) <= max(PARTIAL_LIMIT_BYTES, weight_bytes(g))
        images, down, across = stage.counts(g)
        assert images * down * across * stage.steps(g) <= tile.splits * MAX_MULTIPLIES


@pytest.mark.parametrize("geometry", [*STRIDED, *NARROW], ids=str)
def test_boxes_begin_at_multiples_of_16_bytes_and_stages_cover_every_pixel_once(geometry: Geometry) -> None:
    g = geometry
    assert stages_of(g)
    for stage in stages_of(g):
        images, down, across = stage.counts(g)
        whole = stage.has_whole_rows(g)
        assert whole or stage.rows == 1
        assert stage.images == 1 or (whole and stage.rows == g.height)
        assert stage.run(g) <= stage.run_boxes(g) * BOX_PIXELS
        assert 1 <= stage.steps(g) <= MAX_STEPS
        assert (min(stage.cols, g.width) - 1) * g.stride[1] < COLUMN_LIMIT
        assert images * stage.images >= g.batch
        counted = [[0] * g.width for _ in range(g.height)]
        for y in range(down):
            for x in range(across):
                assert (y * stage.rows * stage.pitch + x * stage.cols) % 4 == 0
                assert whole or x * stage.cols * g.stride[1] % 4 == 0
                for row in range(y * stage.rows, min(g.height, (y + 1) * stage.rows)):
                    for col in range(x * stage.cols, min(g.width, (x + 1) * stage.cols)):
                        counted[row][col] += 1
        assert counted == [[1] * g.width for _ in range(g.height)]


@pytest.mark.parametrize("geometry", [*NARROW, *STRIDED[-2:]], ids=str)
def test_each_pixel_reads_the_columns_of_its_taps_from_the_boxes(geometry: Geometry) -> None:
    """The kernel's arithmetic (pixel_entry, ExistingPixels and the producer of im2col_nchw*.cuh), emulated."""
    g, posed = geometry, tf32_problem(geometry)
    for tile in {one.stage: one for one in im2col_nchw.tiles_for(posed, H200, with_bias=False)}.values():
        main = product_of(im2col_nchw.lower(posed, tile, H200, with_bias=False))
        constants = {name: int(value) for name, value in main.kernel.constants}
        sizes = words_by_name("Im2colNchwSizes", main.structs[0])
        box_cols, run_steps, rows, cols = (
            *(constants["OUT_BOX_COLS"], sizes["run_steps_value"]),
            *(sizes["rows"], sizes["cols"]),
        )
        assert sizes["steps"] == sizes["images"] * run_steps <= constants["MAX_STEPS"]
        cut, in_stage = cols < g.width, rows * cols
        seen = [[0] * g.width for _ in range(g.height)]
        for down, across in product(range(sizes["down"]), range(sizes["across"])):
            left = (g.width if cut else g.height * cols) - (across if cut else down) * in_stage
            first_col = across * cols * g.stride[1] - sizes["left_halo"]
            for pixel in range(run_steps * STEP_PIXELS):
                assert pixel < sizes["run_boxes"] * BOX_PIXELS
                line, col = divmod(pixel, cols)
                memory = down * rows * sizes["pitch"] + across * cols + pixel
                row, in_row = divmod(memory, sizes["pitch"])
                for kw in range(g.kernel[1]):
                    x = sizes["left_halo"] + col * g.stride[1] + kw * g.dilation[1] - g.padding[1]
                    end = sizes["out_boxes"] * box_cols if cut else sizes["out_width"]
                    read = pixel < left and line < rows and col < g.width and 0 <= x < end
                    wanted = in_row * g.stride[1] + kw * g.dilation[1] - g.padding[1]
                    exists = line < rows and row < g.height and in_row < g.width
                    exists &= not cut or in_row == across * cols + pixel
                    if read:
                        assert exists
                        assert first_col + x == wanted
                        assert x // box_cols < sizes["out_boxes"]
                    else:
                        assert not exists or not 0 <= wanted < g.out_width
                if pixel < left and line < rows and col < g.width:
                    seen[row][in_row] += 1
        assert seen == [[1] * g.width for _ in range(g.height)]


@pytest.mark.parametrize(
    ("geometry", "copied"),
    [
        (UNET, set()),
        (replace(UNET, output_padding=(0, 1)), {0}),  # rows of grad_output of 65 pixels
        (replace(WIDE, height=31, width=30), {1}),  # images of 930 pixels
        (replace(UNET, width=31), {0, 1}),
    ],
    ids=str,
)
def test_tensors_are_copied_only_where_boxes_cannot_begin(geometry: Geometry, copied: set[int]) -> None:
    """0 is grad_output, 1 the input."""
    (made,) = im2col_nchw.part_candidates(tf32_problem(geometry), H200, False, 1)
    copies = [one for one in made.launches if one.kernel.entry == "pad_images"]
    assert {one.arguments[0].value for one in copies} == copied


@pytest.mark.parametrize("layer", [WIDE, UNET, SMALL_MAP], ids=str)
def test_two_kernels_of_a_layer_compute_maps_of_all_widths(layer: Geometry) -> None:
    kernels = set()
    for width in (*range(4, 33), 40, 48, 56, 60, 68, 80, 96, 100, 112, 128, 130, 200, 256):
        batch = max(1, (1 << 19) // (64 * width * width))
        posed = tf32_problem(replace(layer, batch=batch, height=width, width=width))
        tile, *_ = choose(posed, H200, im2col_nchw.MAX_SCHEDULES)
        kernels.add(tile.kernel)
        clocks = expected_clocks(posed.geometry, tile, H200)
        tiles = im2col_nchw.tiles_for(posed, H200, with_bias=False)
        best = min(expected_clocks(posed.geometry, one, H200) for one in tiles)
        # Smaller maps fill a kernel whose boxes are narrow, which the layer may lack.
        assert clocks <= (1.35 if width > 8 else 1.8) * best, width
    assert len(kernels) <= im2col_nchw.MAX_SCHEDULES


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(24))
def test_random_tiles_match_float64_on_random_geometries(seed: int, with_bias: bool) -> None:
    assert_random_tile_matches(im2col_nchw, False, seed, with_bias)
