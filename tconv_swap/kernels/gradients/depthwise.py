"""Plans the backward pass of depthwise layers (csrc/kernels/gradients/depthwise.cu): all gradients from one pass over
grad_output and the input. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES, split_k_reduce
from tconv_swap.kernels.common.hardware import REGISTERS
from tconv_swap.kernels.common.limits import WORKSPACE_ALIGNMENT
from tconv_swap.kernels.common.schedules import select_schedules
from tconv_swap.kernels.common.sizes import segment_sizes
from tconv_swap.kernels.grad_weight.layer import of_any_size
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up
from tconv_swap.runtime.program import (
    ELEMENT_TYPES,
    Argument,
    Constant,
    Kernel,
    Launch,
    Part,
    input_,
    output,
    struct,
    workspace,
)

FAMILY = "depthwise"
WHY = "depthwise: every gradient from one pass over grad_output"
#: The most bytes of one load or store of a thread.
MAX_ACCESS_BYTES = 16
#: The most taps whose weights and sums a thread keeps in registers, and the most words of grad_output that it
#: prefetches.
MAX_SUMS, MAX_PREFETCHED = 32, 24
#: Threads of a block: in NCHW if each has all rows of grad_output, or if several share them, and in channels_last.
THREADS, SHARING_THREADS, CHANNELS_LAST_THREADS = 128, 256, 384
MAX_THREADS = 512
#: Blocks of SHARING_THREADS threads that a multiprocessor runs at a time.
SHARING_BLOCKS = 2
#: The most channels side by side in a block, in channels_last.
MAX_LANES = 64
#: The most pixels of the input that a thread adds up one after the other in float32: rounding errors grow with the root
#: of this number.
LONGEST_CHAIN = 512
#: Registers of a thread (about), and of a multiprocessor.
THREAD_REGISTERS = 128
#: The most rows of a tile, and the time that the begin and the end of a tile take, in steps.
MAX_ROWS, TILE_OVERHEAD = 64, 3
#: The most kernels of a layer in NCHW over all sizes; they differ in the widths of tiles and loads.
MAX_SCHEDULES = 4
#: The most bytes of partial sums of grad_weight for each byte of grad_output and input: more take noticeable time.
MAX_PARTIAL = 1 / 4
SHARED_BYTES = 96 << 10


@dataclass(frozen=True, slots=True)
class DepthwiseTile:
    """A tile of gradients/depthwise.cu: its constants, in lower case, and its rows, which are a run-time size."""

    tile_w: int
    load: int
    lanes: int
    tiles: int
    phases: int
    phase_rows: int
    rows: int

    @property
    def threads(self) -> int:
        """Returns how many threads a block has."""
        return self.lanes * self.tiles * self.phases

    def block_tiles(self, geometry: Geometry) -> int:
        """Returns how many tiles a thread would compute if one block computed all tiles of its channels."""
        image_tiles = geometry.batch * ceil_div(geometry.height, self.rows) * (geometry.width // self.tile_w)
        return ceil_div(image_tiles, self.tiles)

    def shared_bytes(self, problem: Problem, mask: tuple[bool, ...]) -> int:
        """Returns the bytes of shared memory of a block that computes the gradients of the mask."""
        geometry = problem.geometry
        side_by_side = self.lanes * self.tiles
        taps = self.phase_rows * lags(geometry) * geometry.kernel[1]
        input_sums = self.phases * (
            self.rows * self.tile_w * side_by_side + (0 if problem.channels_last else taps)
        )
        sums = taps * mask[1] + mask[2]
        parts = self.tiles if problem.channels_last else ceil_div(self.tiles, 32)
        reduced = sums * parts * self.lanes * self.phases
        return 4 * max(input_sums if mask[0] and self.phases > 1 else 0, reduced)


def lags(geometry: Geometry) -> int:
    """Returns how many rows of the input meet the rows of grad_output of a step."""
    return (geometry.kernel[0] - 1) * geometry.dilation[0] // geometry.stride[0] + 1


def columns(geometry: Geometry, tile_w: int) -> int:
    """Returns how many columns of grad_output the columns of a tile meet."""
    return (tile_w - 1) * geometry.stride[1] + (geometry.kernel[1] - 1) * geometry.dilation[1] + 1


def supports(problem: Problem) -> bool:
    """Returns whether the kernel computes a problem, if a thread can keep its taps."""
    g = problem.geometry
    if problem.dtype not in DTYPES or g.batch == 0 or g.batch * g.height * g.width >= INT32_LIMIT:
        return False
    return g.groups == g.in_channels == g.out_channels


def meets_all(geometry: Geometry) -> bool:
    """Returns whether the tiles meet every element of grad_output."""
    return all(
        (geometry.kernel[axis] - 1) * geometry.dilation[axis] + 1 >= geometry.stride[axis]
        and geometry.output_padding[axis] <= geometry.padding[axis]
        for axis in (0, 1)
    )


def tile_of(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> DepthwiseTile | None:
    """Returns the tile for a problem, or None if a thread cannot keep its taps."""
    found = schedules(of_any_size(problem, False), output_mask, device)
    fitting = [tile for tile in found if supports_tile(problem, tile)]
    if not fitting:
        return None
    best = min(fitting, key=lambda tile: loads_of_a_pixel(problem, tile))
    height = problem.geometry.height
    rows = [n for n in range(min(height, MAX_ROWS), 0, -1) if ceil_div(height, ceil_div(height, n)) == n]
    choices = [replace(best, rows=n) for n in rows]
    limit = _max_shared(device)
    choices = [tile for tile in choices if tile.shared_bytes(problem, output_mask) <= limit]
    return min(choices, key=lambda tile: _steps(problem, tile, output_mask, device))


@disk_cache
def schedules(layer: Problem, output_mask: tuple[bool, ...], device: Device) -> tuple[DepthwiseTile, ...]:
    """Returns the tiles of a layer for all its sizes, with one row; in all of them as many threads share a tile."""
    phases: dict[int, list[DepthwiseTile]] = {}
    for shape in _shapes(layer):
        if shape.shared_bytes(layer, output_mask) <= _max_shared(device):
            phases.setdefault(shape.phases, []).append(shape)
    if not phases:
        return ()
    shapes = phases[min(phases)]
    return select_schedules(
        layer,
        MAX_SCHEDULES,
        lambda problem: shapes,
        supports_tile,
        loads_of_a_pixel,
        lambda tile: tile.tile_w == tile.load == 1,
    )


def supports_tile(problem: Problem, tile: DepthwiseTile) -> bool:
    """Returns whether a tile's kernel computes the size: rows hold whole tiles and loads."""
    return problem.geometry.width % tile.tile_w == 0 and problem.geometry.out_width % tile.load == 0


def _max_shared(device: Device) -> int:
    return min(SHARED_BYTES, device.shared_memory_per_block)


def _steps(problem: Problem, tile: DepthwiseTile, output_mask: tuple[bool, ...], device: Device) -> int:
    """Returns how many steps follow one another if every block computes its tiles one after another."""
    g = problem.geometry
    blocks = tile.block_tiles(g) * ceil_div(g.in_channels, tile.lanes)
    by_registers = REGISTERS // (THREAD_REGISTERS * tile.threads)
    by_memory = device.shared_memory_per_block // max(1, tile.shared_bytes(problem, output_mask))
    rounds = ceil_div(blocks, device.multiprocessors * max(1, min(by_registers, by_memory)))
    return rounds * (tile.rows + lags(g) - 1 + TILE_OVERHEAD)


def _shapes(problem: Problem) -> Iterator[DepthwiseTile]:
    """Yields the tiles of every number of phases, with one row."""
    g = problem.geometry
    for phases in (n for n in range(1, g.stride[0] + 1) if g.stride[0] % n == 0):
        phase_rows = g.stride[0] // phases
        sums = phase_rows * lags(g) * g.kernel[1]
        if sums > MAX_SUMS or (phases > 1 and g.dilation[0] > 1):
            continue
        if problem.channels_last:
            lanes = g.in_channels if g.in_channels <= MAX_LANES else MAX_LANES // 2
            tiles = 1
            while 2 * tiles * lanes * phases <= CHANNELS_LAST_THREADS:
                tiles *= 2
        else:
            lanes = 1
            tiles = THREADS if phases == 1 else max(32, SHARING_THREADS // phases // 32 * 32)
        if tiles * lanes * phases > MAX_THREADS:
            continue
        for tile_w in (4, 2, 1) if problem.channels_last else (8, 4, 2, 1):
            # A thread prefetches its part of grad_output.
            if tile_w > 1 and columns(g, tile_w) * phase_rows > MAX_PREFETCHED:
                continue
            for load in (1,) if problem.channels_last else (1, 2, 4, 8):
                if load * problem.dtype.itemsize <= MAX_ACCESS_BYTES and tile_w * g.stride[1] % load == 0:
                    yield DepthwiseTile(tile_w, load, lanes, tiles, phases, phase_rows, 1)


def loads_of_a_pixel(problem: Problem, tile: DepthwiseTile) -> float:
    """Returns how many loads of a row of grad_output each column of the input takes: neighbours share loads."""
    across = columns(problem.geometry, tile.tile_w)
    head = min(problem.geometry.padding[1] % tile.load, across)
    body = (across - head) // tile.load
    return (across - body * (tile.load - 1)) / tile.tile_w


def _repeat(problem: Problem, tile: DepthwiseTile, block_tiles: int, split_bytes: int) -> int:
    """Returns how many tiles a thread computes one after another: enough that the partial sums take little time, but
    not so many that a sum is too long for its accuracy."""
    wanted = ceil_div(
        block_tiles * split_bytes, int(MAX_PARTIAL * problem.dtype.itemsize * problem.geometry.elements) + 1
    )
    if problem.dtype == torch.float32:
        wanted = min(wanted, LONGEST_CHAIN // (tile.rows * tile.tile_w))
    return max(1, wanted, ceil_div(block_tiles * split_bytes, WORKSPACE_LIMIT_BYTES))


def plan_gradients(problem: Problem, output_mask: tuple[bool, ...], device: Device) -> Part | None:
    """Returns the part, or None for a problem that the kernel does not compute.

    Inputs: grad_output, input, weight (16-byte aligned). Outputs: the gradients of the mask.

    Workspace: partial sums of the gradients of weight and bias, at most 64 MiB, or one copy of them if that is more.
    """
    if not supports(problem) or not (output_mask[0] or output_mask[1]):
        return None
    if output_mask[2] and not meets_all(problem.geometry):
        return None
    tile = tile_of(problem, output_mask, device)
    return None if tile is None else lower(problem, tile, output_mask, device)


def lower(problem: Problem, tile: DepthwiseTile, output_mask: tuple[bool, ...], device: Device) -> Part:
    """Returns the part of ``plan_gradients`` with a given tile."""
    g = problem.geometry
    wants_input, wants_weight, wants_bias = output_mask
    channel_blocks = ceil_div(g.in_channels, tile.lanes)
    block_tiles = tile.block_tiles(g)
    count = g.in_channels * g.taps
    split_bytes = 4 * (count + g.out_channels) + WORKSPACE_ALIGNMENT
    repeat = _repeat(problem, tile, block_tiles, split_bytes) if wants_weight or wants_bias else 1
    splits = ceil_div(block_tiles, repeat)
    split = splits > 1
    bias_at = round_up(4 * splits * count, WORKSPACE_ALIGNMENT) if wants_weight else 0
    weight_index, bias_index = int(wants_input), int(wants_input) + int(wants_weight)

    def target(wanted: bool, index: int, at: int) -> Argument:
        return output(index) if wanted and not split else workspace(at if wanted else 0)

    kernel = Kernel("gradients/depthwise.cu", "gradients_depthwise", _constants(problem, tile, output_mask))
    launches = [
        Launch(
            kernel,
            grid=channel_blocks * splits,
            block=tile.threads,
            arguments=(
                input_(0),
                input_(1),
                input_(2),
                output(0) if wants_input else workspace(0),
                target(wants_weight, weight_index, 0),
                target(wants_bias, bias_index, bias_at),
                struct(0),
            ),
            structs=(segment_sizes(g, (tile.rows, tile.tile_w), repeat, split),),
            shared_bytes=tile.shared_bytes(problem, output_mask),
        )
    ]
    sums = []
    if split and wants_weight:
        sums.append(split_k_reduce(problem.dtype, count, splits, 0, weight_index))
    if split and wants_bias:
        sums.append(split_k_reduce(problem.dtype, g.out_channels, splits, bias_at, bias_index))
    launches += [one._replace(overlaps_previous=device.compute_capability >= 90) for one in sums]
    used = bias_at + 4 * splits * g.out_channels * wants_bias if sums else 0
    return Part(FAMILY, WHY, tuple(launches), used)


def _constants(
    problem: Problem, tile: DepthwiseTile, output_mask: tuple[bool, ...]
) -> tuple[tuple[str, Constant], ...]:
    g = problem.geometry
    largest = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int" if largest < INT32_LIMIT else "long long"),
        *g.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("TILE_W", tile.tile_w),
        ("LOAD", tile.load),
        ("LANES", tile.lanes),
        ("TILES", tile.tiles),
        ("PHASES", tile.phases),
        ("PHASE_ROWS", tile.phase_rows),
        ("THREADS", tile.threads),
        ("MIN_BLOCKS", SHARING_BLOCKS if tile.phases > 1 and not problem.channels_last else 1),
        ("WANTS_INPUT", output_mask[0]),
        ("WANTS_WEIGHT", output_mask[1]),
        ("WITH_BIAS", output_mask[2]),
    )
