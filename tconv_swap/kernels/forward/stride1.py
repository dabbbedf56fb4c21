"""Plans of csrc/kernels/forward/stride1.cu: stride 1 in NCHW, a strip's rows one after another (sm_90a); the
output, and the gradient of the input, which is an output of grad_output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import torch

from tconv_swap.kernels.common.epilogue import bias_alone
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.sizes import Words, divisor
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, make_problem
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Constant,
    ElementKind,
    Kernel,
    Launch,
    Output,
    Part,
    Plan,
    TensorMap,
    input_,
    output,
    struct,
    tensor_map,
    workspace,
)

_FAMILY = "stride1"
#: Batch, rows and columns of the maps at one of which strips must be the faster for a layer to have a kernel of them.
LARGE = ((8, 1024, 1024), (1, 1024, 1024), (8, 512, 1024), (8, 512, 512), (16, 256, 256))
#: Work, and channels on either side, from which strips were measured to be the faster.
LEAST_MACS, LEAST_CHANNELS = 1 << 35, 32
#: Of 16 bits: channels of the output, or no more columns of taps.
MANY_CHANNELS, FEW_TAPS = 64, 3
_FILL_THREADS, _PACK_THREADS = 32, 256
#: Pixels of a warpgroup; bytes of a multiply along k.
_PIXELS, _STEP_BYTES = 64, 32
_KINDS = {
    torch.float32: ElementKind.TFLOAT32,
    torch.float16: ElementKind.FLOAT16,
    torch.bfloat16: ElementKind.BFLOAT16,
}
#: As the kernel counts them.
_PRECISIONS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_EXTRA_BYTES = 1024 + 16
_MOST_SLOTS = 4
#: Columns of a multiply that the kernel knows; sums of a thread. Three warpgroups were slower.
_WIDTHS, _MOST_SUMS, _WARPGROUPS = (64, 96, 128, 192, 256), 96, (1, 2)
#: Clocks of a row of the input beside its multiplies.
_ROW_CLOCKS = 400


@dataclass(frozen=True, slots=True)
class Tile:
    """64 ``warpgroups`` pixels by ``channels`` of the output; ``stacked``: rows of taps in one multiply; ``segment``
    rows at a time; ``slots`` rows of the input in shared memory; ``blocks`` for each tile of channels."""

    warpgroups: int
    channels: int
    stacked: bool
    slots: int
    segment: int
    blocks: int

    @property
    def kernel(self) -> tuple[int, int, bool, int]:
        """What is compiled in."""
        return self.warpgroups, self.channels, self.stacked, self.slots

    def __str__(self) -> str:
        return (
            f"{self.channels} channels x {self.warpgroups * _PIXELS} pixels, rows of taps "
            f"{'together' if self.stacked else 'apart'}, {self.segment} rows at a time"
        )


def plan_forward(problem: Problem, has_bias: bool, device: Device) -> Plan | None:
    """The plan of a forward pass where strips are the fastest, or None.

    Inputs: input (16-byte aligned), weight, bias. Output: the output. Workspace: the packed weights.
    """
    posed = _posed(problem, has_bias)
    takes = not in_lines(posed) and computes_some_size(posed, device) and preferred(posed, device)
    plans = plan_candidates(problem, has_bias, device, 1) if takes else []
    return plans[0] if plans else None


def computes_some_size(problem: TileProblem, device: Device) -> bool:
    """Whether ``plan_forward`` makes plans for some sizes of the layer, all by one kernel."""
    return _is_preferred_somewhere(replace(problem, geometry=of_any_size(problem.geometry)), device)


@lru_cache(maxsize=256)
def _is_preferred_somewhere(layer: TileProblem, device: Device) -> bool:
    return any(preferred(_sized(layer, *size), device) for size in LARGE)


def plan_candidates(problem: Problem, has_bias: bool, device: Device, count: int) -> list[Plan]:
    """The ``count`` plans that are expected to be the fastest, the best first."""
    outputs = (Output(problem.geometry.output_shape),)
    return [
        Plan(part.family, part.why, outputs, part.launches, part.workspace_bytes)
        for part in part_candidates(_posed(problem, has_bias), device, count)
    ]


def _posed(problem: Problem, has_bias: bool) -> TileProblem:
    return make_problem(
        problem.geometry,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias,
    )


def part_candidates(problem: TileProblem, device: Device, count: int) -> list[Part]:
    """The same, of an output or of a gradient of an input."""
    if not claims(problem, device):
        return []
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    kernel = _kernel_of_layer(layer, in_lines(problem), planes_of(problem), device)

    def order(tile: Tile) -> tuple[bool, float]:
        return tile.kernel != kernel, expected_clocks(problem, tile, device)

    return [plan_with_tile(problem, tile) for tile in sorted(candidates(problem, device), key=order)[:count]]


@lru_cache(maxsize=256)
def _kernel_of_layer(
    layer: TileProblem, lines: bool, planes: int, device: Device
) -> tuple[int, int, bool, int] | None:
    """What is compiled in for all sizes of a layer whose rows lie so: that of the best tile for large images."""
    for size in ((8, 1024 + rows, 1024 + columns) for rows in range(8) for columns in range(8)):
        sized = _sized(layer, *size)
        if (in_lines(sized), planes_of(sized)) != (lines, planes) or not claims(sized, device):
            continue
        tiles = list(candidates(sized, device))
        tiles = [tile for tile in tiles if tile.warpgroups == _WARPGROUPS[-1]] or tiles
        best = min(tiles, key=lambda tile: expected_clocks(sized, tile, device), default=None)
        return None if best is None else best.kernel
    return None


def _sized(layer: TileProblem, batch: int, height: int, width: int) -> TileProblem:
    return replace(layer, geometry=replace(layer.geometry, batch=batch, height=height, width=width))


def preferred(problem: TileProblem, device: Device) -> bool:
    """Whether strips were measured to be the faster: large images, and two warpgroups in the best tile. Of 16 bits few
    channels do not pay for the reads of a wide kernel's pixels."""
    g = problem.geometry
    if g.macs < LEAST_MACS or min(g.in_channels, g.out_channels) < LEAST_CHANNELS:
        return False
    if problem.item == 2 and g.out_channels < MANY_CHANNELS and g.kernel[1] > FEW_TAPS:
        return False
    tiles = candidates(problem, device) if claims(problem, device) else iter(())
    best = min(tiles, key=lambda tile: expected_clocks(problem, tile, device), default=None)
    return best is not None and best.warpgroups == _WARPGROUPS[-1]


def claims(problem: TileProblem, device: Device) -> bool:
    """Whether the kernel can do it."""
    g = problem.geometry
    if device.architecture != "sm_90a" or problem.dtype not in _KINDS or problem.parts != 1:
        return False
    if problem.input_channels_last or problem.output_channels_last or g.batch == 0 or g.groups != 1:
        return False
    if g.stride != (1, 1) or g.dilation != (1, 1) or g.in_channels > 256:
        return False
    if in_lines(problem):
        first = _first_col(problem)
        if first < 0 or first + g.out_width + g.kernel[1] - 1 > g.width:
            return False
        if planes_of(problem) > 2 or g.in_channels % planes_of(problem):
            return False
    pixels = max(g.height * g.width, g.out_height * g.out_width)
    return pixels < INT32_LIMIT and g.batch * (g.out_height + 8) * (g.out_width + 8) < INT32_LIMIT


def _alignment(problem: TileProblem) -> int:
    """Elements of 16 bytes."""
    return 16 // problem.item


def in_lines(problem: TileProblem) -> bool:
    """Whether boxes count pixels of an image, where its rows are no multiples of 16 bytes."""
    return problem.geometry.width % _alignment(problem) != 0


def planes_of(problem: TileProblem) -> int:
    """Channels from which one lies at a multiple of 16 bytes as the first does."""
    unit = _alignment(problem)
    return unit // gcd(unit, problem.geometry.height * problem.geometry.width) if in_lines(problem) else 1


def _first_col(problem: TileProblem) -> int:
    return problem.geometry.padding[1] - (problem.geometry.kernel[1] - 1)


def pitch(problem: TileProblem, warpgroups: int) -> int:
    """Pixels of a row of a box: a warp's reads meet all banks."""
    g, unit = problem.geometry, _alignment(problem)
    lead = _first_col(problem) % unit
    if in_lines(problem):
        lead = unit - 1
    read = warpgroups * _PIXELS + g.kernel[1] - 1 + lead
    # float32: rows of four channels 8 words apart; 16 bits: of every other channel, which is the next in two planes.
    begin, period = (8, 32) if problem.item == 4 else (16, 32) if planes_of(problem) == 2 else (8, 16)
    return round_up(read - begin, period) + begin


def chunk_bytes(problem: TileProblem) -> int:
    """Of input channels whose weights lie together."""
    return 64 if problem.geometry.in_channels * problem.item <= 64 else 128


def _channels(problem: TileProblem) -> int:
    """Of the input, in whole chunks."""
    chunk = chunk_bytes(problem) // problem.item
    return round_up(problem.geometry.in_channels, chunk)


def _weight_bytes(problem: TileProblem, channels: int, stacked: bool) -> int:
    g = problem.geometry
    rows = 2 * g.kernel[0] - 1 if stacked else g.kernel[0]
    return g.kernel[1] * _channels(problem) * problem.item * rows * channels


def _row_bytes(problem: TileProblem, warpgroups: int) -> int:
    planes = planes_of(problem)
    plane = _channels(problem) // planes * pitch(problem, warpgroups) * problem.item
    return planes * round_up(plane, 128)


def shared_bytes(problem: TileProblem, tile: Tile) -> int:
    """Mirrors forward/stride1.cu, which asserts that they agree."""
    weights = _weight_bytes(problem, tile.channels, tile.stacked)
    return weights + tile.slots * (_row_bytes(problem, tile.warpgroups) + 16) + _EXTRA_BYTES


def candidates(problem: TileProblem, device: Device) -> Iterator[Tile]:
    """All tiles worth a thought."""
    g = problem.geometry
    for warpgroups in _WARPGROUPS:
        for channels in (32, 64):
            for stacked in (True, False):
                width = channels * g.kernel[0] if stacked else channels
                if (
                    width not in _WIDTHS
                    or g.kernel[0] * channels // 2 > _MOST_SUMS
                    or pitch(problem, warpgroups) > 256
                ):
                    continue
                room = (
                    device.shared_memory_per_block - _EXTRA_BYTES - _weight_bytes(problem, channels, stacked)
                )
                slots = min(_MOST_SLOTS, room // (_row_bytes(problem, warpgroups) + 16))
                if slots < 2:
                    continue
                tiles = ceil_div(g.out_channels, channels)
                strips = g.batch * ceil_div(g.out_width, warpgroups * _PIXELS)
                made = []
                for segments in range(1, ceil_div(g.out_height, 8) + 1):
                    segment = ceil_div(g.out_height, segments)
                    columns = strips * ceil_div(g.out_height, segment)
                    blocks = min(max(1, device.multiprocessors // tiles), columns)
                    made.append(Tile(warpgroups, channels, stacked, slots, segment, blocks))
                yield min(made, key=lambda tile: expected_clocks(problem, tile, device))


def expected_clocks(problem: TileProblem, tile: Tile, device: Device) -> float:
    """Roughly."""
    g = problem.geometry
    steps = g.kernel[1] * _channels(problem) * problem.item // _STEP_BYTES
    width = g.kernel[0] * tile.channels
    # Of the multiplier, and of what it reads from shared memory: of 16 bits pixels come twice and are joined.
    multiply, reads = width / 2, (16 if problem.item == 4 else 40) + width / 4
    step = 0.7 * max(multiply, reads) + 0.3 * (multiply + reads)
    row = max(
        tile.warpgroups * steps * step + _ROW_CLOCKS / tile.warpgroups,
        _row_bytes(problem, tile.warpgroups) / 25,
    )
    columns = (
        g.batch * ceil_div(g.out_width, tile.warpgroups * _PIXELS) * ceil_div(g.out_height, tile.segment)
    )
    tiles = ceil_div(g.out_channels, tile.channels)
    waves = ceil_div(tiles * tile.blocks, device.multiprocessors)
    return waves * ceil_div(columns, tile.blocks) * (tile.segment + g.kernel[0] - 1) * row


def _sizes(problem: TileProblem, tile: Tile) -> Words:
    """``Stride1Sizes`` of csrc/kernels/common/sizes.cuh."""
    g = problem.geometry
    strips = ceil_div(g.out_width, tile.warpgroups * _PIXELS)
    segments = ceil_div(g.out_height, tile.segment)
    return (
        *(g.height, g.width, g.out_height, g.out_width),
        *(tile.segment, g.batch * segments * strips),
        *divisor(strips),
        *divisor(segments),
    )


def plan_with_tile(problem: TileProblem, tile: Tile) -> Part:
    """The plan that computes the problem with this tile."""
    g = problem.geometry
    tiles = ceil_div(g.out_channels, tile.channels)
    packed = tiles * _weight_bytes(problem, tile.channels, tile.stacked)
    lying: tuple[tuple[str, Constant], ...] = (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("PRECISION", _PRECISIONS[problem.dtype]),
        ("TILE_CHANNELS", tile.channels),
        ("STACKED", tile.stacked),
        ("CHUNK_BYTES", chunk_bytes(problem)),
    )
    pack = Launch(
        Kernel(
            "forward/stride1_pack.cu",
            "forward_stride1_pack",
            (
                *g.layer_constants,
                *lying,
                ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
                ("OF_GRAD_INPUT", problem.of_grad_input),
                ("THREADS", _PACK_THREADS),
            ),
        ),
        grid=ceil_div(packed // 16, _PACK_THREADS),
        block=_PACK_THREADS,
        arguments=(input_(1), workspace(0)),
    )
    shared = shared_bytes(problem, tile)
    planes = planes_of(problem)
    channels = _channels(problem) // planes
    width, rows = pitch(problem, tile.warpgroups), problem.item * g.width
    size = rows * g.height
    lines = in_lines(problem)
    main = Launch(
        Kernel(
            "forward/stride1.cu",
            "forward_stride1",
            (
                *g.layer_constants,
                *lying,
                ("LINES", lines),
                ("PLANES", planes),
                ("WARPGROUPS", tile.warpgroups),
                ("SLOTS", tile.slots),
                ("PITCH", width),
                *bias_alone(problem.has_bias),
                ("SHARED_BYTES", shared),
            ),
        ),
        grid=tiles * tile.blocks,
        block=128 * tile.warpgroups + _FILL_THREADS,
        arguments=(tensor_map(0), workspace(0), input_(2), output(0), struct(0)),
        shared_bytes=shared,
        overlaps_previous=True,
        structs=(_sizes(problem, tile),),
        tensor_maps=(
            TensorMap(
                input_(0),
                _KINDS[problem.dtype],
                (planes * g.height * g.width, g.in_channels // planes, g.batch)
                if lines
                else (g.width, g.height, g.in_channels, g.batch),
                (planes * size, size * g.in_channels) if lines else (rows, size, size * g.in_channels),
                (width, channels, 1) if lines else (width, 1, channels, 1),
                (1, 1, 1) if lines else (1, 1, 1, 1),
                swizzle_bytes=0,
            ),
        ),
    )
    return Part(_FAMILY, f"{problem.precision} tensor cores, {tile}", (pack, main), packed)
