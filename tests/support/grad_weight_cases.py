"""Layers, random problems and tiles of the gradient of the weight, for the families that have pixels along k."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from harness import assert_kernel_matches
from size_cases import random_output_padding

from tconv_swap.cuda import call
from tconv_swap.geometry import Geometry
from tconv_swap.kernels import plan
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.grad_weight import im2col_nchw as grad_weight_im2col_nchw
from tconv_swap.kernels.grad_weight import im2col_nchw_clocks as grad_weight_im2col_nchw_clocks
from tconv_swap.kernels.grad_weight import im2col_nchw_tile as grad_weight_im2col_nchw_tile
from tconv_swap.kernels.grad_weight import im2col_nhwc as grad_weight_im2col_nhwc
from tconv_swap.kernels.grad_weight import im2col_nhwc_clocks as grad_weight_im2col_nhwc_clocks
from tconv_swap.kernels.grad_weight import im2col_nhwc_tile as grad_weight_im2col_nhwc_tile
from tconv_swap.kernels.grad_weight import implicit_gemm_tma_tile as grad_weight_tma_tile
from tconv_swap.kernels.grad_weight.selection import layer_of
from tconv_swap.runtime.program import Part

H200 = plan.Device("sm_90a", 132, 227 << 10)
UNET = Geometry(4, 1024, 32, 32, 512, (2, 2), (2, 2))
SMALL_MAP = Geometry(128, 512, 4, 4, 256, (4, 4), (2, 2), (1, 1))
WIDE = Geometry(32, 128, 64, 64, 64, (4, 4), (2, 2), (1, 1))
ODD = Geometry(8, 256, 37, 37, 256, (4, 4), (4, 4))
GROUPED = Geometry(1, 4096, 64, 64, 2048, (3, 3), (2, 2), groups=8)
ONE_ROW = Geometry(4, 512, 1, 512, 256, (1, 16), (1, 8), (0, 4))
LAYERS = (UNET, SMALL_MAP, WIDE, ODD, GROUPED)
#: Beside them, rows shorter than a box, and a single row.
STRIDED = (*LAYERS, Geometry(2, 64, 14, 14, 64, (2, 2), (2, 2)), ONE_ROW)
#: Relative L2 error of the weight's gradient against float64, as in tests/cuda/test_cuda_op.py.
TOLERANCE = 1e-3
#: The same of the bias's gradient, which is summed with compensation: about the rounding of the result; plain sums are
#: farther off.
BIAS_TOLERANCE = 1e-7


def tf32_problem(geometry: Geometry, channels_last: bool = False) -> plan.Problem:
    """Returns the problem in TF32, with images and weight in the same layout."""
    return plan.Problem(geometry, torch.float32, "tf32", channels_last, channels_last)


def random_problem(rng: random.Random, channels_last: bool) -> plan.Problem:
    """Returns a random problem in TF32; the weight has either layout."""
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
            random_output_padding(rng, stride, dilation),
            dilation,
            groups,
        )
        if geometry.out_height > 0 and geometry.out_width > 0:
            return plan.Problem(geometry, torch.float32, "tf32", channels_last, rng.random() < 0.5)


def hopper() -> plan.Device:
    """Returns the GPU, or skips the test where it has no wgmma."""
    device = call.device_facts(0)
    if device.architecture != "sm_90a":
        pytest.skip("needs a GPU with wgmma")
    return device


def nchw_tiles(problem: plan.Problem, device: plan.Device) -> list[grad_weight_im2col_nchw_tile.Tile]:
    """Returns all tiles of im2col_nchw that compute the problem, not only those that a plan takes: each kernel that the
    layer may have, with each stage."""
    g = problem.geometry
    if not grad_weight_im2col_nchw.supports(problem, device):
        return []
    found = [
        grad_weight_im2col_nchw_clocks.with_splits(g, kernel, stage, device)
        for kernel in grad_weight_im2col_nchw_tile.kernels(g)
        for stage in grad_weight_im2col_nchw_tile.stages_of(g)
        if grad_weight_im2col_nchw_tile.supports_stage(g, kernel, stage, device)
        and grad_weight_im2col_nchw_tile.copied_bytes(g, stage) <= MAX_COPY_BYTES
    ]
    return [tile for _, tile in filter(None, found)]


def nhwc_tiles(problem: plan.Problem, device: plan.Device) -> list[grad_weight_im2col_nhwc_tile.Tile]:
    """Returns all tiles of im2col_nhwc that compute the problem: each kernel that the layer may have, with each choice
    of pixels and splits."""
    g = problem.geometry
    if not grad_weight_im2col_nhwc.supports(problem, device):
        return []
    found = []
    for one in grad_weight_im2col_nhwc_clocks.pool(layer_of(problem), device):
        for pixels, _ in one.stages:
            if not grad_weight_im2col_nhwc_tile.covers(g, pixels):
                continue
            stages, cluster = grad_weight_im2col_nhwc_tile.stages_of(g, pixels), one.tile.cluster
            choices = grad_weight_im2col_nhwc_clocks.split_choices(
                stages, one.blocks, one.bytes_of_copy, cluster, device
            )
            found += [replace(one.tile, pixels=pixels, splits=splits) for splits in choices]
    return found


def assert_random_tile_matches(channels_last: bool, seed: int, with_bias: bool) -> None:
    """Runs a random tile of the family for the layout on a random problem, against float64."""
    device, rng = hopper(), random.Random(seed)
    torch.manual_seed(seed)
    problem, part = random_part(rng, channels_last, with_bias, device)
    assert_part_matches(problem, part, with_bias)


def random_part(
    rng: random.Random, channels_last: bool, with_bias: bool, device: plan.Device
) -> tuple[plan.Problem, Part]:
    """Returns a random problem that the family for the layout computes, and a random tile of it."""
    while True:
        problem = random_problem(rng, channels_last)
        if channels_last:
            adds_bias = grad_weight_im2col_nhwc.adds_all_of_grad_output(problem.geometry)
            of_nhwc = nhwc_tiles(problem, device) if adds_bias or not with_bias else []
            if of_nhwc:
                tile = rng.choice(of_nhwc)
                return problem, grad_weight_im2col_nhwc.lower(problem, tile, device, with_bias)
        else:
            adds_bias = grad_weight_im2col_nchw.adds_all_of_grad_output(problem.geometry)
            of_nchw = nchw_tiles(problem, device) if adds_bias or not with_bias else []
            if of_nchw:
                chosen = rng.choice(of_nchw)
                return problem, grad_weight_im2col_nchw.lower(problem, chosen, device, with_bias)


def assert_part_matches(problem: plan.Problem, part: Part, with_bias: bool) -> None:
    """Fails unless the part matches float64 in poisoned memory, with the same bits twice."""
    layouts, mask = (problem.channels_last, problem.weight_channels_last), (False, True, with_bias)
    run = assert_kernel_matches(part, problem.geometry, torch.float32, layouts, TOLERANCE, mask)
    if with_bias:
        sums = run.truths[1]
        assert (run.found[1].double() - sums).norm() <= BIAS_TOLERANCE * sums.norm(), part.why


@lru_cache
def tma_tiles(
    problem: plan.Problem,
) -> list[tuple[grad_weight_tma_tile.TmaKernel, grad_weight_tma_tile.Stage]]:
    """Returns some kernels of the copy engine that a size may have, each with a tile."""
    of, size = grad_weight_tma_tile, problem.geometry
    kernels = of.kernels_of_sizes(problem, H200, (size,))
    found = [(one, stage) for one in kernels for _, stage in of.stages_of(size, one, H200)]
    return random.Random(0).sample(found, min(len(found), 60))
