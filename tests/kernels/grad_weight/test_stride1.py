"""The gradient of the weight at stride 1 (csrc/kernels/grad_weight/stride1.cu): which layers it computes, the limits of
its tiles, and random tiles on random geometries."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import stride1, stride1_clocks
from tconv_swap.kernels.grad_weight import stride1_tile as tiles
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
SQUARE = Geometry(8, 64, 1024, 1024, 64, (3, 3))
WIDE = Geometry(64, 64, 128, 256, 128, (3, 5))
FEW = Geometry(8, 32, 512, 1024, 32, (3, 7), padding=(1, 3))
ODD = Geometry(3, 40, 33, 24, 48, (2, 6))
GROUPED = Geometry(1, 128, 20, 64, 64, (3, 3), groups=2)
LAYERS = (SQUARE, WIDE, FEW, ODD, GROUPED)
MODES = (torch.float32, torch.float16, torch.bfloat16)
#: Relative L2 errors against float64, as in tests/cuda/test_cuda_op.py.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> plan.Problem:
    precision = "tf32" if dtype == torch.float32 else "ieee"
    return plan.Problem(geometry, dtype, precision, channels_last, channels_last)


POSED = [problem(g, dtype) for g in LAYERS for dtype in MODES[:2]] + [
    problem(g, channels_last=True) for g in LAYERS
]


@pytest.mark.parametrize("posed", POSED, ids=str)
def test_tiles_keep_the_limits_of_memory_sums_and_tensor_maps(posed: plan.Problem) -> None:
    assert stride1.supports(posed, H200)
    g, item = posed.geometry, posed.dtype.itemsize
    found = [stride1_clocks.best_tile(posed, tile, H200)[1] for tile in tiles.candidates(posed, H200)]
    assert found
    for tile in found:
        assert tiles.shared_bytes(posed, tile) <= H200.shared_memory_per_block
        assert tile.splits == 1 or tile.splits * weight_bytes(g) <= PARTIAL_LIMIT_BYTES
        assert tile.segment * tile.flush * tile.cols * item <= max(
            tiles.MAX_BYTES_PER_SUM, tile.segment * tile.cols * item
        )
        assert tile.segment * tile.cols * item <= tiles.MAX_BYTES_PER_SUM
        for one in stride1.lower(posed, tile).launches[0].tensor_maps:
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] * item % 16 == 0


def test_large_layers_of_stride_1_are_planned_by_stride1() -> None:
    def family(posed: plan.Problem, with_bias: bool = False) -> str:
        return plan.plan_backward(posed, (False, True, with_bias), H200).family

    for geometry in (SQUARE, WIDE, FEW):
        for posed in (
            problem(geometry),
            problem(geometry, torch.float16),
            problem(geometry, channels_last=True),
        ):
            assert family(posed) == "stride1"
            # The gradient of the bias has launches of its own, unless a copy of grad_output adds it up.
            copied = geometry == WIDE and posed.dtype == torch.float16
            apart = "nchw_to_nhwc, implicit_gemm_tma" if copied else "stride1, general"
            assert family(posed, with_bias=True) == apart
        assert family(problem(geometry, torch.float16, channels_last=True)) != "stride1"
        assert family(problem(geometry)._replace(precision="ieee")) != "stride1"
    assert family(problem(SQUARE._replace(height=16, width=16))) != "stride1"
    # Few output channels.
    small = Geometry(1, 256, 264, 200, 17, (3, 3), padding=(1, 1))
    assert family(problem(small)) == "stride1"


def test_only_layers_of_stride_1_are_claimed() -> None:
    def supports(geometry: Geometry, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> bool:
        return stride1.supports(problem(geometry, dtype, channels_last), H200)

    assert not stride1.supports(problem(SQUARE), H200._replace(architecture="sm_100"))
    assert not supports(SQUARE._replace(stride=(2, 2)))
    assert not supports(SQUARE._replace(dilation=(2, 1)))
    assert supports(SQUARE._replace(width=1022), channels_last=True)
    assert not supports(SQUARE._replace(width=1022), torch.float16, channels_last=True)
    assert not supports(SQUARE._replace(in_channels=62), channels_last=True)


def copied(geometry: Geometry, dtype: torch.dtype = torch.float32, linear: bool = False) -> set[int]:
    """Returns the operands that a tile copies which addresses grad_output linearly, or not."""
    return {one.operand for one in tiles.copied_rows(problem(geometry, dtype), linear)}


def test_rows_that_are_not_aligned_are_copied_to_longer_ones() -> None:
    """Those of grad_output (operand 0) only where they are not addressed linearly."""
    padded = SQUARE._replace(padding=(1, 1))
    assert copied(padded) == copied(padded._replace(width=1020)) == set()
    assert copied(padded._replace(width=1020), torch.float16) == {0, 1}
    assert copied(padded._replace(width=1022)) == {0, 1}
    assert copied(SQUARE) == {0}
    assert copied(SQUARE, linear=True) == set()
    assert copied(SQUARE._replace(width=1022)) == {1}
    assert copied(SQUARE._replace(width=1023), linear=True) == {1}
    assert tiles.copied_rows(problem(SQUARE._replace(width=1023), channels_last=True), False) == []


def test_which_layers_may_address_grad_output_linearly() -> None:
    def linear(posed: plan.Problem) -> set[bool]:
        found = {tile.linear for tile in tiles.candidates(posed, H200)}
        assert found == ({False, True} if tiles.may_be_linear(posed) else {False})
        return found

    assert linear(problem(SQUARE)) == linear(problem(SQUARE, torch.float16)) == {False, True}
    # A tap beside the rows of grad_output.
    assert linear(problem(SQUARE._replace(padding=(0, 1)))) == {False}
    assert linear(problem(SQUARE._replace(padding=(1, 0)))) == {False, True}
    # Four planes of float32, eight of 16 bits.
    assert linear(problem(SQUARE._replace(out_channels=60))) == {False, True}
    assert linear(problem(SQUARE._replace(out_channels=60), torch.float16)) == {False}
    assert linear(problem(SQUARE._replace(out_channels=66))) == {False}
    assert linear(problem(SQUARE, channels_last=True)) == {False}


def test_a_layer_has_the_same_tiles_at_all_sizes() -> None:
    for posed in (problem(SQUARE), problem(FEW, torch.float16)):
        found = set(tiles.candidates(posed, H200))
        for height, width in ((1023, 1024), (1024, 1023), (7, 5)):
            other = posed._replace(geometry=posed.geometry._replace(height=height, width=width))
            assert set(tiles.candidates(other, H200)) == found


@pytest.mark.parametrize("dtype", MODES[:2], ids=str)
def test_channels_that_a_warp_reads_at_once_lie_in_different_banks(dtype: torch.dtype) -> None:
    """Eight channels of 16 bytes: those of a plane are a pitch apart, and each plane begins earlier than the one
    before it, from places that are multiples of 128 bytes apart."""
    posed = problem(SQUARE, dtype)
    for tile in tiles.candidates(posed, H200):
        planes, pitch = tiles.planes_of(posed, tile), tiles.output_pixels(posed, tile) * dtype.itemsize
        assert planes == (16 // dtype.itemsize if tile.linear else 1)
        places = {
            channel // planes * pitch + channel % planes * tiles.PLANE_STAGGER * dtype.itemsize
            for channel in range(8)
        }
        assert {place % 128 for place in places} == set(range(0, 128, 16))
        # The last pixel that the last plane reads, of a row that begins as late as possible.
        last = tiles.PLANE_STAGGER * (planes - 1) + (16 // dtype.itemsize - 1 if tile.linear else 0)
        assert last + tile.cols + SQUARE.kernel[1] - 1 <= tiles.output_pixels(posed, tile) <= 256


@pytest.mark.parametrize("dtype", MODES[:2], ids=str)
def test_copies_lie_behind_the_partial_sums(dtype: torch.dtype) -> None:
    padded = SQUARE._replace(padding=(1, 1), height=500)
    posed, aligned = (problem(padded._replace(width=width), dtype) for width in (1023, 1024))
    tile = next(tiles.candidates(posed, H200))
    (clocks, chosen), (without, same) = (
        stride1_clocks.best_tile(one, tile, H200) for one in (posed, aligned)
    )
    assert clocks > without
    part, other = stride1.lower(posed, chosen), stride1.lower(aligned, same)
    *pads, main, _ = part.launches
    assert [one.kernel.entry for one in pads] == ["pad_rows", "pad_rows"]
    assert main.kernel == other.launches[0].kernel
    into, out = main.tensor_maps
    assert [one.arguments[1] for one in pads] == [out.base, into.base]
    assert out.base.value >= chosen.splits * weight_bytes(posed.geometry)
    for map_ in (into, out):
        assert map_.sizes[0] == 1023
        assert map_.strides[0] == 1024 * dtype.itemsize
    assert into.base.value - out.base.value == math.prod(out.sizes[1:]) * 1024 * dtype.itemsize
    assert part.workspace_bytes == 2 * into.base.value - out.base.value
    # Larger images have other kernels.
    many = problem(padded._replace(width=1023, batch=100), dtype)
    assert stride1.supports(many, H200)
    assert not stride1.ranked([tile], many, H200)


def random_geometry(rng: random.Random, channels_last: bool) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 2))
        kernel = (rng.randint(1, 5), rng.randint(1, 8))
        geometry = Geometry(
            rng.randint(1, 3),
            groups * rng.choice((32, 36, 64, 96, 160)),
            rng.randint(1, 40),
            rng.randint(1, 140)
            if channels_last
            else rng.choice((8 * rng.randint(1, 18), rng.randint(1, 140))),
            groups * rng.choice((4, 16, 24, 64, 128)),
            kernel,
            padding=(rng.randint(0, kernel[0]), rng.choice((0, rng.randint(0, kernel[1])))),
            groups=groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def random_part(rng: random.Random, device: plan.Device) -> tuple[plan.Problem, Part]:
    """Returns a problem that the kernel supports, and a random tile of it."""
    while True:
        channels_last = rng.random() < 0.4
        posed = problem(random_geometry(rng, channels_last), rng.choice(MODES), channels_last)
        posed = posed._replace(weight_channels_last=rng.random() < 0.5)
        small = device._replace(multiprocessors=rng.choice((1, 4, device.multiprocessors)))
        found = list(tiles.candidates(posed, small)) if stride1.supports(posed, device) else []
        if found:
            _, tile = stride1_clocks.best_tile(posed, rng.choice(found), small)
            tile = replace(tile, stages=rng.randint(tile.tap_rows + 1, tile.stages))
            return posed, stride1.lower(posed, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Whatever the kernel supports, with a random tile: poisoned outputs, the same bits twice."""
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    posed, part = random_part(rng, facts)
    layouts = (posed.channels_last, posed.weight_channels_last)
    tolerance, mask = TOLERANCES[posed.dtype], (False, True, False)
    assert_kernel_matches(part, posed.geometry, posed.dtype, layouts, tolerance, mask)
