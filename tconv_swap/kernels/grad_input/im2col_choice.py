"""The kernels of csrc/kernels/grad_input/im2col.cu that a layer may have over all its sizes, and the best of those that
it has, with the shape and the splits that are expected to be the fastest, for each size. The functions are pure.

The clocks of a step of k are the same for all sizes of a layer, so they are computed once, with the conflicts of the
banks of shared memory. For a size, the shapes of a kernel differ by how many work tiles they make of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product

from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.grad_input.im2col_clocks import (
    clocks,
    conflicts,
    step_clocks,
    step_count,
    store_clocks,
)
from tconv_swap.kernels.grad_input.im2col_tile import (
    COLUMN_BLOCK,
    Im2colKernel,
    Im2colShape,
    Im2colTile,
    blocks,
    is_aligned,
    kernels,
    may_split,
    shapes,
    variants,
)
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.grad_input.tma_gemm import SPLITS, for_size, may_load
from tconv_swap.kernels.problem import Device

#: A kernel has the shapes that are the fastest for one of the representative maps or one of these: all pairs of sides
#: of which none is more than twice as long, or one row of so many columns, with each batch, of at most so many
#: positions. The conflicts of the banks are computed for the NEAR best of each.
SHAPED_SIDES, SHAPED_COLUMNS = (4, 8, 12, 16, 24, 32, 40, 56, 128), (16, 64, 256, 1024)
SHAPED_BATCHES, SHAPED_POSITIONS = (1, 16, 128, 1024), 1 << 21
NEAR = 3

#: A shape, the expected clocks of a step of k with it and those of a work tile beside its steps, and whether it is
#: right for any number of tiles in a row.
Timed = tuple[Im2colShape, float, float, bool]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kernel, and the shapes that it may get."""

    kernel: Im2colKernel
    shapes: tuple[Timed, ...]


def supports_some_size(layer: StridedProblem, device: Device) -> bool:
    """Returns whether the kernel computes some size of the layer."""
    geometry = layer.geometry
    if layer.input_channels_last or layer.output_channels_last or layer.weight_channels_last:
        return False
    weights = geometry.in_channels_per_group * geometry.taps
    return weights * layer.item % TMA_ALIGNMENT == 0 and may_load(layer, device)


def ranked(
    among: Iterable[Schedule], problem: StridedProblem, device: Device, copy_clocks: float
) -> list[tuple[float, Im2colTile]]:
    """Returns the tiles of those kernels that compute this size and their expected clocks, the one expected to be the
    fastest first. ``copy_clocks``: of a copy of grad_output with longer rows, or 0 if there is none."""
    timed = [
        (clocks(problem, of_tiles, tile.splits) + copy_clocks, tile)
        for one in among
        for of_tiles, tile in best_tiles(one, problem, device)
    ]
    return sorted(timed, key=lambda entry: entry[0])


def every_shape(layer: StridedProblem, device: Device) -> Iterator[Schedule]:
    """Yields every kernel of a layer (``of_any_size``) with each of its shapes, without conflicts of banks."""
    for kernel in kernels(layer, device):
        for timed in _plain(layer, kernel, device):
            yield Schedule(kernel, (timed,))


def best_tiles(
    schedule: Schedule, problem: StridedProblem, device: Device
) -> Iterator[tuple[float, Im2colTile]]:
    """Yields the tile with the best shape, and the expected clocks of its work, for each number of splits that this
    size allows."""
    kernel, batch, (rows, cols) = schedule.kernel, problem.geometry.batch, problem.positions
    takes_wide = problem.geometry.width % COLUMN_BLOCK == 0
    channel_blocks = blocks(problem, kernel)
    counted = [
        (
            -(-batch // shape.images) * -(-rows // shape.rows) * -(-cols // shape.cols) * channel_blocks,
            step,
            beside,
            shape,
        )
        for shape, step, beside, any_count in schedule.shapes
        if (any_count or cols <= shape.cols) and (takes_wide or not shape.wide) and shape.suits(rows, cols)
    ]
    if not counted:
        return
    unsized = Im2colTile(kernel, counted[0][-1], 2 if kernel.partial else 1)
    for tile in for_size(unsized, problem, may_split):
        count = step_count(problem, kernel, tile.splits)
        # Of equals, those with the fewest tiles load least.
        time, _, i = min(
            (-(-work * tile.splits // device.multiprocessors) * (count * step + beside), work, i)
            for i, (work, step, beside, _) in enumerate(counted)
        )
        yield time, replace(tile, shape=counted[i][-1])


def candidates(
    layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device
) -> tuple[Schedule, ...]:
    """Returns every kernel of a layer (``of_any_size``), with the shapes that are the fastest for some map; ``sizes``
    are among these maps."""
    if not supports_some_size(layer, device):
        return ()
    laid: dict[Im2colKernel, tuple[Timed, ...]] = {}
    known: dict[tuple[int, Im2colShape], float] = {}
    found: list[Schedule] = []
    maps = _shaped_maps(layer, sizes)
    for kernel in kernels(layer, device):
        whole = replace(kernel, partial=False)
        if whole not in laid:
            near = _fastest(layer, whole, tuple(_plain(layer, whole, device)), maps, device, NEAR)
            laid[whole] = tuple(_laid(layer, whole, shape, device, known) for shape, *_ in near)
        timed = tuple(
            (shape, step, store_clocks(layer, kernel, shape), any_count)
            for shape, step, _, any_count in laid[whole]
        )
        found.append(Schedule(kernel, _fastest(layer, kernel, timed, maps, device, 1)))
    return tuple(found)


def _plain(layer: StridedProblem, kernel: Im2colKernel, device: Device) -> Iterator[Timed]:
    """Yields the shapes of a kernel with the clocks of a step without conflicts of banks."""
    for shape in shapes(layer, kernel, device):
        yield _timed(layer, kernel, shape, 1.0)


def _laid(
    layer: StridedProblem,
    kernel: Im2colKernel,
    shape: Im2colShape,
    device: Device,
    known: dict[tuple[int, Im2colShape], float],
) -> Timed:
    """Returns the shape with the best layout of shared memory and registers. ``known``: the conflicts of the banks that
    were computed already, by the multiplies of a kernel and the shape without its stages, which make no difference."""
    found = []
    for one in variants(layer, kernel, shape, device):
        key = kernel.multiplies, replace(one, input_stages=0, weight_stages=0)
        if key not in known:
            known[key] = conflicts(layer, kernel, one)
        found.append(_timed(layer, kernel, one, known[key]))
    count = step_count(layer, kernel, 1)
    return min(found, key=lambda timed: count * timed[1] + timed[2])


def _timed(layer: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, passes: float) -> Timed:
    step, beside = step_clocks(layer, kernel, shape, passes), store_clocks(layer, kernel, shape)
    return shape, step, beside, is_aligned(layer, shape)


def _fastest(
    layer: StridedProblem,
    kernel: Im2colKernel,
    timed: tuple[Timed, ...],
    maps: list[tuple[int, int, int]],
    device: Device,
    count: int,
) -> tuple[Timed, ...]:
    """Returns the shapes that are among the ``count`` fastest ones for one of the maps, with some number of splits."""
    channel_blocks = blocks(layer, kernel)
    every_split = SPLITS if kernel.partial else (1, *SPLITS) if count > 1 else (1,)
    counts = [(splits * channel_blocks, step_count(layer, kernel, splits)) for splits in every_split]
    narrow = {i for i, (shape, *_) in enumerate(timed) if not shape.wide}
    kept: set[int] = set()
    for batch, rows, cols in maps:
        works = [
            (-(-batch // shape.images) * -(-rows // shape.rows) * -(-cols // shape.cols), step, beside, i)
            for i, (shape, step, beside, any_count) in enumerate(timed)
            if (any_count or cols <= shape.cols) and shape.suits(rows, cols)
        ]
        for parts, steps in counts:
            clocks = [
                (-(-work * parts // device.multiprocessors) * (steps * step + beside), i)
                for work, step, beside, i in works
            ]
            kept.update(i for _, i in nsmallest(count, clocks))
            # Wide boxes are not legal for every width.
            kept.update(i for _, i in nsmallest(count, [one for one in clocks if one[1] in narrow]))
    return tuple(one for i, one in enumerate(timed) if i in kept)


def _shaped_maps(layer: StridedProblem, sizes: Sequence[StridedProblem]) -> list[tuple[int, int, int]]:
    """Returns the batch, rows and columns of maps for which a kernel has its shapes."""
    found = [(size.geometry.batch, *size.positions) for size in sizes]
    for rows, cols in product((1,), SHAPED_COLUMNS) if layer.one_row else product(SHAPED_SIDES, SHAPED_SIDES):
        if layer.one_row or max(rows, cols) <= 2 * min(rows, cols):
            batches = (batch for batch in SHAPED_BATCHES if batch * rows * cols <= SHAPED_POSITIONS)
            found += [(batch, rows, cols) for batch in batches]
    return found
