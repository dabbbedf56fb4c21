"""grad_input/im2col: every kind of tile on random problems, and when the planner takes the family."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from grad_input_cases import defined_gradient, words_by_name
from harness import assert_kernel_matches
from size_cases import quotient

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.hardware import MAX_BOX
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input import im2col_tile as grad_input_im2col_tile
from tconv_swap.kernels.grad_input import implicit_gemm_choice as grad_input_choice
from tconv_swap.kernels.grad_input.im2col_tile import Im2colKernel, Im2colShape, Im2colTile, as_read
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, as_convolution, of_any_size
from tconv_swap.kernels.grad_input.selection import kernels_for, kernels_of, representatives
from tconv_swap.runtime.program import input_

H200 = plan.Device("sm_90a", 132, 227 << 10)
MODES = ((torch.float32, "tf32"), (torch.float16, "ieee"), (torch.bfloat16, "ieee"))
TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-3, torch.bfloat16: 8e-3}


def random_geometry(rng: random.Random) -> Geometry:
    """Returns a geometry; rows are often multiples of 16 bytes, and often kernel = stride."""
    groups = rng.choice((1, 1, 1, 2, 3))
    kernel = (rng.choice((1, 2, 3, 4, 9)), rng.choice((1, 2, 2, 3, 4, 4, 8, 9)))
    largest = rng.choice((8, 40))
    size = (rng.randint(1, largest), rng.randint(1, largest))
    channels = [groups * rng.choice((8, 24, 32, 64, 72, 136, 264)), rng.choice((1, 2, 3, 5, 10))]
    if rng.random() < 0.6:
        channels[1] = groups * rng.choice((8, 24, 32, 64, 72, 136, 264))
    else:
        groups, channels[0] = 1, rng.choice((channels[0], 9, 30, 65))
    batch = rng.choice((1, 2, 5, 9))
    if rng.random() < 0.4:
        return Geometry(batch, channels[0], *size, channels[1], kernel, kernel, groups=groups)
    stride = (rng.randint(1, 4), rng.choice((1, 2, 2, 3, 4, 8)))
    dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2)))
    padding = (rng.randint(0, 3), rng.randint(0, 3))
    extra = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    added = (extra[0], extra[1])
    return Geometry(batch, channels[0], *size, channels[1], kernel, stride, padding, added, dilation, groups)


def wide_geometry(rng: random.Random) -> Geometry:
    """Returns a geometry whose grad_output has rows of a multiple of 32, at a stride for which boxes of many columns
    have more than TMA takes in one dimension."""
    stride, channels = rng.choice((4, 8)), [rng.choice((8, 32, 64, 136)) for _ in range(2)]
    halo = rng.random() < 0.5
    kernel, padding = (rng.randint(1, 2), (1 + halo) * stride), (0, halo * stride // 2)
    size = (rng.randint(1, 3), 32 * rng.randint(1, 8) // (stride // 4))
    return Geometry(rng.choice((1, 3)), channels[0], *size, channels[1], kernel, (1, stride), padding)


def random_shape(rng: random.Random, posed: StridedProblem, kernel: Im2colKernel) -> Im2colShape | None:
    """Returns any shape that the kernel may get, with a box that may be wider than it needs to be, if shared memory
    holds what was drawn."""
    cols = rng.choice((rng.randint(1, kernel.positions), rng.randint(1, 32)))
    rows = rng.randint(1, kernel.positions // cols)
    images = rng.randint(1, kernel.positions // (cols * rows))
    box_w = grad_input_im2col_tile.min_box_w(posed, cols)
    wide = box_w > MAX_BOX
    more = rng.choice((0, 0, 1, 3)) * grad_input_im2col_tile.column_alignment(posed, wide)
    if wide or box_w + more <= MAX_BOX:
        box_w += more
    shape = Im2colShape(images, rows, cols, box_w, paired=rng.random() < 0.5)
    return grad_input_im2col_tile.with_stages(posed, kernel, shape, H200)


def tiles_of(rng: random.Random, posed: StridedProblem) -> Iterator[Im2colTile]:
    """Yields tiles with the planner's shapes, and with others."""
    for kernel in grad_input_im2col_tile.kernels(posed, H200):
        planned = grad_input_im2col_tile.shapes(posed, kernel, H200)
        shapes = [
            laid
            for shape in rng.sample(list(planned), 1)
            for laid in grad_input_im2col_tile.variants(posed, kernel, shape, H200)
        ]
        shapes += [shape for _ in range(4) if (shape := random_shape(rng, posed, kernel)) is not None]
        for shape in shapes:
            tile = Im2colTile(kernel, shape, rng.randint(2, 4) if kernel.partial else 1)
            if grad_input_im2col_tile.legal(posed, tile):
                yield tile


def cases(
    seed: int, count: int, wide: bool = False
) -> Iterator[tuple[plan.Problem, StridedProblem, Im2colTile]]:
    """Yields problems that the kernel computes, each with one of its tiles; every kind of tile is as likely as another.
    ``wide``: only tiles with boxes of more columns than TMA takes in one dimension."""
    rng = random.Random(seed)
    while count:
        dtype, precision = MODES[count % len(MODES)]
        geometry = wide_geometry(rng) if wide else random_geometry(rng)
        if min(geometry.out_height, geometry.out_width) < 1 or geometry.macs / geometry.groups > 1e9:
            continue
        last = not wide and rng.random() < 0.4
        problem = plan.Problem(geometry, dtype, precision, last, last)
        posed = as_convolution(problem)
        kinds: dict[tuple[object, ...], list[Im2colTile]] = {}
        if posed.step != (1, 1) and grad_input_im2col.supports(posed, H200):
            for tile in tiles_of(rng, as_read(posed)):
                kernel, shape = tile.kernel, tile.shape
                kind = (kernel, shape.paired, shape.cols, shape.images > 1, shape.wide)
                if shape.wide or not wide:
                    kinds.setdefault(kind, []).append(tile)
        if kinds:
            count -= 1
            yield problem, posed, rng.choice(rng.choice(list(kinds.values())))


def emulated(posed: StridedProblem, tile: Im2colTile) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gradient of one channel of the first group, computed from what the launch says, as
    grad_input/im2col.cu does, and by the definition."""
    rng = np.random.default_rng(0)
    posed = as_read(posed)
    geometry, (step_h, step_w) = posed.geometry, posed.step
    launches = grad_input_im2col.lower(posed, tile).launches
    main = next(one for one in launches if one.kernel.entry == "grad_input_im2col")
    constants = {k: v for k, v in main.kernel.constants if not isinstance(v, str)}
    shape, stage_channels = words_by_name("Im2colTileShape", main.structs[1]), constants["STAGE_CHANNELS"]
    alignment, column_block = shape["alignment_columns"], constants["COLUMN_BLOCK"] if shape["wide"] else 1
    box_w, plane = shape["row_pitch"], shape["channel_pitch"]
    box_h, rest = divmod(plane, box_w)
    assert rest == 0
    images, tile_rows, tile_cols = shape["images"], shape["rows"], shape["cols_value"]
    channels, word = geometry.in_channels_per_group, grad_input_im2col_tile.word(posed)
    (height, width), (rows, cols) = (geometry.height, geometry.width), posed.positions
    grad_output = rng.standard_normal((geometry.batch, channels, height, width))
    weight = rng.standard_normal((channels, *geometry.kernel))
    steps, round_stages = tile.kernel.steps, tile.kernel.round_stages
    stages = grad_input_im2col_tile.rounds(posed, tile.kernel) * round_stages
    weight_of_k = np.zeros(stages * steps * 8 * word)
    weight_of_k[: weight.size] = weight.ravel()

    def divided(name: str, n: int) -> int:
        return quotient(tuple(shape[f"{name}_{of}"] for of in ("value", "magic", "shift")), n)

    offsets = np.array([grad_input_im2col_tile.offset(posed, k) for k in range(steps * 8 * word)]) @ (
        plane,
        box_w,
        1,
    )
    assert steps >= 4
    assert steps * round_stages % 4 == 0
    assert offsets.max() * posed.item // 2 < 1 << 16
    table_bytes = 2 * (steps * round_stages * 8) * (2 if constants["HALVES"] else 1)
    barriers = 16 * (constants["MAX_INPUT_STAGES"] + constants["MAX_WEIGHT_STAGES"])
    assert barriers + table_bytes <= constants["HEAD_BYTES"]
    multiplied = constants["WARPGROUPS"] * constants["M_TILES"] * 64
    lines = np.array([divided("cols", position) for position in range(multiplied)])
    at_image = np.array([divided("image_positions", position) for position in range(multiplied)])
    at_col, at_row = np.arange(multiplied) - lines * tile_cols, lines - at_image * tile_rows
    at_image, at_row, at_col = (of[at_image < images] for of in (at_image, at_row, at_col))
    assert len(at_col) == images * tile_rows * tile_cols
    first = at_image * stage_channels * plane + at_row * step_h * box_w + at_col * step_w + alignment
    elements = first[:, None] + offsets
    if word == 2 and not constants["HALVES"]:
        assert (elements[:, 1::2] == elements[:, ::2] + 1).all(), "words"
        assert (elements[:, ::2] % 2 == 0).all(), "words"

    assert len(main.tensor_maps[0].box) == (5 if shape["wide"] else 4)
    assert width % column_block == 0

    # The stage holds all that is loaded and read, and the stages lie within the shared memory.
    assert math.prod(main.tensor_maps[0].box) * posed.item == shape["input_bytes"] <= shape["input_pitch"]
    assert 0 <= elements.min() <= elements.max() < shape["input_bytes"] // posed.item
    assert 2 <= shape["input_stages"] <= constants["MAX_INPUT_STAGES"]
    assert 2 <= shape["weight_stages"] <= constants["MAX_WEIGHT_STAGES"]
    weights = shape["weight_stages"] * constants["BLOCK_CHANNELS"] * 128
    used = constants["HEAD_BYTES"] + weights + shape["input_stages"] * shape["input_pitch"]
    assert 1024 + used <= main.shared_bytes <= H200.shared_memory_per_block
    assert shape["input_pitch"] % 128 == 0

    grad_input = np.full((geometry.batch, rows, cols), np.nan)
    counts = grad_input_im2col_tile.tile_counts(posed, tile.shape)
    for index in np.ndindex(*counts):
        image, row, col = (n * size for n, size in zip(index, (images, tile_rows, tile_cols), strict=True))
        start = col * step_w - geometry.padding[1] - alignment
        assert start % max(column_block, 16 // posed.item) == 0
        n, c, h, w = np.ogrid[
            image : image + images,
            : stages * stage_channels,
            row * step_h - geometry.padding[0] : row * step_h - geometry.padding[0] + box_h,
            start : start + box_w,
        ]
        inside = (n < geometry.batch) & (c < channels) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        clipped = (n.clip(0, geometry.batch - 1), c.clip(0, channels - 1), h.clip(0, height - 1))
        box = np.where(inside, grad_output[(*clipped, w.clip(0, width - 1))], 0)
        sums = np.zeros(len(at_col))
        for stage in range(stages):
            stage_elements = box[:, stage * stage_channels : (stage + 1) * stage_channels].ravel()
            sums += (
                stage_elements[elements]
                @ weight_of_k[stage * steps * 8 * word : (stage + 1) * steps * 8 * word]
            )
        exists = (image + at_image < geometry.batch) & (row + at_row < rows) & (col + at_col < cols)
        stored = (image + at_image[exists], row + at_row[exists], col + at_col[exists])
        assert np.isnan(grad_input[stored]).all(), "stored twice"
        grad_input[stored] = sums[exists]

    return grad_input, defined_gradient(posed, grad_output, weight)


@pytest.mark.parametrize("seed", range(4))
def test_every_position_is_stored_once_from_the_pixels_of_the_definition(seed: int) -> None:
    for _, posed, tile in (*cases(seed, 9), *cases(seed, 3, wide=True)):
        found, wanted = emulated(posed, tile)
        np.testing.assert_allclose(found, wanted, atol=1e-9, err_msg=f"{posed.geometry} {tile}")


def channels_last_problem(geometry: Geometry) -> StridedProblem:
    return as_convolution(plan.Problem(geometry, torch.float16, "ieee", True, True))


def test_in_channels_last_the_channels_of_a_pixel_are_columns_of_its_row() -> None:
    rng, drawn = np.random.default_rng(0), random.Random(0)
    for _ in range(40):
        geometry = random_geometry(drawn)._replace(groups=1, out_channels=drawn.choice((1, 2, 3, 5)))
        geometry = geometry._replace(dilation=(geometry.dilation[0], 1), output_padding=(0, 0))
        if min(geometry.out_height, geometry.out_width) < 1:
            continue
        posed = channels_last_problem(geometry)
        read, g = as_read(posed), posed.geometry
        assert of_any_size(read) == as_read(of_any_size(posed))
        assert read.positions == posed.positions
        grad_output = rng.standard_normal((g.batch, g.height, g.width, g.in_channels))
        weight = rng.standard_normal((*g.kernel, g.in_channels))
        found = defined_gradient(
            read, grad_output.reshape(g.batch, 1, g.height, -1), weight.reshape(1, g.kernel[0], -1)
        )
        wanted = defined_gradient(posed, grad_output.transpose(0, 3, 1, 2), weight.transpose(2, 0, 1))
        np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_channels_last_needs_one_group_whose_taps_follow_one_another() -> None:
    geometry = Geometry(2, 64, 16, 16, 4, (4, 4), (2, 2), (1, 1))
    assert grad_input_im2col.supports(channels_last_problem(geometry), H200)
    for other in (geometry._replace(groups=2), geometry._replace(dilation=(1, 2))):
        assert not grad_input_im2col.supports(channels_last_problem(other), H200)
    weight_in_nchw = plan.Problem(geometry, torch.float16, "ieee", True, False)
    assert not grad_input_im2col.supports(as_convolution(weight_in_nchw), H200)


def test_a_stage_is_all_of_k_where_that_multiplies_less() -> None:
    """Whole steps of whole channels are 8 channels of 9 taps, and four stages of 9 steps fill whole stages of the
    weights."""

    def stage(channels: int, **changes: Any) -> tuple[int, int]:
        geometry = Geometry(4, 64, 32, 32, channels, (3, 3), (2, 2), (1, 1), **changes)
        posed = as_convolution(plan.Problem(geometry, torch.float32, "tf32", False, False))
        kernel = next(grad_input_im2col_tile.kernels(posed, H200))
        return kernel.stage_channels, kernel.steps

    assert stage(1) == (4, 4)
    assert stage(3) == (4, 4)
    assert stage(5) == (8, 8)
    assert stage(32) == (8, 9)
    assert stage(64, groups=2) == (8, 9)


def test_a_size_gets_the_shape_that_is_expected_to_be_the_fastest() -> None:
    """A kernel has other shapes for these maps, and none is faster than the one that is chosen."""
    layer = of_any_size(as_convolution(plan.Problem(DECODER, torch.float16, "ieee", False, False)))
    schedules = grad_input_im2col_choice.candidates(layer, representatives(layer)[0], H200)
    chosen: dict[Im2colKernel, set[Im2colShape]] = {}
    for batch, side in ((64, 4), (64, 8), (64, 16), (8, 64), (8, 128)):
        geometry = DECODER._replace(batch=batch, height=side, width=side)
        posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", False, False))
        for schedule in schedules:
            alone = [schedule._replace(shapes=(one,)) for one in schedule.shapes]
            every = grad_input_im2col.ranked_tiles(alone, posed, H200)
            if not every:
                assert not grad_input_im2col.ranked_tiles([schedule], posed, H200)
                continue
            (time, tile), *_ = grad_input_im2col.ranked_tiles([schedule], posed, H200)
            assert time == min(of_shape for of_shape, _ in every)
            assert grad_input_im2col_tile.legal(posed, tile)
            chosen.setdefault(schedule.kernel, set()).add(tile.shape)
    assert max(map(len, chosen.values())) > 2
    assert {kernel.partial for kernel in chosen} == {False, True}


UNET1 = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
DECODER = UNET1._replace(kernel=(4, 4), padding=(1, 1))
VOCODER = Geometry(12, 768, 1, 174, 384, (1, 20), (1, 10), (0, 5))
#: Layers with rows of 129 and 638 pixels, which are no multiples of 16 bytes; the second has few multiply-adds for each
#: of them.
STYLEGAN2 = Geometry(1, 4096, 64, 64, 2048, (3, 3), (2, 2), groups=8)
KB81 = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))


@pytest.mark.parametrize(
    ("geometry", "dtype", "entries"),
    [
        (UNET1, torch.float32, ["grad_input_im2col"]),
        # A row of which no multiple of 32 columns is made, at a stride for which most tiles need that.
        (VOCODER, torch.float32, ["grad_input_im2col"]),
        (STYLEGAN2, torch.float32, ["pad_rows", "grad_input_im2col"]),
        (STYLEGAN2, torch.float16, ["nchw_to_nhwc", "nchw_to_nhwc", "grad_input_implicit_gemm_tma"]),
        (KB81, torch.float32, ["forward_implicit_gemm_pack", "grad_input_implicit_gemm_mma"]),
        (UNET1._replace(in_channels=16), torch.float32, ["grad_input_im2col"]),
    ],
    ids=str,
)
def test_the_planner_takes_the_family_where_it_is_faster(
    geometry: Geometry, dtype: torch.dtype, entries: list[str]
) -> None:
    """In TF32, rows that TMA cannot read are padded first, if there are multiply-adds enough to pay for the copy."""
    problem = plan.Problem(geometry, dtype, "tf32", False, False)
    made = plan.plan_backward(problem, (True, False, False), H200)
    assert [one.kernel.entry for one in made.launches][: len(entries)] == entries
    ampere = plan.plan_backward(problem, (True, False, False), plan.Device("sm_80", 108, 163 << 10))
    assert ampere.family != grad_input_im2col.FAMILY


def test_tiles_of_several_images_have_whole_ones_or_the_positions_of_a_multiply_of_each() -> None:
    small, large = Im2colShape(8, 4, 4, 12), Im2colShape(2, 8, 8, 20)
    assert small.suits(4, 4)
    assert not small.suits(20, 20)
    assert large.suits(20, 20)
    assert Im2colShape(1, 4, 4, 12).suits(20, 20)
    assert Im2colShape(16, 1, 16, 160).suits(1, 184)


def test_small_tiles_of_wgmma_come_before_those_of_mma_where_large_ones_are_few() -> None:
    """In 16 bits tiles of 16 x 16 positions leave half of the multiprocessors idle here."""
    for batch, side in ((83, 14), (16, 32)):
        geometry = Geometry(batch, 128, side, side, 64, (4, 4), (2, 2), (1, 1))
        problem = as_convolution(plan.Problem(geometry, torch.float16, "ieee", False, False))
        found = kernels_for(problem, H200).implicit_gemm
        (_, _, tile), *_ = grad_input_choice.ranked(found, problem, H200)
        assert tile.wgmma


def test_sides_between_powers_of_two_have_shapes_of_their_own() -> None:
    """Whose tiles multiply at most a third more positions than the map has."""
    for side, batch in ((20, 40), (24, 28), (28, 20), (40, 10), (48, 7), (56, 5)):
        geometry = Geometry(batch, 256, side, side, 256, (4, 4), (2, 2), (1, 1))
        problem = as_convolution(plan.Problem(geometry, torch.float32, "tf32", False, False))
        found = kernels_of(of_any_size(problem), H200).im2col
        (_, tile), *_ = grad_input_im2col.ranked_tiles(found, problem, H200)
        work = grad_input_im2col_tile.work_count(problem, tile) // tile.splits
        multiplied = work * tile.kernel.positions
        positions = batch * side * side * grad_input_im2col_tile.blocks(problem, tile.kernel)
        assert multiplied <= 4 / 3 * positions, side


def test_padded_rows_follow_the_partial_sums_in_the_workspace() -> None:
    posed = as_convolution(plan.Problem(STYLEGAN2._replace(groups=1), torch.float32, "tf32", False, False))
    kernel = next(one for one in grad_input_im2col_tile.kernels(posed, H200) if one.partial)
    tile = Im2colTile(kernel, next(grad_input_im2col_tile.shapes(posed, kernel, H200)), 2)
    part = grad_input_im2col.lower(posed, tile)
    pad, main, _ = part.launches
    stored = main.tensor_maps[0].base.value
    assert pad.arguments[1] == main.tensor_maps[0].base
    assert stored >= 4 * tile.splits * math.prod(STYLEGAN2.input_shape)
    assert stored + 4 * 2048 * 129 * 132 == part.workspace_bytes


@pytest.mark.parametrize("channels_last", [False, True])
def test_weights_whose_rows_tma_cannot_read_are_copied(channels_last: bool) -> None:
    """243 weights a channel are 486 bytes, and their rows 496; rows of grad_output are whole pieces."""
    geometry = Geometry(12, 68, 152, 200, 3, (9, 9), (4, 4), (4, 4), (3, 3))
    posed = as_convolution(plan.Problem(geometry, torch.float16, "ieee", channels_last, channels_last))
    kernel = next(grad_input_im2col_tile.kernels(as_read(posed), H200))
    tile = Im2colTile(kernel, next(grad_input_im2col_tile.shapes(as_read(posed), kernel, H200)))
    part = grad_input_im2col.lower(posed, tile)
    pad, main = part.launches
    assert pad.arguments[0] == input_(2)
    grad_output, weight = main.tensor_maps
    assert grad_output.base == input_(0)
    assert weight.base == pad.arguments[1]
    assert (weight.sizes[:2], weight.strides[0]) == ((243, 68), 496)
    assert part.workspace_bytes >= 68 * 496


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs sm_90a"
)
@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_tile_matches_float64(seed: int) -> None:
    torch.manual_seed(seed)
    for problem, posed, tile in (*cases(100 + seed, 6), *cases(100 + seed, 2, wide=True)):
        part, tolerance = grad_input_im2col.lower(posed, tile), TOLERANCE[problem.dtype]
        mask = (True, False, False)
        layouts = (problem.channels_last, problem.weight_channels_last)
        assert_kernel_matches(part, problem.geometry, problem.dtype, layouts, tolerance, mask)
