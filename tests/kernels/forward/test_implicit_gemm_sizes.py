"""Sizes that kernels of the implicit GEMM get at their launch: what they compute with the sizes, and one kernel at
several of them. test_sizes.py counts those of the whole stage."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from harness import assert_kernel_matches
from implicit_gemm_tiles import choose, kernels_for, kernels_of
from sampling import sampled
from size_cases import H200, LAYERS, MODES, TOLERANCE, quotient, random_sizes

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common import sizes
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward.implicit_gemm_candidates import Timer
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    ALIGNED_PIXELS,
    MAX_PHASES,
    Tile,
    TileProblem,
    block_count,
    make_problem,
    of_any_size,
)
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Kernel, Part


def computing(made: Part) -> Kernel:
    """Returns the kernel that multiplies."""
    (found,) = (
        one.kernel
        for one in made.launches
        if one.kernel.entry
        not in ("forward_implicit_gemm_pack", "nchw_to_nhwc", "forward_implicit_gemm_split_k")
    )
    return found


def test_no_size_is_compiled_in() -> None:
    names = {"BATCH", "HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "SPLITS", "COLUMNS", "OUT_PIXELS"}
    done = 0
    for layer in LAYERS:
        for channels_last in (False, True):
            posed = make_problem(
                layer.geometry, torch.float16, "ieee", channels_last, channels_last, layer.bias
            )
            if not forward_implicit_gemm.supports(posed, H200):
                continue
            for kernel in kernels_for(posed, H200):
                for one in forward_implicit_gemm.lower(kernel.problem, kernel.tile, H200).launches:
                    assert not names & dict(one.kernel.constants).keys()
                    done += 1
    assert done > 1000


def test_all_kernels_of_a_layer_compile(request: pytest.FixtureRequest, exhaustive: bool) -> None:
    """A sample of the kernels that no size of the suite has: all of three layers, or of one; each commit compiles half
    of those of one."""
    done = 0
    names = ("cyclegan2", "simplebaseline", "maskrcnn")
    for name in names if request.config.getoption("all_architectures") else names[:1]:
        geometry = next(layer.geometry for layer in LAYERS if layer.name == name)
        for dtype, channels_last in ((torch.float16, False), (torch.float32, True)):
            problem = make_problem(geometry, dtype, "tf32", channels_last, channels_last, True)
            for kernel in list(kernels_of(of_any_size(problem), H200))[:: 1 if exhaustive else 2]:
                made = forward_implicit_gemm.lower(kernel.problem, kernel.tile, H200)
                _, log = jit.compile_with_log(computing(made), "sm_90a")
                spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
                assert spills
                assert computing(made).spills or not any(spills), log
                done += 1
    assert done >= 4


# ---- the arithmetic, emulated --------------------------------------------------------------------------------


def test_division_by_numbers_known_at_the_launch() -> None:
    rng = random.Random(0)
    most = 2**31 - 1
    divisors = [*range(1, 300), *(2**i + d for i in range(2, 31) for d in (-1, 0, 1)), most]
    divisors += [rng.randint(1, most) for _ in range(500)]
    for value in divisors:
        if value > most:
            continue
        words = sizes.divisor(value)
        assert words[0] == value
        assert all(-(2**31) <= word < 2**31 for word in words)
        edges = [k * value + d for k in (1, 2, 3, most // value) for d in (-1, 0, 1)]
        for n in (0, 1, most - 1, most, *edges, *(rng.randint(0, most) for _ in range(40))):
            if 0 <= n <= most:
                assert quotient(words, n) == n // value, (n, value)


class PassedSizes:
    """``Sizes`` of common/sizes.cuh, by name."""

    def __init__(self, words: sizes.Words) -> None:
        self.batch, self.height, self.width, self.out_height, self.out_width = words[:5]
        self.positions_h, self.positions_w, self.tiles = words[5:8]
        rest = words[8:]
        assert len(rest) == 15
        parts = [rest[i : i + 3] for i in range(0, 15, 3)]
        self.image_tiles, self.row_tiles, self.image_positions, self.row_positions, self.splits = parts


def positions_of(
    passed: PassedSizes, problem: TileProblem, tile: Tile, index: int
) -> Iterator[tuple[int, int, int]]:
    """Yields image, row and column of the positions of a tile, as tile_origin and position_at of common/tile_shape.cuh
    compute them."""
    if problem.flat or tile.dense:
        for position in range(index * tile.positions, (index + 1) * tile.positions):
            image = quotient(passed.image_positions, position)
            in_image = position - image * passed.image_positions[0]
            row = quotient(passed.row_positions, in_image)
            col = in_image - row * passed.row_positions[0]
            if image < passed.batch and row < passed.positions_h and col < passed.positions_w:
                yield image, row, col
        return
    images = quotient(passed.image_tiles, index)
    in_image = index - images * passed.image_tiles[0]
    down = quotient(passed.row_tiles, in_image)
    across = in_image - down * passed.row_tiles[0]
    for n in range(tile.images):
        for h in range(tile.rows):
            for w in range(tile.cols):
                position_at = images * tile.images + n, down * tile.rows + h, across * tile.cols + w
                if (
                    position_at[0] < passed.batch
                    and position_at[1] < passed.positions_h
                    and position_at[2] < passed.positions_w
                ):
                    yield position_at


def sized(problem: TileProblem, geometry: Geometry) -> TileProblem:
    return problem._replace(geometry=geometry)


def chosen(rng: random.Random, most: int = 30, batch: int = 5) -> tuple[TileProblem, Tile]:
    """Returns a size, and a tile of a kernel that computes it: of one that suits this size or another one."""
    while True:
        layer = rng.choice(LAYERS).geometry
        first, second = (random_sizes(rng, layer, most) for _ in "12")
        dtype, precision = rng.choice(MODES)
        channels_last = rng.random() < 0.5
        problem = make_problem(first, dtype, precision, channels_last, channels_last, False)
        if problem.one_pixel or not forward_implicit_gemm.supports(problem, H200):
            continue
        geometry = rng.choice((first, second))._replace(batch=rng.randint(1, batch))
        posed = make_problem(geometry, dtype, precision, channels_last, channels_last, False)
        if of_any_size(posed) != of_any_size(problem):
            continue
        found = [(seen, one) for one in kernels_for(problem, H200) if (seen := one.sees(posed)) is not None]
        if found:
            seen, one = rng.choice(found)
            return seen, Timer(one, H200).tile_for(seen)[1]


@pytest.mark.parametrize("seed", sampled(range(40), 2))
def test_every_output_is_in_one_tile(seed: int) -> None:
    """Each pixel of the output is of one position of one tile: no more, no fewer, whatever the size."""
    problem, tile = chosen(random.Random(seed))
    geometry = problem.geometry
    passed = PassedSizes(sizes.tile_sizes(problem, tile))
    assert (passed.batch, passed.height, passed.width) == (geometry.batch, geometry.height, geometry.width)
    assert (passed.out_height, passed.out_width) == (geometry.out_height, geometry.out_width)
    of_a_tile = block_count(problem, tile._replace(splits=1)) // passed.tiles
    assert of_a_tile * passed.tiles == block_count(problem, tile._replace(splits=1))
    found = [
        position for index in range(passed.tiles) for position in positions_of(passed, problem, tile, index)
    ]
    assert len(found) == len(set(found)) == geometry.batch * passed.positions_h * passed.positions_w
    rows = problem.stack if problem.stack > 1 else geometry.stride[0]
    assert (passed.positions_h - 1) * rows < geometry.out_height <= passed.positions_h * rows
    assert (
        (passed.positions_w - 1) * geometry.stride[1]
        < geometry.out_width
        <= passed.positions_w * geometry.stride[1]
    )


@pytest.mark.parametrize("seed", sampled(range(60), 2))
def test_a_kernel_is_right_for_its_size(seed: int) -> None:
    """The assumptions of a kernel hold for the size: multiples of rows, maps as narrow as the tile, splits."""
    rng = random.Random(1000 + seed)
    problem, tile = chosen(rng, 200, 32)
    geometry, pixels = problem.geometry, problem.geometry.height * problem.geometry.width
    row = pixels if problem.flat else geometry.width
    assert row % problem.row_multiple == 0 or problem.input_channels_last
    assert geometry.out_width % problem.out_row_multiple == 0
    if problem.flat:
        assert problem.positions == (geometry.height, geometry.width)
        assert not problem.even_columns or geometry.width % 2 == 0
        if tile.pixel_major or tile.nchw_stages:
            assert pixels % tile.cols == 0
        if tile.by_rows:
            assert tile.warp_cols * 8 % geometry.width == 0
            assert geometry.width % 2 == 0
    elif tile.wgmma and tile.cols < 8:
        assert problem.positions[1] <= tile.cols
    chunks = -(-problem.words // tile.chunk_words)
    assert 1 <= tile.splits <= chunks
    steps = [split * chunks // tile.splits for split in range(tile.splits + 1)]
    words = sizes.divisor(tile.splits)
    assert steps == [quotient(words, split * chunks) for split in range(tile.splits + 1)]
    assert all(a < b for a, b in pairwise(steps))


@pytest.mark.parametrize(
    ("height", "width", "aligned"),
    [(14, 14, True), (6, 10, True), (16, 24, True), (7, 8, True), (5, 6, False), (4, 7, False)],
)
def test_mma_loads_several_elements_of_images_of_whole_copies(height: int, width: int, aligned: bool) -> None:
    """Where no tap is shifted, images of a multiple of 4 pixels are enough for mma.sync, if rows are even. With wgmma
    images are whole tiles."""
    layer = Geometry(12000 // (height * width), 256, 48, 48, 128, (2, 2), (2, 2))
    for precision in ("ieee", "tf32"):
        posed = make_problem(layer, torch.float32, precision, False, False, False)
        kernels = [one for one in kernels_for(posed, H200) if one.problem.aligned]
        assert {one.tile.wgmma for one in kernels} == ({False} if precision == "ieee" else {True, False})
        size = sized(posed, layer._replace(height=height, width=width))
        for one in kernels:
            assert one.problem.row_multiple == 4
            whole = not one.tile.wgmma or height * width % ALIGNED_PIXELS == 0
            if one.tile.nchw_stages or one.tile.pixel_major:
                whole = whole and height * width % one.tile.cols == 0
            assert (one.sees(size) is not None) == (aligned and whole), one
        assert any(one.problem.aligned for one in kernels_for(size, H200)) == aligned


#: Kernels, strides and padding of upsampling layers, most of them of vocoders: kernel, stride and padding of a row.
WIDE_STRIDES = [
    (16, 10, 3),
    (20, 10, 5),
    (24, 12, 6),
    (18, 9, 4),
    (30, 16, 7),
    (10, 10, 0),
    (12, 12, 0),
    (7, 14, 0),
]


def wide_stride(width: int, wide: tuple[int, int, int], batch: int = 3) -> Geometry:
    kernel, stride, padding = wide
    return Geometry(batch, 96, 1, width, 72, (1, kernel), (1, stride), (0, padding))


@pytest.mark.parametrize("wide", WIDE_STRIDES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_wide_strides_are_computed_in_groups_of_phases(
    wide: tuple[int, int, int], channels_last: bool
) -> None:
    """Blocks of their own compute up to eight phases each, which divide the stride."""
    geometry = wide_stride(50, wide)
    for dtype, precision in MODES:
        posed = make_problem(geometry, dtype, precision, channels_last, channels_last, False)
        assert forward_implicit_gemm.supports(posed, H200)
        rows, cols = posed.phases
        assert rows == 1
        assert geometry.stride[1] % cols == 0
        assert 2 <= cols <= MAX_PHASES
        assert len(posed.group_taps) == geometry.stride[1] // cols <= forward_implicit_gemm.MAX_PHASE_GROUPS
        assert sum(posed.group_taps) == geometry.taps


@pytest.mark.parametrize("stride", [11, 17, 26])
def test_strides_of_too_many_groups_are_left_out(stride: int) -> None:
    posed = make_problem(
        wide_stride(50, (2 * stride, stride, 0)), torch.float16, "tf32", True, True, has_bias=False
    )
    assert not forward_implicit_gemm.supports(posed, H200)


# ---- on a GPU ------------------------------------------------------------------------------------------------


def sizes_of_one_kernel(rng: random.Random) -> tuple[torch.dtype, bool, bool, list[tuple[TileProblem, Tile]]]:
    """Returns three sizes of a small layer that one kernel computes."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice((2, 2, 3, 4))
        stride = rng.choice((1, 2, 2, kernel))
        layer = Geometry(
            1,
            groups * rng.choice((32, 64, 72, 256)),
            1,
            1,
            groups * rng.choice((40, 64, 128)),
            (kernel, kernel),
            (stride, stride),
            (0, 0) if kernel == stride else (rng.randint(0, 1),) * 2,
            groups=groups,
        )
        dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float32))
        precision = rng.choice(("tf32", "ieee"))
        channels_last, bias = rng.random() < 0.5, rng.random() < 0.5
        by_kernel: dict[Kernel, list[tuple[TileProblem, Tile]]] = {}
        for _ in range(40):
            geometry = random_sizes(rng, layer, 60)._replace(batch=rng.randint(1, 5))
            problem = make_problem(geometry, dtype, precision, channels_last, channels_last, bias)
            if forward_implicit_gemm.supports(problem, H200):
                one = rng.choice(choose(problem, H200, 4))
                by_kernel.setdefault(computing(forward_implicit_gemm.lower(*one, H200)), []).append(one)
        several = [found for found in by_kernel.values() if len(found) >= 3]
        if several:
            return dtype, channels_last, bias, rng.choice(several)[:3]


def test_one_kernel_has_several_sizes(exhaustive: bool) -> None:
    for seed in range(5 if exhaustive else 2):
        *_, found = sizes_of_one_kernel(random.Random(seed))
        assert len({problem.geometry for problem, _ in found}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(48))
def test_sizes_in_turn_through_one_kernel(seed: int) -> None:
    """Poisoned outputs, the same bits again, against float64: each size after another one."""
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the tiles are chosen for sm_90a")
    dtype, channels_last, bias, found = sizes_of_one_kernel(random.Random(seed))
    for problem, tile in (*found, found[0]):
        made = forward_implicit_gemm.lower(problem, tile, H200)
        layouts = (channels_last, channels_last)
        assert_kernel_matches(made, problem.geometry, dtype, layouts, TOLERANCE[dtype], with_bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("height", "width", "channels"), [(14, 14, 256), (6, 10, 64), (7, 8, 72), (2, 2, 32), (34, 6, 40)]
)
def test_tiles_of_several_images(height: int, width: int, channels: int) -> None:
    """Images that are whole copies of 16 bytes but no whole tiles."""
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the tiles are chosen for sm_90a")
    geometry = Geometry(12003 // (height * width), channels, height, width, 40, (2, 2), (2, 2))
    posed = make_problem(geometry, torch.float32, "ieee", False, False, True)
    several = [
        (problem, tile)
        for problem, tile in choose(posed, H200, 64)
        if problem.aligned and height * width % tile.cols
    ]
    assert several
    for problem, tile in several[:3]:
        made = forward_implicit_gemm.lower(problem, tile, H200)
        assert_kernel_matches(
            made, geometry, torch.float32, (False, False), TOLERANCE[torch.float32], with_bias=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("wide", WIDE_STRIDES)
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_wide_strides(
    wide: tuple[int, int, int], channels_last: bool, dtype: torch.dtype, precision: str
) -> None:
    torch.manual_seed(0)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the tiles are chosen for sm_90a")
    for width, batch in ((41, 3), (96, 2), (3, 5)):
        geometry = wide_stride(width, wide, batch)
        posed = make_problem(geometry, dtype, precision, channels_last, channels_last, has_bias=True)
        for problem, tile in choose(posed, H200, 4):
            made = forward_implicit_gemm.lower(problem, tile, H200)
            layouts = (channels_last, channels_last)
            assert_kernel_matches(made, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=True)
