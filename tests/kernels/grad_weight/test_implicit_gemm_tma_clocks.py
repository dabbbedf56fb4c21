"""The expected time of the gradient of the weight by TMA (implicit_gemm_tma_clocks.py), and of the copies that it may
need. test_clocks.py tests which of its constants count."""

from __future__ import annotations

import pytest
import torch
from grad_weight_cases import tma_tiles
from size_cases import H200

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.copy_clocks import copy_clocks
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_clocks as grad_weight_tma_clocks
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_tile as grad_weight_tma_tile
from tconv_swap.kernels.grad_weight import nchw_to_nhwc as grad_weight_nchw_to_nhwc
from tconv_swap.kernels.grad_weight.layer import pixel_tiles

LAYER = Geometry(330, 256, 16, 16, 128, (4, 4), (2, 2), (1, 1))


def posed(geometry: Geometry, channels_last: bool) -> plan.Problem:
    return plan.Problem(geometry, torch.float16, "ieee", channels_last, channels_last)


def test_the_clocks_of_loads_by_tma_grow_with_splits_short_rings_and_ragged_pixels() -> None:
    of, problem = grad_weight_tma_clocks, posed(LAYER, True)
    ragged = posed(LAYER._replace(in_channels=248), True)
    split = bound_by_loads = 0
    for kernel, stage in tma_tiles(problem):
        work = of.work_of(problem, kernel, H200)
        tiles = pixel_tiles(LAYER, stage.shape)
        best = of.fastest(work, [(tiles, stage)], LAYER, H200)
        assert best is not None
        assert best.stage == stage
        rounds = -(-work.blocks * best.splits // H200.multiprocessors)
        product = rounds * -(-tiles // best.splits) * work.tile_clocks(stage)
        memory = 2 * of.BYTE_CLOCKS * of.loaded_elements(LAYER, work.channels_read)
        fixed = of.LAUNCH_CLOCKS + of.GRADIENT_BYTE_CLOCKS * work.split_bytes
        sums = of.REDUCTION_CLOCKS + of.PARTIAL_BYTE_CLOCKS * work.split_bytes * best.splits
        sums = sums if best.splits > 1 else 0
        # What memory takes overlaps with the product but for a share.
        assert fixed + sums + max(product, memory) < best.clocks < fixed + sums + product + memory
        split += best.splits > 1
        loads = work.byte_clocks * stage.bytes
        bound_by_loads += loads > work.multiply_clocks
        assert work.tile_clocks(stage) > max(loads, work.multiply_clocks)
        short = stage._replace(stages=grad_weight_tma_tile.MIN_STAGES)
        assert work.tile_clocks(short) >= work.tile_clocks(stage)
        if stage.stages > grad_weight_tma_tile.MIN_STAGES:
            assert work.tile_clocks(short) > 1.1 * work.tile_clocks(stage)
        assert of.work_of(ragged, kernel, H200).tile_clocks(stage) > 1.03 * work.tile_clocks(stage)
    assert split > 10
    assert bound_by_loads > 3


def test_few_tiles_are_cut_into_no_more_splits_than_they_are() -> None:
    cuts = grad_weight_tma_clocks.cuts_of(4, 1 << 20, 1 << 20, H200)
    assert [one.splits for one in cuts] == [1, 33, 64]  # 64 MiB of partial sums
    assert [one.splits for one in grad_weight_tma_clocks.cuts_of(4, 1 << 20, 20, H200)] == [1, 20]
    assert [one.splits for one in grad_weight_tma_clocks.cuts_of(200, 1 << 20, 20, H200)] == [1]


def test_a_gradient_of_a_single_split_is_copied_back_to_nchw() -> None:
    problem = posed(LAYER, False)
    _, stage = tma_tiles(posed(LAYER, True))[0]
    single = grad_weight_tma_clocks.Fastest(1000.0, stage, 1)
    several = single._replace(splits=2)
    expected = grad_weight_nchw_to_nhwc.expected
    weight = 2 * LAYER.in_channels * LAYER.out_channels_per_group * LAYER.taps
    assert expected(problem, single) - expected(problem, several) == pytest.approx(copy_clocks(2 * weight, 1))
    stored = problem._replace(weight_channels_last=True)
    assert expected(stored, single) == expected(stored, several) == expected(problem, several)
