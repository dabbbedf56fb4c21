"""The plans of normalisation: what they support, how tensors are cut into tiles, and that every kernel compiles."""

from __future__ import annotations

import math
import random
import re
from itertools import product

import pytest
import torch
from planned_kernels import one_of_each
from sampling import sampled

from tconv_swap.kernels.norm import plan
from tconv_swap.kernels.norm.shape import FROM_OUTPUT, Activation, Norm, Tiling
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime import jit
from tconv_swap.runtime.cache import csrc_directory
from tconv_swap.runtime.integers import ceil_div
from tconv_swap.runtime.program import Kernel, Plan

HOPPER = Device("sm_90a", 132, 227 << 10)
DEVICES = (HOPPER, Device("sm_80", 108, 163 << 10), Device("sm_75", 40, 64 << 10))
SHAPES = {
    "small": (128, 512, 4, 4),
    "medium": (128, 64, 32, 32),
    "large": (64, 64, 128, 128),
    "few channels": (16, 3, 256, 256),
    "odd": (7, 33, 7, 9),
    "gemm": (128, 100),
    "even": (5, 6, 3, 6),
}


def norm(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, **arguments: object) -> Norm:
    given = dict(channels_last=False, parameters=torch.float32, per_image=False, eps=1e-5)
    return Norm(shape=shape, dtype=dtype, **{**given, **arguments})  # type: ignore[arg-type]


def plans(one: Norm, device: Device) -> list[Plan]:
    trained = plan.plan_forward(one, trains=True, updates=True, momentum=0.1, saves=True, device=device)
    evaluated = plan.plan_forward(one, trains=False, updates=False, momentum=0.0, saves=False, device=device)
    back = plan.plan_backward(one, trains=True, wants=(True, True), device=device)
    frozen = plan.plan_backward(one, trains=False, wants=(True, False), device=device)
    made = [trained, evaluated, back, frozen]
    assert all(made)
    return [one for one in made if one is not None]


@pytest.mark.parametrize("device", sampled(DEVICES, 3), ids=lambda device: device.architecture)
def test_kernels_compile_without_spills(device: Device, request: pytest.FixtureRequest) -> None:
    """Each commit compiles one kernel of each variant, the one whose block takes the most resources."""
    shared: dict[Kernel, int] = {}
    resources: dict[Kernel, int] = {}
    dtypes = (torch.float16, torch.float32) if device is HOPPER else (torch.float32,)
    for shape, dtype, channels_last, adds in product(SHAPES.values(), dtypes, (False, True), (False, True)):
        channels_last &= len(shape) == 4
        one = norm(shape, dtype, channels_last=channels_last, activation=Activation.RELU, adds=adds)
        for launch in (launch for made in plans(one, device) for launch in made.launches):
            shared[launch.kernel] = max(launch.shared_bytes, shared.get(launch.kernel, 0))
            taken = launch.block * max(launch.shared_bytes, 1)
            resources[launch.kernel] = max(taken, resources.get(launch.kernel, 0))
    for kernel in resources if request.config.getoption("all_architectures") else one_of_each(resources):
        _, log = jit.compile_with_log(kernel, device.architecture)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
        assert spilled, log
        assert not any(spilled), f"{kernel} spills: {log}"
        static = max(int(n) for n in re.findall(r"(\d+) bytes smem", log) or ["0"])
        assert static + shared[kernel] <= device.shared_memory_per_block
        assert shared[kernel] > 48 << 10 or static + shared[kernel] <= 48 << 10


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        *sampled(((activation, torch.float16) for activation in Activation), 3),
        *((Activation.TANH, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
def test_every_activation_and_dtype_compiles(
    activation: Activation, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Each commit compiles the kernels of a training step; those of an evaluation compute the same."""
    every = request.config.getoption("all_architectures")
    parameters = dtype if activation is Activation.TANH else torch.float32
    one = norm(SHAPES["small"], dtype, activation=activation, parameters=parameters, slope=0.2)
    for device in (HOPPER, DEVICES[-1]) if every else (HOPPER,):
        for made in plans(one, device)[:: 1 if every else 2]:
            for launch in made.launches:
                jit.compile_kernel(launch.kernel, device.architecture)


def test_every_source_is_planned() -> None:
    used = {launch.kernel.source for made in plans(norm(SHAPES["small"]), HOPPER) for launch in made.launches}
    assert used == {f"norm/{path.name}" for path in (csrc_directory() / "kernels" / "norm").glob("*.cu")}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("per_image", [False, True])
def test_sizes_are_not_compiled_in(channels_last: bool, per_image: bool) -> None:
    kernels, sizes = set(), list(product((1, 3, 16, 61), (8, 24, 64, 104, 256), (8, 24, 128, 256)))
    for batch, side, channels in sizes:
        shape = (batch, channels, side, side + 8)
        for made in plans(norm(shape, channels_last=channels_last, per_image=per_image), HOPPER):
            kernels |= {launch.kernel for launch in made.launches}
    # Forward and backward: a single launch has three block sizes and three cluster sizes, of which not all occur; two
    # launches are one that reduces, with a cluster or without, and one that applies.
    assert len(kernels) <= 22 < len(sizes)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.architecture)
def test_all_blocks_of_a_reduction_run_at_a_time(device: Device) -> None:
    """Registers of a multiprocessor hold two; of 33 clusters of 8, an H200 seems to run 30 (docs/kernels/norm.md)."""
    rng, reductions = random.Random(0), 0
    for _ in range(300):
        shape = (rng.randint(1, 64), 8 * rng.randint(1, 64), rng.randint(8, 200), rng.randint(8, 200))
        one = norm(shape, rng.choice((torch.float16, torch.float32)), channels_last=rng.random() < 0.7)
        for made in plans(one, device)[::2]:
            for launch in made.launches[:-1]:
                blocks, cluster = launch.grid, dict(launch.kernel.constants)["CLUSTER"]
                several = blocks > Tiling.of(one).tiles * cluster
                at_a_time = 2 * device.multiprocessors
                assert blocks % cluster == 0
                assert not several or blocks <= at_a_time * (30 / 33 if cluster > 1 else 1)
                reductions += 1
    assert reductions > 50


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 8, 9, 16])
def test_a_gpu_of_few_multiprocessors_has_plans(multiprocessors: int) -> None:
    few = Device("sm_120", multiprocessors, 99 << 10)
    for shape, channels_last in product(SHAPES.values(), (False, True)):
        for made in plans(norm(shape, channels_last=channels_last and len(shape) == 4), few):
            assert all(launch.grid > 0 for launch in made.launches)


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if len(shape) == 4])
def test_tiles_and_splits_cover_the_tensor_once(name: str, channels_last: bool, per_image: bool) -> None:
    one = norm(SHAPES[name], channels_last=channels_last, per_image=per_image)
    tiling = Tiling.of(one)
    total = one.batch * one.channels * one.pixels
    if tiling.channels_innermost:
        assert one.channels % tiling.values == 0
        sets = one.batch if per_image else 1
        assert tiling.items * sets * one.channels == total
        assert tiling.tiles * tiling.lanes * tiling.values >= one.channels * sets
    else:
        assert one.pixels % tiling.values == 0
        assert tiling.tiles * tiling.items * tiling.values == total
    for splits in (1, 2, 7, 8, 528):
        assert tiling.split_items(splits) * splits >= tiling.items


@pytest.mark.parametrize("name", SHAPES)
def test_small_tensors_take_one_launch_and_large_ones_two_at_most(name: str) -> None:
    for made in plans(norm(SHAPES[name]), HOPPER):
        assert len(made.launches) <= 2
        assert [one.overlaps_previous for one in made.launches] == [False, True][: len(made.launches)]
        if math.prod(SHAPES[name]) <= 128 * 64 * 32 * 32 and SHAPES[name][1] >= 32:
            assert len(made.launches) == 1


def test_partial_sums_fit_the_workspace() -> None:
    for channels_last in (False, True):
        one = norm((16, 3, 512, 512), torch.float32, channels_last=channels_last)
        for made in plans(one, DEVICES[1])[::2]:
            reduce, apply = made.launches
            splits, words = reduce.grid // Tiling.of(one).tiles, apply.structs[0]
            assert words[12] == splits  # this GPU has no clusters
            assert words[13] * words[12] >= Tiling.of(one).items
            assert made.workspace_bytes == ceil_div(splits, 1) * one.groups * 8


def test_unsupported_dtypes_activations_and_empty_tensors_are_not_claimed() -> None:
    assert (
        plan.plan_backward(norm((2, 3, 4, 4), torch.float64), trains=True, wants=(True, True), device=HOPPER)
        is None
    )
    mixed = norm((2, 3, 4, 4), torch.float32, parameters=torch.float16)
    assert plan.plan_backward(mixed, trains=True, wants=(True, True), device=HOPPER) is None
    unkept = norm((2, 3, 4, 4), activation=Activation.SILU, adds=True)
    assert plan.plan_backward(unkept, trains=True, wants=(True, True), device=HOPPER) is None
    empty = norm((0, 3, 4, 4))
    assert plan.plan_backward(empty, trains=True, wants=(True, True), device=HOPPER) is None


@pytest.mark.parametrize(
    ("activation", "dtype", "channels_last"),
    sampled(
        [
            (Activation.TANH, torch.float16, False),
            (Activation.TANH, torch.float16, True),
            *(
                (one, torch.float16, place % 2 == 0)
                for place, one in enumerate(sorted(FROM_OUTPUT - {Activation.TANH}))
            ),
            (Activation.TANH, torch.bfloat16, True),
            (Activation.TANH, torch.float32, False),
        ],
        2,
    ),
    ids=str,
)
def test_every_sum_compiles(
    activation: Activation, dtype: torch.dtype, channels_last: bool, request: pytest.FixtureRequest
) -> None:
    """Each commit compiles a training step of every activation and dtype in one layout, and of one in both."""
    every = request.config.getoption("all_architectures")
    for layout in (False, True) if every else (channels_last,):
        one = norm(SHAPES["even"], dtype, channels_last=layout, activation=activation, adds=True)
        for device in (HOPPER, DEVICES[-1]) if every else (HOPPER,):
            for made in plans(one, device)[:: 1 if every else 2]:
                for launch in made.launches:
                    jit.compile_kernel(launch.kernel, device.architecture)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 12, 49, 1000, 65535, 2**29 + 1])
def test_division_by_a_magic_number(divisor: int) -> None:
    from tconv_swap.kernels.norm.shape import division

    magic, shift = division(divisor)
    magic %= 1 << 32
    for n in (0, 1, divisor - 1, divisor, 7 * divisor - 1, 2**30 - 1, 2**31 - 1):
        assert ((n * magic >> 32) + n) >> shift == n // divisor
