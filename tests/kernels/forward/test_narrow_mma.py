"""The plans of csrc/kernels/forward/narrow_mma.cu, and on a GPU its results on random geometries."""

from __future__ import annotations

import random

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import random_output_padding

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry, phase_taps
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.layer_sizes import representative_sizes
from tconv_swap.kernels.forward import narrow_mma as forward_narrow_mma
from tconv_swap.kernels.forward import narrow_mma_choice as forward_narrow_mma_choice
from tconv_swap.kernels.forward.narrow_mma_tile import product, shared_bytes

H200 = plan.Device("sm_90a", 132, 227 << 10)
AMPERE = plan.Device("sm_80", 108, 163 << 10)
RGB = Geometry(128, 64, 32, 32, 3, (4, 4), (2, 2), (1, 1))
GAPS = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
LARGE_STRIDES = Geometry(2, 21, 16, 16, 21, (64, 64), (32, 32), (16, 16))
GROUPED = Geometry(16, 32, 128, 256, 64, (3, 5), (2, 3), (1, 2), dilation=(2, 1), groups=4)
WIDE_RGB = Geometry(4, 48, 40, 50, 3, (9, 9), (1, 1), (4, 4))
LAYERS = (RGB, GAPS, LARGE_STRIDES, GROUPED, WIDE_RGB)
#: As in test_cuda_op.py.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float16, channels_last: bool = False
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_narrow_layers_in_16_bits_go_to_tensor_cores(geometry: Geometry, channels_last: bool) -> None:
    """RGB heads also to col2im; larger tiles are expected to take nearly as long for the layer with gaps."""
    families = {RGB: {"col2im", "narrow_mma"}, GAPS: {"narrow_mma", "implicit_gemm"}}
    for dtype in (torch.float16, torch.bfloat16):
        made = plan.plan_forward(problem(geometry, dtype, channels_last), True, H200)
        assert made.family in families.get(geometry, {"narrow_mma"})
    turing = plan.Device("sm_75", 30, 64 << 10)
    assert (
        plan.plan_forward(problem(geometry, torch.float16, channels_last), True, turing).family != made.family
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_packed_weights_can_be_kept(dtype: torch.dtype) -> None:
    made = plan.plan_forward(problem(GAPS, dtype), True, H200)
    assert made.family == "narrow_mma"
    packing, going_on = made.without_packing(dtype.itemsize)
    assert [one.kernel.entry for one in packing.launches + going_on.launches] == [
        "forward_narrow_mma_pack",
        "forward_narrow_mma",
    ]
    assert going_on.workspace_bytes == 0


def test_float32_goes_to_tensor_cores_where_most_products_are_of_use() -> None:
    for channels_last in (False, True):
        for precision in ("tf32", "ieee"):
            posed = problem(GAPS, torch.float32, channels_last)._replace(precision=precision)
            assert plan.plan_forward(posed, True, H200).family == "narrow_mma"


def test_sizes_that_represent_a_layer_fit_a_gpu() -> None:
    sizes, weights = representative_sizes(LARGE_STRIDES)
    assert len(sizes) == len(weights) > 1
    assert all(size.elements <= 1 << 28 for size in sizes)
    # A layer whose usual sizes are all larger keeps them.
    many = Geometry(1, 1 << 14, 4, 4, 1 << 14, (2, 2), (2, 2))
    assert len(representative_sizes(many)[0]) > 1


def test_depthwise_stays_with_ffma() -> None:
    depthwise = Geometry(2, 64, 64, 64, 64, (4, 4), (2, 2), (1, 1), groups=64)
    assert plan.plan_forward(problem(depthwise), True, H200).family == "narrow_ffma"


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_the_product_has_room_for_every_tap(geometry: Geometry) -> None:
    for stacked in (False, True):
        for columns_fastest in (False, True):
            p = product(geometry, stacked, columns_fastest)
            taps = [
                len(phase_taps(geometry.kernel[1], geometry.stride[1], geometry.dilation[1], phase))
                for phase in range(geometry.stride[1])
            ]
            rows = sum(map(bool, taps)) * geometry.out_channels_per_group
            assert 0 <= p.m_tiles * 16 - rows * (geometry.stride[0] if stacked else 1) < 16
            assert 2 * p.pairs >= max(taps) * p.group_halves
            assert p.all_pairs <= p.m_tiles * p.pairs


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_every_tile_fits_a_multiprocessor(geometry: Geometry, channels_last: bool) -> None:
    for dtype in (torch.float16, torch.float32):
        posed = problem(geometry, dtype, channels_last)
        tiles = list(forward_narrow_mma_choice.of_size(posed, H200))
        assert tiles or dtype == torch.float32
        for tile in tiles:
            p = product(geometry, tile.stacked, tile.columns_fastest)
            shared = shared_bytes(geometry, p, tile, dtype.itemsize, channels_last)
            assert tile.blocks_per_multiprocessor * (shared + 1024) <= 228 << 10
            assert shared <= H200.shared_memory_per_block


def test_offsets_past_32_bits_are_not_claimed() -> None:
    assert forward_narrow_mma.supports(problem(RGB), H200)
    assert not forward_narrow_mma.supports(problem(RGB._replace(height=8192, width=4096)), H200)
    assert forward_narrow_mma.supports(problem(RGB.with_batch(10**6)), H200)


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        kernel = (rng.randint(1, 6), rng.randint(1, 6))
        stride = (rng.randint(1, 5), rng.randint(1, 5))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.15:
            stride = (rng.choice((6, 8)), rng.choice((6, 8, 9, 16)))
            kernel, dilation = (2 * stride[0], 2 * stride[1]), (1, 1)
        geometry = Geometry(
            rng.randint(1, 5),
            groups * rng.choice((1, 3, 5, 8, 10, 16, 21, 32)),
            rng.randint(1, 30),
            rng.choice((rng.randint(1, 80), 8, 16, 24, 64)),
            groups * rng.choice((1, 2, 3, 4, 7, 16, 21)),
            kernel,
            stride,
            (rng.randint(0, 4), rng.randint(0, 4)),
            random_output_padding(rng, stride, dilation),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def test_float32_is_two_parts_where_tf32_is_allowed_and_cudnn_takes_it() -> None:
    for geometry, precision, parts in (
        (LARGE_STRIDES, "tf32", 2),
        (LARGE_STRIDES, "ieee", 3),
        (GAPS, "tf32", 3),
        (GROUPED, "tf32", 3),
        (RGB, "tf32", 3),
    ):
        for last in (False, True):
            posed = plan.Problem(geometry, torch.float32, precision, last, last)
            assert {tile.parts for tile in forward_narrow_mma_choice.of_size(posed, H200)} == {parts}


def test_outputs_are_stored_from_registers_where_a_tile_of_m_is_contiguous() -> None:
    for geometry, last, direct in (
        (LARGE_STRIDES, False, True),
        (LARGE_STRIDES, True, True),
        (LARGE_STRIDES._replace(output_padding=(1, 1)), False, False),  # a position is cut
        (LARGE_STRIDES._replace(kernel=(64, 31)), False, False),  # a column without taps
        (
            LARGE_STRIDES._replace(kernel=(16, 16), stride=(8, 8), padding=(4, 4)),
            False,
            False,
        ),  # segments of 8
        (GAPS, False, False),
    ):
        tiles = list(forward_narrow_mma_choice.of_size(problem(geometry, channels_last=last), H200))
        assert tiles
        assert {tile.direct for tile in tiles if not tile.stacked} == {direct}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(18))
def test_direct_stores_and_two_parts_match_float64_on_random_geometries(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, precision, tolerance = (
        (torch.float16, "ieee", 1e-3),
        (torch.float32, "tf32", 2e-5),
        (torch.float32, "ieee", 1e-6),
    )[seed % 3]
    facts = call.device_facts(0)
    while True:
        direct = seed % 2 == 0
        rows, columns = rng.choice((2, 4, 8, 16)), rng.choice((16, 32) if direct else (2, 4, 6, 8))
        geometry = Geometry(
            rng.randint(1, 3),
            rng.choice((16, 21)),
            rng.randint(1, 18),
            rng.randint(1, 20),
            rng.choice((16, 21)),
            (2 * rows, 2 * columns),
            (rows, columns),
            (rows // 2, columns // 2),
        )
        posed = plan.Problem(geometry, dtype, precision, rng.random() < 0.5, rng.random() < 0.5)
        tiles = [tile for tile in forward_narrow_mma_choice.of_size(posed, facts) if tile.direct == direct]
        if forward_narrow_mma.supports(posed, facts) and tiles:
            break
    with_bias = rng.random() < 0.5
    made = forward_narrow_mma.lower(posed, with_bias, rng.choice(tiles), facts)
    layouts = (posed.channels_last, posed.weight_channels_last)
    assert_kernel_matches(made, geometry, dtype, layouts, tolerance, with_bias=with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(48))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Every problem that the kernel supports is computed right by a random tile, in poisoned memory, with the same bits
    twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    facts = call.device_facts(0)
    while True:
        geometry = random_geometry(rng)
        posed = plan.Problem(geometry, dtype, "ieee", rng.random() < 0.5, rng.random() < 0.5)
        tiles = list(forward_narrow_mma_choice.of_size(posed, facts))
        if forward_narrow_mma.supports(posed, facts) and tiles:
            break
    with_bias = rng.random() < 0.5
    made = forward_narrow_mma.lower(posed, with_bias, rng.choice(tiles), facts)
    layouts = (posed.channels_last, posed.weight_channels_last)
    assert_kernel_matches(made, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=with_bias)
