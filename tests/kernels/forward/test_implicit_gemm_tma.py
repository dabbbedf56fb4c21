"""The plans of csrc/kernels/forward/implicit_gemm_tma.cu, whose input the copy engine loads, and on a GPU its
results on random geometries."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from harness import assert_kernel_matches
from implicit_gemm_tma_cases import (
    H200,
    dense_case,
    pixel_case,
    random_case,
    row_case,
    split_case,
    staggered_case,
    vary,
)

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_PIXELS
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, make_problem
from tconv_swap.kernels.forward.implicit_gemm_stagger import products
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import ArgumentKind, Kernel, Plan

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_tile_fits_and_its_boxes_are_legal(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for _ in range(60):
        posed, tile = random_case(rng, dtype)
        made = forward_implicit_gemm.lower(posed, tile, H200)
        forward = next(one for one in made.launches if one.kernel.entry == "forward_implicit_gemm_tma")
        assert tile.blocks_per_multiprocessor * (forward.shared_bytes + 1024) <= 228 << 10
        for box in forward.tensor_maps:
            assert len(box.sizes) == len(box.steps) == len(box.strides) + 1
            assert len(box.box) == (2 if box.corners else len(box.sizes))
            assert box.box[0] * dtype.itemsize <= box.swizzle_bytes
            assert max(box.box) <= (MAX_PIXELS if box.corners else MAX_BOX)
            assert all(stride % 16 == 0 for stride in box.strides)
            assert [one for one in forward.arguments if one.kind is ArgumentKind.TENSOR_MAP]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(256, 256, 4, 4, 128, (4, 4), (2, 2), (1, 1)),
        Geometry(16, 512, 4, 4, 256, (3, 3), (2, 2), (1, 1), (1, 1)),
        Geometry(1, 1024, 8, 8, 512, (4, 4), (2, 2), (1, 1)),
    ],
    ids=str,
)
def test_tiles_with_partial_sums_fit_too(geometry: Geometry, channels_last: bool) -> None:
    """In NCHW and 16 bits a warp collects partial sums in twice the memory that it collects outputs in."""
    posed = plan.Problem(geometry, torch.float16, "ieee", channels_last, channels_last)
    plans = [
        made
        for batch in (1, geometry.batch)
        for made in plan.forward_candidates(
            posed._replace(geometry=geometry._replace(batch=batch)), True, H200, 8
        )
    ]
    assert any("splits" in made.why for made in plans)
    for made in plans:
        assert max(one.shared_bytes for one in made.launches) <= H200.shared_memory_per_block


def entries(made: Plan) -> list[str]:
    return [one.kernel.entry.removeprefix("forward_") for one in made.launches]


def multiplying(made: Plan) -> Kernel:
    others = ("implicit_gemm_pack", "nchw_to_nhwc", "implicit_gemm_split_k")
    (found,) = (
        one.kernel for one in made.launches if one.kernel.entry.removeprefix("forward_") not in others
    )
    return found


def multiplied_by(made: Plan) -> str:
    return multiplying(made).entry.removeprefix("forward_implicit_gemm_")


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float16, "ieee"), (torch.float32, "tf32")], ids=str)
def test_the_copy_engine_loads_channels_last(dtype: torch.dtype, precision: str) -> None:
    """In NCHW it loads a copy, or producers transpose what it loads; without it, threads load both layouts."""
    geometry = Geometry(8, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1))
    of_layout = {
        last: plan.forward_candidates(plan.Problem(geometry, dtype, precision, last, last), True, H200, 64)
        for last in (True, False)
    }
    assert multiplied_by(of_layout[True][0]) == "tma"
    assert set(map(multiplied_by, of_layout[True])) == {"tma", "mma"}
    assert not any("nchw_to_nhwc" in entries(made) for made in of_layout[True])
    in_nchw = set(map(multiplied_by, of_layout[False]))
    assert in_nchw >= {"tma", "wgmma", "mma"}
    assert ("tma_nchw" in in_nchw) == (dtype == torch.float16)
    for made in of_layout[False]:
        assert ("nchw_to_nhwc" in entries(made)) == (multiplied_by(made) == "tma")


def test_groups_whose_channels_are_no_multiple_of_16_bytes_use_another_kernel() -> None:
    for channels, expected in ((72, True), (68, False)):
        geometry = Geometry(8, channels * 2, 64, 64, 128, (3, 3), (2, 2), (1, 1), groups=2)
        found = plan.forward_candidates(
            plan.Problem(geometry, torch.float16, "ieee", True, True), True, H200, 64
        )
        assert found
        assert ("tma" in map(multiplied_by, found)) == expected


def test_a_box_of_nchw_lies_in_one_image_and_one_group() -> None:
    """The multiplier reads rows of 64 pixels, in one multiply for each warpgroup."""
    found = {}
    for height, groups, channels in ((16, 1, 72), (20, 1, 72), (24, 2, 64), (24, 2, 72), (14, 1, 64)):
        layer = Geometry(8, groups * channels, height, 16, groups * 128, (2, 2), (2, 2), groups=groups)
        posed = make_problem(layer, torch.float16, "ieee", False, False, False)
        posed = posed._replace(aligned=True)
        tiles = [tile for _, tile in candidates(posed, H200) if tile.pixel_major]
        for tile in tiles:
            assert height * 16 % tile.cols == 0
            assert tile.warp_cols in (8, 16)
            assert groups == 1 or channels // 2 % tile.chunk_words == 0
        found[height, groups, channels] = {(tile.cols, tile.chunk_words) for tile in tiles}
    assert not found[14, 1, 64]
    assert {cols for cols, _ in found[20, 1, 72]} == {64}
    assert len({cols for cols, _ in found[16, 1, 72]}) > 1
    assert {words for _, words in found[24, 2, 64]} == {8, 16}
    assert not found[24, 2, 72]


def test_taps_that_are_further_apart_than_a_box_is_long_use_another_kernel() -> None:
    for dilation, expected in ((110, True), (130, False)):
        geometry = Geometry(8, 64, 8, 600, 64, (1, 3), dilation=(1, dilation))
        found = list(candidates(make_problem(geometry, torch.float16, "ieee", True, True, False), H200))
        assert found
        assert any(tile.tma for _, tile in found) == expected


def test_many_16_bit_weights_in_channels_last_are_not_packed() -> None:
    many = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
    few = Geometry(16, 128, 128, 128, 64, (3, 3), (2, 2), (1, 1), (1, 1))
    for geometry, dtype, precision, weight_channels_last, packs in (
        (many, torch.float16, "ieee", True, False),
        (many, torch.bfloat16, "ieee", True, False),
        (many, torch.float16, "ieee", False, True),
        (many, torch.float32, "tf32", True, True),
        (few, torch.float16, "ieee", True, True),
    ):
        made = plan.plan_forward(
            plan.Problem(geometry, dtype, precision, True, weight_channels_last), True, H200
        )
        assert entries(made) == ["implicit_gemm_pack"] * packs + ["implicit_gemm_tma"]
        assert (made.without_packing(dtype.itemsize) is not None) == packs
        # The work before a call may still write what its first launch reads.
        assert not made.launches[0].overlaps_previous


def staggered_tiles(geometry: Geometry) -> list[tuple[TileProblem, Tile]]:
    posed = make_problem(geometry, torch.float16, "ieee", True, True, False)
    return [entry for entry in candidates(posed, H200) if entry[1].stagger]


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (Geometry(64, 64, 128, 256, 128, (3, 5)), True),
        (Geometry(8, 64, 512, 512, 64, (3, 7)), True),
        (Geometry(8, 64, 1024, 1024, 64, (3, 3)), False),  # more stages than a tile has chunks
        (Geometry(1, 64, 64, 64, 128, (3, 5)), False),  # a block has one tile
        (Geometry(8, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1)), False),
    ],
    ids=str,
)
def test_the_second_warpgroup_begins_later_where_that_was_measured_to_pay(
    geometry: Geometry, expected: bool
) -> None:
    """With more stages than chunks its first warpgroup could be two phases of the barrier ahead."""
    found = staggered_tiles(geometry)
    assert bool(found) == expected
    for problem, tile in found:
        assert tile.stages <= -(-problem.words // tile.chunk_words)
        assert tile.stagger < tile.stages * products(problem, tile)


def test_a_staggered_kernel_does_not_spill() -> None:
    (problem, tile), *_ = staggered_tiles(Geometry(64, 64, 128, 256, 128, (3, 5)))
    made = forward_implicit_gemm.lower(problem, tile, H200)
    assert dict(made.launches[-1].kernel.constants)["STAGGER"] == tile.stagger > 0
    _, log = jit.compile_with_log(made.launches[-1].kernel, "sm_90a")
    assert " 0 bytes spill stores" in log
    assert "serializ" not in log


def test_weights_that_stay_in_shared_memory_are_those_of_every_tile() -> None:
    """A block loads them for its first tile: no other tile may have other channels, groups, phases, or another part of
    the sum."""
    found = []
    for layer in (
        Geometry(1, 512, 8, 8, 64, (1, 1)),
        Geometry(1, 256, 8, 8, 64, (2, 2), (2, 2)),
        Geometry(8, 64, 64, 64, 64, (3, 3)),
        Geometry(8, 64, 64, 64, 128, (3, 3), groups=2),
    ):
        posed = make_problem(layer, torch.float16, "ieee", True, True, False)
        found += [entry for entry in candidates(posed, H200) if entry[1].resident_weights]
    assert len(found) > 8
    for problem, tile in found:
        channels = problem.geometry.out_channels
        assert channels <= problem.block_channels(tile), "one block of channels"
        assert len(problem.group_taps) == problem.geometry.groups == tile.splits == 1, (problem, tile)


CROP = Geometry(16, 256, 14, 14, 256, (2, 2), (2, 2))
DECODER = Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1))


@pytest.mark.parametrize(
    ("geometry", "dtype", "copies", "pixels"),
    [
        (CROP, torch.float16, True, False),  # tiles do not divide its images
        (CROP, torch.float32, True, False),
        (CROP._replace(height=16, width=16), torch.float16, True, True),
        (CROP._replace(height=16, width=16), torch.float32, True, False),
        (DECODER, torch.bfloat16, True, False),
        (DECODER._replace(width=63), torch.float32, True, False),
        (DECODER.with_batch(1024), torch.float32, False, False),  # 4 GiB
    ],
    ids=str,
)
def test_nchw_inputs_are_loaded_directly_or_from_a_copy(
    geometry: Geometry, dtype: torch.dtype, copies: bool, pixels: bool
) -> None:
    found = plan.forward_candidates(plan.Problem(geometry, dtype, "tf32", False, False), True, H200, 64)
    kinds = {False: 0, True: 0}
    for made in found:
        copied, of_pixels = (
            "nchw_to_nhwc" in entries(made),
            bool(dict(multiplying(made).constants)["PIXEL_MAJOR"]),
        )
        before = ["implicit_gemm_pack"] + ["nchw_to_nhwc"] * copied
        assert entries(made)[: 2 + copied] == [*before, f"implicit_gemm_{multiplied_by(made)}"]
        assert (multiplied_by(made) == "tma") == (copied or of_pixels)
        assert not (copied and of_pixels)
        assert not made.launches[0].overlaps_previous
        assert all(one.overlaps_previous for one in made.launches[1:])
        kinds[copied] += 1
    assert kinds[False]
    assert bool(kinds[True]) == copies
    assert any(dict(multiplying(made).constants)["PIXEL_MAJOR"] for made in found) == pixels


def test_the_copy_of_the_input_lies_behind_the_packed_weights() -> None:
    geometry = DECODER._replace(out_channels=256)
    found = plan.forward_candidates(
        plan.Problem(geometry, torch.float32, "tf32", False, False), True, H200, 64
    )
    made = next(one for one in found if entries(one)[1:] == ["nchw_to_nhwc", "implicit_gemm_tma"])
    _, copying, forward = made.launches
    place = copying.arguments[1]
    assert forward.tensor_maps[0].base == place
    weights = 4 * 256 * 256 * 9
    assert place.kind is ArgumentKind.WORKSPACE
    assert place.value >= weights
    assert place.value % 16 == 0
    assert made.workspace_bytes == place.value + 4 * 8 * 256 * 64 * 64
    _, frozen = made.without_packing(4) or pytest.fail("the weight cannot be kept")
    assert [one.overlaps_previous for one in frozen.launches] == [False, True]
    assert frozen.workspace_bytes == 4 * 8 * 256 * 64 * 64


def test_ieee_uses_another_kernel() -> None:
    geometry = Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1))
    made = plan.plan_forward(plan.Problem(geometry, torch.float32, "ieee", True, True), True, H200)
    assert all(one.kernel.entry != "forward_implicit_gemm_tma" for one in made.launches)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_partial_sums_lie_behind_what_else_is_in_the_workspace(channels_last: bool) -> None:
    kinds = set()
    for seed in range(24):
        posed, tile = split_case(random.Random(seed), list(TOLERANCE)[seed % 3], channels_last)
        made = forward_implicit_gemm.lower(posed, tile, H200)
        multiply, add = made.launches[-2:]
        assert add.kernel.entry == "forward_implicit_gemm_split_k"
        assert multiply.shared_bytes <= H200.shared_memory_per_block
        outputs = math.prod(posed.geometry.output_shape)
        place = multiply.arguments[3]
        assert place.kind is ArgumentKind.WORKSPACE
        assert place.value + 4 * outputs * tile.splits == made.workspace_bytes
        weights = math.prod(posed.geometry.weight_shape) * posed.item
        inputs = math.prod(posed.geometry.input_shape) * posed.item
        assert place.value >= weights * (not tile.tma_weights) + inputs * posed.nhwc_copy
        assert place.value % 16 == 0
        kinds.add(multiplied_by(made))
    assert kinds >= {"tma", "mma"}


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("seed", range(18))
def test_split_tiles_match_float64(seed: int, channels_last: bool) -> None:
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the kernels are for sm_90a")
    dtype = list(TOLERANCE)[seed % 3]
    posed, tile = split_case(random.Random(seed), dtype, channels_last)
    made = forward_implicit_gemm.lower(posed, tile, H200)
    layouts = (channels_last, channels_last)
    assert_kernel_matches(made, posed.geometry, dtype, layouts, TOLERANCE[dtype], with_bias=posed.has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("nhwc_copy", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_random_tiles_match_float64_on_random_geometries(seed: int, nhwc_copy: bool) -> None:
    """Every problem that the kernel supports is computed right by a random tile, in poisoned memory, with the same bits
    twice, and NaNs in the channels of another group change nothing."""
    rng = random.Random(2 * seed + nhwc_copy)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    posed, tile = random_case(rng, dtype, nhwc_copy)
    tile = vary(rng, posed, tile)
    geometry = posed.geometry
    made = forward_implicit_gemm.lower(posed, tile, H200)
    layouts = (not nhwc_copy, posed.weight_channels_last)
    run = assert_kernel_matches(made, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=posed.has_bias)
    if geometry.groups > 1:
        x = run.tensors[0]
        assert x is not None
        x[:, -geometry.in_channels_per_group :] = float("nan")
        clean = geometry.out_channels - geometry.out_channels_per_group
        assert torch.equal(run.again()[0][:, :clean], run.found[0][:, :clean])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(9))
def test_staggered_tiles_match_float64_on_random_geometries(seed: int) -> None:
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    posed, tile = staggered_case(random.Random(seed), dtype)
    made = forward_implicit_gemm.lower(posed, tile, H200)
    layouts = (True, posed.weight_channels_last)
    assert_kernel_matches(made, posed.geometry, dtype, layouts, TOLERANCE[dtype], with_bias=posed.has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [row_case, dense_case, pixel_case])
@pytest.mark.parametrize("seed", range(12))
def test_tiles_for_nchw_match_float64_on_random_geometries(
    seed: int, case: Callable[..., tuple[TileProblem, Tile]]
) -> None:
    """Tiles that store whole rows, dense tiles, and tiles that load NCHW in its own layout, are right, too."""
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtypes = (
        (torch.float16, torch.bfloat16)
        if case is pixel_case
        else (torch.float16, torch.bfloat16, torch.float32)
    )
    dtype = dtypes[seed % len(dtypes)]
    posed, tile = case(random.Random(seed), dtype)
    made = forward_implicit_gemm.lower(posed, tile, H200)
    assert_kernel_matches(
        made, posed.geometry, dtype, (False, False), TOLERANCE[dtype], with_bias=posed.has_bias
    )
