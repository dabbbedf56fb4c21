"""The kernels of csrc/kernels/grad_weight/implicit_gemm_{mma,wgmma}.cu that a layer may have: which tiles fit, and
which sizes each computes. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from tconv_swap.kernels.grad_weight.implicit_gemm_shapes import (
    Shape,
    pixel_choices,
    shapes_of,
    whole_steps,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import (
    COPY_BYTES,
    Operands,
    Tile,
    Windows,
    item_bytes,
    most_stages,
    step_pixels,
)
from tconv_swap.kernels.grad_weight.layer import counts_in_32_bits, largest_image, pixel_tiles
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: For how many shapes of each kind, the best at each size, all tiles of pixels are compared; the tiles of pixels
#: with which shapes are compared.
SHAPES_TRIED = 2
USUAL_PIXELS = ((1, 8, 16), (1, 8, 8), (1, 4, 16), (1, 16, 16), (1, 4, 8))
#: What a piece's row and column, counted from the window's first, must stay below: the fields of the kernel's
#: table (grad_weight/implicit_gemm_producer.cuh).
MAX_ROWS, MAX_COLS = 1024, 2048


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
    # Offsets within an image have 32 bits.
    if largest_image(g) * item_bytes(problem) >= INT32_LIMIT:
        return False
    return min(g.in_channels_per_group, g.out_channels_per_group) >= 8


def clocks_of_sizes(
    among: Iterable[Schedule], layer: Problem, sizes: Sequence[Geometry], device: Device
) -> Iterator[tuple[Schedule, list[float]]]:
    """Yields schedules of a layer with their expected clocks for each size, infinite where one does not suit it. Of
    those that differ in nothing but the clocks of a tile, it yields the first of the fastest."""
    # The widths of grad_output make little difference to the time of a map.
    maps = [layer.geometry._replace(batch=g.batch, height=g.height, width=g.width) for g in sizes]
    moved = [tensor_bytes(one, item_bytes(layer)) for one in maps]
    tiles: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    suited: dict[tuple[tuple[int, int, int], int, int], list[bool]] = {}
    fastest: dict[tuple[Any, ...], Schedule] = {}
    for one in among:
        copies = tuple(operand.copy for operand in one.operands)
        alike = one.tile.shape, copies, one.tile.blocks_per_multiprocessor, one.work.beside_clocks
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
    windows, multiples = Windows(layer), _multiples(layer)
    shapes = _shapes_that_do_best(layer, device, sizes, windows, multiples[0])
    found: list[Schedule] = []
    pixels: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}
    for shape in shapes:
        kind = step_pixels(layer) * shape.warps[3], shape.wgmma
        if kind not in pixels:
            pixels[kind] = pixel_choices(sizes, *kind)
        for divided in multiples:
            found += _schedules_of(layer, windows, shape, pixels[kind], divided, device)
    return tuple(found)


def _shapes_that_do_best(
    layer: Problem, device: Device, sizes: Sequence[Geometry], windows: Windows, multiples: Pair
) -> dict[Shape, None]:
    """Returns the ``SHAPES_TRIED`` shapes of each kind of instruction that do best at some of these sizes, each with
    the first of the usual tiles of pixels that it can have."""
    pixels: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}
    firsts: dict[bool, dict[Schedule, Shape]] = {False: {}, True: {}}
    for shape in shapes_of(layer, device):
        kind = step_pixels(layer) * shape.warps[3], shape.wgmma
        if kind not in pixels:
            # All maps of one pixel are equal.
            one_size = len(sizes) == 1
            pixels[kind] = pixel_choices(sizes, *kind) if one_size else whole_steps(USUAL_PIXELS, *kind)
        one = next(_schedules_of(layer, windows, shape, pixels[kind], multiples, device), None)
        if one is not None:
            firsts[shape.wgmma][one] = shape
    counts = list(dict.fromkeys(size.batch * size.height * size.width for size in sizes))
    return dict.fromkeys(
        of_first[one] for of_first in firsts.values() for one in _fastest(list(of_first), counts, device)
    )


def _fastest(among: Sequence[Schedule], counts: Sequence[int], device: Device) -> Iterator[Schedule]:
    """Yields the ``SHAPES_TRIED`` schedules that are expected to be the fastest for each count of pixels, which are
    taken to be filled by tiles."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, one in enumerate(among):
        alike.setdefault((one.tile.pixels, one.work.beside_clocks), []).append(i)
    # Of those that differ in nothing but the clocks of a tile, only the fastest may be among the fastest of all.
    kept = sorted(
        i
        for group in alike.values()
        for i in sorted(group, key=lambda i: among[i].work.clocks)[:SHAPES_TRIED]
    )
    filled: dict[int, list[tuple[int, int]]] = {}
    clocks = []
    for i in kept:
        count = among[i].tile.pixels
        if count not in filled:
            filled[count] = [(ceil_div(pixels, count), 0) for pixels in counts]
        clocks.append(clocks_of_work(among[i].work, among[i].tile, filled[count], device))
    for of_size in zip(*clocks, strict=True):
        for i in nsmallest(SHAPES_TRIED, range(len(kept)), of_size.__getitem__):
            yield among[kept[i]]


def _multiples(layer: Problem) -> tuple[Pair, ...]:
    """Returns the powers of two that divide the columns of the input and of the output, for each kind of map;
    (1, 1) alone in channels_last."""
    if layer.channels_last:
        return ((1, 1),)
    of_layer = (layer.geometry._replace(width=width) for width in (64, 62))
    divided = [(_power_in(g.width), _power_in(g.out_width)) for g in of_layer]
    return tuple(dict.fromkeys((*divided, (1, 1))))


def _power_in(size: int) -> int:
    """Returns the largest power of two that divides ``size``, at most the elements of a 16-byte copy in 16
    bits."""
    return min(COPY_BYTES // 2, size & -size)


def _schedules_of(
    problem: Problem,
    windows: Windows,
    shape: Shape,
    choices: Sequence[tuple[int, int, int]],
    multiples: Pair,
    device: Device,
) -> Iterator[Schedule]:
    """Yields the schedules of one shape with each choice of pixels that fits registers and shared memory."""
    threads, most = 32 * math.prod(shape.warps), 4 if shape.wgmma else 3
    block = shape.warps[0] * shape.warp_m, shape.warps[1] * shape.warp_n
    held = _held_registers(problem, shape)
    # As many blocks of a multiprocessor as have registers for that.
    counts = [blocks for blocks in (1, 2) if threads * blocks <= 512]
    available = [_available_registers(threads * blocks) for blocks in counts]
    for pixels in choices if held <= available[0] else ():
        operands = windows.of(threads, block, (shape.taps, shape.tap_step), pixels, multiples)
        into, out = operands
        if out.span[0] > MAX_ROWS or out.span[1] > MAX_COLS:
            continue
        taken = held + into.staged_registers(threads) + out.staged_registers(threads)
        for blocks, most_registers in zip(counts, available, strict=True):
            # What goes through registers is loaded one tile ahead, so another stage would stay empty.
            stages = min(
                most - (into.through_registers or out.through_registers),
                most_stages(operands, (device.shared_memory_per_block + 1024) // blocks - 1024),
            )
            if taken > most_registers or stages < most - 1:
                break  # if one block does not fit, two do not either
            tile = Tile(
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
            )
            yield Schedule(problem, tile, operands, work_of(problem, tile, operands))


def registers(problem: Problem, tile: Tile, operands: Operands) -> tuple[int, int]:
    """Returns the registers that a thread is estimated to need, and those that it can have."""
    staged = sum(operand.staged_registers(tile.threads) for operand in operands)
    return (
        _held_registers(problem, tile) + staged,
        _available_registers(tile.threads * tile.blocks_per_multiprocessor),
    )


def _held_registers(problem: Problem, tile: Tile | Shape) -> int:
    """Returns the registers that a thread is estimated to need beside those of elements on their way to shared
    memory."""
    if not tile.wgmma:
        fragments = tile.warp_m // 16 * (8 if problem.is_ieee else 4) + (16 if problem.is_ieee else 8)
    else:
        fragments = 8 * tile.warp_taps if item_bytes(problem) == 4 else 0
    sums = tile.warp_m * tile.warp_n * tile.warp_taps // 32
    return sums + fragments + tile.warp_taps + tile.warp_n // 8 + 48


def _available_registers(threads: int) -> int:
    """Returns the registers that each of so many threads of a multiprocessor can have: each quarter of it has registers
    of its own."""
    return min(MAX_REGISTERS, REGISTERS // round_up(threads, 128) // 8 * 8)
