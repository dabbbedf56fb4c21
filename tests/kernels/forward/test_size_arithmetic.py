"""The arithmetic of forward kernels at random sizes, emulated: each position is in one tile, which fits its rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from sampling import sampled
from size_cases import H200, MODES, quotient, random_layer, random_sizes

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.layer_sizes import of_any_size, out_row_multiple
from tconv_swap.kernels.forward import col2im as forward_col2im
from tconv_swap.kernels.forward import narrow_ffma as forward_narrow_ffma
from tconv_swap.kernels.forward import narrow_mma as forward_narrow_mma


@pytest.mark.parametrize("seed", range(30))
def test_what_divides_the_rows_of_some_sizes(seed: int) -> None:
    """``out_row_multiple`` divides the rows of the output at every size at which the multiple divides those of the
    input."""
    rng = random.Random(seed)
    layer = of_any_size(random_layer(rng))
    for multiple in (1, 2, 4, 8):
        found = out_row_multiple(layer, multiple, 8)
        widths = [multiple * n for n in range(1, 40)]
        assert all(layer._replace(width=width).out_width % found == 0 for width in widths)
        assert found == 8 or any(layer._replace(width=width).out_width % (2 * found) for width in widths)


def narrow_layer(seed: int, channels_last: bool) -> Iterator[tuple[plan.Problem, Geometry]]:
    rng = random.Random(seed)
    layer = random_layer(rng)
    dtype, precision = rng.choice(MODES)
    for _ in range(6):
        geometry = random_sizes(rng, layer, 70)._replace(batch=rng.randint(1, 9))
        yield plan.Problem(geometry, dtype, precision, channels_last, channels_last), geometry


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_blocks_of_narrow_ffma_compute_every_position_once(seed: int, channels_last: bool) -> None:
    for problem, geometry in narrow_layer(seed, channels_last):
        for tile in forward_narrow_ffma.of_size(problem, H200)[:2]:
            made = forward_narrow_ffma.lower(problem, False, tile, H200)
            (words,) = made.launches[0].structs
            all_tiles, repeat = words[5:7]
            down, across, segments = words[7:10], words[10:13], words[13:16]
            assert geometry.width % tile.load == 0 or channels_last
            assert geometry.out_width % tile.out_row_multiple == 0
            constants = dict(made.launches[0].kernel.constants)
            rows = int(constants["LANES_H"]) * int(constants["THREAD_ROWS"])
            columns = int(constants["LANES_W"]) * int(constants["THREAD_COLUMNS"])
            positions = [
                -(-out // s) for out, s in zip(geometry.output_shape[2:], geometry.stride, strict=True)
            ]
            others = made.launches[0].grid // (across[0] * segments[0])
            assert others * across[0] * segments[0] == made.launches[0].grid
            seen = set()
            for block in range(across[0] * segments[0]):
                segment = quotient(across, block)
                column = (block - segment * across[0]) * columns
                first = segment * repeat
                for one in range(first, min(first + repeat, all_tiles)):
                    images = quotient(down, one)
                    at = (images, (one - images * down[0]) * rows, column)
                    assert at[1] < positions[0]
                    assert at[2] < positions[1]
                    assert at not in seen
                    seen.add(at)
            images = -(-geometry.batch // int(constants["BLOCK_IMAGES"]))
            assert len(seen) == images * -(-positions[0] // rows) * -(-positions[1] // columns)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("seed", sampled(range(20), 2))
def test_tiles_of_narrow_mma_fit_the_rows_of_their_size(seed: int, channels_last: bool) -> None:
    for problem, geometry in narrow_layer(100 + seed, channels_last):
        for tile in forward_narrow_mma.of_size(problem, H200):
            assert channels_last or geometry.width % tile.row_multiple == 0
            assert geometry.out_width % tile.out_row_multiple == 0
            assert not tile.direct or geometry.out_width % geometry.stride[1] == 0


@pytest.mark.parametrize("seed", range(30))
def test_tiles_of_col2im_cover_the_images_once(seed: int) -> None:
    """Every row of positions is in one row tile, and every group of outputs in one column tile, for any size."""
    rng = random.Random(seed)
    channels_last = rng.random() < 0.5
    problem = col2im_problem(rng, channels_last)
    geometry = problem.geometry
    made = forward_col2im.lower(problem, False, rng.choice(forward_col2im.of_size(problem, H200)), H200)
    constants, (words,) = dict(made.launches[-1].kernel.constants), made.launches[-1].structs
    height, out_height, out_width, tiles, position_rows, groups, whole = words[:7]
    column_tiles, row_tiles = words[7:10], words[10:13]
    assert (height, out_height, out_width) == (geometry.height, geometry.out_height, geometry.out_width)
    assert tiles == geometry.batch * column_tiles[0] * row_tiles[0]
    assert groups <= int(constants["MAX_GROUPS"])
    columns = int(constants["PANEL_PIXELS"]) * int(constants["STEP_PANELS"])
    assert whole == (geometry.width <= columns)
    assert column_tiles[0] == 1 or not whole
    positions = -(-4 // (problem.dtype.itemsize * geometry.stride[1]))
    assert groups * column_tiles[0] * positions * geometry.stride[1] >= out_width
    bounds = [quotient(row_tiles, row_tile * position_rows) for row_tile in range(row_tiles[0] + 1)]
    assert bounds == [row_tile * position_rows // row_tiles[0] for row_tile in range(row_tiles[0] + 1)]
    first = geometry.padding[0] // geometry.stride[0]
    last = (out_height - 1 + geometry.padding[0]) // geometry.stride[0]
    assert (bounds[0], bounds[-1]) == (0, last + 1 - first)
    seen = set()
    for tile in range(tiles):
        rest = quotient(column_tiles, tile)
        image = quotient(row_tiles, rest)
        seen.add((image, rest - image * row_tiles[0], tile - rest * column_tiles[0]))
    assert len(seen) == tiles
    assert max(seen)[0] == geometry.batch - 1


def col2im_problem(rng: random.Random, channels_last: bool) -> plan.Problem:
    while True:
        kernel, stride = rng.randint(2, 7), rng.randint(1, 4)
        geometry = Geometry(
            rng.randint(1, 4),
            rng.choice((16, 32, 48)),
            rng.randint(1, 60),
            rng.choice((rng.randint(16, 300), 8 * rng.randint(2, 30))),
            rng.choice((1, 2, 3)),
            (kernel, kernel),
            (stride, stride),
            (rng.randint(0, kernel // 2),) * 2,
            (rng.randint(0, stride - 1),) * 2,
        )
        dtype, precision = rng.choice(MODES)
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        if min(geometry.out_height, geometry.out_width) <= 0 or not forward_col2im.supports(problem, H200):
            continue
        if forward_col2im.of_size(problem, H200):
            return problem
