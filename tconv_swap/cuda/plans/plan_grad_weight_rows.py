"""Plans of csrc/kernels/grad_weight_rows.cu: the gradient of the weight in TF32 and NCHW, pixels along k (sm_90a)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from tconv_swap.cuda.plans.grad_weight_rows_tile import (
    EXTRA_BYTES,
    Lines,
    Tile,
    blocks_of,
    candidates,
    ceil_div,
    expected_clocks,
    lines_of,
    weight_bytes,
)
from tconv_swap.cuda.plans.plan_general import reduce_slices
from tconv_swap.cuda.problem import Device, Problem
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
from tconv_swap.geometry import Geometry, Pair

_FAMILY = "weight rows"
_THREADS = 384
_PART_THREADS = 256
_REDUCE_THREADS = 256
_MOST_STAGES_IN_RING = 6
#: Of a pass that parts a tensor, for the whole chip to be busy.
_ENOUGH_WARPS = 8192
#: Offsets within an image, and coordinates of boxes, are counted in 32 bits.
_INT32_LIMIT = 2**31
#: Planes that one thread makes.
_MOST_PLANES = 36


def plan_grad_weight(problem: Problem, device: Device, with_bias: bool = False) -> Part | None:
    """Inputs: grad_output, input (16-byte aligned). Outputs: the gradient of the weight, and with ``with_bias`` that of
    the bias. None for what this family does not claim.

    Workspace: a copy of grad_output for every column of taps in a stride (and row, where rows are unfolded), one of
    the input where it does not lie as lines of pixels already, and at most 64 MiB of partial sums, or one copy of the
    gradient if that is more.
    """
    parts = part_candidates(problem, device, with_bias, count=1)
    return parts[0] if parts else None


def part_candidates(problem: Problem, device: Device, with_bias: bool, count: int) -> list[Part]:
    """The ``count`` parts that are expected to be the fastest, the best first."""
    g = problem.geometry
    if not claims(problem, device) or (with_bias and not _reads_all_of_grad_output(g)):
        return []
    lines = lines_of(g)
    stages = lines.stages(g.batch)
    tiles = sorted(candidates(g, stages, device), key=lambda tile: expected_clocks(g, stages, tile, device))
    return [plan_with_tile(problem, lines, tile, device, with_bias) for tile in tiles[:count]]


def claims(problem: Problem, device: Device) -> bool:
    """Whether the kernels can do it."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype != torch.float32 or problem.precision != "tf32":
        return False
    if problem.channels_last or g.batch == 0:
        return False
    lines = lines_of(g)
    rows, cols = _phases(g, lines)
    if rows * cols > _MOST_PLANES:
        return False
    image = max(g.in_channels * (g.height * g.width + 3), g.out_channels * g.out_height * g.out_width)
    line = (ceil_div(g.out_height, g.stride[0]) + lines.lead) * g.width
    if (
        max(image, g.out_channels * line, (lines.lead + g.kernel[0] * g.dilation[0]) * g.width) * 4
        >= _INT32_LIMIT
    ):
        return False
    pixels = g.batch * g.height * g.width
    return pixels * g.taps < _INT32_LIMIT


def _phases(geometry: Geometry, lines: Lines) -> Pair:
    """Planes of grad_output, by rows and columns."""
    g = geometry
    period = g.stride[0] // gcd(g.stride[0], g.dilation[0])
    return g.kernel[0] if lines.unfold_rows else min(g.kernel[0], period), g.kernel[1]


def _reads_all_of_grad_output(geometry: Geometry) -> bool:
    """Whether the planes hold every pixel of grad_output, those with an offset in [0, stride) each once."""
    g = geometry
    offsets = [{k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis])} for axis in (0, 1)]
    all_cols = g.out_width <= g.width * g.stride[1] and offsets[1].issuperset(range(g.stride[1]))
    if lines_of(g).unfold_rows:
        return (
            all_cols and g.out_height <= g.height * g.stride[0] and offsets[0].issuperset(range(g.stride[0]))
        )
    return all_cols and {offset % g.stride[0] for offset in offsets[0]} == set(range(g.stride[0]))


@dataclass(frozen=True, slots=True)
class Planes:
    """A tensor of lines of pixels, [plane][n][channel][cell row][cell column]; ``pitch``: floats of a line."""

    planes: int
    channels: int
    cells: Pair
    pitch: int

    def bytes(self, batch: int) -> int:
        return 4 * self.planes * batch * self.channels * self.pitch

    def map(self, base: Argument, box: int, rows: int, batch: int, element: ElementKind) -> TensorMap:
        """``box``: pixels, ``rows``: channels that a box brings."""
        return TensorMap(
            base,
            element,
            sizes=(self.cells[0] * self.cells[1], self.channels, self.planes * batch),
            strides=(4 * self.pitch, 4 * self.channels * self.pitch),
            box=(box, rows, 1),
            steps=(1, 1, 1),
            swizzle_bytes=4 * box,
        )


def planes_of(planes: int, channels: int, cells: Pair) -> Planes:
    return Planes(planes, channels, cells, ceil_div(cells[0] * cells[1], 4) * 4)


def plan_with_tile(problem: Problem, lines: Lines, tile: Tile, device: Device, with_bias: bool) -> Part:
    """The plan that computes the problem with this tile."""
    g = problem.geometry
    phases = _phases(g, lines)
    cells = g.height if lines.unfold_rows else ceil_div(g.out_height, g.stride[0]) + lines.lead
    out = planes_of(phases[0] * phases[1], g.out_channels, (cells, g.width))
    into = planes_of(1, g.in_channels, (g.height, g.width))
    lies_as_lines = into.pitch == g.height * g.width
    room = Room()
    out_at = room.take(out.bytes(g.batch))
    bias_rows = bias_rows_of(problem, out)
    bias_at = room.take(4 * bias_rows * g.out_channels) if with_bias else 0
    launches = []
    in_base = input_(1)
    if not lies_as_lines:
        in_at = room.take(into.bytes(g.batch))
        in_base = workspace(in_at)
        launches.append(
            part_phases(problem, input_(1), in_at, into, (g.height, g.width), unparted(g.height), None)
        )
    parting = (
        ("PIXELS_H", g.height),
        ("KERNEL_H", g.kernel[0]),
        ("ROW_PHASES", phases[0]),
        ("COL_PHASES", phases[1]),
        ("STRIDE_H", g.stride[0]),
        ("STRIDE_W", g.stride[1]),
        ("PADDING_H", g.padding[0]),
        ("PADDING_W", g.padding[1]),
        ("DILATION_H", g.dilation[0]),
        ("DILATION_W", g.dilation[1]),
        ("UNFOLD_ROWS", lines.unfold_rows),
        ("LEAD", lines.lead),
    )
    out_size = (g.out_height, g.out_width)
    launches.append(
        part_phases(problem, input_(0), out_at, out, out_size, parting, bias_at if with_bias else None)
    )
    direct = tile.slices == 1 and problem.weight_channels_last
    partial_at = 0 if direct else room.take(tile.slices * weight_bytes(g))
    target = output(0) if direct else workspace(partial_at)
    ring = min(_MOST_STAGES_IN_RING, (device.shared_memory_per_block - EXTRA_BYTES) // tile.stage_bytes)
    tile_constants: tuple[tuple[str, Constant], ...] = (
        *g.constants,
        ("UNFOLD_ROWS", lines.unfold_rows),
        ("LEAD", lines.lead),
        ("BOX", lines.box),
        ("ROW_PHASES", phases[0]),
        ("TILE_COLS", tile.cols),
        ("SWAPPED", tile.swapped),
        ("CHUNK", tile.chunk),
        ("SHARES", tile.shares),
        ("INPUT_COPY", tile.input_copy),
        ("OUTPUT_COPY", tile.output_copy),
        ("STAGES", ring),
    )
    launches.append(
        Launch(
            # A few words, outside the loops.
            Kernel(
                "grad_weight_rows.cu",
                "grad_weight_rows",
                tile_constants,
                spills=tile.swapped and tile.cols > 128,
            ),
            grid=blocks_of(g, tile),
            block=_THREADS,
            arguments=(tensor_map(0), tensor_map(1), target, int64(g.batch), int64(tile.slices)),
            shared_bytes=ring * tile.stage_bytes + EXTRA_BYTES,
            overlaps_previous=True,
            tensor_maps=(
                into.map(in_base, lines.box, tile.input_copy, g.batch, ElementKind.TFLOAT32),
                out.map(workspace(out_at), lines.box, tile.output_copy, g.batch, ElementKind.FLOAT32),
            ),
        )
    )
    if not direct:
        launches.append(reduce(problem, tile.slices, partial_at))
    if with_bias:
        launches.append(reduce_slices(problem.dtype, g.out_channels, bias_rows, bias_at, 1))
    return Part(_FAMILY, f"wgmma, {tile}, boxes of {lines.box} pixels", tuple(launches), room.bytes)


class Room:
    """The workspace, dealt out."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, size: int) -> int:
        at = self.bytes
        self.bytes += ceil_div(size, 256) * 256
        return at


def unparted(height: int) -> tuple[tuple[str, Constant], ...]:
    """How part_phases.cu leaves pixels where they are, of images of so many rows."""
    return (
        ("PIXELS_H", height),
        ("ROW_PHASES", 1),
        ("COL_PHASES", 1),
        *((f"{name}_{axis}", 1) for name in ("STRIDE", "DILATION") for axis in "HW"),
        ("KERNEL_H", 1),
        ("PADDING_H", 0),
        ("PADDING_W", 0),
        ("UNFOLD_ROWS", False),
        ("LEAD", 0),
    )


def _segment(problem: Problem, planes: Planes) -> int:
    """Positions that a warp parts."""
    positions = ceil_div(planes.cells[0] * planes.cells[1], 32) * 32
    most = problem.geometry.batch * planes.channels * positions // _ENOUGH_WARPS
    return min(positions, 1024 if most >= 1024 else 256)


def bias_rows_of(problem: Problem, planes: Planes) -> int:
    """What the parting leaves of each channel's sum: of every segment a sum, and what rounding left of it."""
    segments = ceil_div(planes.cells[0] * planes.cells[1], _segment(problem, planes))
    return 2 * problem.geometry.batch * segments


def part_phases(
    problem: Problem,
    source: Argument,
    to: int,
    planes: Planes,
    size: Pair,
    parting: tuple[tuple[str, Constant], ...],
    bias_at: int | None,
) -> Launch:
    """``size``: of the source, in pixels; ``bias_at``: where the sums of the segments go, in the workspace."""
    batch = problem.geometry.batch
    segment = _segment(problem, planes)
    warps = batch * planes.channels * ceil_div(planes.cells[0] * planes.cells[1], segment)
    kernel = Kernel(
        "part_phases.cu",
        "part_phases",
        (
            ("CHANNELS", planes.channels),
            ("SOURCE_H", size[0]),
            ("SOURCE_W", size[1]),
            ("CELL_ROWS", planes.cells[0]),
            ("CELL_COLS", planes.cells[1]),
            ("CHANNEL_PITCH", planes.pitch),
            *parting,
            ("SEGMENT", segment),
            ("WITH_BIAS", bias_at is not None),
            ("THREADS", _PART_THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=ceil_div(warps, _PART_THREADS // 32),
        block=_PART_THREADS,
        arguments=(source, workspace(to), workspace(bias_at or 0), int64(batch)),
    )


def reduce(problem: Problem, slices: int, partial_at: int) -> Launch:
    """The slices' sums, added up, in the order of the weight."""
    g = problem.geometry
    sharers = next(sharers for sharers in (1, 2, 4, 8) if slices <= 4 * sharers or sharers == 8)
    columns = max(32, min(256, 2048 // g.taps // 32 * 32))
    columns = min(columns, ceil_div(g.out_channels_per_group, 8) * 8)
    if sharers == 1:
        grid = g.in_channels * ceil_div(g.out_channels_per_group, columns)
    else:
        grid = ceil_div(weight_bytes(g) // 4 * sharers, _REDUCE_THREADS)
    kernel = Kernel(
        "grad_weight_rows_reduce.cu",
        "grad_weight_rows_reduce",
        (
            ("Element", ELEMENT_TYPES[problem.dtype]),
            *g.layer_constants,
            ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
            ("SHARERS", sharers),
            ("COLUMNS", columns),
            ("THREADS", _REDUCE_THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=grid,
        block=_REDUCE_THREADS,
        arguments=(workspace(partial_at), output(0), int64(slices)),
        overlaps_previous=True,
    )
