"""Plans all gradients of layers whose input is one pixel, in one launch (csrc/kernels/gradients/gemm.cu, sm_90a)."""

from __future__ import annotations

import math

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.general import split_k_reduce
from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    ElementKind,
    Kernel,
    Launch,
    Output,
    Plan,
    TensorMap,
    input_,
    int64,
    output,
    tensor_map,
    workspace,
)

_FAMILY = "gemm"
_THREADS = 256
#: The tile of a block: images at a time, input channels, columns.
IMAGES, CHANNELS, COLUMNS = 128, 128, 64
_BOX_BYTES = 128 * 128
_SUMS_PITCH = CHANNELS + 8
#: Sizes of a cluster, whose blocks add up their sums before they store them; the largest that divides the blocks is
#: taken.
CLUSTERS = (4, 2, 1)
# The constants of ``expected_clocks`` are fitted to 575 times of an H200, in clocks of 1.7 GHz; the standard deviation
# of the logarithm is 0.12 (docs/kernels/gradients/gemm.md).
LAUNCH_CLOCKS = 7960
#: Clocks of a block's tile of images for the gradient of the weight, by the bytes of an element, and for that of the
#: input.
WEIGHT_TILE_CLOCKS, INPUT_TILE_CLOCKS = {2: 2000, 4: 5720}, 5890
#: Clocks of a byte of the weight or its gradient, and of grad_output for each tile of input channels.
WEIGHT_BYTE_CLOCKS, GRAD_OUTPUT_BYTE_CLOCKS = 0.00185, 0.00069
#: Clocks of the launch that adds up partial sums, of a byte of them, and of a block of a cluster for a tile of images.
REDUCE_CLOCKS, SUM_BYTE_CLOCKS, CLUSTER_CLOCKS = 1640, 0.00065, 494
#: The most images; a block computes tiles of them one after another.
_MAX_IMAGES = 512


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the problem: images of one pixel, whose taps are the output's pixels, in the
    order of the weight's taps."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype == torch.float64:
        return False
    if problem.is_ieee:
        return False
    one_product = (
        g.height == g.width == g.groups == 1
        and (g.out_height, g.out_width) == g.kernel
        and g.padding == (0, 0)
        and g.output_padding == (0, 0)
    )
    same_order = problem.channels_last == problem.weight_channels_last or g.taps == 1
    whole = columns_of(g) * problem.dtype.itemsize % TMA_ALIGNMENT == 0 and g.in_channels % 4 == 0
    return one_product and same_order and whole and 0 < g.batch <= _MAX_IMAGES and columns_of(g) < INT32_LIMIT


def columns_of(geometry: Geometry) -> int:
    """Returns how many columns the matrix product has: output channels times taps."""
    return geometry.out_channels * geometry.taps


def cluster_of(geometry: Geometry) -> int:
    """Returns how many blocks a cluster has."""
    blocks = ceil_div(columns_of(geometry), COLUMNS)
    return next(size for size in CLUSTERS if blocks % size == 0)


def expected_clocks(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> float:
    """Returns the expected clocks of the gradients of the mask; infinitely many for a problem that the family does not
    compute."""
    if not supports(problem, device) or not any(output_mask[:2]):
        return math.inf
    g, item = problem.geometry, problem.dtype.itemsize
    wants_input, wants_weight, wants_bias = output_mask
    columns, cluster = columns_of(g), cluster_of(g)
    blocks, across = ceil_div(columns, COLUMNS), ceil_div(g.in_channels, CHANNELS)
    tiles = ceil_div(g.batch, IMAGES)
    of_tile = wants_weight * WEIGHT_TILE_CLOCKS[item] + wants_input * INPUT_TILE_CLOCKS
    clocks: float = LAUNCH_CLOCKS + ceil_div(blocks * across, device.multiprocessors) * tiles * of_tile
    clocks += WEIGHT_BYTE_CLOCKS * columns * g.in_channels * item
    clocks += GRAD_OUTPUT_BYTE_CLOCKS * g.batch * columns * item * across
    if wants_input:
        sums = blocks // cluster * g.batch * g.in_channels * 4
        clocks += REDUCE_CLOCKS + SUM_BYTE_CLOCKS * sums + CLUSTER_CLOCKS * cluster * tiles
    return clocks + wants_bias * REDUCE_CLOCKS


def plan_backward(
    problem: Problem, output_mask: tuple[bool, ...], device: Device, cluster: int | None = None
) -> Plan | None:
    """Returns the plan of the gradients of the mask, or None for a problem that the family does not compute.

    Inputs: grad_output, input, weight (16-byte aligned). Workspace: a copy of grad_input in float32 for each 64
    ``cluster`` columns, and 8 bytes a column.
    """
    if not supports(problem, device) or not any(output_mask[:2]):
        return None
    g, item = problem.geometry, problem.dtype.itemsize
    wants_input, wants_weight, wants_bias = output_mask
    columns = columns_of(g)
    blocks = ceil_div(columns, COLUMNS)
    cluster = cluster or cluster_of(g)
    sums = blocks // cluster if wants_input else 0
    columns_at = round_up(sums * g.batch * g.in_channels * 4, WORKSPACE_ALIGNMENT)
    box_columns = 128 // item
    boxes = 2 * (COLUMNS // box_columns) + CHANNELS // box_columns
    shared = 2048 + boxes * _BOX_BYTES + (IMAGES * _SUMS_PITCH * 4 if wants_input else 0)

    grad_input = Output(g.input_shape, problem.channels_last)
    grad_weight = Output(g.weight_shape, problem.weight_channels_last)
    wanted = zip(output_mask, (grad_input, grad_weight, Output((g.out_channels,))), strict=True)
    outputs = tuple(one for is_wanted, one in wanted if is_wanted)
    weight_index = int(wants_input)
    rounded = ElementKind.FLOAT32 if wants_bias else ElementKind.TFLOAT32
    kernel = Kernel(
        "gradients/gemm.cu",
        "gradients_gemm",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            ("PRECISION", {torch.float16: 1, torch.bfloat16: 2}.get(problem.dtype, 0)),
            ("IN_CHANNELS", g.in_channels),
            ("OUT_CHANNELS", g.out_channels),
            ("TAPS", g.taps),
            ("ALL_COLUMNS", columns),
            ("CHANNELS_LAST", problem.channels_last),
            ("WITH_INPUT", wants_input),
            ("WITH_WEIGHT", wants_weight),
            ("WITH_BIAS", wants_bias),
            ("ROUNDS", wants_bias and item == 4),
            ("CLUSTER", cluster),
            ("SHARED_BYTES", shared),
        ),
    )
    launches = [
        Launch(
            kernel,
            grid=blocks * ceil_div(g.in_channels, CHANNELS),
            block=_THREADS,
            arguments=(
                tensor_map(0),
                tensor_map(1),
                input_(1),
                output(weight_index) if wants_weight else workspace(0),
                workspace(0),
                workspace(columns_at),
                int64(g.batch),
            ),
            shared_bytes=shared,
            tensor_maps=(
                _map(problem, input_(0), columns, g.batch, rounded),
                # Without grad_input the kernel does not load the weight.
                _map(problem, input_(2), columns, g.in_channels)
                if wants_input
                else _map(problem, input_(0), columns, g.batch),
            ),
        )
    ]
    if wants_input:
        launches.append(split_k_reduce(problem.dtype, g.batch * g.in_channels, sums, 0, 0))
    if wants_bias:
        index = len(outputs) - 1
        launches.append(split_k_reduce(problem.dtype, g.out_channels, 2 * g.taps, columns_at, index))
    launches[1:] = [one._replace(overlaps_previous=True) for one in launches[1:]]
    workspace_bytes = columns_at + (columns * 8 if wants_bias else 0)
    why = f"one product of matrices, the sums of {cluster} blocks added up by them"
    return Plan(_FAMILY, why, outputs, tuple(launches), workspace_bytes)


def _map(
    problem: Problem, base: Argument, columns: int, rows: int, kind: ElementKind = ElementKind.TFLOAT32
) -> TensorMap:
    """Returns the tensor map of a matrix, whose boxes are 128 rows of 128 bytes."""
    item = problem.dtype.itemsize
    kinds = {torch.float16: ElementKind.FLOAT16, torch.bfloat16: ElementKind.BFLOAT16}
    return TensorMap(
        base,
        kinds.get(problem.dtype, kind),
        (columns, rows),
        (columns * item,),
        (128 // item, IMAGES),
        (1, 1),
    )
