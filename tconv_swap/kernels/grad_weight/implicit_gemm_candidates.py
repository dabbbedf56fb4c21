"""The kernels of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu that a layer may have: which tiles fit, and
which sizes each computes. The functions are pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import nsmallest
from typing import Any

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.hardware import MAX_REGISTERS, REGISTERS
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import (
    Work,
    expected_clocks,
    tensor_bytes,
    work_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import clocks_of_sizes as clocks_of_work
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    COPY_BYTES,
    Operands,
    Tile,
    item_bytes,
    shared_bytes,
    step_pixels,
    windows,
)
from tconv_swap.kernels.grad_weight.layer import counts_in_32_bits, pixel_tiles
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: For how many shapes of each kind, the best at each size, all tiles of pixels are compared; the tiles of pixels
#: with which shapes are compared.
SHAPES_TRIED = 2
USUAL_PIXELS = ((1, 8, 16), (1, 8, 8), (1, 4, 16), (1, 16, 16), (1, 4, 8))
#: What a piece's row and column, counted from the window's first, must stay below: the fields of the kernel's
#: table (grad_weight/implicit_gemm_producer.cuh).
MAX_ROWS, MAX_COLS = 1024, 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile without its pixels."""

    taps: Pair
    tap_step: Pair
    warps: tuple[int, int, int, int]
    warp_m: int
    warp_n: int
    warp_taps: int
    wgmma: bool


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one kernel of a layer computes: ``operands`` are the tile's windows."""

    problem: Problem
    tile: Tile
    operands: Operands
    work: Work

    def legal(self, geometry: Geometry) -> bool:
        """Returns whether the kernel computes this size correctly."""
        into, out = self.operands
        if not self.problem.channels_last and (geometry.width % into.copy or geometry.out_width % out.copy):
            return False
        return counts_in_32_bits(geometry, self.tile.shape)

    def suits(self, geometry: Geometry) -> bool:
        """Returns whether the kernel is legal and its tiles are meant for such maps: tiles of several images,
        or of rows of a few pixels, only for maps that are no larger."""
        tile = self.tile
        if tile.images > 1 and (tile.rows < geometry.height or tile.cols < geometry.width):
            return False
        return not tile.cols < min(8, geometry.width) and self.legal(geometry)

    def clocks(self, geometry: Geometry, device: Device) -> float:
        """Returns the expected clocks at this size."""
        tiles = pixel_tiles(geometry, self.tile.shape)
        moved_bytes = tensor_bytes(geometry, item_bytes(self.problem))
        return expected_clocks(self.work, self.tile, tiles, moved_bytes, device)

    @property
    def computes_any_size(self) -> bool:
        """Returns whether the kernel computes every size, but those of more pixels than it counts."""
        return self.problem.channels_last or all(operand.copy == 1 for operand in self.operands)


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernels compute the problem, provided that a tile fits."""
    g = problem.geometry
    if problem.dtype not in DTYPES or device.compute_capability < 80 or g.batch == 0:
        return False
    image = max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)
    # Offsets within an image have 32 bits.
    if image * item_bytes(problem) >= INT32_LIMIT:
        return False
    return min(g.in_channels_per_group, g.out_channels_per_group) >= 8


def clocks_of_sizes(
    among: Iterable[Schedule], layer: Problem, sizes: Sequence[Geometry], device: Device
) -> Iterator[tuple[Schedule, list[float]]]:
    """Yields schedules of a layer with their expected clocks for each size, infinite where one does not suit it. Of
    those that differ in nothing but the clocks of a tile, it yields the first of the fastest."""
    # The widths of grad_output make little difference to the time of a map.
    maps = [replace(layer.geometry, batch=g.batch, height=g.height, width=g.width) for g in sizes]
    moved = [tensor_bytes(one, item_bytes(layer)) for one in maps]
    tiles: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    suited: dict[tuple[tuple[int, int, int], int, int], list[bool]] = {}
    fastest: dict[tuple[Any, ...], Schedule] = {}
    for one in among:
        copies = tuple(operand.copy for operand in one.operands)
        alike = one.tile.shape, copies, one.tile.blocks_per_multiprocessor, one.work._replace(clocks=0.0)
        kept = fastest.setdefault(alike, one)
        if one.work.clocks < kept.work.clocks:
            fastest[alike] = one
    for one in fastest.values():
        shape, (into, out) = one.tile.shape, one.operands
        if shape not in tiles:
            tiles[shape] = [(pixel_tiles(g, shape), count) for g, count in zip(sizes, moved, strict=True)]
        loaded = shape, into.copy, out.copy
        if loaded not in suited:
            suited[loaded] = [one.suits(g) for g in sizes]
        clocks = clocks_of_work(one.work, one.tile, tiles[shape], device)
        yield (
            one,
            [found if suits else math.inf for found, suits in zip(clocks, suited[loaded], strict=True)],
        )


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device, sizes: tuple[Geometry, ...]) -> tuple[Schedule, ...]:
    """Returns all candidate schedules: every tile of pixels of the shapes that do best at some of these sizes."""
    multiples = _multiples(layer)
    firsts: dict[bool, list[tuple[Shape, Schedule]]] = {False: [], True: []}
    for shape in _shapes(layer, device):
        # All maps of one pixel are equal.
        one_size = len(sizes) == 1
        usual = _choices_of(sizes[0], step_pixels(layer) * shape.warps[3]) if one_size else USUAL_PIXELS
        one = next(_schedules_of(layer, shape, usual, multiples[0], device), None)
        if one is not None:
            firsts[shape.wgmma].append((shape, one))
    shapes: dict[Shape, None] = {}
    counts = list(dict.fromkeys(size.batch * size.height * size.width for size in sizes))
    for kind in firsts.values():
        # The map is taken to be filled by tiles of this shape.
        clocks = []
        for _, one in kind:
            filled = [(ceil_div(pixels, one.tile.pixels), 0) for pixels in counts]
            clocks.append(clocks_of_work(one.work, one.tile, filled, device))
        for of_size in zip(*clocks, strict=True):
            best = nsmallest(SHAPES_TRIED, range(len(kind)), key=of_size.__getitem__)
            shapes.update((kind[i][0], None) for i in best)
    found: list[Schedule] = []
    choices: dict[int, list[tuple[int, int, int]]] = {}
    for shape in shapes:
        step = step_pixels(layer) * shape.warps[3]
        if step not in choices:
            choices[step] = list(dict.fromkeys(one for size in sizes for one in _choices_of(size, step)))
        for divided in multiples:
            found += _schedules_of(layer, shape, choices[step], divided, device)
    return tuple(found)


def _multiples(layer: Problem) -> tuple[Pair, ...]:
    """Returns the powers of two that divide the columns of the input and of the output, for each kind of map;
    (1, 1) alone in channels_last."""
    if layer.channels_last:
        return ((1, 1),)
    of_layer = (replace(layer.geometry, width=width) for width in (64, 62))
    divided = [(_power_in(g.width), _power_in(g.out_width)) for g in of_layer]
    return tuple(dict.fromkeys((*divided, (1, 1))))


def _power_in(size: int) -> int:
    """Returns the largest power of two that divides ``size``, at most the elements of a 16-byte copy in 16
    bits."""
    return min(COPY_BYTES // 2, size & -size)


def _shapes(problem: Problem, device: Device) -> Iterator[Shape]:
    """Yields the shapes of each kind of tensor-core instruction."""
    kinds = [(False, _warp_choices)]
    if device.architecture == "sm_90a" and item_bytes(problem) == 2:
        kinds.append((True, _warpgroup_choices))
    for taps, tap_step in _tap_choices(problem):
        for wgmma, choices in kinds:
            for warps in choices(problem, math.prod(taps)):
                yield Shape(taps, tap_step, *warps, wgmma)


def _schedules_of(
    problem: Problem,
    shape: Shape,
    choices: Sequence[tuple[int, int, int]],
    multiples: Pair,
    device: Device,
) -> Iterator[Schedule]:
    """Yields the schedules of one shape with each choice of pixels that fits."""
    step = step_pixels(problem) * shape.warps[3]
    warps, most = math.prod(shape.warps), 4 if shape.wgmma else 3

    def tile_of(pixels: tuple[int, int, int], stages: int, blocks: int) -> Tile:
        return Tile(
            shape.warps,
            shape.warp_m,
            shape.warp_n,
            shape.warp_taps,
            shape.taps,
            shape.tap_step,
            *pixels,
            stages,
            blocks,
            shape.wgmma,
            multiples,
        )

    for pixels in choices:
        # wgmma reads 8 contiguous pixels.
        if math.prod(pixels) % step or (shape.wgmma and pixels[2] < 8):
            continue
        operands: Operands | None = None
        for blocks in (1, 2):
            if warps * blocks > 16:
                break
            tile = tile_of(pixels, most, blocks)
            operands = operands or windows(problem, tile)
            stages = _fitting_stages(problem, tile, operands, device)
            if not stages:
                break  # if one block does not fit, two do not either
            tile = tile if stages == most else tile_of(pixels, stages, blocks)
            yield Schedule(problem, tile, operands, work_of(problem, tile, operands))


_Warps = tuple[tuple[int, int, int, int], int, int, int]


def _warpgroup_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """Yields warps along (m, n, taps, k) and the channels in, channels out and taps of a warp for wgmma,
    where a warpgroup's four warps lie along m."""
    g = problem.geometry
    if g.in_channels_per_group <= 32:
        return
    for warp_n, warp_taps in itertools.product((128, 64, 32), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_n * warp_taps // 2
        if warp_taps > taps or not 48 <= sums <= 160 or warp_n >= max(64, 2 * g.out_channels_per_group):
            continue
        for groups_m, groups_n, groups_k in itertools.product((1, 2), (1, 2), (1, 2)):
            groups_t = ceil_div(taps, warp_taps)
            if not 2 <= groups_m * groups_n * groups_t * groups_k <= 4:
                continue
            if (groups_m - 1) * 64 >= g.in_channels_per_group:
                continue
            if (groups_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (4 * groups_m, groups_n, groups_t, groups_k), 16, warp_n, warp_taps


def _warp_choices(problem: Problem, taps: int) -> Iterator[_Warps]:
    """Yields warps along (m, n, taps, k) and the channels in, channels out and taps of a warp for mma.sync."""
    g = problem.geometry
    # A warp with too few sums waits for its operands. A small product has no more sums.
    widest = [
        min(64, 1 << (channels - 1).bit_length())
        for channels in (g.in_channels_per_group, g.out_channels_per_group)
    ]
    min_sums = min(48, max(16, widest[0]) * widest[1] * min(taps, 5) // 64)
    for warp_m, warp_n, warp_taps in itertools.product((64, 32, 16), (64, 32, 16, 8), (1, 2, 3, 4, 5, 6, 8)):
        sums = warp_m * warp_n * warp_taps // 32
        if warp_taps > taps or not min_sums <= sums <= 128 or (problem.is_ieee and warp_m == 64):
            continue
        if warp_m >= max(32, 2 * g.in_channels_per_group) or warp_n >= max(16, 2 * g.out_channels_per_group):
            continue
        warps_t = ceil_div(taps, warp_taps)
        for warps_m, warps_n, warps_k in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
            warps = warps_m * warps_n * warps_t * warps_k
            if not 4 <= warps <= 16 or (warps_k > 1 and warps > 8) or warps_m * warps_n > 4:
                continue
            if (warps_m - 1) * warp_m >= g.in_channels_per_group:
                continue
            if (warps_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (warps_m, warps_n, warps_t, warps_k), warp_m, warp_n, warp_taps


def _tap_choices(problem: Problem) -> Iterator[tuple[Pair, Pair]]:
    """Yields the taps of a block and the steps between them: all taps, those of one vertical phase, fewer rows
    or columns."""
    g = problem.geometry
    period = g.stride[0] // math.gcd(g.stride[0], g.dilation[0])
    row_choices = {(g.kernel[0], 1), (1, 1)}
    if 1 < period < g.kernel[0]:
        row_choices.add((ceil_div(g.kernel[0], period), period))
    if g.kernel[0] > 3:
        row_choices.add((ceil_div(g.kernel[0], ceil_div(g.kernel[0], 3)), 1))
    col_choices = {(g.kernel[1], 1), (ceil_div(g.kernel[1], 2), 1), (min(8, g.kernel[1]), 1)}
    for rows, row_step in sorted(row_choices):
        for cols, col_step in sorted(col_choices):
            if rows * cols <= 32:
                yield (rows, cols), (row_step, col_step)


def _choices_of(geometry: Geometry, step: int) -> list[tuple[int, int, int]]:
    return _pixel_choices((geometry.batch, geometry.height, geometry.width), step)


@lru_cache(maxsize=256)
def _pixel_choices(size: tuple[int, int, int], step: int) -> list[tuple[int, int, int]]:
    """Returns images, rows and columns of tiles of a multiple of ``step`` pixels, powers of two, those nearest
    to 128 pixels and to a square first."""
    found = []
    widest, tallest, deepest = (1 << max(0, count - 1).bit_length() for count in reversed(size))
    for cols, rows in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64)):
        if cols > widest or rows > tallest or (cols < 8 and cols != widest):
            continue
        if rows * cols >= max(64, step):
            images = [1]
        elif cols == widest and rows == tallest:
            # Small maps: many whole images.
            images = [count // (rows * cols) for count in (32, 64, 128) if count <= deepest * rows * cols]
            images = images or [max(step, 32) // (rows * cols)]
        else:
            images = [1]
        for n in images:
            if n * rows * cols % step == 0 and 32 <= n * rows * cols <= 256:
                found.append((n, rows, cols))
    return sorted(
        found, key=lambda one: (abs(math.log2(math.prod(one) / 128)), abs(math.log2(one[1] / one[2])))
    )


def registers(problem: Problem, tile: Tile, operands: Operands) -> tuple[int, int]:
    """Returns the registers that a thread is estimated to need, and those that it can have."""
    into, out = operands
    staged = into.staged_registers(tile.threads) + out.staged_registers(tile.threads)
    if not tile.wgmma:
        fragments = tile.warp_m // 16 * (8 if problem.is_ieee else 4) + (16 if problem.is_ieee else 8)
    else:
        fragments = 8 * tile.warp_taps if item_bytes(problem) == 4 else 0
    # Each quarter of a multiprocessor has registers of its own.
    threads = round_up(tile.threads * tile.blocks_per_multiprocessor, 128)
    taken = tile.sums + fragments + staged + tile.warp_taps + tile.warp_n // 8 + 48
    return taken, min(MAX_REGISTERS, REGISTERS // threads // 8 * 8)


def _fitting_stages(problem: Problem, tile: Tile, operands: Operands, device: Device) -> int:
    """Returns with how many stages the tile fits registers and shared memory: its own or one less; 0 if with
    neither. ``operands``: its windows."""
    into, out = operands
    if out.span[0] > MAX_ROWS or out.span[1] > MAX_COLS:
        return 0
    taken, available = registers(problem, tile, operands)
    if taken > available:
        return 0
    # What goes through registers is loaded one tile ahead, so another stage would stay empty.
    most = tile.stages - (into.through_registers or out.through_registers)
    for stages in range(most, tile.stages - 2, -1):
        shared = shared_bytes(stages, operands)
        if tile.blocks_per_multiprocessor * (shared + 1024) <= device.shared_memory_per_block + 1024:
            return stages
    return 0
