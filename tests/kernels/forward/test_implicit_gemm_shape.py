"""The shapes of the tiles of csrc/kernels/forward/implicit_gemm_tma.cu that a kernel takes at its launch: which pixels
a tap reads in each of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from grad_input_cases import words_by_name
from im2col_mode import loaded
from implicit_gemm_tma_cases import H200, random_geometry

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import sizes
from tconv_swap.kernels.common.limits import MAX_REMEMBERED
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_shape as forward_shape
from tconv_swap.kernels.forward.implicit_gemm_candidates import Schedule, Timer
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import clocks_of_tile, expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    dense_map,
    make_problem,
)


def shaped_tiles(posed: TileProblem) -> list[tuple[TileProblem, Tile]]:
    return [entry for entry in candidates(posed, H200) if entry[1].shaped_pixels]


def shaped_cases(seed: int, count: int) -> Iterator[tuple[TileProblem, Tile]]:
    """Yields random problems, each with a shaped tile in each of its legal shapes."""
    rng = random.Random(seed)
    while count:
        posed = make_problem(random_geometry(rng, 2), torch.float16, "ieee", True, True, False)
        if rng.random() < 0.5:
            posed = posed._replace(nhwc_copy=True, output_channels_last=False)
        if not forward_implicit_gemm.supports(posed, H200):
            continue
        tiles = shaped_tiles(posed)
        if tiles:
            count -= 1
            problem, tile = rng.choice(tiles)
            of_size = [
                one for one in forward_shape.shapes(problem, tile) if forward_shape.legal(problem, one)
            ]
            assert tile in of_size
            yield from ((problem, one) for one in of_size)


def box_of(
    problem: TileProblem, tile: Tile, x: np.ndarray, first: tuple[int, int, int]
) -> tuple[np.ndarray, int]:
    """Returns the pixels of a stage, one after the other, and the pixels from a row to the next."""
    (least_h, most_h), (least_w, most_w) = problem.shifts
    image, row, col = first
    if tile.dense:
        source = forward_implicit_gemm.lower(problem, tile, H200).launches[-1].tensor_maps[0]
        n, h, w = loaded(source, (image, row + least_h, col + least_w))
        pitch = dense_map(problem).cols
    else:
        pitch = tile.cols + most_w - least_w
        n, h, w = np.ogrid[: tile.images, : tile.rows + most_h - least_h, :pitch]
        n, h, w = n + image, h + row + least_h, w + col + least_w
    batch, height, width = x.shape
    inside = (n < batch) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    return np.where(
        inside, x[n.clip(0, batch - 1), h.clip(0, height - 1), w.clip(0, width - 1)], 0
    ).ravel(), pitch


@pytest.mark.parametrize("seed", range(6))
def test_every_tap_of_every_position_reads_its_pixel(seed: int) -> None:
    for problem, tile in shaped_cases(seed, 6):
        problem = problem._replace(geometry=problem.geometry._replace(batch=3))
        if not forward_shape.legal(problem, tile):
            continue
        geometry, (rows, cols) = problem.geometry, problem.positions
        x = np.random.default_rng(seed).standard_normal((3, geometry.height, geometry.width))
        shape = words_by_name("TileShape", forward_shape.shape_words(problem, tile))
        across, down = sizes.tile_counts(problem, tile)[2], sizes.tile_counts(problem, tile)[1]
        (least_h, most_h), (least_w, most_w) = problem.shifts
        map_rows, map_cols, *_ = dense_map(problem)
        found = np.zeros((3, rows, cols), int)
        for index in range(int(np.prod(sizes.tile_counts(problem, tile)))):
            if tile.dense:
                line, col = divmod(index * tile.positions, map_cols)
                first = (*divmod(line, map_rows), col)
            else:
                image, in_image = divmod(index, down * across)
                row, col = divmod(in_image, across)
                first = (image * tile.images, row * tile.rows, col * tile.cols)
            stage, pitch = box_of(problem, tile, x, first)
            assert stage.size == shape["box_pixels"] <= tile.shaped_pixels
            assert pitch == shape["row_pixels"]
            for warpgroup in range(tile.warps_n):
                for group in range(tile.warp_rows):
                    for eight in range(8):
                        pixel = warpgroup * shape["warpgroup_pixels"] + group * shape["group_pixels"] + eight
                        if tile.dense:
                            place = (
                                index * tile.positions
                                + warpgroup * shape["warpgroup_cols"]
                                + group * 8
                                + eight
                            )
                            line, w = divmod(place, map_cols)
                            n, h = divmod(line, map_rows)
                        else:
                            n = first[0] + warpgroup * shape["warpgroup_images"]
                            h = first[1] + warpgroup * shape["warpgroup_rows"] + group
                            w = first[2] + warpgroup * shape["warpgroup_cols"] + eight
                        if n >= 3 or h >= rows or w >= cols:
                            continue
                        found[n, h, w] += 1
                        for dh in range(most_h - least_h + 1):
                            for dw in range(most_w - least_w + 1):
                                at_h, at_w = h + dh + least_h, w + dw + least_w
                                inside = 0 <= at_h < geometry.height and 0 <= at_w < geometry.width
                                wanted = x[n, at_h, at_w] if inside else 0
                                assert stage[pixel + dh * shape["row_pixels"] + dw] == wanted
        assert (found == 1).all(), f"{geometry} {tile}"


def test_one_kernel_takes_the_shape_that_fits_each_map() -> None:
    """A warpgroup computes maps of 8 rows and columns one at a time, if its tile has no more rows. Maps of 10 rows and
    columns, of which parts would cover more than twice as many positions as there are, are dense."""
    layer = Geometry(16, 256, 64, 64, 256, (4, 4), (2, 2), (1, 1))
    posed = make_problem(layer, torch.float32, "tf32", True, True, False)
    tiles = shaped_tiles(posed)
    assert {tile.warps_n for _, tile in tiles} == {1, 2}
    for problem, tile in tiles:
        schedule, kernels = Schedule(problem, tile), set()
        for batch, side in ((4, 64), (256, 8), (164, 10), (5, 56), (2, 100)):
            of_size = posed._replace(geometry=layer._replace(batch=batch, height=side, width=side))
            seen = schedule.sees(of_size) or pytest.fail(f"{of_size} is not computed")
            _, found = Timer(schedule, H200).tile_for(seen)
            kernels.add(forward_implicit_gemm.lower(seen, found, H200).launches[1].kernel)
            if side in (8, 10):
                assert found.dense == (side == 10 or tile.warp_rows > 8)
                assert found.dense or found.images == tile.warps_n
        assert len(kernels) == 1


def test_groups_that_share_a_chunk_have_no_dense_tile() -> None:
    """A chunk in im2col mode would read the channels of the next group."""
    for channels, dense in ((64, True), (40, False)):
        geometry = Geometry(16, 2 * channels, 10, 10, 128, (4, 4), (2, 2), (1, 1), groups=2)
        posed = make_problem(geometry, torch.float16, "ieee", True, True, False)
        tiles = [tile for _, tile in shaped_tiles(posed)]
        assert tiles
        assert any(one.dense for tile in tiles for one in forward_shape.shapes(posed, tile)) == dense


@pytest.mark.parametrize("nhwc_copy", [False, True])
def test_strides_above_1_alone_have_shaped_tiles(nhwc_copy: bool) -> None:
    for stride in (1, 2):
        geometry = Geometry(16, 64, 20, 20, 64, (3, 3), (stride, stride), (1, 1))
        posed = make_problem(geometry, torch.float16, "ieee", True, True, False)
        if nhwc_copy:
            posed = posed._replace(nhwc_copy=True, output_channels_last=False)
        assert any(tile.tma for _, tile in candidates(posed, H200))
        assert bool(shaped_tiles(posed)) == (stride == 2)


def test_a_plan_names_dense_positions() -> None:
    geometry = Geometry(164, 256, 10, 10, 256, (4, 4), (2, 2), (1, 1))
    problem = plan.Problem(geometry, torch.float32, "tf32", True, True)
    made = plan.plan_forward(problem, False, H200)
    assert re.search(r" \d+ x \d+ positions", made.why)
    assert made.launches[-1].tensor_maps[0].corners


def test_corners_of_more_than_a_byte_leave_parts_of_the_map() -> None:
    """The taps of a kernel of 300 columns begin 149 pixels before a position."""
    for columns, dense in ((200, True), (300, False)):
        geometry = Geometry(16, 64, 1, 400, 64, (1, columns), (1, 2), (0, 0))
        problem = make_problem(geometry, torch.float16, "ieee", True, True, False)
        tile = Tile(4, 1, 2, 8, 8, 1, 8, 1, 8, 4, 1, wgmma=True, tma=True, shaped_pixels=1024)
        found = [
            one.dense for one in forward_shape.shapes(problem, tile) if forward_shape.legal(problem, one)
        ]
        assert (True in found) == dense


def test_of_parts_that_are_nearly_as_fast_that_with_the_fewest_tiles_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 12 maps there are 180 tiles of 1 x 8 x 16 and of 1 x 16 x 8 positions, and 150 of 2 x 8 x 8. Dense tiles are
    taken where they are faster than that part."""
    geometry = Geometry(12, 256, 37, 37, 64, (4, 4), (2, 2), (1, 1))
    problem = make_problem(geometry, torch.float16, "ieee", True, True, False)
    tile = Tile(4, 1, 2, 8, 8, 1, 8, 1, 8, 5, 1, wgmma=True, tma=True, shaped_pixels=262)
    wide, high, of_images, dense = forward_shape.shapes(problem, tile)
    assert [block_count(problem, one) for one in (wide, high, of_images)] == [180, 180, 150]
    for clocks, best in (
        ((1000, 1010, 1040, 1045), of_images),
        ((1000, 1010, 1060, 1045), wide),
        ((1000, 990, 1060, 1045), high),
        ((1000, 1010, 1040, 1030), dense),
        ((1000, 1010, 1060, 990), dense),
    ):
        of_shape = dict(zip((wide, high, of_images, dense), clocks, strict=True))
        monkeypatch.setattr(
            forward_shape, "clocks_of_tile", lambda _, one, __, found=of_shape: lambda _: found[one]
        )
        assert forward_shape.best_shape(problem, tile, 132)(problem) == (of_shape[best], best)


def test_the_clocks_of_few_widths_are_remembered() -> None:
    """Dense tiles take other clocks at each width."""
    posed, tile = next((posed, tile) for posed, tile in shaped_cases(3, 40) if tile.dense)
    clocks_of = clocks_of_tile(posed, tile, H200.multiprocessors)
    (remembered,) = (cell.cell_contents for cell in clocks_of.__closure__ or () if cell.cell_contents == {})
    for width in range(8, 8 + 2 * MAX_REMEMBERED):
        size = posed._replace(geometry=posed.geometry._replace(width=width))
        assert clocks_of(size) == expected_clocks(size, tile, H200.multiprocessors)
        assert 1 <= len(remembered) <= MAX_REMEMBERED
    assert len(remembered) > 1
