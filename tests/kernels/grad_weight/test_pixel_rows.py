"""The gradient of the weight with pixels along k (csrc/kernels/grad_weight/pixel_rows.cu): which layers it computes,
the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from grad_weight_cases import (
    GROUPED,
    H200,
    LAYERS,
    ODD,
    UNET,
    WIDE,
    assert_part_matches,
    hopper,
    random_problem,
    tf32_problem,
)

from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import im2col_nhwc, pixel_rows
from tconv_swap.kernels.grad_weight.pixel_rows_tile import (
    MAX_STAGES_PER_SUM,
    PARTIAL_LIMIT_BYTES,
    candidates,
    pixel_rows_of,
    weight_bytes,
    with_splits,
)
from tconv_swap.runtime.program import Part


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_splits_are_short_and_their_sums_bounded(geometry: Geometry) -> None:
    rows = pixel_rows_of(geometry)
    tiles = [
        with_splits(geometry, rows.stages(geometry.batch), tile, H200, 0) for tile in candidates(geometry)
    ]
    assert tiles
    for tile in tiles:
        assert tile is not None
        assert rows.stages(geometry.batch) <= tile.splits * MAX_STAGES_PER_SUM
        assert tile.splits == 1 or tile.splits * weight_bytes(geometry) <= PARTIAL_LIMIT_BYTES


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_tensor_maps_keep_the_limits_of_tma(geometry: Geometry) -> None:
    (made,) = pixel_rows.part_candidates(tf32_problem(geometry), H200, False, 1)
    maps = [one for step in made.launches for one in step.tensor_maps]
    assert len(maps) == 2
    for one in maps:
        assert all(stride % 16 == 0 for stride in one.strides)
        assert one.box[0] * 4 == one.swizzle_bytes
        assert all(1 <= size <= 256 for size in one.box)
    for step in made.launches:
        assert step.shared_bytes <= H200.shared_memory_per_block


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_boxes_begin_at_multiples_of_16_bytes_and_never_before_a_plane(geometry: Geometry) -> None:
    g, rows = geometry, pixel_rows_of(geometry)
    for k in range(g.kernel[0]):
        shift = (k * g.dilation[0] - g.padding[0]) // g.stride[0] + rows.zero_rows
        assert rows.im2col_rows or (shift >= 0 and shift * g.width % 4 == 0)


def test_one_kernel_reads_shifted_planes_where_the_width_allows_it_and_a_plane_for_each_tap_elsewhere() -> (
    None
):
    kernels, planes = set(), []
    for width in (20, 21):
        posed = tf32_problem(replace(WIDE, width=width))
        (made,) = pixel_rows.part_candidates(posed, H200, False, 1, limit=1)
        *copies, multiplying, _ = made.launches
        kernels.add(multiplying.kernel)
        planes.append(dict(copies[-1].kernel.constants)["IM2COL_ROWS"])
        assert multiplying.structs[0][-1] == planes[-1]
    assert planes == [False, True]
    assert len(kernels) == 1


def test_the_input_is_copied_only_where_its_images_are_not_aligned() -> None:
    def copies(geometry: Geometry) -> int:
        (made,) = pixel_rows.part_candidates(tf32_problem(geometry), H200, False, 1)
        return sum(step.kernel.entry == "space_to_depth" for step in made.launches)

    assert copies(UNET) == 1
    assert copies(ODD) == 2


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_each_layout_has_its_kernel(geometry: Geometry) -> None:
    for channels_last, entry in ((False, "grad_weight_im2col_nchw"), (True, "grad_weight_im2col_nhwc")):
        made = plan.plan_backward(tf32_problem(geometry, channels_last), (False, True, False), H200)
        if geometry == GROUPED and not channels_last:
            entry = "grad_weight_pixel_rows"  # rows of 129 columns are no multiple of 16 bytes
        assert entry in [step.kernel.entry for step in made.launches]
        assert made.family == entry.removeprefix("grad_weight_")
    ieee = replace(tf32_problem(geometry), precision="ieee")
    assert plan.plan_backward(ieee, (False, True, False), H200).family == "implicit_gemm"


def test_channels_that_are_no_multiple_of_16_bytes_are_planned_as_implicit_gemm() -> None:
    posed = tf32_problem(replace(UNET, in_channels=1022), channels_last=True)
    for with_bias in (False, True):
        made = plan.plan_backward(posed, (False, True, with_bias), H200)
        assert made.family == "implicit_gemm"


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(32, 2048, 8, 6, 256, (4, 4), (2, 2), (1, 1)),
        Geometry(5, 1024, 1, 407, 512, (1, 6), (1, 3), (0, 2)),
    ],
    ids=["rows of 6 pixels", "one row"],
)
def test_wide_layers_in_nchw_are_planned_as_pixel_rows(geometry: Geometry) -> None:
    for with_bias in (False, True):
        posed = plan.Problem(geometry, torch.float32, "tf32", False, False)
        assert plan.plan_backward(posed, (False, True, with_bias), H200).family == "pixel_rows"


def test_only_aligned_tf32_problems_on_hopper_are_claimed() -> None:
    posed = tf32_problem(UNET)
    assert pixel_rows.supports(posed, H200)
    channels_last = tf32_problem(UNET, channels_last=True)
    assert im2col_nhwc.supports(channels_last, H200)
    assert not im2col_nhwc.supports(tf32_problem(replace(UNET, in_channels=1022), True), H200)
    assert not im2col_nhwc.supports(tf32_problem(replace(UNET, stride=(9, 9)), True), H200)
    families = ((pixel_rows, posed), (im2col_nhwc, channels_last))
    for family, one in families:
        assert not family.supports(replace(one, precision="ieee"), H200)
        assert not family.supports(replace(one, dtype=torch.float16), H200)
        assert not family.supports(replace(one, channels_last=not one.channels_last), H200)
        assert not family.supports(one, replace(H200, architecture="sm_100"))
    assert not pixel_rows.supports(tf32_problem(replace(WIDE, height=4096, width=4096)), H200)
    # Kernel 2, stride 3: no tap reads a third of grad_output, so its bias needs another kernel.
    gaps = replace(UNET, stride=(3, 3))
    assert pixel_rows.part_candidates(tf32_problem(gaps), H200, False, 1)
    assert not pixel_rows.part_candidates(tf32_problem(gaps), H200, True, 1)


def random_part(rng: random.Random, with_bias: bool, device: plan.Device) -> tuple[plan.Problem, Part]:
    """Returns a problem that the kernel supports, and a random tile of it."""
    while True:
        posed = random_problem(rng, False)
        if not pixel_rows.part_candidates(posed, device, with_bias, 1):
            continue
        rows = pixel_rows_of(posed.geometry)
        tile = rng.choice(list(candidates(posed.geometry)))
        split = with_splits(posed.geometry, rows.stages(posed.geometry.batch), tile, device, 0)
        if split is not None:
            return posed, pixel_rows.lower(posed, rows, split, device, with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["weight", "weight and bias"])
@pytest.mark.parametrize("seed", range(10))
def test_random_tiles_match_float64_on_random_geometries(seed: int, with_bias: bool) -> None:
    device = hopper()
    torch.manual_seed(seed)
    assert_part_matches(*random_part(random.Random(seed), with_bias, device), with_bias)
