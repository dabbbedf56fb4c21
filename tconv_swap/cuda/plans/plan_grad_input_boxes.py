"""Plans of the gradient of the input, strides above 1, by boxes of the copy engine (csrc/kernels/grad_input_boxes.cu).
Pure functions of data."""

from __future__ import annotations

from itertools import islice

import torch

from tconv_swap.cuda.integers import INT32_LIMIT
from tconv_swap.cuda.plans import boxes_tile, plan_tile
from tconv_swap.cuda.plans.boxes_tile import BoxTile
from tconv_swap.cuda.plans.grad_input_layout import StridedProblem
from tconv_swap.cuda.plans.plan_general import WORKSPACE_LIMIT_BYTES
from tconv_swap.cuda.problem import Device
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Argument,
    Constant,
    ElementKind,
    Kernel,
    Launch,
    Part,
    TensorMap,
    input_,
    int64,
    output,
    tensor_map,
    workspace,
)

FAMILY = "box tile"
#: The kernel's code does not depend on it, but a table of its constants does.
MOST_TAPS = 64
#: Of a group, on either side: with fewer it was not measured, and most of a chunk or of a multiply is padding. (The
#: halo tile was the faster where the output's leave half of a chunk empty.)
LEAST_CHANNELS = 32
ELEMENT_KINDS = {
    "TF32": ElementKind.TFLOAT32,
    "FP16": ElementKind.FLOAT16,
    "BF16": ElementKind.BFLOAT16,
}
_ALIGNMENT = 16


def claims(problem: StridedProblem, device: Device) -> bool:
    """Whether the kernel computes the problem."""
    geometry = problem.geometry
    if device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    if problem.dtype == torch.float64 or problem.precision not in ELEMENT_KINDS:
        return False
    if not (problem.input_channels_last and problem.weight_channels_last):
        return False
    sizes = [geometry.in_channels_per_group]
    if problem.output_channels_last:
        sizes.append(geometry.out_channels_per_group)
    if any(size * problem.item % _ALIGNMENT for size in sizes):
        return False
    pixels = geometry.batch * geometry.height * geometry.width
    return (
        max(problem.step) <= boxes_tile.MOST_STEP
        and geometry.taps <= MOST_TAPS
        and max(pixels, geometry.batch * problem.cells[0] * problem.cells[1]) < INT32_LIMIT
    )


def part_candidates(problem: StridedProblem, device: Device, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    half_empty = 2 * geometry.in_channels_per_group * problem.item <= boxes_tile.ROW_BYTES
    if channels < LEAST_CHANNELS or half_empty or not claims(problem, device):
        return []
    grad_input_bytes = 4 * geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    found = (
        tile
        for tile in boxes_tile.ranked(problem, device)
        if tile.splits == 1 or tile.splits * grad_input_bytes <= WORKSPACE_LIMIT_BYTES
    )
    return [part_with_tile(problem, tile, device.multiprocessors) for tile in islice(found, count)]


def part_with_tile(
    problem: StridedProblem,
    tile: BoxTile,
    multiprocessors: int = 132,
    grad_output: Argument = input_(0),  # noqa: B008 - plain data
    weight: Argument = input_(2),  # noqa: B008
) -> Part:
    """The part that computes the problem with this tile. ``grad_output``, ``weight``: where they lie, channels_last."""
    geometry = problem.geometry
    works = boxes_tile.work_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    split = tile.splits > 1
    to = workspace(0) if split else output(0)
    _, tiles_h, tiles_w = boxes_tile.tile_counts(problem, tile)
    shared = boxes_tile.shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Out", "float" if split else ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16").index(problem.precision)),
        *((name, value) for name, value in geometry.layer_constants if not name.startswith("STRIDE")),
        ("STEP_H", problem.step[0]),
        ("STEP_W", problem.step[1]),
        ("OUT_HEIGHT", geometry.out_height),
        ("OUT_WIDTH", geometry.out_width),
        ("OUTPUT_CHANNELS_LAST", problem.output_channels_last),
        ("FLAT", boxes_tile.flat(problem)),
        ("DENSE", tile.dense),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("TILES_H", 1 if boxes_tile.flat(problem) else tiles_h),
        ("TILES_W", tiles_w),
        ("M_TILES", tile.m_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("TEAMS", tile.teams),
        ("WARPGROUPS_H", tile.warpgroups_h),
        ("BLOCK_CHANNELS", tile.channels),
        *boxes_tile.pitches(problem, tile).items(),
        ("INPUT_STAGES", tile.input_stages),
        ("WEIGHT_STAGES", tile.weight_stages),
        ("SPLITS", tile.splits),
        ("SLICES_FIRST", tile.slices_first),
        ("PHASED", tile.phased),
        ("SHARED_BYTES", shared),
    )
    main = Launch(
        # With 128 sums, a thread's other registers are in some geometries a few words too little to store them by.
        Kernel(
            "grad_input_boxes.cu", "grad_input_boxes", constants, spills=tile.m_tiles * tile.channels >= 256
        ),
        grid=min(works, multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            to,
            int64(geometry.batch),
            int64(works),
        ),
        shared_bytes=shared,
        tensor_maps=(
            _grad_output_map(problem, tile, grad_output),
            _weight_map(problem, tile, weight),
        ),
    )
    launches = [main]
    if split:
        launches.append(plan_tile.reduce_launch(problem, tile.splits, 0, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        4 * count * tile.splits if split else 0,
    )


def _grad_output_map(problem: StridedProblem, tile: BoxTile, base: Argument) -> TensorMap:
    """Channels, groups if there are several, columns, rows, images."""
    geometry = problem.geometry
    pixel = geometry.in_channels * problem.item
    images, rows = geometry.batch, geometry.height
    if boxes_tile.flat(problem):
        images, rows = 1, images * rows
    box_h, box_w = boxes_tile.box_size(problem, tile)
    step_h, step_w = problem.step
    if tile.phased:
        return TensorMap(
            base,
            ELEMENT_KINDS[problem.precision],
            (geometry.in_channels, step_w, geometry.width // step_w, rows, images),
            (pixel, step_w * pixel, geometry.width * pixel, rows * geometry.width * pixel),
            (boxes_tile.ROW_BYTES // problem.item, 1, box_w, (box_h - 1) * step_h + 1, tile.images),
            (1, 1, 1, step_h, 1),
            fetched_bytes=boxes_tile.fetched_bytes(problem),
        )
    group = geometry.in_channels_per_group
    grouped = geometry.groups > 1
    sizes = (group, geometry.groups, geometry.width, rows, images)
    strides = (group * problem.item, pixel, geometry.width * pixel, rows * geometry.width * pixel)
    box = (
        boxes_tile.ROW_BYTES // problem.item,
        1,
        (box_w - 1) * step_w + 1,
        (box_h - 1) * step_h + 1,
        tile.images,
    )
    steps = (1, 1, step_w, step_h, 1)
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        sizes if grouped else _without_groups(sizes),
        strides if grouped else strides[1:],
        box if grouped else _without_groups(box),
        steps if grouped else _without_groups(steps),
        fetched_bytes=boxes_tile.fetched_bytes(problem),
    )


def _without_groups(values: tuple[int, ...]) -> tuple[int, ...]:
    return values[:1] + values[2:]


def _weight_map(problem: StridedProblem, tile: BoxTile, base: Argument) -> TensorMap:
    """Channels of the output, taps, channels of the input, groups."""
    geometry = problem.geometry
    group = geometry.in_channels_per_group * problem.item
    channels = geometry.out_channels_per_group
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        (geometry.in_channels_per_group, geometry.taps, channels, geometry.groups),
        (group, geometry.taps * group, channels * geometry.taps * group),
        (boxes_tile.ROW_BYTES // problem.item, 1, tile.channels, 1),
        (1, 1, 1, 1),
    )
