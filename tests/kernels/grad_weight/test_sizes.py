"""Kernels of the weight's gradient take their sizes at the launch: how many kernels a layer has over all sizes,
that the size arguments cover every pixel once, and that one kernel computes several sizes."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import AMPERE, H200, LAYERS, MODES, TOLERANCE, quotient, random_sizes

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import im2col_nhwc_classes as grad_weight_im2col_nhwc_classes
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm_candidates as grad_weight_candidates
from tconv_swap.kernels.grad_weight import implicit_gemm_tma as grad_weight_tma
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_classes as grad_weight_tma_classes
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_tile as grad_weight_tma_tile
from tconv_swap.kernels.grad_weight.implicit_gemm_classes import of_any_size, select
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.measurement.suite import Layer
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Kernel, Launch, Output, Part, Plan

MASK = (False, True, False)


def planned(problem: plan.Problem, device: plan.Device, with_bias: bool) -> list[Part]:
    """Returns the parts of a problem: by way of channels_last where that pays; both parts where two families may
    compute it."""
    if gradients_nchw_to_nhwc.pays(problem, MASK, device):
        piece = gradients_nchw_to_nhwc.nhwc_grad_weight(problem, device)
        if piece is not None:
            return [piece.part]
    im2col = grad_weight_im2col_nhwc.part_candidates(problem, device, with_bias, 1)
    ranked = grad_weight_implicit_gemm.implicit_gemm(problem, device, with_bias, 1)
    return im2col + [one.make() for one in ranked]


@pytest.mark.parametrize("device", [H200, AMPERE], ids=lambda device: device.architecture)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_a_layer_has_four_kernels_at_most(layer: Layer, device: plan.Device) -> None:
    rng = random.Random(layer.name)
    for dtype, precision in MODES:
        for channels_last in (False, True):
            computing: set[Kernel] = set()
            reducing_launches: dict[str, set[Kernel]] = {}
            for _ in range(60):
                geometry = random_sizes(rng, layer.geometry)
                problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                parts = planned(problem, device, False)
                assert parts or not grad_weight_implicit_gemm.supports(problem, device)
                for part in parts:
                    computing.add(part.launches[0].kernel)
                    for one in part.launches[1:]:
                        reducing_launches.setdefault(one.kernel.entry, set()).add(one.kernel)
            assert len(computing) <= 4, computing
            assert all(len(found) <= 4 for found in reducing_launches.values()), reducing_launches


def test_no_size_is_compiled_in() -> None:
    names = {
        "BATCH",
        "HEIGHT",
        "WIDTH",
        "OUT_HEIGHT",
        "OUT_WIDTH",
        "SPLITS",
        "FLUSH",
        "THROUGH_WORKSPACE",
        "MERGED",
    }
    done = 0
    for layer in LAYERS:
        for channels_last in (False, True):
            problem = plan.Problem(layer.geometry, torch.float16, "ieee", channels_last, channels_last)
            posed = (problem, replace(problem, dtype=torch.float32, precision="tf32"))
            parts = [part for one in posed for part in planned(one, H200, False)]
            for one in (launch for part in parts for launch in part.launches):
                assert not names & dict(one.kernel.constants).keys()
                done += 1
    assert done


def test_the_output_padding_is_an_argument() -> None:
    """As PyTorch's ``output_size`` changes it from call to call."""
    layer = Geometry(4, 96, 30, 30, 64, (3, 3), (2, 2), (1, 1))
    for dtype, precision in MODES:
        for channels_last in (False, True):
            kernels = set()
            for size in range(30, 38):
                for padding in ((0, 0), (1, 1), (0, 1)):
                    geometry = replace(layer, width=size, output_padding=padding)
                    problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                    parts = planned(problem, H200, False)
                    assert parts
                    kernels.update(part.launches[0].kernel for part in parts)
            assert len(kernels) <= 4


def test_the_kernels_of_all_classes_compile(request: pytest.FixtureRequest) -> None:
    """A sample of the kernels that no size of the suite uses; on each commit those of one layer in two modes."""
    done = 0
    names = ("cyclegan2", "simplebaseline", "kb75")
    modes = ((torch.float16, True), (torch.float32, False), (torch.float16, False), (torch.float32, True))
    every = request.config.getoption("all_architectures")
    for name in names if every else names[:1]:
        geometry = next(layer.geometry for layer in LAYERS if layer.name == name)
        for dtype, channels_last in modes if every else modes[:2]:
            posed = plan.Problem(geometry, dtype, "tf32", channels_last, channels_last)
            layer, parts = of_any_size(posed), []
            if grad_weight_tma.supports(posed, H200):
                for tma_tile in grad_weight_tma_classes.schedules(layer, H200, 4):
                    parts.append(grad_weight_tma.lower(tma_tile.problem, tma_tile, 1, False))
            if grad_weight_im2col_nhwc.supports(posed, H200):
                for one in grad_weight_im2col_nhwc_classes.schedules(layer, H200):
                    parts.append(grad_weight_im2col_nhwc.lower(posed, one.tile, H200, False))
            for tile in grad_weight_candidates.schedules(layer, H200, 4):
                parts.append(grad_weight_implicit_gemm.lower(tile.problem, tile, H200, False))
            for part in parts:
                kernel = part.launches[0].kernel
                _, log = jit.compile_with_log(kernel, "sm_90a")
                spills = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
                assert spills
                assert kernel.spills or not any(spills), log
                done += 1
    assert done >= 8


# ---- which few schedules ---------------------------------------------------------------------------------------


def test_the_candidates_nearest_to_the_best_are_selected() -> None:
    never = float("inf")
    clocks = [
        [10.0, 40.0, 40.0],  # the best at the first size, far from it at the others
        [30.0, 12.0, 12.0],
        [never, 10.0, 10.0],  # faster, but not at all sizes
        [30.0, 12.0, 12.0],  # as good as the second
    ]
    even = [1.0, 1.0, 1.0]
    assert select(clocks, even, 1) == [1]
    assert select(clocks, even, 2) == [2, 0]  # not the first, which was the best alone
    assert select(clocks, even, 4) == [1, 0, 2]
    assert select(clocks, [100.0, 1.0, 1.0], 1) == [0]
    assert select([[never, 5.0]], [1.0, 1.0], 4) == [0]
    assert select([], [], 4) == []


def test_uncovered_sizes_count_by_their_weight() -> None:
    never = float("inf")
    clocks = [[10.0, 20.0, never], [20.0, 10.0, 10.0]]
    assert select(clocks, [2.0, 0.1, 0.1], 1, uncovered=1.0) == [0]
    assert select(clocks, [1.0, 1.0, 1.0], 1, uncovered=1.0) == [1]


def test_a_map_of_few_columns_takes_im2col_nhwc() -> None:
    (layer,) = (layer for layer in LAYERS if layer.name == "simplebaseline")  # 8 x 6
    problem = plan.Problem(layer.geometry, torch.float32, "tf32", True, True)
    part = grad_weight_implicit_gemm.plan_grad_weight(problem, H200)
    assert part is not None
    assert part.family == "im2col_nhwc"


# ---- the arithmetic, emulated ----------------------------------------------------------------------------------


class PixelSizes:
    """``GradWeightTileSizes`` of common/sizes.cuh, by name."""

    def __init__(self, words: tuple[int, ...]) -> None:
        self.batch, self.height, self.width, self.out_height, self.out_width = words[:5]
        self.splits, self.split_tiles, self.longer_splits, self.flush, self.through_workspace = words[5:10]
        self.image_tiles, self.row_tiles = words[10:13], words[13:16]
        #: Of ``Im2colNhwcSizes``: images, rows and columns of a stage.
        self.stage = words[16:19]
        assert len(words) in (16, 21)

    def first_tile(self, split: int) -> int:
        return split * self.split_tiles + min(split, self.longer_splits)

    def tiles_of(self, split: int) -> int:
        return self.split_tiles + (split < self.longer_splits)


def random_part(rng: random.Random, limit: int = 30) -> tuple[plan.Problem, Launch, tuple[Launch, ...]]:
    """Returns a problem, the launch that multiplies, and those that reduce its splits."""
    while True:
        layer = rng.choice(LAYERS).geometry
        geometry = replace(random_sizes(rng, layer, limit), batch=rng.randint(1, 9))
        dtype, precision = rng.choice(MODES)
        channels_last = rng.random() < 0.5
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        parts = planned(problem, H200, rng.random() < 0.5)
        if parts:
            part = rng.choice(parts)
            return problem, part.launches[0], part.launches[1:]


@pytest.mark.parametrize("seed", range(60))
def test_every_pixel_is_in_one_tile_of_one_split(seed: int) -> None:
    problem, main, _ = random_part(random.Random(seed))
    g, sizes, constants = problem.geometry, PixelSizes(main.structs[0]), dict(main.kernel.constants)
    if sizes.stage:  # im2col_nhwc
        images, rows, cols = sizes.stage
        assert main.structs[0][19] == cols.bit_length() - 1
        assert images * rows * cols == 32
        if sizes.batch < g.batch:  # as rows of one image
            g = replace(g, batch=1, height=g.batch * g.height)
    else:
        images, rows, cols = (int(constants[name]) for name in ("TILE_N", "TILE_H", "TILE_W"))
        assert (sizes.out_height, sizes.out_width) == (g.out_height, g.out_width)
    assert (sizes.batch, sizes.height, sizes.width) == (g.batch, g.height, g.width)
    assert main.grid % sizes.splits == 0
    tiles = []
    for split in range(sizes.splits):
        assert sizes.tiles_of(split) > 0
        tiles += [sizes.first_tile(split) + i for i in range(sizes.tiles_of(split))]
    seen: set[tuple[int, int, int]] = set()
    for tile in tiles:
        image = quotient(sizes.image_tiles, tile)
        in_image = tile - image * sizes.image_tiles[0]
        row = quotient(sizes.row_tiles, in_image)
        first = image * images, row * rows, (in_image - row * sizes.row_tiles[0]) * cols
        assert all(at < size for at, size in zip(first, (g.batch, g.height, g.width), strict=True))
        seen.add(first)
    assert len(seen) == len(tiles)
    assert len(seen) == -(-g.batch // images) * -(-g.height // rows) * -(-g.width // cols)


@pytest.mark.parametrize("seed", range(100))
def test_a_kernel_is_right_for_its_size(seed: int) -> None:
    """What a kernel takes for granted holds of the size: multiples of what one copy moves, room for the sums."""
    rng = random.Random(1000 + seed)
    constants: dict[str, object] = {}
    while "TILE_N" not in constants:  # im2col_nhwc has other names
        problem, main, reducing_launches = random_part(rng, 200)
        constants = dict(main.kernel.constants)
    g, sizes = problem.geometry, PixelSizes(main.structs[0])
    if not constants["CHANNELS_LAST"]:
        assert g.width % int(constants["INPUT_COPY"]) == 0
        assert g.out_width % int(constants["OUTPUT_COPY"]) == 0
    copies = sizes.splits * int(constants["WARPS_K"])
    longest = sizes.tiles_of(0)
    step = 8 if problem.dtype == torch.float32 else 16
    pixels = int(constants["TILE_N"]) * int(constants["TILE_H"]) * int(constants["TILE_W"])
    multiplies = pixels // step // int(constants["WARPS_K"])
    # So few multiplies into the same sums that their truncation does not show.
    assert min(sizes.flush, longest) * multiplies < 2 * 1024 or min(sizes.flush, longest) == 1
    assert bool(sizes.through_workspace) == (copies > 1 or sizes.flush <= longest)
    if sizes.through_workspace:
        (reducing,) = reducing_launches
        copies_added, bias_rows, weight_blocks, unit_bits = reducing.structs[0]
        assert copies_added == copies
        sums = -(-main.grid // sizes.splits) * 32 * int(constants["WARPS_M"]) * int(constants["WARPS_N"])
        fragments = int(constants["WARP_M"]) * int(constants["WARP_N"]) * int(constants["WARP_TAPS"]) // 128
        units = sums * int(constants["WARPS_T"]) * fragments
        assert (weight_blocks - 1) << unit_bits < units <= weight_blocks << unit_bits
        with_bias = bool(constants["WITH_BIAS"])
        assert (reducing.grid > weight_blocks) == with_bias == (bias_rows > 0)


def unreached_by_definition(geometry: Geometry, side: int) -> bool:
    """Returns whether the columns of zeros of tiles of ``side`` columns meet outputs that no column of the input
    reaches."""
    g = geometry
    offsets = [k * g.dilation[1] - g.padding[1] for k in range(g.kernel[1])]
    real = {q * g.stride[1] + o for o in offsets for q in range(g.width)} & set(range(g.out_width))
    last = max(real, default=0)  # a tensor map has one column at least
    beyond = range(g.width, -(-g.width // side) * side)
    met = {q * g.stride[1] + o for o in offsets for q in beyond}
    return any(0 <= at <= last and at not in real for at in met)


def test_zeros_beyond_the_input_meet_no_pixel_that_belongs_to_no_gradient() -> None:
    rng = random.Random(0)
    forbidden = 0
    for _ in range(3000):
        stride, dilation = rng.randint(1, 7), rng.randint(1, 7)
        kernel = rng.randint(1, 6)
        geometry = Geometry(
            1,
            64,
            1,
            rng.choice((rng.randint(1, 9), rng.randint(1, 99))),
            64,
            (1, kernel),
            (1, stride),
            (0, rng.randint(0, dilation * (kernel - 1))),
            (0, rng.randint(0, max(stride, dilation) - 1)),
            (1, dilation),
        )
        if geometry.out_width <= 0:
            continue
        side = rng.choice((4, 6, 8, 14, 16, 32, 64))
        fits = -geometry.width % side <= grad_weight_tma_tile.max_beyond(geometry, 1)
        assert fits == (not unreached_by_definition(geometry, side)), geometry
        forbidden += not fits
        offsets = [k * dilation - geometry.padding[1] for k in range(kernel)]
        real = [q * stride + o for o in offsets for q in range(geometry.width)]
        last = max((at for at in real if 0 <= at < geometry.out_width), default=0)
        assert grad_weight_tma_tile.last_reached(geometry, 1) == last
    assert forbidden > 100


# ---- on a GPU ------------------------------------------------------------------------------------------------


def sizes_of_one_kernel(rng: random.Random, device: plan.Device) -> list[tuple[plan.Problem, Plan]]:
    """Returns three sizes of a small layer that one kernel computes."""
    while True:
        groups, kernel = rng.choice((1, 1, 2)), rng.choice((2, 2, 3, 4))
        stride = rng.choice((1, 2, 2, kernel))
        layer = Geometry(
            1,
            groups * rng.choice((16, 32, 64, 72, 128)),
            1,
            1,
            groups * rng.choice((24, 40, 64, 128)),
            (kernel, kernel),
            (stride, stride),
            (0, 0) if kernel == stride else (rng.randint(0, 1),) * 2,
            groups=groups,
        )
        dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float32))
        precision = rng.choice(("tf32", "ieee"))
        channels_last, bias = rng.random() < 0.5, rng.random() < 0.5
        by_kernel: dict[Kernel, list[tuple[plan.Problem, Plan]]] = {}
        for _ in range(40):
            geometry = replace(random_sizes(rng, layer, 70), batch=rng.randint(1, 5))
            posed = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
            if gradients_nchw_to_nhwc.pays(posed, MASK, device):
                continue  # its kernels read copies
            for part in planned(posed, device, bias) or planned(posed, device, False):
                kernel_of = part.launches[0].kernel
                outputs = (
                    Output(geometry.weight_shape, channels_last),
                    Output((geometry.out_channels,)),
                )[: 1 + bool(dict(kernel_of.constants)["WITH_BIAS"])]
                made = Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
                by_kernel.setdefault(kernel_of, []).append((posed, made))
        several = [found for found in by_kernel.values() if len(found) >= 3]
        if several:
            return rng.choice(several)[:3]


def test_several_sizes_share_a_kernel() -> None:
    for seed in range(5):
        found = sizes_of_one_kernel(random.Random(seed), H200)
        assert len({posed.geometry for posed, _ in found}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(64))
def test_one_kernel_computes_several_sizes_in_turn(seed: int) -> None:
    """Each size after another one: poisoned outputs, the same bits twice, against float64."""
    torch.manual_seed(seed)
    found = sizes_of_one_kernel(random.Random(seed), call.device_facts(0))
    for posed, made in (*found, found[0]):
        layouts, mask = (
            (posed.channels_last, posed.weight_channels_last),
            (False, True, len(made.outputs) > 1),
        )
        assert_kernel_matches(made, posed.geometry, posed.dtype, layouts, TOLERANCE[posed.dtype], mask)
