"""Kernels of all gradients, whose sizes are arguments at run time: how many a layer has for all sizes and families, and
one kernel at several sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import (
    AMPERE,
    H200,
    MODES,
    TOLERANCE,
    any_size,
    on_devices,
    random_sizes,
    sizes_for,
    some_modes,
)

from tconv_swap.cuda import call
from tconv_swap.cuda.choice import Mask
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common import general
from tconv_swap.kernels.grad_input import narrow_mma as grad_input_narrow_mma
from tconv_swap.kernels.grad_input.implicit_gemm_layout import (
    StridedProblem,
    as_convolution,
    as_problem,
    of_any_size,
)
from tconv_swap.kernels.grad_input.narrow_mma import GradInputTile
from tconv_swap.kernels.grad_input.selection import representatives
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nchw_tile as grad_weight_im2col_nchw_tile
from tconv_swap.kernels.grad_weight import narrow_mma as grad_weight_narrow_mma
from tconv_swap.kernels.grad_weight import stride1 as grad_weight_stride1
from tconv_swap.kernels.grad_weight import stride1_tile as grad_weight_stride1_tile
from tconv_swap.kernels.grad_weight.narrow_mma import GradWeightTile
from tconv_swap.kernels.grad_weight.selection import kernels_of, layer_of
from tconv_swap.kernels.grad_weight.selection import representatives as grad_weight_representatives
from tconv_swap.kernels.gradients import depthwise as gradients_depthwise
from tconv_swap.kernels.gradients import large_kernel as gradients_large_kernel
from tconv_swap.kernels.gradients import narrow_joint as gradients_narrow_joint
from tconv_swap.kernels.gradients.depthwise import meets_all
from tconv_swap.measurement.suite import Layer, load_suite
from tconv_swap.runtime.program import Kernel, Part

TURING = plan.Device("sm_75", 30, 64 << 10)
#: Kernels that prepare copies or add up partial sums, and kernels that compute what no other family can.
AUXILIARY = {
    "nchw_to_nhwc",
    "grad_input_general",
    "grad_weight_general",
    "forward_implicit_gemm_split_k",
    "grad_bias_general",
    "grad_weight_split_k_reduce",
    "grad_weight_split_k_reduce_untiled",
    "forward_narrow_mma_pack",
    "forward_stride1_pack",
    "forward_implicit_gemm_pack",
    "pad_rows",
    "pad_images",
    "split_k_reduce",
}
#: Constants that follow from the sizes of images.
SIZES = {
    *("BATCH", "HEIGHT", "WIDTH", "OUT_HEIGHT", "OUT_WIDTH", "OUT_PIXELS", "TILES_H", "TILES_W"),
    *("REPEAT", "ROW_COUNT", "FLUSH", "THROUGH_WORKSPACE", "MERGED"),
}
MAX_KERNELS = 4
#: How many of the random sizes are planned for both gradients in one call, and in float32 without TF32, as well.
FURTHER_SIZES = 60
#: Vocoders' layers, which some families compute only where columns are whole strides.
VOCODERS = (
    Layer("stride 10", "", Geometry(16, 512, 1, 40, 256, (1, 16), (1, 10), (0, 3)), False, False),
    Layer("stride 12", "", Geometry(16, 256, 1, 480, 128, (1, 24), (1, 12), (0, 6)), False, False),
    Layer("stride 5", "", Geometry(1, 256, 1, 4000, 128, (1, 10), (1, 5), (0, 3), (0, 1)), False, False),
)
LAYERS = (*load_suite().layers, *VOCODERS)
#: The gradient of the input, of the weight, and both.
MASKS: tuple[Mask, ...] = ((True, False, False), (False, True, False), (True, True, False))


@pytest.mark.parametrize(
    ("layer", "device"),
    on_devices(LAYERS, AMPERE, TURING),
    ids=lambda one: one.architecture if isinstance(one, plan.Device) else one.name,
)
def test_a_layer_has_at_most_four_kernels_beside_auxiliary_ones(
    layer: Layer, device: plan.Device, exhaustive: bool
) -> None:
    """The limit holds for each gradient; a kernel that computes both counts for each."""
    rng = random.Random(layer.name)
    sizes = [any_size(rng, layer.geometry) for _ in range(sizes_for(device))]
    for dtype, precision in MODES if exhaustive else some_modes(layer):
        for channels_last in (False, True):
            for mask in MASKS:
                kernels: set[Kernel] = set()
                further = sum(mask) > 1 or (dtype, precision) == (torch.float32, "ieee")
                for geometry in sizes[:FURTHER_SIZES] if further else sizes:
                    posed = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
                    kernels.update(one.kernel for one in plan.plan_backward(posed, mask, device).launches)
                others: dict[str, set[Kernel]] = {}
                for one in kernels:
                    assert not SIZES & dict(one.constants).keys(), one
                    if one.entry in AUXILIARY:
                        others.setdefault(one.entry, set()).add(one)
                computing = {one for one in kernels if one.entry not in AUXILIARY}
                for gradient in ("grad_input", "grad_weight") if sum(mask) == 2 else ("",):
                    of_it = {one for one in computing if _computes(one, gradient)}
                    assert len(of_it) <= MAX_KERNELS, (mask, dtype, channels_last, of_it)
                # Four tensors may be converted, with rows that begin inside a piece of 16 bytes or not.
                conversions = others.pop("nchw_to_nhwc", set())
                assert len(conversions) <= 2 * MAX_KERNELS, conversions
                assert all(len(found) <= MAX_KERNELS for found in others.values()), others


def _computes(kernel: Kernel, gradient: str) -> bool:
    """Returns whether a kernel computes a gradient. Kernels with neither in their name compute both; those of the
    forward pass also compute the gradient of the input."""
    named = {name for name in ("grad_input", "grad_weight") if name in kernel.entry}
    if kernel.entry.startswith("forward"):
        named = {"grad_input"}
    return not named or not gradient or gradient in named


# ---- on a GPU ------------------------------------------------------------------------------------------------

Made = tuple[Part, Mask]


def computing(part: Part) -> Kernel:
    """Returns the kernel of a part that multiplies."""
    return next(one.kernel for one in part.launches if one.kernel.entry != "pad_images")


def _general(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    yield general.plan_grad_input(posed), (True, False, False)
    yield general.plan_grad_weight(posed, device), (False, True, False)
    yield general.plan_grad_bias(posed, device), (False, False, True)


def _narrow_mma(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    of_input, of_weight = _narrow_tiles(of_any_size(as_convolution(posed)), layer_of(posed), device)
    for one in grad_input_narrow_mma.ranked(of_input, posed, device)[:4]:
        yield one.make(), (True, False, False)
    for one in grad_weight_narrow_mma.ranked(of_weight, posed, device, bias)[:4]:
        yield one.make(), (False, True, bias)


@lru_cache
def _narrow_tiles(
    convolution: StridedProblem, layer: plan.Problem, device: plan.Device
) -> tuple[tuple[GradInputTile, ...], tuple[GradWeightTile, ...]]:
    """Returns the tiles of both gradients that a layer may have."""
    sizes = [as_problem(size) for size in representatives(convolution)[0]]
    others = [layer._replace(geometry=size.geometry) for size in grad_weight_representatives(layer)]
    return (
        grad_input_narrow_mma.candidates(sizes, device),
        grad_weight_narrow_mma.candidates(others, device),
    )


def _depthwise(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    for mask in (
        (True, True, bias and meets_all(posed.geometry)),
        (True, False, False),
        (False, True, False),
    ):
        part = gradients_depthwise.plan_gradients(posed, mask, device)
        if part is not None:
            yield part, mask


def _narrow_joint(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    if gradients_narrow_joint.supports(posed, device):
        with_bias = bias and gradients_narrow_joint.counts_the_output(posed.geometry)
        for tile in gradients_narrow_joint.rank(posed, device)[:2]:
            yield gradients_narrow_joint.lower(posed, tile, device, with_bias), (True, True, with_bias)


def _large_kernel(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    shape = (
        gradients_large_kernel.shape_of(posed, device)
        if gradients_large_kernel.supports(posed, device)
        else None
    )
    if shape is not None:
        yield gradients_large_kernel.lower(posed, shape, device), (True, True, False)


def _im2col_nchw(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    every = grad_weight_im2col_nchw_tile.kernels(posed.geometry)
    for with_bias in (False, True) if bias else (False,):
        for one in grad_weight_im2col_nchw.ranked(every, posed, device, with_bias):
            yield one.make(), (False, True, with_bias)


def _stride1(posed: plan.Problem, device: plan.Device, bias: bool) -> Iterator[Made]:
    """Those of the layer, whose rows may begin in several ways, and all tiles for rows that begin as these do."""
    if grad_weight_stride1.supports(posed, device):
        of_layer = kernels_of(layer_of(posed), device).stride1
        every = dict.fromkeys((*of_layer, *grad_weight_stride1_tile.candidates(posed, device)))
        for one in grad_weight_stride1.ranked(every, posed, device):
            yield one.make(), (False, True, False)


def _wide(rng: random.Random) -> Geometry:
    return _layer(rng, rng.choice((64, 72, 128)), rng.choice((64, 96, 128)), rng.choice((2, 3, 4)), 1)


def _of_stride_one(rng: random.Random) -> Geometry:
    found = _layer(rng, rng.choice((32, 64, 72)), rng.choice((32, 64)), rng.choice((3, 5)), 1)
    return found._replace(stride=(1, 1), dilation=(1, 1))


def _few_channels(rng: random.Random) -> Geometry:
    groups = rng.choice((1, 1, 4))
    kernel = rng.choice((2, 3, 4, 5))
    into, out = rng.choice(((64, 3), (48, 1), (16, 8), (8, 24), (3, 40)))
    return _layer(rng, groups * into, groups * out, kernel, groups)


def _of_groups(rng: random.Random) -> Geometry:
    channels = rng.choice((3, 16, 40, 72))
    return _layer(rng, channels, channels, rng.choice((2, 3, 4)), channels)


def _rgb(rng: random.Random) -> Geometry:
    found = _layer(rng, rng.choice((40, 64, 100, 128)), rng.choice((1, 3)), rng.choice((3, 4)), 1)
    return found._replace(stride=(4, 4), dilation=(1, 1)) if rng.random() < 0.3 else found


def _of_many_taps(rng: random.Random) -> Geometry:
    stride = rng.choice((8, 16))
    kernel = (rng.randint(9, 17), stride * rng.choice((1, 2)))
    return Geometry(1, rng.choice((5, 21)), 1, 1, rng.choice((4, 8)), kernel, (stride, stride), (4, 8))


def _layer(rng: random.Random, into: int, out: int, kernel: int, groups: int) -> Geometry:
    stride = rng.choice((1, 2, 2, 3))
    dilation = rng.choice((1, 1, 1, 2))
    return Geometry(
        1,
        into,
        1,
        1,
        out,
        (kernel, rng.choice((kernel, 3))),
        (stride, stride),
        (rng.randint(0, 1), rng.randint(0, 1)),
        dilation=(dilation, dilation),
        groups=groups,
    )


Planner = Callable[[plan.Problem, plan.Device, bool], Iterator[Made]]
FAMILIES: dict[str, tuple[Planner, Callable[[random.Random], Geometry], bool]] = {
    "general": (_general, _few_channels, False),
    "narrow_mma": (_narrow_mma, _few_channels, False),
    "depthwise": (_depthwise, _of_groups, False),
    "narrow_joint": (_narrow_joint, _rgb, True),
    "large_kernel": (_large_kernel, _of_many_taps, False),
    "im2col_nchw": (_im2col_nchw, _wide, True),
    "stride1": (_stride1, _of_stride_one, True),
}


def sizes_of_one_kernel(
    family: str, rng: random.Random, device: plan.Device
) -> list[tuple[plan.Problem, Part, Mask]]:
    """Returns three sizes of a small layer that one kernel computes."""
    planner, layer_of, _ = FAMILIES[family]
    while True:
        layer = layer_of(rng)
        dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float32)
        dtype = rng.choice((*dtypes, torch.float64) if family == "general" else dtypes)
        precision = "ieee" if dtype != torch.float32 else rng.choice(("tf32", "ieee"))
        channels_last, bias = rng.random() < 0.5, rng.random() < 0.5
        if family == "im2col_nchw":
            dtype, precision, channels_last = torch.float32, "tf32", False
        elif family == "stride1":
            precision = "tf32"
        by_kernel: dict[tuple[Kernel, Mask], list[tuple[plan.Problem, Part, Mask]]] = {}
        for _ in range(40):
            geometry = random_sizes(rng, layer, rng.choice((9, 70)))._replace(batch=rng.randint(1, 5))
            if family == "im2col_nchw":
                geometry = geometry._replace(width=8 * -(-geometry.width // 8))
            largest = [max(s, d) - 1 for s, d in zip(layer.stride, layer.dilation, strict=True)]
            padded = geometry._replace(
                output_padding=(rng.randint(0, largest[0]), rng.randint(0, largest[1]))
            )
            geometry = rng.choice((geometry, padded))
            posed = plan.Problem(geometry, dtype, precision, channels_last, channels_last)
            for part, mask in planner(posed, device, bias):
                by_kernel.setdefault((computing(part), mask), []).append((posed, part, mask))
        several = [found for found in by_kernel.values() if len(found) >= 3]
        if several:
            found = rng.choice(several)
            return [found[0], *sorted(found[1:], key=lambda one: one[0].geometry.elements)[-2:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_kernel_computes_several_sizes(family: str, exhaustive: bool) -> None:
    for seed in range(6 if exhaustive else 2):
        found = sizes_of_one_kernel(family, random.Random(seed), H200)
        assert len({problem.geometry for problem, *_ in found}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_in_turn_through_one_kernel(family: str, seed: int) -> None:
    """Each size after another one: poisoned outputs, the same bits again, and float64 as the truth."""
    torch.manual_seed(seed)
    device = call.device_facts(0)
    if FAMILIES[family][2] and device.architecture != "sm_90a":
        pytest.skip("needs sm_90a (TMA)")
    found = sizes_of_one_kernel(family, random.Random(seed), device)
    for posed, part, mask in (*found, found[0]):
        tolerance = 1e-9 if posed.dtype == torch.float64 else TOLERANCE[posed.dtype]
        layouts = (posed.channels_last, posed.weight_channels_last)
        assert_kernel_matches(part, posed.geometry, posed.dtype, layouts, tolerance, mask)
