"""Plans of the gradient of the input, strides above 1, from NCHW as it lies (csrc/kernels/grad_input_unfolded.cu). Pure
functions of data."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch

from tconv_swap.cuda.integers import INT32_LIMIT, round_up
from tconv_swap.cuda.plans import plan_tile, unfolded_tile
from tconv_swap.cuda.plans.grad_input_layout import StridedProblem
from tconv_swap.cuda.plans.part_phases import part_phases, planes_of, unparted
from tconv_swap.cuda.plans.plan_general import WORKSPACE_LIMIT_BYTES
from tconv_swap.cuda.plans.plan_grad_input_boxes import ELEMENT_KINDS
from tconv_swap.cuda.plans.room import MOST_ARRANGED_BYTES, WORKSPACE_ALIGNMENT
from tconv_swap.cuda.plans.unfolded_tile import UnfoldedTile
from tconv_swap.cuda.problem import Device
from tconv_swap.cuda.program import (
    ELEMENT_TYPES,
    Argument,
    Constant,
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

FAMILY = "unfolded tile"
#: Of a group, on either side: with fewer it was not measured.
LEAST_CHANNELS = 32
#: Multiply-adds for each element of grad_output from which copying grad_output to longer rows pays.
LEAST_MACS_PER_PADDED = 768


def claims(problem: StridedProblem, device: Device) -> bool:
    """Whether the kernel computes the problem."""
    geometry = problem.geometry
    if device.architecture != "sm_90a" or geometry.batch == 0:
        return False
    if problem.dtype == torch.float64 or problem.precision not in ELEMENT_KINDS:
        return False
    if problem.input_channels_last or problem.output_channels_last or problem.weight_channels_last:
        return False
    weights = geometry.in_channels_per_group * geometry.taps
    if weights * problem.item % unfolded_tile.ALIGNMENT:
        return False
    if not aligned(problem) and (problem.item < 4 or _padded_bytes(problem) > MOST_ARRANGED_BYTES):
        return False
    pixels = geometry.batch * max(geometry.height * geometry.width, problem.cells[0] * problem.cells[1])
    return pixels < INT32_LIMIT and geometry.batch * geometry.in_channels < INT32_LIMIT


def aligned(problem: StridedProblem) -> bool:
    """Whether the copy engine can read grad_output's rows as they lie."""
    return problem.geometry.width * problem.item % unfolded_tile.ALIGNMENT == 0


def part_candidates(problem: StridedProblem, device: Device, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    if channels < LEAST_CHANNELS or not claims(problem, device):
        return []
    grad_output_elements = geometry.batch * geometry.in_channels * geometry.height * geometry.width
    if not aligned(problem) and unfolded_tile.macs(problem) < LEAST_MACS_PER_PADDED * grad_output_elements:
        return []
    grad_input_bytes = 4 * geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    found = (
        tile
        for tile in unfolded_tile.ranked(problem, device)
        if tile.splits == 1 or tile.splits * grad_input_bytes <= WORKSPACE_LIMIT_BYTES
    )
    return [part_with_tile(problem, tile, device.multiprocessors) for tile in islice(found, count)]


def part_with_tile(problem: StridedProblem, tile: UnfoldedTile, multiprocessors: int = 132) -> Part:
    """The part that computes the problem with this tile."""
    geometry = problem.geometry
    works = unfolded_tile.work_count(problem, tile)
    count = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
    split = tile.splits > 1
    partial_bytes = round_up(4 * count * tile.splits, WORKSPACE_ALIGNMENT) if split else 0
    grad_output = input_(0) if aligned(problem) else workspace(partial_bytes)
    _, tiles_h, tiles_w = unfolded_tile.tile_counts(problem, tile)
    shared = unfolded_tile.shared_bytes(problem, tile)
    constants: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Out", "float" if split else ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16").index(problem.precision)),
        *((name, value) for name, value in geometry.layer_constants if not name.startswith("STRIDE")),
        ("STEP_H", problem.step[0]),
        ("STEP_W", problem.step[1]),
        ("OUT_HEIGHT", geometry.out_height),
        ("OUT_WIDTH", geometry.out_width),
        ("TILE_N", tile.images),
        ("TILE_H", tile.rows),
        ("TILE_W", tile.cols),
        ("TILES_H", tiles_h),
        ("TILES_W", tiles_w),
        ("M_TILES", tile.m_tiles),
        ("WARPGROUPS", tile.warpgroups),
        ("BLOCK_CHANNELS", tile.channels),
        ("PAIRED", tile.paired),
        ("STAGE_CHANNELS", tile.stage_channels),
        ("BOX_H", unfolded_tile.box_h(problem, tile)),
        ("BOX_W", tile.box_w),
        ("LEAD", unfolded_tile.lead(problem, tile)),
        ("HALVES", unfolded_tile.halves(problem, tile)),
        ("FOLD_W", unfolded_tile.fold(problem, tile)),
        ("INPUT_STAGES", tile.input_stages),
        ("WEIGHT_STAGES", tile.weight_stages),
        ("SPLITS", tile.splits),
        ("SHARED_BYTES", shared),
    )
    main = Launch(
        Kernel("grad_input_unfolded.cu", "grad_input_unfolded", constants),
        grid=min(works, multiprocessors),
        block=tile.threads,
        arguments=(
            tensor_map(0),
            tensor_map(1),
            workspace(0) if split else output(0),
            int64(geometry.batch),
            int64(works),
        ),
        shared_bytes=shared,
        tensor_maps=(_grad_output_map(problem, tile, grad_output), _weight_map(problem, tile)),
    )
    launches = [main]
    if not aligned(problem):
        launches = [_pad_rows(problem, partial_bytes), replace(main, overlaps_previous=True)]
    if split:
        launches.append(plan_tile.reduce_launch(problem, tile.splits, 0, count))
    return Part(
        FAMILY,
        f"{problem.precision} tensor cores, {tile}",
        tuple(launches),
        partial_bytes + (0 if aligned(problem) else _padded_bytes(problem)),
    )


def _padded_width(problem: StridedProblem) -> int:
    align = unfolded_tile.ALIGNMENT // problem.item
    return round_up(problem.geometry.width, align)


def _padded_bytes(problem: StridedProblem) -> int:
    geometry = problem.geometry
    return geometry.batch * geometry.in_channels * geometry.height * _padded_width(problem) * problem.item


def _pad_rows(problem: StridedProblem, to: int) -> Launch:
    """grad_output (float32) with rows that the copy engine can read: one phase of all, in lines that are longer."""
    g = problem.geometry
    planes = planes_of(1, g.in_channels, (g.height, _padded_width(problem)))
    segment = min(round_up(planes.pitch, 32), 1024)
    size = (g.height, g.width)
    return part_phases(g.batch, input_(0), to, planes, size, unparted(g.height), segment=segment)


def _grad_output_map(problem: StridedProblem, tile: UnfoldedTile, base: Argument) -> TensorMap:
    """Columns (folded: so many, and the rest), rows, channels, images."""
    geometry, item = problem.geometry, problem.item
    fold = unfolded_tile.fold(problem, tile)
    row = (geometry.width if aligned(problem) else _padded_width(problem)) * item
    plane = geometry.height * row
    folded = (fold,) if fold > 1 else ()
    box = (tile.box_w // fold, unfolded_tile.box_h(problem, tile), tile.stage_channels, tile.images)
    return TensorMap(
        base,
        ELEMENT_KINDS[problem.precision],
        (*folded, geometry.width // fold, geometry.height, geometry.in_channels, geometry.batch),
        (*(size * item for size in folded), row, plane, geometry.in_channels * plane),
        (*folded, *box),
        (1,) * (len(folded) + len(box)),
        swizzle_bytes=0,
    )


def _weight_map(problem: StridedProblem, tile: UnfoldedTile) -> TensorMap:
    """Channels of the output with their taps, channels of the input, groups."""
    geometry = problem.geometry
    row = geometry.in_channels_per_group * geometry.taps
    channels = geometry.out_channels_per_group
    return TensorMap(
        input_(2),
        ELEMENT_KINDS[problem.precision],
        (row, channels, geometry.groups),
        (row * problem.item, channels * row * problem.item),
        (unfolded_tile.BOX_WORDS * unfolded_tile.word(problem), tile.channels, 1),
        (1, 1, 1),
    )
