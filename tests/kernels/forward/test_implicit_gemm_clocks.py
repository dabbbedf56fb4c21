"""The clocks that tiles of the forward implicit GEMM are expected to take: what takes longer, and where each part
counts. No GPU."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from first_difference import differs
from size_cases import H200, MODES

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_clocks as clocks_of_tiles
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    Tile,
    TileProblem,
    block_count,
    can_be_aligned,
    make_problem,
)
from tconv_swap.kernels.forward.implicit_gemm_memory import copies_of_stage, loaded_pixels
from tconv_swap.kernels.forward.implicit_gemm_shape import best_shape, legal, shapes

Mode = tuple[torch.dtype, str]
Case = tuple[TileProblem, Tile]
#: Layers and sizes of which every constant of the clocks concerns some tile: maps of few and of many columns, taps in
#: phase groups, channels that are no whole lines or pieces, weights of 16 MiB and more, odd rows, groups, wide kernels,
#: few tiles, many phases, single outputs of flat problems, and many copies of a thread.
VARIED = (
    Geometry(40, 72, 14, 13, 40, (4, 4), (2, 2), (1, 1)),
    Geometry(16, 1024, 8, 8, 640, (4, 4), (2, 2), (1, 1)),
    Geometry(3, 128, 31, 30, 66, (5, 5), (3, 3), (1, 1)),
    Geometry(8, 256, 32, 32, 160, (2, 2), (2, 2)),
    Geometry(2, 64, 64, 128, 64, (3, 5)),
    Geometry(64, 64, 64, 128, 128, (3, 5)),
    Geometry(8, 144, 64, 64, 128, (3, 3), (2, 2), (1, 1), groups=2),
    Geometry(8, 64, 128, 128, 64, (9, 9), (1, 1), (4, 4)),
    Geometry(16, 128, 64, 64, 128, (4, 4), (2, 2), (1, 1)),
    Geometry(300, 256, 4, 4, 128, (4, 4), (2, 2), (1, 1)),
    Geometry(1, 512, 16, 16, 96, (4, 4), (2, 2), (1, 1)),
    Geometry(2, 64, 1, 600, 40, (1, 8), (1, 6)),
    Geometry(64, 96, 44, 42, 96, (3, 3), (3, 3)),
    Geometry(4, 64, 250, 250, 24, (5, 5), (1, 1), (2, 2)),
)


def posed(geometry: Geometry, mode: Mode = MODES[1], channels_last: bool = True) -> TileProblem:
    return make_problem(geometry, *mode, channels_last, channels_last, False)


@lru_cache
def cases() -> list[Case]:
    """Returns the tiles of varied sizes, with each of their shapes."""
    found: list[Case] = []
    for geometry, mode, last in itertools.product(VARIED, MODES, (False, True)):
        problem = posed(geometry, mode, last)
        both = [problem, problem._replace(aligned=True)] if not last else [problem]
        for one in both:
            if not forward_implicit_gemm.supports(one, H200) or not (last or can_be_aligned(one)):
                continue
            for seen, tile in candidates(one, H200):
                of_size = shapes(seen, tile) if tile.shaped_pixels else [tile]
                found += [(seen, shape) for shape in of_size if legal(seen, shape)]
    return found


def expected_of_all() -> Iterator[float]:
    return (expected_clocks(problem, tile, 132) for problem, tile in cases())


# ---- what takes longer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_a_round_more_takes_longer(mode: Mode) -> None:
    """264 tiles are two rounds of 132 multiprocessors, 268 are three."""
    tile, found = Tile(4, 1, 1, 8, 16, 1, 8, 1, 8, 5, 1, wgmma=True, tma=True), {}
    for batch in (33, 66, 67, 99):
        problem = posed(Geometry(batch, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1)), mode)
        found[block_count(problem, tile)] = expected_clocks(problem, tile, 132)
    assert list(found) == [132, 264, 268, 396]
    assert 1.5 * found[132] < found[264] < 0.8 * found[268]
    assert found[268] > 0.9 * found[396]


def test_blocks_that_have_a_multiprocessor_alone_take_less_than_a_round_and_more_than_half() -> None:
    """Two blocks of a multiprocessor are resident: 264 blocks are a round."""
    tile = Tile(4, 1, 1, 8, 16, 1, 8, 2, 8, 3, 2)
    found = {}
    for batch in (66, 99, 132):
        problem = posed(Geometry(batch, 256, 16, 32, 64, (4, 4), (2, 2), (1, 1)), MODES[0])
        found[block_count(problem, tile)] = expected_clocks(problem, tile, 132)
    assert list(found) == [264, 396, 528]
    of_a_round = found[528] - found[264]
    assert 0.55 * of_a_round < found[396] - found[264] < 0.95 * of_a_round


def test_the_best_shape_is_that_with_the_fewest_clocks_but_for_nearly_equal_parts() -> None:
    for batch, side in ((256, 8), (164, 10), (84, 14), (41, 20), (16, 32), (4, 64), (1, 112)):
        size = posed(Geometry(batch, 256, side, side, 128, (4, 4), (2, 2), (1, 1)))
        shaped = [entry for entry in candidates(size, H200) if entry[1].shaped_pixels]
        assert shaped
        for problem, tile in shaped:
            clocks, best = best_shape(problem, tile, 132)(problem)
            others = [one for one in shapes(problem, tile) if legal(problem, one)]
            fewest = min(expected_clocks(problem, one, 132) for one in others)
            assert clocks == expected_clocks(problem, best, 132) <= 1.05 * fewest
            if not best.dense:
                assert block_count(problem, best) == min(
                    block_count(problem, one)
                    for one in others
                    if not one.dense and expected_clocks(problem, one, 132) <= 1.05 * fewest
                )


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_what_takes_longer(mode: Mode) -> None:
    """A copy of the input, a part of the sum where there are many tiles, rows of outputs that fill no sector, threads
    that copy single elements or several images, channels that are no whole pieces, two stages."""
    layer = Geometry(64, 256, 32, 32, 128, (4, 4), (2, 2), (1, 1))
    last = posed(layer, mode)
    tile = Tile(4, 1, 1, 8, 16, 1, 8, 1, 8, 4, 1, wgmma=True, tma=True)

    def clocks(problem: TileProblem, one: Tile) -> float:
        return expected_clocks(problem, one, 132)

    plain = clocks(last, tile)
    assert clocks(last._replace(nhwc_copy=True), tile) > 1.03 * plain
    assert clocks(last, tile._replace(splits=2)) > plain
    assert clocks(last, tile._replace(stages=2)) > 1.1 * plain
    assert clocks(posed(layer._replace(out_channels=127), mode), tile) > 1.1 * plain
    first = posed(layer, mode, channels_last=False)
    threads = tile._replace(tma=False, producer_warps=8)
    unaligned = clocks(first, threads)
    assert clocks(first._replace(aligned=True), threads) < unaligned
    assert clocks(first._replace(geometry=layer._replace(width=31)), threads) > unaligned
    images = threads._replace(images=2, rows=8, cols=8, warp_images=1)
    assert images.positions == threads.positions
    assert clocks(first, images) > 1.05 * unaligned


@pytest.mark.parametrize("mode", MODES[:2])
def test_whole_rows_of_outputs_that_are_no_whole_vectors_take_longer(mode: Mode) -> None:
    """Rows of 16 outputs are stored in vectors of 16 bytes, rows of 18 in shorter ones."""
    tile = Tile(4, 1, 1, 1, 64, 1, 1, 8, 4, 4, 1, wgmma=True, tma=True, by_rows=True)
    whole, ragged = (
        posed(Geometry(64, 256, 16, width, 128, (4, 4), (2, 2), (1, 1)), mode, channels_last=False)
        for width in (8, 9)
    )
    per_row = [clocks_of_tiles._store_clocks_nchw(problem, tile, 1024) for problem in (whole, ragged)]
    assert per_row[1] > 1.5 * per_row[0]


def test_float32_takes_three_products_and_a_lone_block_is_not_hidden() -> None:
    layer, tile = (
        Geometry(64, 256, 32, 32, 128, (4, 4), (2, 2), (1, 1)),
        Tile(4, 1, 1, 8, 16, 1, 2, 2, 8, 3, 2),
    )
    exact, rounded = (posed(layer, mode, channels_last=False) for mode in (MODES[2], MODES[0]))
    assert expected_clocks(exact, tile, 132) > 2 * expected_clocks(rounded, tile, 132)
    alone = tile._replace(blocks_per_multiprocessor=1)
    assert expected_clocks(rounded, alone, 132) > 1.1 * expected_clocks(rounded, tile, 132)


def test_a_flat_tile_is_loaded_in_several_boxes() -> None:
    problem = posed(Geometry(8, 64, 64, 64, 64, (1, 1)))
    tile = Tile(4, 1, 1, 1, 512, 1, 1, 32, 8, 4, 1, wgmma=True, tma=True)
    assert problem.flat
    assert loaded_pixels(problem, tile) == 512


# ---- where each constant counts ---------------------------------------------------------------------------------


def constants() -> Iterator[str]:
    for statement in ast.parse(inspect.getsource(clocks_of_tiles)).body:
        if isinstance(statement, ast.Assign):
            names = (name for target in statement.targets for name in ast.walk(target))
            yield from (name.id for name in names if isinstance(name, ast.Name) and name.id.isupper())


def test_every_constant_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    base, names = list(expected_of_all()), list(constants())
    assert len(names) > 40
    for name in names:
        with monkeypatch.context() as patch:
            value = vars(clocks_of_tiles)[name]
            patch.setattr(clocks_of_tiles, name, type(value)(2 * value))
            assert differs(expected_of_all(), base), name


def by_threads(tile: Tile) -> bool:
    return tile.wgmma and not (tile.tma or tile.nchw_stages)


def is_ragged(problem: TileProblem, tile: Tile) -> bool:
    rows = problem.geometry.out_width * problem.item
    return not problem.output_channels_last and rows % 32 != 0 and not tile.by_rows


def is_far(problem: TileProblem) -> bool:
    return problem.moved_bytes > 48 << 20


def is_stored_far(problem: TileProblem, tile: Tile) -> bool:
    """Returns whether rows of outputs go to more memory than the L2 has."""
    return is_far(problem) and not (problem.output_channels_last or tile.by_rows)


def outputs_across_rows(problem: TileProblem, tile: Tile) -> int:
    """Returns the outputs of one store in NCHW of a flat problem whose rows go on in the next one, or 0."""
    if problem.output_channels_last or tile.by_rows or not problem.flat:
        return 0
    return clocks_of_tiles._outputs_of_store(problem, tile)


def reads_again(problem: TileProblem, tile: Tile) -> bool:
    """Returns whether several blocks read the same input."""
    one = problem.geometry.out_channels_per_group <= problem.block_channels(tile)
    return not (tile.tma or (one and len(problem.group_taps) == 1))


#: Where some of the constants count.
WHERE: dict[str, Callable[[TileProblem, Tile], bool]] = {
    "COPY_MARGIN": lambda problem, _: problem.nhwc_copy,
    "BYTE_CLOCKS": lambda *_: True,
    "RAGGED_OF_THREADS": lambda *one: is_ragged(*one) and by_threads(one[1]),
    "RAGGED_TRANSPOSED": lambda *one: is_ragged(*one) and one[1].nchw_stages > 0,
    "RAGGED_BYTE_CLOCKS": lambda *one: is_ragged(*one) and (one[1].tma or not one[1].wgmma),
    "RAGGED_FAR": lambda *one: is_ragged(*one) and (one[1].tma or by_threads(one[1])) and is_far(one[0]),
    "PACKED_BYTE_CLOCKS": lambda _, tile: not tile.tma_weights,
    "PARTIAL_BYTE_CLOCKS": lambda _, tile: tile.splits > 1,
    "REREAD_BYTE_CLOCKS": reads_again,
    "MULTIPLY_CLOCKS": lambda _, tile: tile.tma,
    "OF_THREADS": lambda problem, tile: by_threads(tile) and problem.item == 4,
    "OF_THREADS_16_BITS": lambda problem, tile: by_threads(tile) and problem.item == 2,
    "TRANSPOSED": lambda _, tile: tile.nchw_stages > 0,
    "MMA": lambda _, tile: not tile.wgmma,
    "IEEE": lambda problem, _: problem.precision == "IEEE",
    "LONE_BLOCK": lambda *one: one[1].blocks_per_multiprocessor == 2 and 0 < block_count(*one) % 264 <= 132,
    "GROUPS": lambda problem, tile: problem.geometry.groups > 1 and tile.wgmma and not tile.nchw_stages,
    "DENSE_CLOCKS": lambda problem, tile: tile.dense and problem.output_channels_last,
    "OWN_LAYOUT": lambda _, tile: tile.tma_weights,
    "TWO_STAGES": lambda _, tile: tile.tma and tile.stages == 2,
    "TWO_STAGES_OF_THREADS": lambda _, tile: by_threads(tile) and tile.stages == 2,
    "SEVERAL_IMAGES": lambda _, tile: by_threads(tile) and tile.images > 1,
    "NARROW": lambda problem, tile: tile.tma and tile.cols < 8 and not problem.flat and tile.chunk_words == 8,
    "MMA_NARROW": lambda problem, tile: not tile.wgmma and tile.cols < 8 and not problem.flat,
    "FAR_ROW_CLOCKS": lambda problem, tile: by_threads(tile) and is_far(problem),
    "FAR_STORED_ROW_CLOCKS": lambda *one: one[1].tma and is_stored_far(*one),
    "FAR_STORED_ROW_CLOCKS_OF_THREADS": lambda *one: by_threads(one[1]) and is_stored_far(*one),
    "FLAT_SINGLES": lambda *one: one[1].wgmma and outputs_across_rows(*one) == 1,
    "FLAT_SHORT_MMA": lambda problem, tile: (
        not tile.wgmma and 0 < outputs_across_rows(problem, tile) * problem.item <= 4
    ),
    "MMA_CROWDED": lambda problem, tile: (
        not (tile.wgmma or problem.input_channels_last)
        and problem.item == 2
        and copies_of_stage(problem, tile) > 64
    ),
    "MMA_MANY_PHASES": lambda problem, tile: not tile.wgmma and math.prod(problem.phases) > 4,
    "MMA_ONE_BLOCK": lambda _, tile: not tile.wgmma and tile.blocks_per_multiprocessor == 1,
}


@pytest.mark.parametrize("name", WHERE)
def test_where_a_constant_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = list(expected_of_all())
    value = vars(clocks_of_tiles)[name]
    monkeypatch.setattr(clocks_of_tiles, name, 2 * value)
    counts = [now > before for now, before in zip(expected_of_all(), base, strict=True)]
    assert any(counts)
    assert all(counts) == (name == "BYTE_CLOCKS")
    for (problem, tile), counted in zip(cases(), counts, strict=True):
        assert counted == WHERE[name](problem, tile), (problem, tile)
