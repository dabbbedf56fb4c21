"""The whole forward stage over all sizes, all families together: how many kernels a layer has, that no size is compiled
in, and one kernel of each family at several sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import AMPERE, H200, MODES, on_devices, random_layer, random_sizes, sizes_for, some_modes

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.sizes import Words
from tconv_swap.kernels.forward import stride1 as forward_stride1
from tconv_swap.kernels.forward import stride1_tile as forward_stride1_tile
from tconv_swap.kernels.forward.implicit_gemm_layout import as_problem, make_problem
from tconv_swap.kernels.forward.implicit_gemm_layout import of_any_size as of_any_size_as_posed
from tconv_swap.kernels.forward.plan import posed
from tconv_swap.kernels.forward.selection import FAMILIES as FAMILIES_AS_THEY_LIE
from tconv_swap.kernels.forward.selection import representatives
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.runtime.program import Kernel, Output, Part, Plan

TURING = plan.Device("sm_75", 40, 64 << 10)
Candidates = Callable[[plan.Problem, bool, plan.Device], list[Plan]]
LAYERS = load_suite().layers
#: Kernels that prepare what others compute from, or add up what they computed.
AUXILIARY = (
    "forward_implicit_gemm_pack",
    "forward_narrow_mma_pack",
    "forward_stride1_pack",
    "nchw_to_nhwc",
    "pad_rows",
    "forward_implicit_gemm_split_k",
)
#: The layer is an argument of this kernel, too: there is one for each dtype, whatever the layers are.
OF_NO_LAYER = "forward_tiny"
#: Of an image, in float32.
MAX_IMAGE_BYTES = 256 << 20
#: Constants that follow from the sizes of images.
SIZE_NAMES = {"BATCH", "HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "SEGMENT", "SPLITS", "COLUMNS"}
TOLERANCE = {
    (torch.float32, "ieee"): 1e-6,
    (torch.float32, "tf32"): 1e-3,
    (torch.float16, "ieee"): 1e-3,
    (torch.bfloat16, "ieee"): 8e-3,
}


def sizes_of(layer: Geometry, count: int) -> Iterator[Geometry]:
    """Yields ``count`` random sizes of the layer, maps of one pixel, and images so large that forward/stride1.cu
    computes them. Inputs have at most 1 GiB in float32, because larger ones are not copied, and images are so small
    that their offsets have 32 bits."""
    rng = random.Random(str(layer))
    for batch in (1, 7, 64, 200, 256, 300):
        yield layer._replace(batch=batch, height=1, width=1)
    if not layer.height == layer.kernel[0] == 1:
        for batch, height, width in ((8, 512, 1024), (16, 512, 512), (2, 1024, 1024), (5, 700, 1000)):
            found = layer._replace(batch=batch, height=height, width=width)
            images = [4 * math.prod(shape[1:]) for shape in (found.input_shape, found.output_shape)]
            if batch * images[0] <= MAX_COPY_BYTES and max(images) <= MAX_IMAGE_BYTES:
                yield found
    for _ in range(count):
        yield random_sizes(rng, layer)


def computing(made: Plan) -> Kernel:
    """Returns the kernel that computes the output."""
    (found,) = (one.kernel for one in made.launches if one.kernel.entry not in AUXILIARY)
    return found


@pytest.mark.parametrize(
    ("layer", "device"),
    on_devices(LAYERS, AMPERE, TURING),
    ids=lambda one: one.architecture if isinstance(one, plan.Device) else one.name,
)
def test_the_forward_stage_has_four_kernels_at_most_for_inputs_of_a_gibibyte(
    layer: Layer, device: plan.Device, exhaustive: bool
) -> None:
    for dtype, precision in MODES if exhaustive else some_modes(layer):
        for channels_last in (False, True):
            kernels: dict[str, set[Kernel]] = {}
            for geometry in sizes_of(layer.geometry, sizes_for(device)):
                if min(geometry.out_height, geometry.out_width) <= 0:
                    continue
                problem = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                made = plan.plan_forward(problem, layer.bias, device)
                for one in made.launches:
                    assert not SIZE_NAMES & dict(one.kernel.constants).keys()
                    if one.kernel.entry == OF_NO_LAYER:
                        assert len(one.kernel.constants) <= 3
                        continue
                    entry = one.kernel.entry if one.kernel.entry in AUXILIARY else "computes"
                    kernels.setdefault(entry, set()).add(one.kernel)
            assert all(len(found) <= 4 for found in kernels.values()), kernels
            assert len(kernels.get("nchw_to_nhwc", ())) <= 2  # rows that begin between two pieces, and others
            assert len(kernels.get("forward_implicit_gemm_split_k", ())) <= 1
            assert len(kernels.get("forward_stride1_pack", ())) <= 1


@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
def test_float64_has_one_kernel(channels_last: bool) -> None:
    for layer in LAYERS:
        problems = [
            plan.Problem(size, torch.float64, "ieee", channels_last, channels_last)
            for size in sizes_of(layer.geometry, sizes_for(H200))
            if min(size.out_height, size.out_width) > 0
            and max(size.batch * size.out_channels * size.out_height * size.out_width, 1) < 2**31 - 256
        ]
        made = [plan.plan_forward(problem, layer.bias, H200) for problem in problems]
        assert len({computing(one) for one in made}) == 1


def stride1_plans(problem: plan.Problem, bias: bool, device: plan.Device) -> list[Plan]:
    """Returns the best plan of forward/stride1.py."""
    posed = make_problem(
        problem.geometry, problem.dtype, problem.precision, False, problem.weight_channels_last, bias
    )
    if not forward_stride1.supports(posed, device):
        return []
    found = forward_stride1.ranked(forward_stride1_tile.kernels(posed, device), posed, device)
    return [_as_plan(one.make(), problem) for one in found[:1]]


def _as_plan(part: Part, problem: plan.Problem) -> Plan:
    outputs = (Output(problem.geometry.output_shape, problem.channels_last),)
    return Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)


def plans_of(name: str) -> Candidates:
    """Returns the function that returns the plans of a family: those of the tiles that the layer may have, as far as
    they compute the size."""
    family = FAMILIES_AS_THEY_LIE[name]

    def found(problem: plan.Problem, bias: bool, device: plan.Device) -> list[Plan]:
        sizes, _ = representatives(of_any_size_as_posed(posed(problem, bias)))
        tiles = family.candidates([as_problem(size) for size in sizes], device)[:8]
        return [
            _as_plan(family.lower(problem, bias, tile, device), problem)
            for tile, (clocks,) in zip(tiles, family.clocks([problem], tiles, device), strict=True)
            if clocks < math.inf
        ]

    return found


def test_stride1_gets_the_sizes_of_its_tiles() -> None:
    layer = Geometry(8, 64, 512, 512, 64, (3, 3))
    for size in ((8, 512, 512), (3, 700, 1000), (1, 1024, 2048)):
        geometry = layer._replace(batch=size[0], height=size[1], width=size[2])
        problem = plan.Problem(geometry, torch.float16, "ieee", False, False)
        (made,) = stride1_plans(problem, False, H200)
        words: Words = made.launches[1].structs[0]
        height, width, out_height, out_width, segment, columns = words[:6]
        assert (height, width, out_height, out_width) == (*size[1:], geometry.out_height, geometry.out_width)
        column_tiles, segments = words[6:9], words[9:12]
        assert (column_tiles[0] - 1) * 128 < out_width <= column_tiles[0] * 128
        assert (segments[0] - 1) * segment < out_height <= segments[0] * segment
        assert columns == geometry.batch * column_tiles[0] * segments[0]


# ---- on a GPU ------------------------------------------------------------------------------------------------


def small_sizes(rng: random.Random, layer: Geometry, most: int = 60) -> Geometry:
    return random_sizes(rng, layer, most)._replace(batch=rng.randint(1, 5))


def of_pixels(rng: random.Random, layer: Geometry) -> Geometry:
    return layer._replace(batch=rng.choice((1, 5, 40, 130, 200)), height=1, width=1)


def rgb_layer(rng: random.Random) -> Geometry:
    kernel, stride = rng.choice(((4, 2), (4, 2), (3, 1), (5, 3), (9, 4)))
    channels = rng.choice((32, 48, 64))
    out = rng.choice((1, 3) if kernel < 9 else (1,))
    return Geometry(1, channels, 1, 1, out, (kernel,) * 2, (stride,) * 2, (rng.randint(0, 2),) * 2)


def stride_1_layer(rng: random.Random) -> Geometry:
    kernel = (rng.randint(1, 3), rng.randint(1, 5))
    return Geometry(1, rng.choice((16, 32, 64)), 1, 1, rng.choice((32, 64)), kernel)


def generator_layer(rng: random.Random) -> Geometry:
    return Geometry(
        1, rng.choice((64, 100, 130)), 1, 1, rng.choice((8, 20, 64)), (4, 4), (rng.randint(1, 3),) * 2
    )


Found = list[tuple[plan.Problem, Plan]]
#: Plans of one kernel, layers that it computes, sizes of them.
FAMILIES: dict[str, tuple[Candidates, Callable[[random.Random], Geometry], Callable[..., Geometry]]] = {
    "narrow_mma": (plans_of("narrow_mma"), random_layer, small_sizes),
    "col2im": (plans_of("col2im"), rgb_layer, small_sizes),
    "general": (
        lambda problem, bias, *_: [general.plan_forward(problem, bias)],
        random_layer,
        small_sizes,
    ),
    "narrow_ffma": (plans_of("narrow_ffma"), random_layer, small_sizes),
    "gemm": (plans_of("gemm"), generator_layer, of_pixels),
    "stride1": (stride1_plans, stride_1_layer, small_sizes),
}


def sizes_of_one_kernel(family: str, rng: random.Random, device: plan.Device) -> tuple[bool, Found]:
    """Returns whether the layer has a bias, and three of its sizes that one kernel computes."""
    candidates, layer_of, size_of = FAMILIES[family]
    while True:
        layer = layer_of(rng)
        dtype, precision = rng.choice(list(TOLERANCE))
        channels_last, weight_last = family != "stride1" and rng.random() < 0.5, rng.random() < 0.5
        if family == "gemm":
            weight_last = channels_last
        bias = rng.random() < 0.5
        by_kernel: dict[Kernel, Found] = {}
        for _ in range(30):
            geometry = size_of(rng, layer)
            problem = plan.Problem(geometry, dtype, precision, channels_last, weight_last)
            for made in candidates(problem, bias, device):
                by_kernel.setdefault(computing(made), []).append((problem, made))
        several = [found for found in by_kernel.values() if len({one.geometry for one, _ in found}) >= 3]
        if several:
            found = rng.choice(several)
            return bias, rng.sample(list({one.geometry: (one, made) for one, made in found}.values()), 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_kernel_has_several_sizes(family: str, exhaustive: bool) -> None:
    for seed in range(3 if exhaustive else 1):
        _, found = sizes_of_one_kernel(family, random.Random(seed), H200)
        assert len({problem.geometry for problem, _ in found}) == 3
        assert len({computing(made) for _, made in found}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_one_kernel_computes_several_sizes_one_after_another(family: str, seed: int) -> None:
    """The outputs match float64 in poisoned memory, with the same bits twice, each size after another one."""
    torch.manual_seed(seed)
    facts = call.device_facts(0)
    if facts.architecture != "sm_90a":
        pytest.skip("the tiles are chosen for sm_90a")
    bias, found = sizes_of_one_kernel(family, random.Random(1000 + seed), facts)
    for problem, made in (*found, found[0]):
        layouts = (problem.channels_last, problem.weight_channels_last)
        dtype = problem.dtype
        # Of these kernels, only stride1, gemm and narrow_mma round to TF32.
        precision = problem.precision if family in ("stride1", "gemm", "narrow_mma") else "ieee"
        tolerance = TOLERANCE[dtype, precision]
        assert_kernel_matches(made, problem.geometry, dtype, layouts, tolerance, with_bias=bias)
