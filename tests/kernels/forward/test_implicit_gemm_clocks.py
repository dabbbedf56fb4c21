"""The clocks that rank the tiles of the forward implicit GEMM, and the choice that follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from implicit_gemm_tma_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward import implicit_gemm_classes as forward_classes
from tconv_swap.kernels.forward import implicit_gemm_clocks as clocks_of_tiles
from tconv_swap.kernels.forward.implicit_gemm_clocks import expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, make_problem
from tconv_swap.kernels.forward.implicit_gemm_memory import loaded_pixels
from tconv_swap.kernels.forward.implicit_gemm_shape import best_shape, legal, shapes
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import tma_tiles

MODES = ((torch.float16, "ieee"), (torch.float32, "tf32"))


def posed(
    batch: int,
    side: int,
    channels: tuple[int, int] = (256, 128),
    mode: tuple[torch.dtype, str] = MODES[0],
    channels_last: bool = True,
) -> TileProblem:
    geometry = Geometry(batch, channels[0], side, side, channels[1], (4, 4), (2, 2), (1, 1))
    return make_problem(geometry, *mode, channels_last, channels_last, False)


def shaped_tile(problem: TileProblem) -> tuple[TileProblem, Tile]:
    return next(entry for entry in tma_tiles(problem, H200) if entry[1].shaped_pixels)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_round_more_takes_longer(mode: tuple[torch.dtype, str]) -> None:
    """264 tiles are two rounds of 132 multiprocessors, 268 are three."""
    found = {}
    for batch in (33, 66, 67):
        problem, tile = shaped_tile(posed(batch, 16, mode=mode))
        tile = next(one for one in shapes(problem, tile) if (one.rows, one.cols, one.dense) == (8, 16, False))
        tile = replace(tile, splits=1, tma_weights=False, stages=5)
        found[batch] = expected_clocks(replace(problem, block_phases=(2, 2)), tile, 132)
    assert block_count(replace(problem, block_phases=(2, 2)), tile) == 268
    assert found[33] < found[66] < 0.8 * found[67]


def test_blocks_that_have_a_multiprocessor_alone_take_half_a_round() -> None:
    """Two blocks of a multiprocessor are resident: of 396 blocks the last 132 take half as long as 264."""
    tile = Tile(4, 1, 1, 8, 16, 1, 8, 2, 8, 3, 2)
    found = {}
    for batch in (66, 99, 132):
        geometry = Geometry(batch, 256, 16, 32, 64, (4, 4), (2, 2), (1, 1))
        problem = make_problem(geometry, *MODES[1], True, True, False)
        found[block_count(problem, tile)] = expected_clocks(problem, tile, 132)
    assert list(found) == [264, 396, 528]
    assert found[396] < 0.85 * found[528]


def test_the_best_shape_is_that_with_the_fewest_clocks_but_for_nearly_equal_parts() -> None:
    for batch, side in ((256, 8), (164, 10), (84, 14), (41, 20), (16, 32), (4, 64), (1, 112)):
        problem, tile = shaped_tile(posed(batch, side))
        best = best_shape(problem, tile, 132)
        others = [one for one in shapes(problem, tile) if legal(problem, one)]
        fewest = min(expected_clocks(problem, one, 132) for one in others)
        assert expected_clocks(problem, best, 132) <= 1.05 * fewest
        if not best.dense:
            assert block_count(problem, best) == min(
                block_count(problem, one)
                for one in others
                if not one.dense and expected_clocks(problem, one, 132) <= 1.05 * fewest
            )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("mode", [*MODES, (torch.float32, "ieee")], ids=str)
def test_a_size_takes_the_schedule_with_the_fewest_clocks(
    mode: tuple[torch.dtype, str], channels_last: bool
) -> None:
    for channels in ((256, 128), (1024, 512), (64, 48)):
        for batch, side in ((1, 4), (64, 4), (1024, 4), (1, 16), (256, 8), (41, 20), (16, 64)):
            problem = posed(batch, side, channels, mode, channels_last)
            (chosen,) = forward_classes.choose(problem, H200)
            of_layer = forward_classes.schedules(forward_classes.of_any_size(problem), H200)
            for schedule, _ in of_layer:
                if schedule.legal(problem):
                    adapted = schedule.adapted(problem)
                    tile = replace(schedule.in_shape(problem, H200), splits=1)
                    if schedule.tile.splits == 1:
                        assert expected_clocks(*chosen, 132) <= expected_clocks(adapted, tile, 132)


@pytest.mark.parametrize("channels_last", [False, True])
def test_maps_of_4_columns_take_tiles_whose_blocks_share_the_weights(channels_last: bool) -> None:
    """Tiles of half as many positions would load the weights twice (docs/kernels/forward/implicit_gemm_tma.md)."""
    for mode in MODES:
        for channels, batch in (((256, 128), 1024), ((512, 256), 128)):
            problem = posed(batch, 4, channels, mode, channels_last)
            ((made, tile),) = forward_classes.choose(problem, H200)
            assert (tile.cols, tile.positions, tile.splits) == (4, 128, 1)
            assert made.nhwc_copy != channels_last


def chosen(geometry: Geometry) -> list[tuple[TileProblem, Tile]]:
    problems = (make_problem(geometry, *mode, False, False, False) for mode in MODES)
    return [forward_classes.choose(problem, H200)[0] for problem in problems]


def test_rows_that_are_not_aligned_are_copied_where_threads_load_single_elements() -> None:
    """Layers of few channels, whose input is read once, and of many; stride 1 as well."""
    for kernel, stride, padding in (((4, 4), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1))):
        for channels, width, copied in ((512, 33, True), (512, 15, True), (64, 64, False), (64, 33, False)):
            layer = Geometry(16, channels, 32, width, channels, kernel, stride, padding)
            for problem, tile in chosen(layer):
                assert problem.nhwc_copy == copied == tile.tma, (layer, width, problem.dtype)


def test_each_part_of_the_cost() -> None:
    """What makes a plan slower raises its expected clocks: a copy, splits, rows of outputs that fill no sector, threads
    that copy single elements or several images, groups, stores of single channels, products of float32, a block that
    is alone on its multiprocessor."""
    layer = Geometry(64, 256, 32, 32, 128, (4, 4), (2, 2), (1, 1))
    for mode in MODES:
        last = make_problem(layer, *mode, True, False, False)
        tile = Tile(4, 1, 1, 8, 16, 1, 8, 1, 8, 4, 1, wgmma=True, tma=True)
        plain = expected_clocks(last, tile, 132)
        assert expected_clocks(replace(last, nhwc_copy=True), tile, 132) > 1.03 * plain
        assert expected_clocks(last, replace(tile, splits=2), 132) > plain
        first = make_problem(layer, *mode, False, False, False)
        threads = replace(tile, tma=False, producer_warps=8)
        unaligned = expected_clocks(first, threads, 132)
        assert expected_clocks(replace(first, aligned=True), threads, 132) < unaligned
        odd = replace(first, geometry=replace(layer, width=31))
        assert expected_clocks(odd, threads, 132) > unaligned
        halves = replace(first, geometry=replace(layer, in_channels=512, groups=2))
        assert expected_clocks(halves, threads, 132) > 1.25 * unaligned
        images = replace(threads, images=8, rows=4, cols=4, warp_images=8, warp_rows=1)
        with pytest.MonkeyPatch.context() as patch:
            dear = expected_clocks(first, images, 132)
            patch.setattr(clocks_of_tiles, "SEVERAL_IMAGES", 1.0)
            assert expected_clocks(first, images, 132) < dear
            assert expected_clocks(first, threads, 132) == unaligned
            # With more images, a thread makes so many copies that each takes longer.
            many = replace(images, images=32, warp_images=32)
            dear = expected_clocks(first, many, 132)
            patch.setattr(clocks_of_tiles, "MANY_COPIES_POWER", 0.0)
            assert expected_clocks(first, many, 132) < dear
        row = make_problem(replace(layer, out_channels=127), *mode, True, True, False)
        assert expected_clocks(row, tile, 132) > 1.1 * expected_clocks(
            make_problem(layer, *mode, True, True, False), tile, 132
        )
    mma = Tile(4, 1, 1, 8, 16, 1, 2, 2, 8, 3, 2)
    exact, rounded = (
        make_problem(layer, torch.float32, precision, False, False, False) for precision in ("ieee", "tf32")
    )
    assert expected_clocks(exact, mma, 132) > 2 * expected_clocks(rounded, mma, 132)
    alone = replace(mma, blocks_per_multiprocessor=1)
    assert expected_clocks(rounded, alone, 132) > 1.3 * expected_clocks(rounded, mma, 132)


def test_layers_with_strides_have_tiles_for_small_maps_and_for_aligned_rows() -> None:
    """Up to 256 channels a group beside aligned rows; above, before these."""
    for channels in ((128, 64), (96, 48), (512, 64)):
        for mode in MODES:
            problem = posed(16, 64, channels, mode, channels_last=False)
            found = [one for one, _ in forward_classes.schedules(forward_classes.of_any_size(problem), H200)]
            assert any(one.tile.cols == 4 for one in found), (channels, mode)
            if channels[0] <= 256:
                assert any(one.problem.aligned for one in found), (channels, mode)


def test_layers_of_many_channels_have_tiles_for_maps_of_8_and_4_columns() -> None:
    for mode in (*MODES, (torch.float32, "ieee")):
        problem = posed(16, 64, (512, 64), mode, channels_last=False)
        found = [one for one, _ in forward_classes.schedules(forward_classes.of_any_size(problem), H200)]
        assert {one.tile.cols for one in found} >= {8, 4}
        assert not any(one.problem.aligned for one in found)


def test_partial_sums_of_many_outputs_are_not_legal() -> None:
    """A schedule for few tiles splits its sum; larger sizes would write gigabytes."""
    problem = posed(1, 16, (2048, 128), MODES[1], channels_last=False)
    found = [one for one, _ in forward_classes.schedules(forward_classes.of_any_size(problem), H200)]
    split = [one for one in found if one.tile.splits > 1]
    assert split
    large = replace(problem, geometry=replace(problem.geometry, batch=64, height=64, width=64))
    assert all(one.legal(problem) and not one.legal(large) for one in split)


def test_a_flat_tile_is_loaded_in_several_boxes() -> None:
    problem = make_problem(Geometry(8, 64, 64, 64, 64, (1, 1)), torch.float16, "ieee", True, True, False)
    tile = Tile(4, 1, 1, 1, 512, 1, 1, 32, 8, 4, 1, wgmma=True, tma=True)
    assert problem.flat
    assert loaded_pixels(problem, tile) == 512
