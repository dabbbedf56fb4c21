"""Kernels of the weight's gradient take their sizes at the launch: that the size arguments cover every pixel once, that
what a kernel takes for granted holds of its sizes, and that one kernel computes several sizes. test_selection.py tests
which of them a layer has."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable

import pytest
import torch
from harness import assert_kernel_matches
from sampling import sampled
from size_cases import H200, LAYERS, MODES, TOLERANCE, quotient, random_sizes

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_shape as grad_weight_tma_shape
from tconv_swap.kernels.grad_weight.selection import Kernels, kernels_of, layer_of, representatives
from tconv_swap.kernels.gradients import nchw_to_nhwc as gradients_nchw_to_nhwc
from tconv_swap.runtime import jit
from tconv_swap.runtime.program import Kernel, Launch, Output, Part, Plan


def planned(problem: plan.Problem, device: plan.Device, with_bias: bool) -> list[Part]:
    """Returns the parts of all kernels of the layer that compute a problem from the tensors as they lie."""
    return [one.make() for one in grad_weight_implicit_gemm.ranked(problem, device, with_bias)]


def from_copies(problem: plan.Problem, device: plan.Device) -> list[Part]:
    """Returns the parts of those that read copies in channels_last."""
    return [one.make() for one in grad_weight_implicit_gemm.ranked_from_copies(problem, device)]


def multiplying(made: Part | Plan) -> Kernel:
    """Returns the kernel that multiplies, not those that copy or add up."""
    (found,) = (
        one.kernel
        for one in made.launches
        if one.kernel.entry.startswith("grad_weight") and "reduce" not in one.kernel.entry
    )
    return found


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
            posed = (problem, problem._replace(dtype=torch.float32, precision="tf32"))
            parts = [part for one in posed for part in (*planned(one, H200, False), *from_copies(one, H200))]
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
                    geometry = layer._replace(width=size, output_padding=padding)
                    problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                    parts = [*planned(problem, H200, False), *from_copies(problem, H200)]
                    assert parts
                    kernels.update(map(multiplying, parts))
            assert len(kernels) <= 4


def count(kernels: Kernels) -> int:
    return sum(len(getattr(kernels, family)) for family in Kernels.__slots__)


def test_the_kernels_of_a_layer_compile(request: pytest.FixtureRequest) -> None:
    """All of them, also those that no size of the suite uses; on each commit those of one layer in two modes."""
    done = 0
    modes = ((torch.float16, True), (torch.float32, False), (torch.float16, False), (torch.float32, True))
    every = request.config.getoption("all_architectures")
    for name in ("cyclegan2", "simplebaseline", "kb75") if every else ("cyclegan2",):
        geometry = next(layer.geometry for layer in LAYERS if layer.name == name)
        for dtype, channels_last in modes if every else modes[:2]:
            layer = layer_of(plan.Problem(geometry, dtype, "tf32", channels_last, channels_last))
            compiled: dict[Kernel, list[int]] = {}
            for size, _ in representatives(layer):
                problem = layer._replace(geometry=size)
                for kernel in map(multiplying, (*planned(problem, H200, False), *from_copies(problem, H200))):
                    if kernel not in compiled:
                        _, log = jit.compile_with_log(kernel, "sm_90a")
                        compiled[kernel] = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
            assert len(compiled) == count(kernels_of(layer, H200))
            assert all(compiled.values())
            assert not any(any(spills) for kernel, spills in compiled.items() if not kernel.spills), compiled
            done += len(compiled)
    assert done > 4


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
        #: Images, rows and columns of a tile, where the launch gives them.
        self.stage = words[16:19]
        assert len(words) in (16, 21, 40)

    def first_tile(self, split: int) -> int:
        return split * self.split_tiles + min(split, self.longer_splits)

    def tiles_of(self, split: int) -> int:
        return self.split_tiles + (split < self.longer_splits)


IMPLICIT_GEMM = ("implicit_gemm", "implicit_gemm_tma")
#: Overlapping taps, kernels that are their stride, groups, one row, stride 1, and a plain product.
EMULATED = ("dcgan2", "unet4", "maskrcnn", "stylegan2_mod", "hifigan_up1", "kb65", "dcgan1", "higherhrnet")


def random_part(
    rng: random.Random, families: Iterable[str] = (*IMPLICIT_GEMM, "im2col_nhwc"), limit: int = 30
) -> tuple[plan.Problem, Launch, tuple[Launch, ...]]:
    """Returns a problem, the launch that multiplies, and those that reduce its splits."""
    layers = [layer.geometry for layer in LAYERS if layer.name in EMULATED]
    while True:
        geometry = random_sizes(rng, rng.choice(layers), limit)._replace(batch=rng.randint(1, 9))
        dtype, precision = rng.choice(MODES)
        channels_last = rng.random() < 0.5
        problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
        found = [*planned(problem, H200, rng.random() < 0.5), *from_copies(problem, H200)]
        # The sizes of the others have other names.
        parts = [part for part in found if part.family in families]
        if parts:
            part = rng.choice(parts)
            return problem, part.launches[0], part.launches[1:]


@pytest.mark.parametrize("seed", sampled(range(60), 2))
def test_every_pixel_is_in_one_tile_of_one_split(seed: int) -> None:
    problem, main, _ = random_part(random.Random(seed))
    g, sizes, constants = problem.geometry, PixelSizes(main.structs[0]), dict(main.kernel.constants)
    of_kernel = (int(constants.get(name, 0)) for name in ("TILE_N", "TILE_H", "TILE_W"))
    images, rows, cols = sizes.stage or of_kernel
    if main.kernel.entry == "grad_weight_im2col_nhwc":
        assert main.structs[0][19] == cols.bit_length() - 1
        assert images * rows * cols == 32
        if sizes.batch < g.batch:  # as rows of one image
            g = g._replace(batch=1, height=g.batch * g.height)
    else:
        assert images * rows * cols == constants.get("TILE_PIXELS", images * rows * cols)
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


@pytest.mark.parametrize("seed", sampled(range(100), 3))
def test_a_kernel_is_right_for_its_size(seed: int) -> None:
    """What a kernel takes for granted holds of the size: multiples of what one copy moves, room for the sums."""
    rng = random.Random(1000 + seed)
    problem, main, reducing_launches = random_part(rng, IMPLICIT_GEMM, 200)
    constants = dict(main.kernel.constants)
    g, sizes = problem.geometry, PixelSizes(main.structs[0])
    if not constants["CHANNELS_LAST"]:
        assert g.width % int(constants["INPUT_COPY"]) == 0
        assert g.out_width % int(constants["OUTPUT_COPY"]) == 0
    copies = sizes.splits * int(constants["WARPS_K"])
    longest = sizes.tiles_of(0)
    step = 8 if problem.dtype == torch.float32 else 16
    if sizes.stage:
        pixels = math.prod(sizes.stage)
    else:
        pixels = math.prod(int(constants[name]) for name in ("TILE_N", "TILE_H", "TILE_W"))
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
        if with_bias:
            # Each block of taps and channels, and each warp of mma.sync, has a row of every split.
            blocks = -(-main.grid // sizes.splits) // problem.geometry.groups
            columns = int(constants["WARPS_N"]) * int(constants["WARP_N"])
            blocks //= -(-problem.geometry.out_channels_per_group // columns)
            warps = math.prod(int(constants[f"WARPS_{of}"]) for of in "MTK")
            by_mma = main.kernel.entry == "grad_weight_implicit_gemm_mma"
            assert bias_rows == sizes.splits * blocks * (warps if by_mma else 1)


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
        fits = -geometry.width % side <= grad_weight_tma_shape.max_beyond(geometry, 1)
        assert fits == (not unreached_by_definition(geometry, side)), geometry
        forbidden += not fits
        offsets = [k * dilation - geometry.padding[1] for k in range(kernel)]
        real = [q * stride + o for o in offsets for q in range(geometry.width)]
        last = max((at for at in real if 0 <= at < geometry.out_width), default=0)
        assert grad_weight_tma_shape.last_reached(geometry, 1) == last
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
            geometry = random_sizes(rng, layer, 70)._replace(batch=rng.randint(1, 5))
            posed = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
            with_bias = bias and bool(planned(posed, device, True))
            outputs = (Output(geometry.weight_shape, channels_last), Output((geometry.out_channels,)))
            plans = [
                Plan(part.family, part.why, outputs[: 1 + with_bias], part.launches, part.workspace_bytes)
                for part in planned(posed, device, with_bias)
            ]
            plans += gradients_nchw_to_nhwc.plan_candidates(posed, (False, True, bias), device)
            for made in plans:
                by_kernel.setdefault(multiplying(made), []).append((posed, made))
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
