"""Plans both gradients in one pass over grad_output where the kernel is large: FCN heads
(csrc/kernels/gradients/large_kernel.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tconv_swap.kernels.common.dtypes import PRECISIONS
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.sizes import large_kernel_sizes
from tconv_swap.kernels.gradients.narrow_mma import MANY_TAPS, overlapping
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    workspace,
)

FAMILY = "large_kernel"
MAX_CHANNELS = 32
MIN_WARPS, MAX_WARPS = 4, 12
WARP_TAPS = {2: 64, 4: 32}
#: The most steps of 16 pixels that a warp adds up one after the other: rounding errors grow with the root of it.
LONGEST_CHAIN = 256
#: The fewest taps in float32. This family is faster for smaller kernels too, but they have more pixels to add up in one
#: chain: with 32 x 32 and 16 x 16 taps it was less accurate than PyTorch (docs/kernels/gradients/large_kernel.md).
MANY_TAPS_FLOAT32 = 2048
#: The fewest steps of a split, and the pixels of a step.
MIN_STEPS = 8
STEP_PIXELS = 16
#: A second kernel, whose blocks have the most warps, is compiled if it leaves at most this share of the partial sums.
FEWER_SUMS = 0.75


@dataclass(frozen=True, slots=True)
class Shape:
    """How the blocks of csrc/kernels/gradients/large_kernel.cu divide the work: ``tap_blocks`` blocks of ``warps``
    warps divide the taps, ``warp_taps`` for each warp; ``splits`` divide the pixels."""

    warps: int
    warp_taps: int
    splits: int
    tap_blocks: int


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel computes the gradients of a problem."""
    g = problem.geometry
    if problem.dtype not in PRECISIONS or device.compute_capability < 80 or g.batch == 0:
        return False
    if problem.channels_last != problem.weight_channels_last or g.groups != 1 or g.dilation != (1, 1):
        return False
    vector = 16 // problem.dtype.itemsize
    column_elements = g.out_channels if problem.channels_last else 1
    whole = all(
        n * column_elements % vector == 0 for n in (g.kernel[1], g.stride[1], g.padding[1], g.out_width)
    )
    sizes = (
        g.in_channels * g.height * g.width,
        g.out_channels * g.out_height * g.out_width,
        g.in_channels * g.out_channels * g.taps,
    )
    ieee = problem.dtype != torch.float32 or g.taps >= MANY_TAPS or problem.precision == "ieee"
    return whole and g.in_channels <= MAX_CHANNELS and max(sizes) < INT32_LIMIT and ieee


def pays(problem: Problem) -> bool:
    """Returns whether it was measured to be faster than the two narrow kernels
    (docs/kernels/gradients/large_kernel.md). In float32, with its three products, it wins only in channels_last, where
    the narrow kernels read one channel of a pixel at a time."""
    taps = problem.geometry.taps
    if problem.dtype == torch.float32:
        return problem.channels_last and taps >= MANY_TAPS_FLOAT32
    return taps >= MANY_TAPS


def shape_of(problem: Problem, device: Device) -> Shape | None:
    """Returns the shape that fills the GPU, or the one of the fewest blocks, or None if their partial sums would take
    too much memory."""
    for warps, tap_blocks in _warps_and_tap_blocks(problem, device):
        shape = _split(problem, warps, tap_blocks, device)
        if partial_bytes(problem, shape) <= WORKSPACE_LIMIT_BYTES:
            return shape
    return None


def _warps_and_tap_blocks(problem: Problem, device: Device) -> list[tuple[int, int]]:
    """Returns the warps and the blocks over the taps that a layer has for all its sizes: those that fill the GPU, and
    those that leave the fewest partial sums."""
    warp_taps = WARP_TAPS[problem.dtype.itemsize]
    warp_tiles = ceil_div(problem.geometry.out_channels * problem.geometry.taps, warp_taps)
    max_warps = min(
        MAX_WARPS, device.shared_memory_per_block // shared_bytes(problem, Shape(1, warp_taps, 1, 1))
    )
    waves = ceil_div(warp_tiles, device.multiprocessors * max_warps)
    filling = max(MIN_WARPS, ceil_div(warp_tiles, device.multiprocessors * waves))
    found = [(filling, ceil_div(warp_tiles, filling))]
    if ceil_div(warp_tiles, max_warps) <= FEWER_SUMS * found[0][1]:
        found.append((max_warps, ceil_div(warp_tiles, max_warps)))
    return found


def kernels_of(layer: Problem, device: Device) -> int:
    """Returns how many kernels a layer has for all its sizes."""
    g = layer.geometry
    if layer.dtype not in PRECISIONS or device.compute_capability < 80 or g.groups > 1 or not pays(layer):
        return 0
    return len(_warps_and_tap_blocks(layer, device)) if g.in_channels <= MAX_CHANNELS else 0


def _split(problem: Problem, warps: int, tap_blocks: int, device: Device) -> Shape:
    geometry = problem.geometry
    steps = geometry.batch * geometry.height * ceil_div(geometry.width, STEP_PIXELS)
    weights = 4 * geometry.in_channels * geometry.out_channels * geometry.taps
    wanted = max(
        1, min(device.multiprocessors // tap_blocks, steps // MIN_STEPS), ceil_div(steps, LONGEST_CHAIN)
    )
    splits = max(1, min(wanted, WORKSPACE_LIMIT_BYTES // 2 // weights))
    return Shape(warps, WARP_TAPS[problem.dtype.itemsize], splits, tap_blocks)


def partial_bytes(problem: Problem, shape: Shape) -> int:
    """Returns the bytes of the partial sums that blocks store."""
    geometry = problem.geometry
    images = 4 * geometry.batch * geometry.in_channels * geometry.height * geometry.width
    weights = 4 * geometry.in_channels * geometry.out_channels * geometry.taps
    copies = round_up(images * shape.tap_blocks, WORKSPACE_ALIGNMENT)
    return copies + (weights * shape.splits if shape.splits > 1 else 0)


def plan_gradients(problem: Problem, device: Device) -> Part | None:
    """Returns the part, or None for a problem that the family does not compute.

    Inputs: grad_output, input, weight. Outputs: the gradients of the input and of the weight. Workspace: at most 64
    MiB.
    """
    if not supports(problem, device) or not pays(problem):
        return None
    shape = shape_of(problem, device)
    return None if shape is None else lower(problem, shape, device)


def shared_bytes(problem: Problem, shape: Shape) -> int:
    """Returns SHARED_BYTES of csrc/kernels/gradients/large_kernel.cu."""
    item = problem.dtype.itemsize
    parts = 2 if item == 4 else 1
    m_tiles = ceil_div(problem.geometry.in_channels, 16)
    im2col = parts * 16 * (shape.warp_taps * item + 16)
    weights = shape.warp_taps * item // 32 * m_tiles * parts * 512
    sums = 2 * m_tiles * 8 * 128
    return shape.warps * (im2col + weights + sums)


def lower(problem: Problem, shape: Shape, device: Device) -> Part:
    """Returns the part that computes the problem in this shape."""
    g = problem.geometry
    shared = shared_bytes(problem, shape)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int"),
        *g.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("PRECISION", PRECISIONS[problem.dtype]),
        ("WARPS", shape.warps),
        ("WARP_TAPS", shape.warp_taps),
        ("SHARED_BYTES", shared),
    )
    inputs = g.batch * g.in_channels * g.height * g.width
    weights = g.in_channels * g.out_channels * g.taps
    weights_at = round_up(4 * inputs * shape.tap_blocks, WORKSPACE_ALIGNMENT)
    split = shape.splits > 1
    launch = Launch(
        Kernel("gradients/large_kernel.cu", "gradients_large_kernel", constants),
        grid=shape.tap_blocks * shape.splits,
        block=32 * shape.warps,
        arguments=(
            input_(1),
            input_(0),
            input_(2),
            workspace(0),
            workspace(weights_at) if split else output(1),
            struct(0),
        ),
        shared_bytes=shared,
        structs=(large_kernel_sizes(g, STEP_PIXELS, shape.splits),),
    )
    launches = [launch, split_k_reduce(problem.dtype, inputs, shape.tap_blocks, 0, 0)]
    if split:
        launches.append(split_k_reduce(problem.dtype, weights, shape.splits, weights_at, 1))
    why = f"{g.kernel[0]} x {g.kernel[1]} taps: all gradients in one pass, {shape.warps} warps, {shape.splits} splits"
    return Part(FAMILY, why, overlapping(launches, device), partial_bytes(problem, shape))
