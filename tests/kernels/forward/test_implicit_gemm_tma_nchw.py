"""Inputs in NCHW that the copy engine brings and warps turn (csrc/kernels/forward/implicit_gemm_tma_nchw.cu): where
they are chosen, that the boxes are what the copy engine takes, and on a GPU that forced tiles are right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import implicit_gemm_choice as forward_choice
from tconv_swap.kernels.forward import implicit_gemm_fit as forward_fit
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, can_be_aligned, make_problem
from tconv_swap.kernels.forward.implicit_gemm_memory import nchw_box, shared_bytes, supports_tma_nchw

H200 = plan.Device("sm_90a", 132, 227 << 10)
SQUARE = Geometry(8, 64, 64, 128, 64, (3, 3))
FEW_CHANNELS = Geometry(8, 32, 64, 128, 32, (3, 7), padding=(1, 3))
DECODER = Geometry(32, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1))
UPSAMPLING = Geometry(64, 128, 32, 32, 64, (2, 2), (2, 2))
#: As in test_cuda_op.py.
TOLERANCE = {torch.float32: 6e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def posed(geometry: Geometry, dtype: torch.dtype) -> TileProblem:
    return aligned(make_problem(geometry, dtype, "tf32", False, False, True))


def aligned(problem: TileProblem) -> TileProblem:
    return replace(problem, aligned=can_be_aligned(problem))


def first_tile(problem: TileProblem) -> tuple[TileProblem, Tile]:
    return next(iter(forward_choice.candidates(problem, H200)))


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        (SQUARE, torch.float32),
        (FEW_CHANNELS, torch.float16),
        (FEW_CHANNELS, torch.float32),
        (UPSAMPLING, torch.float32),
        (DECODER, torch.float16),
        (DECODER, torch.bfloat16),
    ],
    ids=str,
)
def test_what_is_turned(geometry: Geometry, dtype: torch.dtype) -> None:
    problem, tile = first_tile(posed(geometry, dtype))
    assert tile.nchw_stages >= 2
    made = forward_implicit_gemm.plan_with_tile(problem, tile, H200)
    assert made.launches[1].kernel.source == "forward/implicit_gemm_tma_nchw.cu"
    (map_,) = made.launches[1].tensor_maps
    assert all(stride % 16 == 0 for stride in map_.strides)
    assert all(1 <= size <= 256 for size in map_.box)
    assert map_.box[0] * dtype.itemsize % 16 == 0
    assert shared_bytes(problem, tile) <= H200.shared_memory_per_block


@pytest.mark.parametrize(
    "geometry",
    [
        replace(SQUARE, width=126),
        Geometry(64, 128, 14, 14, 64, (2, 2), (2, 2)),
    ],  # rows of 504 bytes; images that tiles do not divide
    ids=str,
)
def test_what_is_not_turned(geometry: Geometry) -> None:
    assert not first_tile(posed(geometry, torch.float32))[1].nchw_stages


def test_chunks_of_a_group_end_where_it_does() -> None:
    problem = posed(replace(SQUARE, in_channels=40, groups=2), torch.float16)  # 10 words a group, chunks of 8
    tile = Tile(4, 1, 1, 8, 64, 1, 8, 4, 8, 3, 1, wgmma=True, nchw_stages=3)
    assert not supports_tma_nchw(problem, tile)
    assert supports_tma_nchw(posed(replace(SQUARE, in_channels=40), torch.float16), tile)


def tiles(problem: TileProblem) -> list[Tile]:
    """Tiles of many shapes, not only those that are chosen."""
    phases = problem.phases[0] * problem.phases[1]
    found = []
    for groups_n, producer_warps, most_rows, chunk_words in (
        (2, 8, 8, 8),
        (1, 8, 8, 16),
        (1, 12, 4, 8),
        (2, 4, 1, 8),
    ):
        fragments = 1 << (32 // phases).bit_length() - 1 if phases <= 8 else 0
        if fragments < 4 or chunk_words > max(8, problem.words):
            continue
        arranged = forward_fit.tile_fragments(problem, fragments, groups_n, most_rows)
        run = arranged[5] if arranged[4] == 1 else arranged[4]
        if arranged[2] < 8 or run < 4 or run in (5, 6, 7):
            continue
        for stages, nchw_stages in forward_choice.TRANSPOSER_STAGES:
            tile = Tile(
                4,
                1,
                *arranged,
                chunk_words,
                stages,
                1,
                wgmma=True,
                producer_warps=producer_warps,
                nchw_stages=nchw_stages,
            )
            if (
                supports_tma_nchw(problem, tile)
                and shared_bytes(problem, tile) <= H200.shared_memory_per_block
            ):
                found.append(tile)
                break
    return found


def random_geometry(rng: random.Random, item: int) -> Geometry:
    groups = rng.choice((1, 1, 1, 2))
    kernel, stride, dilation = rng.choice(
        [
            ((3, 3), (1, 1), (1, 1)),
            ((4, 4), (2, 2), (1, 1)),
            ((3, 3), (2, 2), (1, 1)),
            ((3, 7), (1, 1), (1, 1)),
            ((2, 3), (1, 2), (1, 1)),
            ((3, 2), (3, 2), (1, 2)),
            ((2, 2), (2, 2), (1, 1)),
            ((5, 1), (2, 1), (2, 1)),
        ]
    )
    one_row = kernel == stride == (2, 2)  # of cells, as no tap is shifted
    return Geometry(
        rng.randint(1, 5),
        groups * rng.choice((16, 24, 32, 33, 64, 72)),
        rng.choice((4, 8, 16)) if one_row else rng.randint(5, 40),
        rng.choice((16, 32, 48)) if one_row else 16 // item * rng.randint(2, 12),
        groups * rng.choice((40, 64, 96)),
        kernel,
        stride,
        (0, 0) if one_row else (rng.randint(0, 2), rng.randint(0, 2)),
        (0, 0) if one_row else (rng.randint(0, stride[0] - 1), rng.randint(0, stride[1] - 1)),
        dilation,
        groups,
    )


def forced(seed: int) -> tuple[TileProblem, Tile]:
    rng = random.Random(seed)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    while True:
        geometry = random_geometry(rng, dtype.itemsize)
        if geometry.out_height < 1 or geometry.out_width < 1:
            continue
        problem = aligned(make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5))
        found = tiles(problem) if forward_implicit_gemm.claims(problem, H200) else []
        if found:
            return problem, rng.choice(found)


def test_a_box_covers_the_halo_of_its_tile() -> None:
    for seed in range(60):
        problem, tile = forced(seed)
        (least_h, most_h), (least_w, most_w) = problem.shifts
        columns, _, rows = nchw_box(problem, tile)
        lead = least_w % (16 // problem.item)
        assert columns >= lead + tile.cols + most_w - least_w
        assert rows == (tile.rows - 1) * problem.position_input_rows + 1 + most_h - least_h
        assert (least_w - lead) * problem.item % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(36))
def test_forced_on_random_geometries(seed: int) -> None:
    """Poisoned memory, and the same bits again."""
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the kernel is made for sm_90a")
    torch.manual_seed(seed)
    problem, tile = forced(seed)
    geometry, dtype = problem.geometry, problem.dtype
    made = forward_implicit_gemm.plan_with_tile(problem, tile, facts)
    assert_kernel_matches(made, geometry, dtype, (False, False), TOLERANCE[dtype], with_bias=problem.has_bias)
