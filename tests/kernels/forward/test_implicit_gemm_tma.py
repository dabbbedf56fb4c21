"""The forward kernel that the copy engine fills (csrc/kernels/forward/implicit_gemm_tma.cu), forced on random
geometries, and what its plans say."""

from __future__ import annotations

import random
from collections.abc import Callable
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
from tconv_swap.kernels.forward import implicit_gemm_layout as forward_layout
from tconv_swap.kernels.forward import implicit_gemm_memory as forward_memory
from tconv_swap.kernels.forward import implicit_gemm_nchw as forward_nchw
from tconv_swap.kernels.forward import implicit_gemm_stagger as forward_stagger
from tconv_swap.kernels.forward import implicit_gemm_tma_choice as forward_tma_choice
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import ArgumentKind

H200 = plan.Device("sm_90a", 132, 227 << 10)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random_geometry(rng: random.Random, item: int) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        kernel = (rng.randint(1, 5), rng.randint(1, 5))
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        dilation = (rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 1, 2)))
        padding = (rng.randint(0, 2), rng.randint(0, 2))
        kind = rng.random()
        if kind < 0.5:
            kernel, stride, dilation = (rng.choice(((2, 2), (4, 4))), (2, 2), (1, 1))
        elif kind < 0.65:
            stride = (1, 1)
        if kernel == stride:
            padding = (0, 0)
        sizes = ((rng.randint(1, 40), rng.randint(1, 40)), (4, 4), (rng.randint(2, 9), rng.randint(2, 9)))
        geometry = Geometry(
            rng.randint(1, 9),
            groups * 16 // item * rng.randint(2, 12),
            *rng.choice((*sizes, (1, 1), (16, 16), (1, 64))),
            groups * rng.choice((16, 24, 33, 40, 64, 72, 100, 128)),
            kernel,
            stride,
            padding,
            (0, 0)
            if rng.random() < 0.5
            else (
                rng.randint(0, max(stride[0], dilation[0]) - 1),
                rng.randint(0, max(stride[1], dilation[1]) - 1),
            ),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def random_case(rng: random.Random, dtype: torch.dtype, arranged: bool = False) -> tuple[TileProblem, Tile]:
    """With ``arranged`` from NCHW to NCHW, by way of a copy of the input in channels_last."""
    while True:
        posed = forward_layout.make_problem(
            random_geometry(rng, dtype.itemsize),
            dtype,
            "tf32",
            True,
            rng.random() < 0.5,
            rng.random() < 0.5,
        )
        if arranged:
            posed = replace(posed, output_channels_last=False, nhwc_copy=True)
        if forward_implicit_gemm.claims(posed, H200):
            found = [entry for entry in forward_choice.candidates(posed, H200) if entry[1].tma]
            if found:
                return rng.choice(found)


def vary(rng: random.Random, posed: TileProblem, tile: Tile) -> Tile:
    """What the rule would not choose for this problem, and the kernel can do all the same."""
    if rng.random() < 0.3:
        tile = replace(tile, stages=2)
    boxed = rng.random() < 0.5 and forward_layout.supports_tma_weights(posed)
    other = replace(tile, tma_weights=boxed, whole_lines=boxed)
    blocks_of_weights = -(-posed.geometry.out_channels_per_group // posed.block_channels(tile)) * tile.splits
    if blocks_of_weights * posed.geometry.groups * len(forward_layout.group_taps(posed)) == 1:
        other = replace(other, resident_weights=rng.random() < 0.5)
    if forward_stagger.can_stagger(posed, other):
        taps = forward_stagger.products(posed, other)
        other = replace(other, stagger=rng.choice((0, 1, taps, rng.randint(1, 2 * taps - 1))))
    fits = forward_memory.shared_bytes(posed, other) <= H200.shared_memory_per_block
    return other if fits and tile.blocks_per_multiprocessor == 1 else tile


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_tile_fits_and_its_boxes_are_legal(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for _ in range(60):
        posed, tile = random_case(rng, dtype)
        made = forward_implicit_gemm.plan_with_tile(posed, tile, H200)
        forward = next(one for one in made.launches if one.kernel.entry == "forward_implicit_gemm_tma")
        assert tile.blocks_per_multiprocessor * (forward.shared_bytes + 1024) <= 228 << 10
        for box in forward.tensor_maps:
            assert len(box.sizes) == len(box.box) == len(box.strides) + 1
            assert box.box[0] * dtype.itemsize <= box.swizzle_bytes
            assert max(box.box) <= 256
            assert all(stride % 16 == 0 for stride in box.strides)
            assert [one for one in forward.arguments if one.kind is ArgumentKind.TENSOR_MAP]


def test_channels_last_is_filled_by_boxes_and_nchw_is_not() -> None:
    geometry = Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1))
    for dtype, precision, of_nchw in (
        (
            torch.float16,
            "ieee",
            "forward_implicit_gemm_tma_nchw",
        ),  # brought by boxes, but not as the multiplier takes them
        (torch.float32, "tf32", "forward_implicit_gemm_wgmma"),
    ):
        for channels_last, entry in ((True, "forward_implicit_gemm_tma"), (False, of_nchw)):
            made = plan.plan_forward(
                plan.Problem(geometry, dtype, precision, channels_last, channels_last), True, H200
            )
            assert made.launches[-1].kernel.entry == entry


def test_a_group_of_channels_that_16_bytes_do_not_divide_has_no_boxes() -> None:
    for channels, boxed in ((72, True), (68, False)):
        geometry = Geometry(8, channels * 2, 64, 64, 128, (3, 3), (2, 2), (1, 1), groups=2)
        made = plan.plan_forward(plan.Problem(geometry, torch.float16, "ieee", True, True), True, H200)
        assert (made.launches[-1].kernel.entry == "forward_implicit_gemm_tma") == boxed


def test_many_16_bit_weights_in_channels_last_are_not_packed() -> None:
    many = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
    few = Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1))
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
        assert [one.kernel.entry for one in made.launches] == ["forward_implicit_gemm_pack"] * packs + [
            "forward_implicit_gemm_tma"
        ]
        assert (made.without_packing(dtype.itemsize) is not None) == packs
        # Whatever ran before a call's first launch may still write what that one reads.
        assert not made.launches[0].overlaps_previous


@pytest.mark.parametrize(
    ("geometry", "channels_last", "late"),
    [
        (Geometry(64, 64, 128, 256, 128, (3, 5)), True, True),
        (Geometry(8, 64, 512, 512, 64, (3, 7)), True, True),
        (Geometry(8, 64, 1024, 1024, 64, (3, 3)), True, False),  # more stages than a tile has chunks
        (Geometry(1, 64, 64, 64, 128, (3, 5)), True, False),  # a block has one tile
        (Geometry(8, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1)), True, False),
    ],
    ids=str,
)
def test_which_second_warpgroups_begin_late(geometry: Geometry, channels_last: bool, late: bool) -> None:
    made = plan.plan_forward(
        plan.Problem(geometry, torch.float16, "ieee", channels_last, channels_last), True, H200
    )
    constants = dict(made.launches[-1].kernel.constants)
    assert (int(constants["STAGGER"]) > 0) == late


def test_a_late_warpgroup_needs_no_more_registers_than_there_are() -> None:
    geometry = Geometry(64, 64, 128, 256, 128, (3, 5))
    made = plan.plan_forward(plan.Problem(geometry, torch.float16, "ieee", True, True), False, H200)
    assert dict(made.launches[-1].kernel.constants)["STAGGER"] > 0
    _, log = jit.compile_with_log(made.launches[-1].kernel, "sm_90a")
    assert " 0 bytes spill stores" in log
    assert "serializ" not in log


CROP = Geometry(16, 256, 14, 14, 256, (2, 2), (2, 2))
DECODER = Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1))
FEW = Geometry(8, 256, 64, 64, 64, (4, 4), (2, 2), (1, 1))


@pytest.mark.parametrize(
    ("geometry", "dtype", "launched", "pixels"),
    [
        (
            CROP,
            torch.float16,
            ["forward_implicit_gemm_pack", "nchw_to_nhwc", "forward_implicit_gemm_tma"],
            False,
        ),
        (
            DECODER,
            torch.float32,
            ["forward_implicit_gemm_pack", "nchw_to_nhwc", "forward_implicit_gemm_tma"],
            False,
        ),
        (
            replace(DECODER, width=63),
            torch.bfloat16,
            ["forward_implicit_gemm_pack", "nchw_to_nhwc", "forward_implicit_gemm_tma"],
            False,
        ),
        (
            replace(CROP, height=16, width=16),
            torch.float16,
            ["forward_implicit_gemm_pack", "forward_implicit_gemm_tma"],
            True,
        ),
        (
            replace(CROP, height=16, width=16),
            torch.float32,
            ["forward_implicit_gemm_pack", "nchw_to_nhwc", "forward_implicit_gemm_tma"],
            False,
        ),
        (
            FEW,
            torch.float32,
            ["forward_implicit_gemm_pack", "forward_implicit_gemm_wgmma"],
            False,
        ),  # each input is read once anyhow
        (
            replace(DECODER, stride=(1, 1), output_padding=(0, 0)),
            torch.float32,
            ["forward_implicit_gemm_pack", "forward_implicit_gemm_wgmma"],
            False,
        ),
        (
            DECODER.with_batch(1024),
            torch.float32,
            ["forward_implicit_gemm_pack", "forward_implicit_gemm_wgmma"],
            False,
        ),  # 4 GiB
    ],
    ids=str,
)
def test_which_nchw_inputs_boxes_bring(
    geometry: Geometry, dtype: torch.dtype, launched: list[str], pixels: bool
) -> None:
    made = plan.plan_forward(plan.Problem(geometry, dtype, "tf32", False, False), True, H200)
    assert [one.kernel.entry for one in made.launches] == launched
    assert dict(made.launches[-1].kernel.constants)["PIXEL_MAJOR"] == pixels
    assert not made.launches[0].overlaps_previous
    assert all(one.overlaps_previous for one in made.launches[1:])


def test_the_copy_of_the_input_lies_behind_the_weights() -> None:
    made = plan.plan_forward(plan.Problem(DECODER, torch.float32, "tf32", False, False), True, H200)
    _, copying, forward = made.launches
    place = copying.arguments[1]
    assert forward.tensor_maps[0].base == place
    weights = 4 * 256 * 128 * 9
    assert place.kind is ArgumentKind.WORKSPACE
    assert place.value >= weights
    assert place.value % 16 == 0
    assert made.workspace_bytes == place.value + 4 * 8 * 256 * 64 * 64
    _, frozen = made.without_packing(4) or pytest.fail("the weight cannot be kept")
    assert [one.overlaps_previous for one in frozen.launches] == [False, True]
    assert frozen.workspace_bytes == 4 * 8 * 256 * 64 * 64


def test_ieee_has_no_boxes() -> None:
    geometry = Geometry(8, 128, 64, 64, 64, (3, 3), (2, 2), (1, 1), (1, 1))
    made = plan.plan_forward(plan.Problem(geometry, torch.float32, "ieee", True, True), True, H200)
    assert all(one.kernel.entry != "forward_implicit_gemm_tma" for one in made.launches)


def late_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """Stride 1, with blocks of several tiles and few stages: the second warpgroup begins some taps late."""
    while True:
        groups = rng.choice((1, 1, 2))
        geometry = Geometry(
            rng.randint(1, 4),
            groups * rng.choice((64, 72, 128)),
            rng.randint(60, 90),
            rng.randint(60, 200),
            groups * rng.choice((24, 40, 64, 100, 128)),
            (rng.randint(1, 3), rng.randint(2, 7)),
            (1, 1),
            (rng.randint(0, 1), rng.randint(0, 2)),
            groups=groups,
        )
        posed = forward_layout.make_problem(
            geometry, dtype, "tf32", True, rng.random() < 0.5, rng.random() < 0.5
        )
        found = [(p, t) for p, t in forward_choice.candidates(posed, H200) if t.tma]
        p, tile = rng.choice(found[:3])
        tile = replace(tile, stages=rng.choice((2, 3)), stagger=0)
        if forward_stagger.can_stagger(p, tile):
            taps = forward_stagger.products(p, tile)
            late = replace(tile, stagger=rng.choice((1, taps // 2 + 1, taps, 2 * taps - 1)))
            if forward_fit.fits_device(p, late, H200):
                return p, late


def row_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """The same as ``arranged``, with tiles of whole rows: of any width and alignment, of images that end in a tile."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice((2, 2, 3, 4))
        height, width = rng.randint(1, 9), rng.choice((2, 4, 8, 14, 28, 56) if kernel == 2 else range(45, 73))
        geometry = Geometry(
            rng.randint(1, 7),
            groups * 16 // dtype.itemsize * rng.randint(2, 9),
            height,
            width,
            groups * rng.choice((40, 64, 100)),
            (kernel, kernel),
            (2, 2),
            (0, 0) if kernel == 2 else (rng.randint(0, 1), rng.randint(0, 1)),
            (0, 0) if kernel == 2 else (rng.randint(0, 1), rng.randint(0, 1)),
            groups=groups,
        )
        posed = forward_layout.make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5)
        posed = replace(posed, input_channels_last=True, nhwc_copy=True)
        found = [entry for entry in forward_tma_choice.tma_tiles(posed, H200) if entry[1].by_rows]
        if found:
            return rng.choice(found)


def pixel_case(rng: random.Random, dtype: torch.dtype) -> tuple[TileProblem, Tile]:
    """From NCHW as it lies: kernel = stride, 16 bits, maps that tiles divide."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice(((2, 2), (1, 3), (2, 4), (3, 1)))
        geometry = Geometry(
            rng.randint(1, 5),
            groups * rng.choice((32, 64, 96) if groups > 1 else (9, 40, 72, 100)),
            *rng.choice(((16, 16), (8, 32), (12, 64), (3, 256), (1, 128))),
            groups * rng.choice((40, 64, 96, 150)),
            kernel,
            kernel,
            groups=groups,
        )
        posed = forward_layout.make_problem(geometry, dtype, "tf32", False, False, rng.random() < 0.5)
        posed = replace(posed, aligned=forward_layout.can_be_aligned(posed))
        found = [entry for entry in forward_nchw.candidates(posed, H200) if entry[1].pixel_major]
        if found:
            return rng.choice(found)


@pytest.mark.gpu
@pytest.mark.parametrize("arranged", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_forced_on_random_geometries(seed: int, arranged: bool) -> None:
    """Whatever the kernel claims is right, with a random one of its tiles: poisoned memory, the same bits again,
    and neighbours' channels that are not numbers do no harm."""
    rng = random.Random(2 * seed + arranged)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    posed, tile = random_case(rng, dtype, arranged)
    tile = vary(rng, posed, tile)
    geometry = posed.geometry
    made = forward_implicit_gemm.plan_with_tile(posed, tile, H200)
    layouts = (not arranged, posed.weight_channels_last)
    run = assert_kernel_matches(made, geometry, dtype, layouts, TOLERANCE[dtype], with_bias=posed.has_bias)
    if geometry.groups > 1:
        x = run.tensors[0]
        assert x is not None
        x[:, -geometry.in_channels_per_group :] = float("nan")
        clean = geometry.out_channels - geometry.out_channels_per_group
        assert torch.equal(run.again()[0][:, :clean], run.found[0][:, :clean])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(9))
def test_a_late_warpgroup_on_random_geometries(seed: int) -> None:
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    posed, tile = late_case(random.Random(seed), dtype)
    made = forward_implicit_gemm.plan_with_tile(posed, tile, H200)
    layouts = (True, posed.weight_channels_last)
    assert_kernel_matches(made, posed.geometry, dtype, layouts, TOLERANCE[dtype], with_bias=posed.has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [row_case, pixel_case])
@pytest.mark.parametrize("seed", range(12))
def test_ways_from_nchw_on_random_geometries(
    seed: int, case: Callable[..., tuple[TileProblem, Tile]]
) -> None:
    """The same of outputs that leave in whole rows, and of boxes that the multiplier reads across k."""
    torch.manual_seed(seed)
    if call.device_facts(0).architecture != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    dtypes = (
        (torch.float16, torch.bfloat16, torch.float32)
        if case is row_case
        else (torch.float16, torch.bfloat16)
    )
    dtype = dtypes[seed % len(dtypes)]
    posed, tile = case(random.Random(seed), dtype)
    made = forward_implicit_gemm.plan_with_tile(posed, tile, H200)
    assert_kernel_matches(
        made, posed.geometry, dtype, (False, False), TOLERANCE[dtype], with_bias=posed.has_bias
    )
