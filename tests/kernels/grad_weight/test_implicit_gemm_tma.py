"""The implicit GEMM of the weight's gradient with TMA (csrc/kernels/grad_weight/implicit_gemm_tma.cu): which layers it
computes, the limits of its tiles, and random tiles on random geometries."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from harness import assert_kernel_matches
from oracle import conv_transpose2d_reference

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight.implicit_gemm_tma import lower, supports
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_choice import Schedule, ranked
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_clocks import cuts_of, work_of
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_shape import usual_shape
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    Stage,
    TmaKernel,
    computes_any_size,
    kernels_of_sizes,
    stages_of,
)
from tconv_swap.kernels.grad_weight.layer import pixel_tiles, reads_all_of_grad_output
from tconv_swap.runtime import launch
from tconv_swap.runtime.program import ArgumentKind, Output, Plan

H200 = plan.Device("sm_90a", 132, 227 << 10)
DCGAN2 = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
UNET = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
CYCLEGAN = Geometry(8, 256, 64, 64, 128, (3, 3), (2, 2), (1, 1), (1, 1))
MASKRCNN = Geometry(256, 256, 14, 14, 256, (2, 2), (2, 2))
AUDIO = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))
POSE = Geometry(32, 2048, 8, 6, 256, (4, 4), (2, 2), (1, 1))
LAYERS = (DCGAN2, UNET, CYCLEGAN, MASKRCNN, AUDIO, POSE)
#: Relative L2 errors against float64, as in tests/cuda/test_cuda_op.py.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def problem(
    geometry: Geometry, dtype: torch.dtype = torch.float16, channels_last: bool = True
) -> plan.Problem:
    return plan.Problem(geometry, dtype, "ieee", channels_last, channels_last)


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_wide_layers_in_16_bits_and_channels_last_are_planned_with_tma(geometry: Geometry) -> None:
    def family(posed: plan.Problem, device: plan.Device = H200) -> str:
        return plan.plan_backward(posed, (False, True, False), device).family

    assert family(problem(geometry)) == family(problem(geometry, torch.bfloat16)) == "implicit_gemm_tma"
    assert family(problem(geometry, channels_last=False)) != "implicit_gemm_tma"
    assert family(problem(geometry, torch.float32)) != "implicit_gemm_tma"
    assert family(problem(geometry), plan.Device("sm_100", 132, 227 << 10)) != "implicit_gemm_tma"


@pytest.mark.parametrize(
    "change",
    [
        {"in_channels": 100},  # a pixel does not begin at a multiple of 16 bytes
        {"out_channels": 68},
        {"stride": (9, 2)},  # beyond a box's steps
        {"out_channels": 16},
        {"batch": 0},
    ],
    ids=str,
)
def test_what_tma_cannot_load_is_not_claimed(change: dict) -> None:
    assert supports(problem(CYCLEGAN), H200)
    assert not supports(problem(CYCLEGAN._replace(**change)), H200)


def test_few_channels_are_planned_with_tma_where_the_kernel_leaves_gaps() -> None:
    gaps = Geometry(16, 32, 64, 128, 64, (3, 3), (5, 5), (1, 1), dilation=(2, 2))
    part = plan.plan_backward(problem(gaps), (False, True, False), H200)
    assert part.family == "implicit_gemm_tma"
    # Three taps side by side, not two and one unused.
    constants = dict(part.launches[0].kernel.constants)
    assert (constants["TAP_ROWS"], constants["TAP_COLS"]) in ((1, 3), (3, 1))
    assert not supports(problem(gaps._replace(stride=(3, 3), dilation=(1, 1))), H200)
    assert not supports(problem(gaps._replace(in_channels=24)), H200)


def candidates(posed: plan.Problem, device: plan.Device, *others: Geometry) -> list[tuple[TmaKernel, Stage]]:
    """Returns the kernels of a layer of this size and ``others`` with the stages with which they compute this size."""
    kernels = kernels_of_sizes(posed, device, (posed.geometry, *others))
    return [(one, stage) for one in kernels for _, stage in stages_of(posed.geometry, one, device)]


def possible_splits(posed: plan.Problem, kernel: TmaKernel, stage: Stage, device: plan.Device) -> list[int]:
    """Returns into how many splits the pixels may be cut."""
    work = work_of(posed, kernel, device)
    tiles = pixel_tiles(posed.geometry, stage.shape)
    return [one.splits for one in cuts_of(work.blocks, work.split_bytes, tiles, device)]


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_every_tile_keeps_the_limits_of_workspace_shared_memory_and_tensor_maps(geometry: Geometry) -> None:
    posed = problem(geometry)
    found = candidates(posed, H200)
    assert found
    for kernel, stage in random.Random(0).sample(found, min(40, len(found))):
        assert stage.shared_bytes <= H200.shared_memory_per_block
        # A single split's sums pass through the stages, a row of each input channel apart (implicit_gemm_store.cuh).
        sums = kernel.block_n * math.prod(kernel.taps)
        assert stage.stages * stage.bytes >= kernel.block_m * (-(-sums // 32) * 32 + 8) * 4
        for splits in possible_splits(posed, kernel, stage, H200):
            part = lower(posed, Schedule(posed, kernel, work_of(posed, kernel, H200)), stage, splits, False)
            one_copy = 4 * math.prod(geometry.weight_shape)
            # Whole tiles may be four times the gradient: taps and channels may not fill them.
            assert part.workspace_bytes <= max(64 << 20, 4 * one_copy)
            main = part.launches[0]
            for one in main.tensor_maps:
                assert all(0 < size <= 256 for size in one.box)
                assert all(step <= 8 for step in one.steps)
                assert all(stride % 16 == 0 for stride in one.strides)


def test_tiles_never_read_pixels_that_no_tap_reaches() -> None:
    """Offsets 0, 4, 8 at stride 5 leave gaps that pixels beyond the last would read."""
    geometry = Geometry(8, 64, 16, 13, 64, (1, 3), (1, 5), dilation=(1, 4))
    tiles = candidates(problem(geometry), H200)
    assert {stage.shape[2] for _, stage in tiles} <= {13}
    without = candidates(problem(geometry._replace(dilation=(1, 1))), H200)
    assert {stage.shape[2] for _, stage in without} - {13}


def bytes_of_pixel(
    kernel: TmaKernel, stage: Stage, words: tuple[int, ...], g: Geometry, tap: Pair, k: int
) -> int:
    """Returns where a multiply reads what a tap of a block reads for the k-th pixel of a tile, from the first box of
    grad_output on: the arithmetic of implicit_gemm_tma.{cu,cuh}, emulated."""
    box_cols, box_bytes, group_pixels, *_ = words[19:22]
    rows, cols = (
        (at * step * dilation, stride // math.gcd(stride, step * dilation), stride)
        for at, step, dilation, stride in zip(tap, kernel.tap_step, g.dilation, g.stride, strict=True)
    )
    phase_row, shift_row = tap[0] % rows[1], rows[0] // rows[2]
    phase_col, shift_col = tap[1] % cols[1], cols[0] // cols[2]
    columns = min(kernel.taps[1], cols[1])
    if kernel.box_per_tap_col:
        phase_col, shift_col, columns = tap[1], 0, kernel.taps[1]
    box = (phase_row * columns + phase_col) * kernel.channel_blocks
    pixel = shift_row * box_cols + shift_col + k % 16 // 8 * group_pixels + k % 8
    return box * box_bytes + pixel * 128 + words[24 + k // 16] * 16


def where_it_was_loaded(
    kernel: TmaKernel, stage: Stage, g: Geometry, tap: Pair, k: int
) -> tuple[int, int] | None:
    """Returns the box, and the pixel in it, that hold what a tap reads for the k-th pixel, counted by where the boxes
    begin in grad_output."""
    _, tile_rows, tile_cols = stage.shape
    image, row, col = k // (tile_rows * tile_cols), k // tile_cols % tile_rows, k % tile_cols
    pitches = [step * dilation for step, dilation in zip(kernel.tap_step, g.dilation, strict=True)]
    wanted = [
        at * stride + i * pitch
        for at, stride, i, pitch in zip((row, col), g.stride, tap, pitches, strict=True)
    ]
    periods = [stride // math.gcd(stride, pitch) for stride, pitch in zip(g.stride, pitches, strict=True)]
    phase_rows, phase_cols = (min(count, period) for count, period in zip(kernel.taps, periods, strict=True))
    begins = [
        ((i, j), i * pitches[0] % g.stride[0], j * pitches[1] % g.stride[1])
        for i in range(phase_rows)
        for j in range(phase_cols)
    ]
    if kernel.box_per_tap_col:
        phase_cols = kernel.taps[1]
        begins = [
            ((i, j), i * pitches[0] % g.stride[0], j * pitches[1])
            for i in range(phase_rows)
            for j in range(phase_cols)
        ]
    _, box_rows, box_cols = stage.boxes.shape
    for (i, j), first_row, first_col in begins:
        (down, off_row), (across, off_col) = (
            divmod(at - first, stride)
            for at, first, stride in zip(wanted, (first_row, first_col), g.stride, strict=True)
        )
        if kernel.box_per_tap_col and j != tap[1]:
            continue
        if not off_row and not off_col and 0 <= down < box_rows and 0 <= across < box_cols:
            return (i * phase_cols + j) * kernel.channel_blocks, (image * box_rows + down) * box_cols + across
    return None


@pytest.mark.parametrize("seed", range(40))
def test_multiplies_read_what_the_boxes_hold(seed: int) -> None:
    rng = random.Random(seed)
    posed, tiles = posed_at_random(rng, torch.float16, H200)
    for kernel, stage in rng.sample(tiles, min(6, len(tiles))):
        part = lower(posed, Schedule(posed, kernel, work_of(posed, kernel, H200)), stage, 1, False)
        (words,) = part.launches[0].structs
        assert words[16:19] == stage.shape
        assert words[23] == stage.stages
        input_map, output_map = part.launches[0].tensor_maps
        loaded = (kernel.input_blocks, stage.boxes.per_channel_block * kernel.channel_blocks)
        boxes = (math.prod(input_map.box), math.prod(stage.boxes.shape) * output_map.box[0])
        assert words[22] == 2 * sum(count * box for count, box in zip(loaded, boxes, strict=True))
        for tap in itertools.product(*map(range, kernel.taps)):
            for k in range(kernel.pixels):
                at = where_it_was_loaded(kernel, stage, posed.geometry, tap, k)
                assert at is not None
                box, pixel = at
                found = bytes_of_pixel(kernel, stage, words, posed.geometry, tap, k)
                assert found == box * stage.boxes.bytes + pixel * 128


def test_a_kernel_computes_sizes_that_its_tiles_do_not_suit() -> None:
    """Tiles may have more images than the map, or rows and columns beyond it, if no other covers it."""
    posed = problem(MASKRCNN)
    kernels = [one for one in kernels_of_sizes(posed, H200, (MASKRCNN,)) if one.pixels == 112]
    assert kernels
    for kernel in kernels:
        assert computes_any_size(posed, kernel, H200)
        for batch, side in itertools.product((1, 2, 40), (1, 3, 7, 64)):
            size = MASKRCNN._replace(batch=batch, height=side, width=side)
            found = stages_of(size, kernel, H200)
            assert found
            for tiles, stage in found:
                assert math.prod(stage.shape) == 112
                assert tiles == pixel_tiles(size, stage.shape)
                assert stage.shape[0] < 2 * batch or all(one.shape[0] >= 2 * batch for _, one in found)
    # Maps of one pixel are taken many at a time.
    for kernel in (one for one in kernels_of_sizes(posed, H200, (MASKRCNN,)) if one.pixels == 128):
        ((fewest, stage),) = stages_of(MASKRCNN._replace(batch=40, height=1, width=1), kernel, H200)
        assert (fewest, math.prod(stage.shape)) == (1, 128)


def test_tiles_suit_a_map() -> None:
    """They have no more images than it needs, and few columns where those of a power of two would waste many; eight
    columns are two groups of eight pixels with a halo between them."""
    posed = problem(CYCLEGAN)
    kernels = [one for one in kernels_of_sizes(posed, H200, (CYCLEGAN,)) if one.pixels == 128]
    halo = 0
    for kernel in kernels:
        for batch in (1, 2, 64):
            size = CYCLEGAN._replace(batch=batch, height=15, width=20)
            found = [stage for _, stage in stages_of(size, kernel, H200)]
            assert all(stage.shape[0] < 2 * batch for stage in found)
            halo += any(stage.shape[2] == 8 and stage.boxes.shape[2] == 9 for stage in found)
    assert halo > 10
    narrow = [one for one in kernels if one.taps == (1, 1)]
    shapes = {stage.shape for one in narrow for _, stage in stages_of(size, one, H200)}
    assert {shape[2] for shape in shapes} == {4}


def test_few_tiles_are_cut_into_no_more_splits() -> None:
    posed = problem(CYCLEGAN._replace(in_channels=64, out_channels=64))
    schedules = tuple(
        Schedule(posed, one, work_of(posed, one, H200)) for one in kernels_of_sizes(posed, H200, (CYCLEGAN,))
    )
    size = posed.geometry._replace(batch=1, height=24, width=24)
    found = ranked(schedules, size, H200)
    assert found
    for best, _ in found:
        assert best.splits <= pixel_tiles(size, best.stage.shape)
    assert any(best.splits > 1 for best, _ in found)


@pytest.mark.parametrize("geometry", LAYERS, ids=str)
def test_what_computes_any_size_has_a_stage_for_each(geometry: Geometry) -> None:
    """Also where the tiles that suit a map do not fit into shared memory."""
    rng, usual_alone = random.Random(0), 0
    for device in (H200, H200._replace(shared_memory_per_block=150 << 10)):
        posed = problem(geometry)
        kernels = kernels_of_sizes(posed, device, (geometry, CYCLEGAN, MASKRCNN))
        of_any_size = [one for one in kernels if computes_any_size(posed, one, device)]
        assert len(of_any_size) > len(kernels) // 2
        for kernel in rng.sample(of_any_size, min(30, len(of_any_size))):
            for _ in range(20):
                height, width = (rng.choice((rng.randint(1, 20), rng.randint(1, 90))) for _ in range(2))
                size = geometry._replace(batch=rng.randint(1, 40), height=height, width=width)
                found = stages_of(size, kernel, device)
                assert found
                usual_alone += [stage.shape for _, stage in found] == [usual_shape(kernel.pixels)]
                assert all(stage.shared_bytes <= device.shared_memory_per_block for _, stage in found)
    assert usual_alone > 10


def test_boxes_begin_at_whole_pieces_of_memory() -> None:
    """A box of a group whose channels begin elsewhere raised an illegal instruction, although all channels together
    were whole pieces."""
    grouped = Geometry(1, 8 * 512, 64, 64, 8 * 256, (3, 3), (2, 2), groups=8)
    assert supports(problem(grouped), H200)
    for channels in ({"in_channels": 8 * 511}, {"out_channels": 8 * 257}, {"in_channels": 8 * 516}):
        assert not supports(problem(grouped._replace(**channels)), H200)


def random_geometry(rng: random.Random) -> Geometry:
    while True:
        groups = rng.choice((1, 1, 1, 2, 3))
        stride = (rng.randint(1, 5), rng.randint(1, 5))
        kernel = (rng.randint(1, 5), rng.randint(1, 5))
        dilation = (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3)))
        padding = (rng.randint(0, 3), rng.randint(0, 3))
        output_padding = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
        if rng.random() < 0.4:
            kernel, padding, output_padding, dilation = stride, (0, 0), (0, 0), (1, 1)
        height, width = rng.choice(
            ((4, 4), (8, 6), (5, 7), (8, 8), (9, 13), (14, 14), (1, 70), (12, 10), (33, 31))
        )
        geometry = Geometry(
            rng.choice((1, 2, 3, 5, 16)),
            groups * rng.choice((40, 64, 68, 72, 128, 200, 256)),
            height,
            width,
            groups * rng.choice((24, 32, 40, 60, 64, 72, 128, 136, 256, 320)),
            kernel,
            stride,
            padding,
            (output_padding[0], output_padding[1]),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return geometry


def forced(posed: plan.Problem, kernel: TmaKernel, stage: Stage, splits: int, with_bias: bool) -> Plan:
    g = posed.geometry
    part = lower(posed, Schedule(posed, kernel, work_of(posed, kernel, H200)), stage, splits, with_bias)
    assert any(a.kind is ArgumentKind.TENSOR_MAP for a in part.launches[0].arguments)
    outputs = [Output(g.weight_shape, posed.weight_channels_last), Output((g.out_channels,))]
    return Plan(part.family, part.why, tuple(outputs[: 1 + with_bias]), part.launches, part.workspace_bytes)


def posed_at_random(
    rng: random.Random, dtype: torch.dtype, facts: plan.Device
) -> tuple[plan.Problem, list[tuple[TmaKernel, Stage]]]:
    while True:
        posed = plan.Problem(random_geometry(rng), dtype, "ieee", True, rng.random() < 0.5)
        # Kernels of another size may have no tile that suits this one.
        others = [posed.geometry._replace(batch=64, height=14, width=14)] if rng.random() < 0.3 else []
        tiles = candidates(posed, facts, *others) if supports(posed, facts) else []
        if rng.random() < 0.4:
            tiles = [one for one in tiles if one[0].box_per_tap_col] or tiles
        if tiles:
            return posed, tiles


def tensors(posed: plan.Problem) -> tuple[torch.Tensor, torch.Tensor]:
    g = posed.geometry
    grad, x = (torch.randn(shape, device="cuda").to(posed.dtype) for shape in (g.output_shape, g.input_shape))
    return grad.contiguous(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(64))
def test_random_tiles_match_float64_on_random_geometries(seed: int) -> None:
    """Whatever the kernel supports, with a random tile: poisoned outputs, the same bits twice."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    posed, tiles = posed_at_random(rng, (torch.float16, torch.bfloat16)[seed % 2], facts)
    kernel, stage = rng.choice(tiles)
    with_bias = reads_all_of_grad_output(posed.geometry)
    splits = rng.choice(possible_splits(posed, kernel, stage, facts))
    made = forced(posed, kernel, stage, splits, with_bias)
    layouts, mask = (True, posed.weight_channels_last), (False, True, with_bias)
    assert_kernel_matches(made, posed.geometry, posed.dtype, layouts, TOLERANCE[posed.dtype], mask)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dilation"), [(13, 1), (16, 4)])
def test_an_infinity_that_no_tap_reads_does_not_reach_the_gradient(size: int, dilation: int) -> None:
    """Gaps between the taps, and output padding; 13 pixels fill no tile."""
    torch.manual_seed(0)
    facts = call.device_facts(0)
    posed = problem(Geometry(4, 64, size, size, 72, (3, 3), (5, 5), (1, 1), (3, 3), (dilation, dilation)))
    g = posed.geometry
    grad, x = tensors(posed)
    ones = (torch.ones(shape, device="cuda") for shape in (g.input_shape, g.weight_shape))
    reached = (
        conv_transpose2d_reference(*ones, None, g.stride, g.padding, g.output_padding, 1, g.dilation) != 0
    )
    assert not reached.all()
    grad = grad.masked_fill(~reached, float("inf")).contiguous(memory_format=torch.channels_last)
    tiles = candidates(posed, facts)
    assert tiles
    for kernel, stage in random.Random(0).sample(tiles, min(6, len(tiles))):
        made = forced(posed, kernel, stage, 1, False)
        handle = launch.add_plan(made, posed.dtype, torch.device("cuda", 0), facts.architecture)
        (gradient,) = torch.ops.tconv_swap.launch.default(handle, [grad, x, None])
        assert torch.isfinite(gradient).all(), made.why
