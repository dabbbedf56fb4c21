"""The kernels of csrc/kernels/grad_input/im2col.cu that a layer may have over all its sizes, and the best of those that
it has, with the shape and the splits that are expected to be the fastest, for each size. The functions are pure.

The clocks of a step of k are the same for all sizes of a layer, so they are computed once, with the conflicts of the
banks of shared memory. For a size, the shapes of a kernel differ by how many work tiles they make of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, product
from typing import NamedTuple

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
#: How many tiles each work tile of all channels and splits counts for, and the expected clocks of a tile in each shape.
Run = tuple[int, list[float]]
#: The batches of maps, by their rows and columns.
Maps = dict[tuple[int, int], set[int]]


class Schedule(NamedTuple):
    """A kernel, and the shapes that it may get."""

    kernel: Im2colKernel
    shapes: tuple[Timed, ...]


def supports_some_size(layer: StridedProblem, device: Device) -> bool:
    """Returns whether the kernel computes some size of the layer."""
    return not (layer.input_channels_last or layer.weight_channels_last) and may_load(layer, device)


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
        yield time, tile._replace(shape=counted[i][-1])


def candidates(
    layer: StridedProblem, sizes: Sequence[StridedProblem], device: Device
) -> tuple[Schedule, ...]:
    """Returns every kernel of a layer (``of_any_size``), with the shapes that are the fastest for some map; ``sizes``
    are among these maps."""
    if not supports_some_size(layer, device):
        return ()
    known: dict[tuple[int, ...], float] = {}
    found: list[Schedule] = []
    maps = _shaped_maps(layer, sizes)
    for whole, alike in groupby(kernels(layer, device), key=lambda one: one._replace(partial=False)):
        plain = list(_plain(layer, whole, device))
        (near,) = _fastest(plain, [_runs(layer, whole, plain, (1, *SPLITS))], maps, device, NEAR)
        laid = [_laid(layer, whole, plain[i][0], device, known) for i in sorted(near)]
        of_kernels = []
        for kernel in alike:
            timed = [
                (shape, step, store_clocks(layer, kernel, shape), any_count)
                for shape, step, _, any_count in laid
            ]
            of_kernels.append(
                (kernel, timed, _runs(layer, kernel, timed, SPLITS if kernel.partial else (1,)))
            )
        fastest = _fastest(laid, [runs for *_, runs in of_kernels], maps, device, 1)
        for (kernel, timed, _), kept in zip(of_kernels, fastest, strict=True):
            found.append(Schedule(kernel, tuple(timed[i] for i in sorted(kept))))
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
    known: dict[tuple[int, ...], float],
) -> Timed:
    """Returns the shape with the best layout of shared memory and registers. ``known``: the conflicts of the banks that
    were computed already, by the multiplies of a kernel and the shape without its stages, which make no difference."""
    count = step_count(layer, kernel, 1)

    def with_conflicts(one: Im2colShape) -> Timed:
        key = kernel.multiplies, one.images, one.rows, one.cols, one.box_w, one.paired
        if key not in known:
            known[key] = conflicts(layer, kernel, one)
        return _timed(layer, kernel, one, known[key])

    def of_sum(timed: Timed) -> float:
        return count * timed[1] + timed[2]

    first, *others = variants(layer, kernel, shape, device)
    best = with_conflicts(first)
    for one in others:
        # Conflicts only add clocks, so they need not be known where it is no faster without them.
        if of_sum(_timed(layer, kernel, one, 1.0)) < of_sum(best):
            best = min(best, with_conflicts(one), key=of_sum)
    return best


def _timed(layer: StridedProblem, kernel: Im2colKernel, shape: Im2colShape, passes: float) -> Timed:
    step, beside = step_clocks(layer, kernel, shape, passes), store_clocks(layer, kernel, shape)
    return shape, step, beside, is_aligned(layer, shape)


def _runs(
    layer: StridedProblem, kernel: Im2colKernel, timed: Sequence[Timed], every_split: Iterable[int]
) -> list[Run]:
    """Returns the runs of a kernel with each of these numbers of splits."""
    channel_blocks, found = blocks(layer, kernel), []
    for splits in every_split:
        count = step_count(layer, kernel, splits)
        found.append((splits * channel_blocks, [count * step + beside for _, step, beside, _ in timed]))
    return found


def _fastest(
    timed: Sequence[Timed], kernels_runs: Sequence[Sequence[Run]], maps: Maps, device: Device, count: int
) -> list[set[int]]:
    """Returns for each kernel, of which there are these runs, the shapes that are among the ``count`` fastest ones for
    one of the maps, with some number of splits."""
    found: list[set[int]] = [set() for _ in kernels_runs]
    multiprocessors = device.multiprocessors
    for (rows, cols), batches in maps.items():
        suited = [
            i
            for i, (shape, _, _, any_count) in enumerate(timed)
            if (any_count or cols <= shape.cols) and shape.suits(rows, cols)
        ]
        shapes_here = [timed[i][0] for i in suited]
        of_image = [(one.images, -(-rows // one.rows) * -(-cols // one.cols)) for one in shapes_here]
        # Wide boxes are not legal for every width.
        narrow = [not one.wide for one in shapes_here]
        all_narrow = all(narrow)
        works = [[-(-batch // images) * tiles for images, tiles in of_image] for batch in batches]
        for runs, kept in zip(kernels_runs, found, strict=True):
            fastest: set[int] = set()
            for parts, of_tile in runs:
                here = [of_tile[i] for i in suited]
                for work in works:
                    clocks = [
                        -(-tiles * parts // multiprocessors) * one
                        for tiles, one in zip(work, here, strict=True)
                    ]
                    order = sorted(range(len(clocks)), key=clocks.__getitem__)
                    fastest.update(order[:count])
                    if not all_narrow:
                        fastest.update(islice(filter(narrow.__getitem__, order), count))
            kept.update(suited[i] for i in fastest)
    return found


def _shaped_maps(layer: StridedProblem, sizes: Sequence[StridedProblem]) -> Maps:
    """Returns the maps for which a kernel has its shapes."""
    found: Maps = {}
    for size in sizes:
        found.setdefault(size.positions, set()).add(size.geometry.batch)
    for rows, cols in product((1,), SHAPED_COLUMNS) if layer.one_row else product(SHAPED_SIDES, SHAPED_SIDES):
        if layer.one_row or max(rows, cols) <= 2 * min(rows, cols):
            batches = (batch for batch in SHAPED_BATCHES if batch * rows * cols <= SHAPED_POSITIONS)
            found.setdefault((rows, cols), set()).update(batches)
    return found
