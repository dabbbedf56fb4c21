"""The plans of csrc/kernels/forward/stride1.cu, and on a GPU its results on random geometries: outputs and gradients of
inputs."""

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
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward import plan as forward_plan
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward import stride1_clocks as forward_stride1_clocks
from tconv_swap.kernels.forward import stride1_tile as forward_stride1_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, make_problem, of_any_size
from tconv_swap.kernels.forward.selection import kernels_for, kernels_of
from tconv_swap.kernels.forward.stride1_clocks import best_tile
from tconv_swap.kernels.grad_input import implicit_gemm as grad_input_implicit_gemm
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
SQUARE = Geometry(8, 64, 1024, 1024, 64, (3, 3))
#: Of images of 4 GiB, which the implicit GEMM does not compute.
HUGE = Geometry(8, 64, 4096, 4096, 64, (3, 3))
FEW = Geometry(8, 32, 512, 1024, 32, (3, 3))
PADDED = Geometry(8, 32, 512, 1024, 32, (3, 7), padding=(1, 3))
#: As in test_cuda_op.py.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def problem(geometry: Geometry, dtype: torch.dtype = torch.float32) -> plan.Problem:
    return plan.Problem(geometry, dtype, "tf32" if dtype == torch.float32 else "ieee", False, False)


def as_output(geometry: Geometry, dtype: torch.dtype = torch.float32) -> TileProblem:
    return make_problem(geometry, dtype, problem(geometry, dtype).precision, False, False, True)


@pytest.mark.parametrize("geometry", [SQUARE, FEW, PADDED, HUGE], ids=str)
def test_large_images_use_the_kernel(geometry: Geometry) -> None:
    assert plan.plan_forward(problem(geometry), True, H200).family == "stride1"
    backward = plan.plan_backward(problem(geometry), (True, False, False), H200)
    assert backward.family == "stride1"
    small = geometry._replace(height=32, width=32)
    assert plan.plan_forward(problem(small), True, H200).family != "stride1"
    ieee = problem(geometry)._replace(precision="ieee")
    assert plan.plan_forward(ieee, True, H200).family != "stride1"


@DTYPES
@pytest.mark.parametrize("geometry", [SQUARE, FEW, PADDED], ids=str)
def test_tiles_fit_the_device_and_their_tensor_maps_are_legal(geometry: Geometry, dtype: torch.dtype) -> None:
    for posed in (as_output(geometry, dtype), grad_input_implicit_gemm.as_forward(problem(geometry, dtype))):
        found = list(forward_stride1_tile.kernels(posed, H200))
        assert found
        for kernel in found:
            assert forward_stride1.computes(posed, kernel)
            assert forward_stride1_tile.shared_bytes(posed, kernel) <= H200.shared_memory_per_block
            _, tile = best_tile(posed, kernel, H200)
            *pads, pack, main = forward_stride1.lower(posed, tile).launches
            assert len(pads) == len(forward_stride1_tile.copied_rows(posed, kernel))
            packed = forward_stride1_tile.packed_bytes(posed, kernel)
            assert packed <= pack.grid * pack.block * 16 < packed + 256 * 16
            for one in main.tensor_maps:
                assert all(stride % 16 == 0 for stride in one.strides)
                assert all(1 <= size <= 256 for size in one.box)
                assert one.box[0] * dtype.itemsize % 16 == 0


def test_images_that_the_implicit_gemm_does_not_compute_have_a_kernel() -> None:
    """Also of a layer that has none of stride1 for smaller ones."""
    layer = as_output(Geometry(4, 96, 64, 64, 32, (3, 3), (1, 1), (1, 1)), torch.float16)
    assert not kernels_of(of_any_size(layer), H200).stride1
    huge = layer._replace(geometry=layer.geometry._replace(height=2048, width=2048))
    assert not forward_implicit_gemm.supports(huge, H200)
    assert [one.family for one in forward_plan.part_candidates(huge, H200, 1)] == ["stride1"]


def test_rows_that_are_not_aligned_are_loaded_by_one_kernel_with_others() -> None:
    """Where no tap reads beyond the ends of rows: one that loads consecutive pixels of two planes computes all. Kernels
    of aligned rows read copies."""
    layer = FEW._replace(padding=(0, 2))
    two_planes = [one for one in forward_stride1_tile.kernels(as_output(layer), H200) if one.planes == 2]
    assert two_planes
    for width, height, planes in ((1024, 512, 1), (1026, 512, 1), (1026, 511, 2), (1025, 510, 2)):
        posed = as_output(layer._replace(width=width, height=height))
        found = list(forward_stride1_tile.kernels(posed, H200))
        assert {one.unaligned_rows for one in found} == {True, False}
        assert {one.planes for one in found if one.unaligned_rows} == {planes, 2}
        assert {one for one in found if one.planes == 2} == set(two_planes)
        assert all(forward_stride1.computes(posed, one) for one in two_planes)
        copied = {
            len(forward_stride1_tile.copied_rows(posed, one)) for one in found if not one.unaligned_rows
        }
        assert copied == {int(width % 4 > 0)}
    # Taps that read beyond the ends need rows that begin at multiples of 16 bytes.
    for other in (FEW, layer._replace(width=1025, height=511)):
        assert not any(forward_stride1.computes(as_output(other), one) for one in two_planes)


@DTYPES
def test_rows_that_are_not_aligned_are_copied_to_longer_ones(dtype: torch.dtype) -> None:
    posed, aligned = (as_output(PADDED._replace(width=width), dtype) for width in (1023, 1024))
    kernel = next(forward_stride1_tile.kernels(posed, H200))
    assert kernel in forward_stride1_tile.kernels(aligned, H200)
    (clocks, tile), (without_copy, same) = (best_tile(one, kernel, H200) for one in (posed, aligned))
    assert clocks > without_copy
    part, other = forward_stride1.lower(posed, tile), forward_stride1.lower(aligned, same)
    pad, _, main = part.launches
    assert (pad.kernel.entry, main.kernel) == ("pad_rows", other.launches[-1].kernel)
    (map_,) = main.tensor_maps
    assert (map_.sizes[0], map_.strides[0]) == (1023, 1024 * dtype.itemsize)
    # The copy lies behind the packed weights.
    assert pad.arguments[1] == map_.base
    assert map_.base.value == other.workspace_bytes >= forward_stride1_tile.packed_bytes(posed, kernel)
    assert part.workspace_bytes == map_.base.value + math.prod(map_.strides[2:]) * posed.geometry.batch


def test_copies_of_rows_are_limited() -> None:
    """Larger images have other kernels."""
    posed = as_output(PADDED._replace(width=1023, batch=400))
    assert forward_stride1.supports(posed, H200)
    kernels = list(forward_stride1_tile.kernels(posed, H200))
    assert kernels
    assert not forward_stride1.ranked(kernels, posed, H200)
    fewer = posed._replace(geometry=posed.geometry.with_batch(8))
    assert forward_stride1.ranked(kernels, fewer, H200)


@DTYPES
def test_the_segments_of_a_tile_take_the_fewest_rows(dtype: torch.dtype) -> None:
    for height, width in ((512, 1024), (40, 60), (100, 1000), (9, 700)):
        posed = as_output(FEW._replace(height=height, width=width), dtype)
        for kernel in forward_stride1_tile.kernels(posed, H200):
            expected, tile = best_tile(posed, kernel, H200)
            g = posed.geometry

            def rows(segment: int, one: int = kernel.warpgroups, g: Geometry = g) -> int:
                tiles = g.batch * ceil_div(g.out_width, 64 * one) * ceil_div(g.out_height, segment)
                return ceil_div(tiles, min(132, tiles)) * (segment + g.kernel[0] - 1)

            segments = {ceil_div(g.out_height, count) for count in range(1, ceil_div(g.out_height, 8) + 1)}
            assert rows(tile.segment) == min(map(rows, segments))
            assert best_tile(posed._replace(geometry=g.with_batch(64)), kernel, H200)[0] > expected > 0


def expected_of_all() -> list[tuple[float, int]]:
    """Returns the expected clocks and the rows of a segment of every kernel for some sizes."""
    found = []
    sizes = (FEW, PADDED, FEW._replace(padding=(0, 2), width=130), FEW._replace(batch=1, height=20, width=40))
    for geometry in sizes:
        for dtype in (torch.float32, torch.float16):
            posed = as_output(geometry, dtype)
            if forward_stride1.supports(posed, H200):
                timed = [best_tile(posed, one, H200) for one in forward_stride1_tile.kernels(posed, H200)]
                found += [(clocks, tile.segment) for clocks, tile in timed]
    # Rows of odd length, in 16 bits.
    odd = as_output(FEW._replace(kernel=(3, 4)), torch.float16)
    assert odd.geometry.out_width % 2
    return found + [(best_tile(odd, one, H200)[0], 0) for one in forward_stride1_tile.kernels(odd, H200)]


def test_every_constant_of_the_expected_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    base = expected_of_all()
    constants = [name for name in vars(forward_stride1_clocks) if name.isupper() and name != "PIXELS"]
    assert len(constants) == 14
    for name in constants:
        value = getattr(forward_stride1_clocks, name)
        more = (
            {key: 1.5 * one for key, one in value.items()}
            if isinstance(value, dict)
            else type(value)(1.5 * value)
        )
        with monkeypatch.context() as patch:
            patch.setattr(forward_stride1_clocks, name, more)
            assert expected_of_all() != base, name


def test_the_expected_time_ranks_it_with_the_implicit_gemm() -> None:
    """In one selection, and in one list for a size: kernels that a layer does not have come after its own."""
    for geometry in (SQUARE, FEW, PADDED):
        posed = as_output(geometry)
        kernels = kernels_of(of_any_size(posed), H200)
        assert kernels.stride1
        assert kernels.implicit_gemm
        assert set(kernels.stride1) <= set(kernels_for(posed, H200).stride1)
        families = [one.family for one in forward_plan.part_candidates(posed, H200, 6)]
        assert families[:2] == ["stride1", "implicit_gemm"]
        own = forward_stride1.ranked(kernels.stride1, posed, H200)
        assert forward_plan.part_candidates(posed, H200, 1) == [own[0].make()]


def loads_unaligned(posed: TileProblem) -> bool:
    return any(one.unaligned_rows for one in forward_stride1_tile.kernels(posed, H200))


def test_other_problems_are_not_claimed() -> None:
    assert forward_stride1.supports(as_output(FEW), H200)
    assert not forward_stride1.supports(as_output(FEW), H200._replace(architecture="sm_100"))
    for other in ({"stride": (2, 2)}, {"dilation": (1, 2)}, {"groups": 2}, {"in_channels": 288}):
        assert not forward_stride1.supports(as_output(FEW._replace(**other)), H200)
    # Rows whose bytes are no multiple of 16 are read as they lie only where no tap reads beyond their ends.
    uneven = FEW._replace(width=1026)
    assert not loads_unaligned(as_output(uneven))
    assert loads_unaligned(as_output(uneven._replace(padding=(0, 2))))
    # Addresses of every second channel differ by multiples of 16 bytes, or only those of every fourth.
    assert loads_unaligned(as_output(uneven._replace(height=511, padding=(0, 2))))
    assert not loads_unaligned(as_output(uneven._replace(width=1025, height=511, padding=(0, 2))))
    # All weights of some output channels have to fit shared memory.
    assert not list(forward_stride1_tile.kernels(as_output(SQUARE._replace(kernel=(3, 7))), H200))


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        kernel = (rng.randint(1, 4), rng.randint(1, 7))
        geometry = Geometry(
            rng.randint(1, 3),
            rng.choice((16, 32, 36, 64)),
            rng.randint(1, 40),
            rng.choice((4 * rng.randint(1, 60), rng.randint(1, 200))),
            rng.choice((16, 24, 32, 64, 100)),
            kernel,
            padding=(rng.randint(0, kernel[0]), rng.choice((0, rng.randint(0, kernel[1])))),
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def random_part(
    rng: random.Random, of_grad_input: bool, device: plan.Device
) -> tuple[plan.Problem, bool, Part]:
    """A problem that the kernel supports, whether it has a bias, and one of its tiles for it."""
    while True:
        posed = problem(random_geometry(rng), rng.choice(list(TOLERANCES)))
        posed = posed._replace(weight_channels_last=rng.random() < 0.5)
        has_bias = not of_grad_input and rng.random() < 0.5
        weight_last = posed.weight_channels_last
        tiled = grad_input_implicit_gemm.as_forward(posed)
        if not of_grad_input:
            tiled = make_problem(posed.geometry, posed.dtype, posed.precision, False, weight_last, has_bias)
        small = device._replace(multiprocessors=rng.choice((2, 40, device.multiprocessors)))
        supported = forward_stride1.supports(tiled, device)
        found = list(forward_stride1_tile.kernels(tiled, device)) if supported else []
        if found:
            kernel = rng.choice(found)
            _, tile = best_tile(tiled, replace(kernel, stages=rng.randint(2, kernel.stages)), small)
            return posed, has_bias, forward_stride1.lower(tiled, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_outputs_match_float64(seed: int) -> None:
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    torch.manual_seed(seed)
    posed, has_bias, part = random_part(random.Random(seed), False, facts)
    layouts, tolerance = (False, posed.weight_channels_last), TOLERANCES[posed.dtype]
    assert_kernel_matches(part, posed.geometry, posed.dtype, layouts, tolerance, with_bias=has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_gradients_of_the_input_match_float64(seed: int) -> None:
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    torch.manual_seed(seed)
    posed, _, part = random_part(random.Random(seed), True, facts)
    part = part._replace(launches=grad_input_implicit_gemm.reading_backward(part.launches))
    layouts, tolerance = (False, posed.weight_channels_last), TOLERANCES[posed.dtype]
    assert_kernel_matches(part, posed.geometry, posed.dtype, layouts, tolerance, (True, False, False))
