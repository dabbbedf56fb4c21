"""Which kernels of the halo tile a layer has, whatever its sizes: at most four schedules; and which of them computes
one size. Pure functions of data.

A schedule is the tile that forward/implicit_gemm_choice.py takes for a size that stands for its class; a size takes
the schedule that covers its map with the fewest cells too many. So a layer has no more kernels than schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest

from tconv_swap.kernels.common.forward_schedules import max_implicit_gemm_schedules
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward import implicit_gemm_nchw as forward_nchw
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates, power_above
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem, block_count, can_be_aligned
from tconv_swap.kernels.grad_input.implicit_gemm_shares import share_of_stride_one
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Candidates that are remembered of each class, for tuning.
MOST_CANDIDATES = 8
#: Input channels times columns of the map that stands for large ones: layers of many channels see smaller maps. And its
#: images, up to so many channels and beyond.
CHANNEL_COLUMNS = 32768
LARGE_COLUMNS = (32, 512)
LARGE_IMAGES, MOST_CHANNELS = (16, 8), 256
#: Columns of the large map that many networks have, whatever their channels are.
USUAL_COLUMNS = 128
#: Input channels times images of small maps, and those images.
CHANNEL_IMAGES = 65536
SMALL_IMAGES = (32, 128)
#: So many where those would leave the warpgroup's multiply idle.
MANY_IMAGES = 2048
#: Columns of a row of cells that whole rows of them divide (ROW_FRAGMENTS, 7 of them), where images follow each other.
WHOLE_ROW_CELLS = 56
#: Of an image: a tile takes several images only where an offset from the first to the last is below 2^31.
MANY_IMAGES_BYTES = 1 << 24
#: By what the cells of a tile count for more: those of other large maps, and of small ones, whose halo is larger.
HANDICAP_LARGE, HANDICAP_SMALL = 1.05, 1.15


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one kernel computes. ``problem``: of the size that stands for the class. ``whole_rows``: rows of cells must
    divide ``WHOLE_ROW_CELLS``. ``few``: for sizes that leave multiprocessors idle otherwise. ``handicap``: what a cell
    of it costs, compared with the first schedule's."""

    problem: TileProblem
    tile: Tile
    whole_rows: bool = False
    few: bool = False
    handicap: float = 1.0

    def posed(self, problem: TileProblem) -> TileProblem:
        """A problem of this layer, of any size, as this kernel sees it."""
        return replace(self.problem, geometry=problem.geometry)

    def legal(self, problem: TileProblem) -> bool:
        """Whether the kernel is right for this size."""
        geometry, posed, tile = problem.geometry, self.problem, self.tile
        image = geometry.in_channels * geometry.height * geometry.width * problem.item
        if posed.arranged and geometry.batch * image > MAX_COPY_BYTES:
            return False
        if posed.aligned and not can_be_aligned(self.posed(problem)):
            return False
        if posed.flat:
            if (tile.pixel_boxes or tile.raw_stages) and geometry.height * geometry.width % tile.cols:
                return False
            return not self.whole_rows or (WHOLE_ROW_CELLS % geometry.width == 0 and geometry.width % 2 == 0)
        if tile.images > 2 and image > MANY_IMAGES_BYTES:
            return False
        return not (tile.wgmma and tile.cols < 8) or self.posed(problem).cells[1] <= tile.cols

    def multiplied(self, problem: TileProblem) -> float:
        """Cells that the tiles of this size have, the empty ones too, counted in those of the first schedule."""
        posed, tile = self.posed(problem), self.tile
        batch, (rows, cols) = problem.geometry.batch, posed.cells
        if posed.flat:
            return self.handicap * round_up(batch * rows * cols, tile.cols) * posed.stack
        cells = round_up(batch, tile.images) * round_up(rows, tile.rows) * round_up(cols, tile.cols)
        return self.handicap * cells * posed.stack


def ranked(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Tiles for this very size, the one expected to be the fastest first: those for inputs as they are given and those
    of forward/implicit_gemm_tma.cu for NCHW in turn, the better kind first."""
    boxes = list(forward_nchw.candidates(problem, device))
    ways: list[Iterable[tuple[TileProblem, Tile]]] = [candidates(problem, device), boxes]
    if boxes and forward_nchw.pays(*boxes[0]):
        ways.reverse()
    return (entry for entries in zip_longest(*ways) for entry in entries if entry is not None)


def choose(problem: TileProblem, device: Device, count: int = 1) -> list[tuple[TileProblem, Tile]]:
    """At most ``count`` tiles for this size out of the layer's classes, the one expected to be the fastest first."""
    legal = [one for one in schedules(of_any_size(problem), device) if one[0].legal(problem)]
    if not legal:
        legal = list(_of_huge_inputs(of_any_size(problem), device))
    if not legal:
        return []
    # What is for some sizes alone is the faster there.
    legal.sort(key=lambda one: not (one[0].problem.aligned or one[0].whole_rows))
    whole = [one for one in legal if not one[0].few] or legal
    best = min(whole, key=lambda one: one[0].multiplied(problem))
    few = [one for one in legal if one[0].few]
    if few and 4 * block_count(best[0].posed(problem), best[0].tile) < 3 * device.multiprocessors:
        best = few[0]
    found = [best[0], *(one for one in best[1] if one.legal(problem) and one != best[0])]
    return [_for_size(one, problem, device) for one in found[:count]]


def of_any_size(problem: TileProblem) -> TileProblem:
    """The same for all sizes of a layer, but that maps of one pixel may have another stride (make_problem)."""
    side = 1 if problem.one_pixel else 64
    return replace(problem, geometry=replace(problem.geometry, batch=1, height=side, width=side))


def _for_size(schedule: Schedule, problem: TileProblem, device: Device) -> tuple[TileProblem, Tile]:
    posed, tile = schedule.posed(problem), schedule.tile
    if tile.splits > 1:
        splits, chunks = 2, ceil_div(posed.words, tile.chunk_words)
        room = device.multiprocessors * tile.blocks_per_multiprocessor
        blocks = block_count(posed, replace(tile, splits=1))
        while splits < 8 and 2 * splits * blocks <= room and chunks >= 16 * splits:
            splits *= 2
        tile = replace(tile, splits=splits)
    return posed, tile


#: A class's first schedule, and the others of its size that were nearly as good.
Ranked = tuple[Schedule, tuple[Schedule, ...]]


@lru_cache(maxsize=1024)
def schedules(layer: TileProblem, device: Device) -> tuple[Ranked, ...]:
    """The kernels of a layer (``of_any_size``), the one that computes any size first."""
    if layer.one_pixel:
        one = _best(layer, _sized(layer, 4096, 1, 1), device)
        return (one,) if one is not None else ()
    found: dict[tuple[TileProblem, Tile], Ranked] = {}
    most = (
        share_of_stride_one(layer, device)
        if layer.of_grad_input
        else max_implicit_gemm_schedules(layer, device)
    )
    for make in _classes(layer):
        if len(found) == most:
            break
        one = make(device)
        if one is None or (
            one[0].problem.aligned and _copies(found.values()) and not one[0].tile.pixel_boxes
        ):
            continue
        found.setdefault((replace(one[0].problem, geometry=layer.geometry), one[0].tile), one)
    return tuple(found.values())


def _copies(found: Iterable[Ranked]) -> bool:
    """Whether the first kernel reads a copy of the input, for which no size is better than another."""
    return any(one.problem.arranged for one, _ in islice(found, 1))


Make = Callable[[Device], "Ranked | None"]


def _classes(layer: TileProblem) -> Iterator[Make]:
    """One after another, those first that any layer needs."""
    geometry = layer.geometry
    least, most = LARGE_COLUMNS
    channels = geometry.in_channels_per_group
    columns = min(most, max(least, power_above(ceil_div(CHANNEL_COLUMNS + 1, channels)) // 2))
    images = LARGE_IMAGES[channels > MOST_CHANNELS]
    boxed = layer.input_channels_last

    def made(batch: int, height: int, width: int, handicap: float = 1.0, aligned: bool = False) -> Make:
        def make(device: Device) -> Ranked | None:
            found = _best(layer, _sized(layer, batch, height, width, aligned), device)
            if found is None or found[0].problem.aligned != aligned:
                return None
            return replace(found[0], handicap=handicap), found[1]

        return make

    def small(cells: int) -> Make:
        height, width = _map_of(layer, cells)
        fewest, most_images = SMALL_IMAGES
        batch = min(most_images, max(fewest, CHANNEL_IMAGES // channels))

        def make(device: Device) -> Ranked | None:
            found = made(batch, height, width, HANDICAP_SMALL)(device)
            many = made(MANY_IMAGES, height, width, HANDICAP_SMALL)(device)
            return found if found and many and found[0].tile.wgmma == many[0].tile.wgmma else many

        return make

    def few(height: int, width: int) -> Make:
        def make(device: Device) -> Ranked | None:
            found = _best(layer, _sized(layer, 1, height, width), device)
            return None if found is None else (replace(found[0], few=True), found[1])

        return make

    if layer.flat:
        yield made(images, columns, columns)
        yield few(16, 16)
        if not boxed:
            yield made(images, columns, columns, aligned=True)
            if max(geometry.stride) == 2:
                yield made(2048, 14, 14)
        return
    if geometry.kernel[0] == geometry.stride[0] == 1:
        # What a layer of one dimension is made of, whose maps have one row.
        yield made(8, 1, 512)
        yield few(1, 64)
        if not boxed:
            yield made(8, 1, 512, aligned=True)
        yield made(images, columns, columns, HANDICAP_LARGE)
        return
    yield made(images, columns, columns)
    yield few(16, 16)
    if not boxed:
        side = USUAL_COLUMNS if max(geometry.stride) == 1 else max(least, columns // 4)
        yield made(images, side, side, aligned=True)
    elif max(geometry.stride) == 1:
        yield made(images, USUAL_COLUMNS, USUAL_COLUMNS, HANDICAP_LARGE)
    if layer.precision != "IEEE" or channels <= MOST_CHANNELS:
        yield small(8)
    yield small(4)


def _sized(layer: TileProblem, batch: int, height: int, width: int, aligned: bool = False) -> TileProblem:
    geometry = replace(layer.geometry, batch=batch, height=height, width=width)
    return replace(layer, geometry=geometry, aligned=aligned)


def _map_of(layer: TileProblem, cells: int) -> tuple[int, int]:
    """The largest map of so many cells along each axis, or the smallest of more."""
    found = []
    for axis in (0, 1):
        sizes = {
            size: replace(layer, geometry=replace(layer.geometry, height=size, width=size)).cells[axis]
            for size in range(1, 2 * cells + 1)
        }
        fitting = [size for size, of_it in sizes.items() if 0 < of_it <= cells]
        found.append(max(fitting, default=2 * cells))
    return found[0], found[1]


def _best(layer: TileProblem, sized: TileProblem, device: Device) -> Ranked | None:
    """The best of the candidates for a size that stands for its class, and the others."""
    tiles = list(islice(dict.fromkeys(ranked(sized, device)), MOST_CANDIDATES))
    made = tuple(Schedule(problem, tile, _in_whole_rows(problem, tile)) for problem, tile in tiles)
    return (made[0], made[1:]) if made else None


def _in_whole_rows(problem: TileProblem, tile: Tile) -> bool:
    return problem.flat and tile.by_rows


@lru_cache(maxsize=256)
def _of_huge_inputs(layer: TileProblem, device: Device) -> tuple[Ranked, ...]:
    """Of layers whose kernels all read a copy of the input, where that would be too large (``MAX_COPY_BYTES``)."""
    sized = _sized(layer, 8, 256, 256)
    tiles = list(islice(candidates(sized, device), 1))
    return tuple((Schedule(problem, tile), ()) for problem, tile in tiles)
