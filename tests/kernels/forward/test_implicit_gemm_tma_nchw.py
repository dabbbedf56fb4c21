"""The plans of csrc/kernels/forward/implicit_gemm_tma_nchw.cu, whose producers transpose what the copy engine
loads, and on a GPU its results on random geometries."""

from __future__ import annotations

import random

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
    return problem._replace(aligned=can_be_aligned(problem))


def candidates(problem: TileProblem) -> list[tuple[TileProblem, Tile]]:
    """Returns the tiles of this kernel that suit the size."""
    return [entry for entry in forward_choice.candidates(problem, H200) if entry[1].nchw_stages]


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
def test_rows_of_whole_16_bytes_use_the_kernel(geometry: Geometry, dtype: torch.dtype) -> None:
    found = candidates(posed(geometry, dtype))
    assert found
    for problem, tile in found:
        assert supports_tma_nchw(problem, tile)
        assert tile.nchw_stages >= 2
        made = forward_implicit_gemm.lower(problem, tile, H200)
        assert made.launches[1].kernel.source == "forward/implicit_gemm_tma_nchw.cu"
        (map_,) = made.launches[1].tensor_maps
        assert all(stride % 16 == 0 for stride in map_.strides)
        assert all(1 <= size <= 256 for size in map_.box)
        assert map_.box[0] * dtype.itemsize % 16 == 0
        assert shared_bytes(problem, tile) <= H200.shared_memory_per_block


@pytest.mark.parametrize(
    "geometry",
    [
        SQUARE._replace(width=126),
        Geometry(64, 128, 14, 14, 64, (2, 2), (2, 2)),
    ],  # rows of 504 bytes; images that tiles do not divide
    ids=str,
)
def test_other_rows_do_not_use_the_kernel(geometry: Geometry) -> None:
    assert not candidates(posed(geometry, torch.float32))


def test_chunks_of_a_group_end_where_it_does() -> None:
    problem = posed(SQUARE._replace(in_channels=40, groups=2), torch.float16)  # 10 words a group, chunks of 8
    tile = Tile(4, 1, 1, 8, 64, 1, 8, 4, 8, 3, 1, wgmma=True, nchw_stages=3)
    assert not supports_tma_nchw(problem, tile)
    assert supports_tma_nchw(posed(SQUARE._replace(in_channels=40), torch.float16), tile)


def tiles(problem: TileProblem) -> list[Tile]:
    """Returns tiles of many shapes, not only those that are chosen."""
    phases = problem.phases[0] * problem.phases[1]
    found = []
    for groups_n, producer_warps, max_rows, chunk_words in (
        (2, 8, 8, 8),
        (1, 8, 8, 16),
        (1, 12, 4, 8),
        (2, 4, 1, 8),
    ):
        fragments = 1 << (32 // phases).bit_length() - 1 if phases <= 8 else 0
        if fragments < 4 or chunk_words > max(8, problem.words):
            continue
        shape = forward_fit.tile_fragments(problem, fragments, groups_n, max_rows)
        multiplied = forward_fit.multiplied_fragments(shape)
        if shape[2] < 8 or multiplied < 4 or multiplied in (5, 6, 7):
            continue
        for stages, nchw_stages in forward_choice.TRANSPOSER_STAGES:
            tile = Tile(
                4,
                1,
                *shape,
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
    flat = kernel == stride == (2, 2)  # no tap is shifted
    return Geometry(
        rng.randint(1, 5),
        groups * rng.choice((16, 24, 32, 33, 64, 72)),
        rng.choice((4, 8, 16)) if flat else rng.randint(5, 40),
        rng.choice((16, 32, 48)) if flat else 16 // item * rng.randint(2, 12),
        groups * rng.choice((40, 64, 96)),
        kernel,
        stride,
        (0, 0) if flat else (rng.randint(0, 2), rng.randint(0, 2)),
        (0, 0) if flat else (rng.randint(0, stride[0] - 1), rng.randint(0, stride[1] - 1)),
        dilation,
        groups,
    )


def random_case(seed: int) -> tuple[TileProblem, Tile]:
    rng = random.Random(seed)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    while True:
        geometry = random_geometry(rng, dtype.itemsize)
        if geometry.out_height < 1 or geometry.out_width < 1:
            continue
        problem = aligned(make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5))
        found = tiles(problem) if forward_implicit_gemm.supports(problem, H200) else []
        if found:
            return problem, rng.choice(found)


def test_a_box_covers_the_halo_of_its_tile() -> None:
    for seed in range(60):
        problem, tile = random_case(seed)
        (min_h, max_h), (min_w, max_w) = problem.shifts
        columns, _, rows = nchw_box(problem, tile)
        left_pad = min_w % (16 // problem.item)
        assert columns >= left_pad + tile.cols + max_w - min_w
        assert rows == (tile.rows - 1) * problem.position_input_rows + 1 + max_h - min_h
        assert (min_w - left_pad) * problem.item % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(36))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """The results are right in poisoned memory, with the same bits twice."""
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the kernel is made for sm_90a")
    torch.manual_seed(seed)
    problem, tile = random_case(seed)
    geometry, dtype = problem.geometry, problem.dtype
    made = forward_implicit_gemm.lower(problem, tile, facts)
    assert_kernel_matches(made, geometry, dtype, (False, False), TOLERANCE[dtype], with_bias=problem.has_bias)
