"""The gradient of the weight in TF32 and NCHW with grad_output read where it lies
(csrc/kernels/grad_weight/im2col_nchw.cu): the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import math
import re
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
    nchw_tiles,
    tf32_problem,
)
from sampling import sampled

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight import im2col_nchw
from tconv_swap.kernels.grad_weight.im2col_nchw_clocks import (
    PARTIAL_BYTE_CLOCKS,
    fixed_clocks,
    stage_clocks,
    with_splits,
)
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import (
    BOX_PIXELS,
    COLUMN_LIMIT,
    MAX_MULTIPLIES,
    MAX_STEPS,
    STEP_PIXELS,
    Im2colKernel,
    copies_grad_output,
    kernels,
    stages_of,
    tiles_of,
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


@pytest.mark.parametrize("geometry", sampled([WIDE, SMALL_MAP], 2), ids=str)
def test_no_kernel_spills(geometry: Geometry, exhaustive: bool) -> None:
    posed = tf32_problem(geometry)
    tiles = {
        (tile.kernel.warpgroups, tile.kernel.m_tiles, tile.kernel.cols): tile
        for tile in reversed(nchw_tiles(posed, H200))
    }
    assert len(tiles) > 8
    compiled = {}
    for shape in sorted(tiles, reverse=True)[:: 1 if exhaustive else 2]:
        kernel = product_of(im2col_nchw.lower(posed, tiles[shape], H200, with_bias=False)).kernel
        _, log = jit.compile_with_log(kernel, H200.architecture)
        compiled[shape] = set(re.findall(r"(\d+) bytes spill", log))
        # With 3 x 2 x 96 ptxas had too few registers, and the multiplies waited for one another.
        assert "are serialized" not in log, shape
    assert all(spilled == {"0"} for spilled in compiled.values()), compiled


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_each_tile_of_input_channels_has_a_row_of_the_bias(geometry: Geometry) -> None:
    g, posed, done = geometry, tf32_problem(geometry), 0
    for tile in nchw_tiles(posed, H200):
        if copies_grad_output(g) or not im2col_nchw.adds_all_of_grad_output(g):
            continue
        made = im2col_nchw.lower(posed, tile, H200, with_bias=True)
        alone = im2col_nchw.lower(posed, tile, H200, with_bias=False)
        *_, count, rows = made.launches[-1].arguments
        tiles = -(-g.in_channels_per_group // tile.kernel.cols)
        assert (count.value, rows.value) == (g.out_channels, 2 * tile.splits * tiles * g.stride[0])
        assert made.workspace_bytes - alone.workspace_bytes >= 4 * count.value * rows.value
        done += 1
    assert done or g.output_padding != (0, 0) or g.out_width % 4


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_every_tile_keeps_the_limits_of_tma_and_holds_what_its_taps_read(geometry: Geometry) -> None:
    g, posed = geometry, tf32_problem(geometry)
    tiles = nchw_tiles(posed, H200)
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
    for tile in {one.stage: one for one in nchw_tiles(posed, H200)}.values():
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
        (UNET._replace(output_padding=(0, 1)), {0}),  # rows of grad_output of 65 pixels
        (WIDE._replace(height=31, width=30), {1}),  # images of 930 pixels
        (UNET._replace(width=31), {0, 1}),
    ],
    ids=str,
)
def test_tensors_are_copied_only_where_boxes_cannot_begin(geometry: Geometry, copied: set[int]) -> None:
    """0 is grad_output, 1 the input."""
    made, *_ = im2col_nchw.ranked(kernels(geometry), tf32_problem(geometry), H200, False)
    copies = [one for one in made.make().launches if one.kernel.entry == "pad_images"]
    assert {one.arguments[0].value for one in copies} == copied


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_the_best_stage_of_each_kernel_is_ranked(geometry: Geometry) -> None:
    """Of all tiles of a kernel the one with the fewest clocks, and the kernels by those of their best tiles."""
    posed, every = tf32_problem(geometry), list(kernels(geometry))
    best: dict[Im2colKernel, float] = {}
    for tile in nchw_tiles(posed, H200):
        clocks, same = with_splits(geometry, tile.kernel, tile.stage, H200) or (0.0, None)
        assert same == tile
        clocks = fixed_clocks(geometry, tile.stage) + clocks
        best[tile.kernel] = min(clocks, best.get(tile.kernel, clocks))
    found = [one.clocks for one in im2col_nchw.ranked(every, posed, H200, False)]
    assert found == sorted(best.values())


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_other_numbers_of_splits_are_hardly_faster(geometry: Geometry) -> None:
    g, compared = geometry, 0
    for tile in nchw_tiles(tf32_problem(geometry), H200):
        stages, blocks = math.prod(tile.stage.counts(g)), tiles_of(g, tile.kernel)
        of_stage = stage_clocks(g, tile.kernel, tile.stage, H200)
        most = min(PARTIAL_LIMIT_BYTES // weight_bytes(g), stages // 4, 400)
        least = -(-stages * tile.stage.steps(g) // MAX_MULTIPLIES)
        clocks = {
            splits: -(-blocks * splits // H200.multiprocessors) * -(-stages // splits) * of_stage
            + (PARTIAL_BYTE_CLOCKS * weight_bytes(g) * splits if splits > 1 else 0)
            for splits in {tile.splits, *range(max(1, least), most + 1)}
        }
        assert clocks[tile.splits] + fixed_clocks(g, tile.stage) < 1.15 * (
            min(clocks.values()) + fixed_clocks(g, tile.stage)
        )
        compared += len(clocks)
    assert compared


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(24))
def test_random_tiles_match_float64_on_random_geometries(seed: int, with_bias: bool) -> None:
    assert_random_tile_matches(False, seed, with_bias)
