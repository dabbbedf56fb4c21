"""The expected clocks by which the families of the gradient of the input are ranked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from first_difference import differs
from size_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_input import im2col as grad_input_im2col
from tconv_swap.kernels.grad_input import im2col_choice as grad_input_im2col_choice
from tconv_swap.kernels.grad_input import im2col_clocks as grad_input_im2col_clocks
from tconv_swap.kernels.grad_input import im2col_tile as grad_input_im2col_tile
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.kernels.grad_input import implicit_gemm_choice as grad_input_choice
from tconv_swap.kernels.grad_input import implicit_gemm_clocks as grad_input_clocks
from tconv_swap.kernels.grad_input import implicit_gemm_tma as grad_input_tma
from tconv_swap.kernels.grad_input import implicit_gemm_tma_choice as grad_input_tma_choice
from tconv_swap.kernels.grad_input import implicit_gemm_tma_clocks as grad_input_tma_clocks
from tconv_swap.kernels.grad_input import implicit_gemm_tma_tile as grad_input_tma_tile
from tconv_swap.kernels.grad_input import nchw_to_nhwc as grad_input_nchw_to_nhwc
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    as_convolution,
    of_any_size,
    sized,
)
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import TmaTile
from tconv_swap.kernels.grad_input.selection import kernels_for, kernels_of

LAYER = Geometry(330, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1))
MODES = ((torch.float32, "tf32"), (torch.float16, "ieee"))


def problem(
    geometry: Geometry, mode: tuple[torch.dtype, str] = MODES[1], channels_last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, *mode, channels_last, channels_last)


def with_columns(posed: StridedProblem, columns: int) -> StridedProblem:
    """Returns the problem with so many columns of grad_input."""
    return sized(posed, posed.geometry.batch, posed.positions[0], columns)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_kernel_with_the_fewest_clocks_comes_first(
    mode: tuple[torch.dtype, str], channels_last: bool, exhaustive: bool
) -> None:
    rng = random.Random(3)
    taken = set()
    for _ in range(60 if exhaustive else 30):
        channels = [rng.choice((128, 256)), rng.choice((32, 128))]
        kernel, stride, padding, output_padding = rng.choice(((4, 2, 1, 0), (3, 2, 1, 1), (2, 2, 0, 0)))
        side = rng.choice((4, 7, 10, 14, 20, 32, 37, 64))
        geometry = Geometry(
            max(1, 16384 // side**2),
            channels[0],
            side,
            side,
            channels[1],
            (kernel, kernel),
            (stride, stride),
            (padding, padding),
            (output_padding, output_padding),
        )
        posed = problem(geometry, mode, channels_last)
        convolution = as_convolution(posed)
        kernels = kernels_of(of_any_size(convolution), H200)
        own = grad_input_choice.ranked(kernels.implicit_gemm, convolution, H200)
        best = [clocks for clocks, *_ in own]
        best += [one.clocks for one in grad_input_im2col.ranked(kernels.im2col, convolution, H200)]
        if channels_last:
            by_tma = grad_input_tma.ranked(kernels.implicit_gemm_tma, convolution, H200)
        else:
            by_tma = grad_input_nchw_to_nhwc.ranked(kernels.implicit_gemm_tma, posed, H200)
        best += [one.clocks for one in by_tma]
        found = grad_input_implicit_gemm.ranked(posed, H200)
        assert found[0].clocks == min(best)
        assert sorted(one.clocks for one in found) == sorted(best)
        made = grad_input_implicit_gemm.part_candidates(posed, H200, 1)[0]
        assert made == found[0].make()
        taken.add(made.family)
        # Then the best of each other family.
        families = [one.make().family for one in found]
        assert len(set(families[: len(set(families))])) == len(set(families))
    if channels_last:
        assert {"implicit_gemm_tma"} <= taken <= {"implicit_gemm_tma", "implicit_gemm", "im2col"}
    else:
        copies = {grad_input_nchw_to_nhwc.FAMILY} if mode[0] == torch.float16 else set()
        assert taken == {"im2col", "implicit_gemm"} | copies


def test_the_clocks_of_the_implicit_gemm_grow_with_rounds_copies_and_splits() -> None:
    posed = as_convolution(problem(LAYER))
    own = grad_input_choice.ranked(kernels_for(posed, H200).implicit_gemm, posed, H200)
    tile = next(tile for _, _, tile in own if tile.wgmma)
    tile, plain = tile._replace(splits=1), posed._replace(aligned=False, even=False)

    def clocks(one: StridedProblem, splits: int = 1) -> float:
        return grad_input_clocks.clocks(one, tile._replace(splits=splits), H200)

    g = posed.geometry
    weights = g.in_channels_per_group * g.out_channels * g.taps * posed.item
    fixed = grad_input_clocks.LAUNCH_CLOCKS + grad_input_clocks.PACKED_BYTE_CLOCKS * 2 * weights
    twice = plain._replace(geometry=g._replace(batch=2 * LAYER.batch))
    once = clocks(plain) - fixed
    assert 1.9 * once < clocks(twice) - fixed < 2.1 * once
    assert clocks(plain._replace(aligned=True)) < clocks(plain)
    # Two rounds of half the sum take as long as one of all of it.
    partial_bytes = 2 * 4 * posed.grad_input_elements
    more = clocks(plain, 2) - clocks(plain)
    assert more > grad_input_clocks.PARTIAL_BYTE_CLOCKS * partial_bytes
    assert more == pytest.approx(grad_input_clocks.PARTIAL_BYTE_CLOCKS * partial_bytes, rel=0.1)


def test_multiplies_by_mma_take_longer_and_odd_rows_are_stored_one_element_at_a_time() -> None:
    posed = as_convolution(problem(LAYER))._replace(aligned=False)
    own = [
        tile for _, _, tile in grad_input_choice.ranked(kernels_for(posed, H200).implicit_gemm, posed, H200)
    ]
    by_wgmma, by_mma = (
        min(grad_input_clocks.clocks(posed, one, H200) for one in own if one.wgmma == wgmma)
        for wgmma in (True, False)
    )
    assert by_mma > 1.5 * by_wgmma
    # Tiles of 8 or 16 columns are as many for both, so only the bytes differ.
    tile = next(one for one in own if one.splits == 1 and one.cols in (8, 16))
    even, odd = with_columns(posed, 14), with_columns(posed, 13)
    longer = grad_input_clocks.clocks(odd, tile, H200) - grad_input_clocks.clocks(even, tile, H200)
    moved = grad_input_clocks.BYTE_CLOCKS * (odd.moved_bytes - even.moved_bytes)
    assert longer == pytest.approx(moved + grad_input_clocks.ODD_ROW_CLOCKS * odd.grad_input_elements)
    last = odd._replace(input_channels_last=True, output_channels_last=True, weight_channels_last=True)
    last_even = even._replace(input_channels_last=True, output_channels_last=True, weight_channels_last=True)
    assert grad_input_clocks.clocks(last, tile, H200) <= grad_input_clocks.clocks(last_even, tile, H200)


def test_the_clocks_of_im2col_are_its_tiles_its_bytes_its_sums_and_rows_that_are_ragged() -> None:
    of = grad_input_im2col_clocks
    posed = as_convolution(problem(LAYER, MODES[0]))
    g = posed.geometry
    weights = g.in_channels_per_group * g.out_channels * g.taps * posed.item
    least = of.LAUNCH_CLOCKS + of.BYTE_CLOCKS * posed.moved_bytes + of.WEIGHT_BYTE_CLOCKS * weights
    assert of.clocks(posed, 0.0, 1) == pytest.approx(least)
    assert of.clocks(posed, 1e6, 1) == pytest.approx(least + 1e6)
    partial_bytes = 4 * posed.grad_input_elements
    for splits in (2, 4):
        sums = of.PARTIAL_BYTE_CLOCKS * splits * partial_bytes
        assert of.clocks(posed, 0.0, splits) == pytest.approx(least + sums)
    # 14 columns are no whole sectors of 32 bytes, and 15 are an odd number as well.
    for columns, of_odd in ((14, 0.0), (15, of.ODD_ROW_CLOCKS)):
        ragged = with_columns(posed, columns)
        more = of.clocks(ragged, 0.0, 1) - of.BYTE_CLOCKS * ragged.moved_bytes
        without = least - of.BYTE_CLOCKS * posed.moved_bytes
        of_element = of.RAGGED_BYTE_CLOCKS * 4 + of_odd
        assert more - without == pytest.approx(of_element * ragged.grad_input_elements)


def tma_tiles(posed: StridedProblem) -> list[TmaTile]:
    """Returns the best shape of every kernel for a size."""
    return [
        grad_input_tma_choice.in_best_shape(one, posed, H200)
        for one in grad_input_tma_choice.candidates(of_any_size(posed), H200)
    ]


def test_the_clocks_of_loads_by_tma_grow_with_rounds_and_splits() -> None:
    posed = as_convolution(problem(LAYER.with_batch(3300), channels_last=True))
    twice = posed._replace(geometry=posed.geometry._replace(batch=6600))
    nothing = posed._replace(geometry=posed.geometry._replace(batch=0))
    of = grad_input_tma_clocks
    for tile in tma_tiles(posed):
        fixed = of.clocks(nothing, tile, 132)
        assert fixed >= of.LAUNCH_CLOCKS
        once = of.clocks(posed, tile, 132) - fixed
        assert 1.9 * once < of.clocks(twice, tile, 132) - fixed < 2.1 * once, tile
        if tile.splits > 1:
            whole = tile._replace(splits=1)
            sums = of.PARTIAL_BYTE_CLOCKS * 4 * posed.grad_input_elements * tile.splits
            assert of.clocks(posed, tile, 132) > of.clocks(posed, whole, 132) + 0.9 * sums


def test_two_consumers_are_faster_only_where_both_have_tiles() -> None:
    """The one multiplies while the other stores, which takes long where there are few taps and NCHW is stored."""
    layer = Geometry(330, 128, 16, 16, 64, (2, 2), (2, 2))
    posed, alone = (
        as_convolution(problem(layer.with_batch(batch), channels_last=True))._replace(
            output_channels_last=False
        )
        for batch in (330, 1)
    )
    pairs = [tile for tile in tma_tiles(posed) if tile.consumers > 1]
    assert pairs
    for tile in pairs:
        one = tile._replace(consumers=1)
        of_two, of_one = (grad_input_tma_clocks.clocks(posed, each, 132) for each in (tile, one))
        assert of_two < of_one
        assert grad_input_tma_tile.work_count(alone, tile) <= 132
        of_two, of_one = (grad_input_tma_clocks.clocks(alone, each, 132) for each in (tile, one))
        assert of_two == of_one


def test_a_tile_that_stores_nchw_takes_longer() -> None:
    posed = as_convolution(problem(LAYER, channels_last=True))
    in_nchw = posed._replace(output_channels_last=False)
    for tile in tma_tiles(posed):
        of_each = [grad_input_tma_clocks.tile_clocks(one, tile) for one in (posed, in_nchw)]
        assert of_each[0] < of_each[1]


#: Layers of which every constant of the clocks concerns some size: taps that overlap, strides above 2, kernels within
#: their stride, many weights, channels whose pixels are no whole lines.
VARIED = (
    Geometry(40, 96, 14, 13, 40, (4, 4), (2, 2), (1, 1)),
    Geometry(3, 64, 31, 30, 72, (5, 5), (3, 3), (1, 1)),
    Geometry(200, 128, 16, 24, 64, (2, 2), (2, 2)),
    Geometry(1, 1024, 8, 8, 640, (4, 4), (2, 2), (1, 1)),
)

#: Facts that the modules import from others.
IMPORTED = ("PRODUCER_THREADS", "ROW_BYTES", "SECTOR_BYTES", "STEP_WORDS")


def expected_of_all(of: ModuleType) -> Iterator[float]:
    """Yields the expected clocks of every kernel of a family for some sizes of varied layers."""
    for layer, channels_last in itertools.product(VARIED, (False, True)):
        for mode in (*MODES, (torch.float32, "ieee")):
            posed = problem(layer, mode, channels_last)
            size = as_convolution(posed)
            if of is grad_input_clocks:
                every = kernels_for(size, H200).implicit_gemm
                yield from (clocks for clocks, *_ in grad_input_choice.ranked(every, size, H200))
            elif of is grad_input_im2col_clocks:
                if grad_input_im2col.supports(size, H200):
                    shapes = list(grad_input_im2col_choice.every_shape(of_any_size(size), H200))
                    for one in shapes:
                        unpaired = one.shapes[0][0]._replace(paired=False)
                        yield grad_input_im2col_clocks.store_clocks(size, one.kernel, unpaired)
                    yield from (clocks for clocks, _ in grad_input_im2col.ranked_tiles(shapes, size, H200))
            else:
                read = size if channels_last else grad_input_nchw_to_nhwc.convolution_of_copies(size)
                if grad_input_tma.supports(read, H200):
                    kernels = grad_input_tma_choice.candidates(of_any_size(read), H200)
                    yield from (clocks for clocks, _ in grad_input_tma_choice.ranked(kernels, read, H200))


@pytest.mark.parametrize(
    "of", [grad_input_clocks, grad_input_tma_clocks, grad_input_im2col_clocks], ids=lambda of: of.__name__
)
def test_every_constant_counts(of: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    base = list(expected_of_all(of))
    constants = [name for name in vars(of) if name.isupper() and name not in IMPORTED]
    assert len(constants) > 10
    for name in constants:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, type(vars(of)[name])(1.5 * vars(of)[name]))
            assert differs(expected_of_all(of), base), name


@pytest.mark.parametrize(
    ("channels", "of_blocks"),
    [(5, {16}), (33, {40}), (66, {64, 72}), (100, {64, 128}), (300, {64, 128, 256})],
)
def test_a_block_of_im2col_has_no_more_channels_than_the_layer(channels: int, of_blocks: set[int]) -> None:
    """But those of a multiply: 16 to 96 in steps of 8, 128 and 256."""
    posed = as_convolution(problem(LAYER._replace(in_channels=channels)))
    assert {kernel.channels for kernel in grad_input_im2col_tile.kernels(posed, H200)} == of_blocks


def test_blocks_of_few_channels_take_fewer_clocks_beside_their_steps() -> None:
    posed = as_convolution(problem(LAYER))
    kernel = next(grad_input_im2col_tile.kernels(posed, H200))
    shape = next(grad_input_im2col_tile.shapes(posed, kernel, H200))
    beside = [
        grad_input_im2col_clocks.store_clocks(posed, kernel._replace(channels=channels), shape)
        for channels in (16, 32, 64, 128)
    ]
    assert beside[0] < beside[1] < beside[2] == beside[3]


def test_in_16_bits_only_positions_of_nchw_that_are_stored_alone_take_further_clocks() -> None:
    for channels_last, further in ((False, True), (True, False)):
        geometry = LAYER._replace(out_channels=4)
        posed = grad_input_im2col_tile.as_read(as_convolution(problem(geometry, channels_last=channels_last)))
        kernel = next(grad_input_im2col_tile.kernels(posed, H200))
        shape = next(grad_input_im2col_tile.shapes(posed, kernel, H200))
        alone, paired = (
            grad_input_im2col_clocks.store_clocks(posed, kernel, shape._replace(paired=one))
            for one in (False, True)
        )
        assert (alone > paired) == further
