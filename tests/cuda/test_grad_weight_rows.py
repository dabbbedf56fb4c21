"""The gradient of the weight with pixels along k (csrc/kernels/grad_weight_{direct,in_place,rows}.cu), forced on
random geometries, and what its plans say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from harness import assert_kernel_matches

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import pixel_rows as grad_weight_pixel_rows
from tconv_swap.kernels.grad_weight.im2col_nchw_tile import columns_of, pixels_of
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import rows_follow, stages_of
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    MOST_STAGES,
    PARTIAL_LIMIT_BYTES,
    candidates,
    in_slices,
    lines_of,
    weight_bytes,
)
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
UNET = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
SMALL_MAP = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
WIDE = Geometry(32, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1))
ODD = Geometry(8, 256, 37, 37, 256, (4, 4), (4, 4))
GROUPED = Geometry(1, 4096, 64, 64, 2048, (3, 3), (2, 2), groups=8)
LAYERS = (UNET, SMALL_MAP, WIDE, ODD, GROUPED)
#: An odd output, rows shorter than a box, a row alone.
STRIDED = (
    *LAYERS,
    Geometry(2, 64, 14, 14, 64, (2, 2), (2, 2)),
    Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4)),
)
#: As in test_cuda_op.py.
TF32_TOLERANCE = 1e-3
#: Of sums that keep what rounding takes: hardly more than that of the result, and less than plain sums are off.
BIAS_TOLERANCE = 1e-7


def problem(geometry: Geometry, channels_last: bool = False) -> plan.Problem:
    return plan.Problem(geometry, torch.float32, "tf32", channels_last, channels_last)


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_slices_are_short_and_their_sums_bounded(geometry: Geometry) -> None:
    lines = lines_of(geometry)
    tiles = [
        in_slices(geometry, lines.stages(geometry.batch), tile, H200, 0) for tile in candidates(geometry)
    ]
    assert tiles
    for tile in tiles:
        assert tile is not None
        assert lines.stages(geometry.batch) <= tile.slices * MOST_STAGES
        assert tile.slices == 1 or tile.slices * weight_bytes(geometry) <= PARTIAL_LIMIT_BYTES


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_boxes_are_what_the_copy_engine_takes(geometry: Geometry) -> None:
    (made,) = grad_weight_pixel_rows.part_candidates(problem(geometry), H200, False, 1)
    maps = [one for step in made.launches for one in step.tensor_maps]
    assert len(maps) == 2
    for one in maps:
        assert all(stride % 16 == 0 for stride in one.strides)
        assert one.box[0] * 4 == one.swizzle_bytes
        assert all(1 <= size <= 256 for size in one.box)
    for step in made.launches:
        assert step.shared_bytes <= H200.shared_memory_per_block


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_boxes_begin_at_multiples_of_16_bytes_and_never_before_a_line(geometry: Geometry) -> None:
    g, lines = geometry, lines_of(geometry)
    for k in range(g.kernel[0]):
        shift = (k * g.dilation[0] - g.padding[0]) // g.stride[0] + lines.lead
        assert lines.unfold_rows or (shift >= 0 and shift * g.width % 4 == 0)


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_boxes_of_grad_output_as_it_lies(geometry: Geometry) -> None:
    """Every tile: what the copy engine takes, and that a box holds what the taps of a stage's pixels reach."""
    g, posed = geometry, problem(geometry)
    tiles = grad_weight_im2col_nchw.tiles_for(posed, H200, with_bias=False)
    assert tiles
    for tile in tiles:
        made = grad_weight_im2col_nchw.plan_with_tile(posed, tile, H200, with_bias=False)
        step = next(step for step in made.launches if step.kernel.entry == "grad_weight_im2col_nchw")
        assert step.shared_bytes <= H200.shared_memory_per_block
        for one in step.tensor_maps:
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] % 4 == 0
        pixels, columns = tile.pixels, columns_of(g, tile.pixels)
        assert columns.left % 4 == 0
        end = columns.blocks * columns.block - columns.left
        last = (pixels.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] - g.padding[1]
        if columns.whole:
            assert end >= g.out_width
        else:
            assert pixels.cols * g.stride[1] % 4 == 0
            assert columns.left >= g.padding[1]
            assert end > last
        assert tile.slices * weight_bytes(g) <= max(PARTIAL_LIMIT_BYTES, weight_bytes(g))
        assert pixels.stages(g) * pixels.count <= tile.slices * 8 * 1024


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_stages_reach_over_an_edge_only_where_grad_output_ends(geometry: Geometry) -> None:
    g = geometry
    for pixels in pixels_of(g):
        below = -(-g.height // pixels.rows) * pixels.rows > g.height
        right = -(-g.width // pixels.cols) * pixels.cols > g.width
        assert not below or g.height * g.stride[0] - g.padding[0] >= g.out_height
        assert not right or g.width * g.stride[1] - g.padding[1] >= g.out_width
        assert pixels.images == 1 or pixels.rows * pixels.cols % pixels.box == 0
        assert not pixels.apart or pixels.cols % pixels.box == 0
        assert pixels.count % 8 == 0


@pytest.mark.parametrize("geometry", STRIDED, ids=str)
def test_boxes_that_are_turned_in_place(geometry: Geometry) -> None:
    """Every tile: what the copy engine takes, that boxes hold what the taps reach, and which sums there are."""
    g, posed = geometry, problem(geometry, channels_last=True)
    tiles = grad_weight_im2col_nhwc.tiles_for(posed, H200, with_bias=False)
    assert tiles
    for tile in tiles:
        made = grad_weight_im2col_nhwc.plan_with_tile(posed, tile, H200, with_bias=False)
        step = made.launches[0]
        assert step.shared_bytes <= H200.shared_memory_per_block
        assert step.grid % tile.together == 0
        into, out = step.tensor_maps
        for one in (into, out):
            assert all(stride % 16 == 0 for stride in one.strides)
            assert all(1 <= size <= 256 for size in one.box)
            assert one.box[0] * 4 == one.swizzle_bytes == 128
        p = tile.pixels
        assert p.images * p.rows * p.cols == 32
        # A tap reads every stride-th column of its box, from its shift on.
        shifts = tile.shifts(g)
        assert len(shifts) == tile.taps[1]
        assert (out.box[1] - 1) // out.steps[1] + 1 == p.cols + max(shifts)
        assert not tile.flat or not any(shifts)
        units = tile.taps[0] * tile.taps[1] * tile.chunks
        assert units <= 4 * tile.warpgroups
        assert tile.slices % tile.together == 0
        assert tile.copies * weight_bytes(g) <= max(PARTIAL_LIMIT_BYTES, weight_bytes(g))
        assert stages_of(g, p) <= tile.slices * MOST_STAGES
        assert len(made.launches) == (1 if tile.copies == 1 else 2)


def test_images_whose_rows_follow_one_another() -> None:
    assert rows_follow(UNET)
    assert rows_follow(ODD)
    assert not rows_follow(WIDE)  # rows of taps overlap
    assert not rows_follow(replace(UNET, output_padding=(1, 1)))


def test_the_input_is_copied_only_where_it_does_not_lie_as_lines() -> None:
    def parted(geometry: Geometry) -> int:
        (made,) = grad_weight_pixel_rows.part_candidates(problem(geometry), H200, False, 1)
        return sum(step.kernel.entry == "space_to_depth" for step in made.launches)

    assert parted(UNET) == 1
    assert parted(ODD) == 2


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_each_layout_has_its_kernel(geometry: Geometry) -> None:
    for channels_last, entry in ((False, "grad_weight_im2col_nchw"), (True, "grad_weight_im2col_nhwc")):
        made = plan.plan_backward(problem(geometry, channels_last), (False, True, False), H200)
        if geometry == GROUPED and not channels_last:
            entry = "grad_weight_pixel_rows"  # rows of 129 columns are no multiple of 16 bytes
        assert entry in [step.kernel.entry for step in made.launches]
        assert made.family == entry.removeprefix("grad_weight_")
    ieee = replace(problem(geometry), precision="ieee")
    assert plan.plan_backward(ieee, (False, True, False), H200).family == "implicit_gemm"


def test_channels_that_are_no_multiple_of_16_bytes_go_to_the_weight_tiles() -> None:
    posed = problem(replace(UNET, in_channels=1022), channels_last=True)
    for with_bias in (False, True):
        made = plan.plan_backward(posed, (False, True, with_bias), H200)
        assert made.family == "implicit_gemm"


@pytest.mark.parametrize(
    "geometry", [STRIDED[-1], Geometry(16, 256, 14, 14, 128, (2, 2), (2, 2))], ids=["one row", "little work"]
)
def test_many_channels_go_along_pixels_in_nchw(geometry: Geometry) -> None:
    for with_bias in (False, True):
        posed = plan.Problem(geometry, torch.float32, "tf32", False, False)
        assert plan.plan_backward(posed, (False, True, with_bias), H200).family == "pixel_rows"


def test_what_is_not_claimed() -> None:
    posed = problem(UNET)
    assert grad_weight_pixel_rows.claims(posed, H200)
    channels_last = problem(UNET, channels_last=True)
    assert grad_weight_im2col_nhwc.claims(channels_last, H200)
    assert not grad_weight_im2col_nhwc.claims(problem(replace(UNET, in_channels=1022), True), H200)
    assert not grad_weight_im2col_nhwc.claims(problem(replace(UNET, stride=(9, 9)), True), H200)
    families = ((grad_weight_pixel_rows, posed), (grad_weight_im2col_nhwc, channels_last))
    for family, one in families:
        assert not family.claims(replace(one, precision="ieee"), H200)
        assert not family.claims(replace(one, dtype=torch.float16), H200)
        assert not family.claims(replace(one, channels_last=not one.channels_last), H200)
        assert not family.claims(one, replace(H200, architecture="sm_100"))
    assert not grad_weight_pixel_rows.claims(problem(replace(WIDE, height=4096, width=4096)), H200)
    # Kernel 2, stride 3: no tap reads a third of grad_output, so the bias is somebody else's.
    gaps = replace(UNET, stride=(3, 3))
    assert grad_weight_pixel_rows.part_candidates(problem(gaps), H200, False, 1)
    assert not grad_weight_pixel_rows.part_candidates(problem(gaps), H200, True, 1)


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        stride = (rng.randint(1, 4), rng.randint(1, 4))
        kernel = rng.choice((stride, (rng.randint(1, 6), rng.randint(1, 6))))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        geometry = Geometry(
            rng.randint(1, 7),
            groups * rng.choice((8, 37, 64, 128, 136, 256)),
            rng.randint(1, 30),
            rng.choice((rng.randint(1, 80), 4, 16, 32, 64)),
            groups * rng.choice((8, 21, 64, 96, 128, 131, 256)),
            kernel,
            stride,
            (rng.randint(0, 3), rng.randint(0, 3)),
            (
                rng.randint(0, max(stride[0], dilation[0]) - 1),
                rng.randint(0, max(stride[1], dilation[1]) - 1),
            ),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def random_part(rng: random.Random, with_bias: bool, device: plan.Device) -> tuple[plan.Problem, Part]:
    """A problem that the kernels claim, and one of their tiles for it."""
    while True:
        geometry = random_geometry(rng)
        posed = plan.Problem(geometry, torch.float32, "tf32", rng.random() < 0.5, rng.random() < 0.5)
        if rng.random() < 0.6 and grad_weight_im2col_nchw.tiles_for(posed, device, with_bias):
            tile = rng.choice(grad_weight_im2col_nchw.tiles_for(posed, device, with_bias))
            return posed, grad_weight_im2col_nchw.plan_with_tile(posed, tile, device, with_bias)
        tiles = grad_weight_im2col_nhwc.tiles_for(posed, device, with_bias)
        if tiles:
            return posed, grad_weight_im2col_nhwc.plan_with_tile(posed, rng.choice(tiles), device, with_bias)
        if not grad_weight_pixel_rows.part_candidates(posed, device, with_bias, 1):
            continue
        lines = lines_of(geometry)
        tile = rng.choice(list(candidates(geometry)))
        cut = in_slices(geometry, lines.stages(geometry.batch), tile, device, 0)
        if cut is not None:
            return posed, grad_weight_pixel_rows.plan_with_tile(posed, lines, cut, device, with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(32))
def test_forced_on_random_geometries(seed: int, with_bias: bool) -> None:
    """Whatever the kernels claim is right, with a random one of its tiles: poisoned memory, the same bits again."""
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    posed, part = random_part(rng, with_bias, facts)
    layouts, mask = (posed.channels_last, posed.weight_channels_last), (False, True, with_bias)
    run = assert_kernel_matches(part, posed.geometry, torch.float32, layouts, TF32_TOLERANCE, mask)
    if with_bias:
        sums = run.truths[1]
        assert (run.found[1].double() - sums).norm() <= BIAS_TOLERANCE * sums.norm(), part.why
