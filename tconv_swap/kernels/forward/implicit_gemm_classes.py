"""The schedules of the forward implicit GEMM that a layer has, at most four whatever its sizes, and which of them
computes one size. Pure functions of data.

A schedule is the tile that forward/implicit_gemm_choice.py chooses for the nominal size of its class. A size takes
the schedule with the fewest expected clocks. A layer therefore has no more kernels than schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest

from tconv_swap.kernels.common.forward_schedules import (
    max_implicit_gemm_schedules,
    max_schedules_of_grad_input,
)
from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.forward import implicit_gemm_nchw as forward_nchw
from tconv_swap.kernels.forward.implicit_gemm_choice import candidates
from tconv_swap.kernels.forward.implicit_gemm_clocks import expected_clocks
from tconv_swap.kernels.forward.implicit_gemm_fit import power_above
from tconv_swap.kernels.forward.implicit_gemm_layout import (
    ALIGNED_PIXELS,
    Tile,
    TileProblem,
    block_count,
    can_be_aligned,
)
from tconv_swap.kernels.forward.implicit_gemm_shape import best_shape, of_any_shape
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.disk_cache import disk_cache
from tconv_swap.runtime.integers import ceil_div

#: How many candidates of each class tuning can measure.
MAX_CANDIDATES = 8
#: The nominal large map: its input channels times its columns, because layers of many channels see smaller maps; the
#: bounds of its columns; its images up to MANY_CHANNELS channels and above.
CHANNEL_COLUMNS = 32768
LARGE_COLUMNS = (32, 512)
LARGE_IMAGES, MANY_CHANNELS = (16, 8), 256
#: Columns of the large map that many networks have, whatever their channels are.
USUAL_COLUMNS = 128
#: Columns of the medium map.
MEDIUM_COLUMNS = 16
#: The nominal small map: its input channels times its images, and the bounds of its images.
CHANNEL_IMAGES = 65536
SMALL_IMAGES = (32, 128)
#: Images of the nominal small map where fewer images would not be multiplied by wgmma.
MANY_IMAGES = 2048
#: Positions of a warp's whole rows in a flat problem: 7 fragments of 8 (the last of ROW_FRAGMENTS). The columns of a
#: map have to divide this number.
WHOLE_ROW_POSITIONS = 56
#: The most bytes of an image where a tile takes more than two images: an offset within them has to stay below 2^31.
MANY_IMAGES_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one kernel computes.

    Attributes:
        problem: the layer with the nominal size of the class.
        whole_rows: whether the columns of a map have to divide ``WHOLE_ROW_POSITIONS``.
    """

    problem: TileProblem
    tile: Tile
    whole_rows: bool = False

    def adapted(self, problem: TileProblem) -> TileProblem:
        """Returns a problem of this layer, of any size, as this kernel sees it."""
        return replace(self.problem, geometry=problem.geometry)

    def legal(self, problem: TileProblem) -> bool:
        """Whether the kernel is right for this size."""
        geometry, nominal, tile = problem.geometry, self.problem, self.tile
        image = geometry.in_channels * geometry.height * geometry.width * problem.item
        if nominal.nhwc_copy and geometry.batch * image > MAX_COPY_BYTES:
            return False
        outputs = geometry.batch * geometry.out_channels * geometry.out_height * geometry.out_width
        if tile.splits > 1 and 2 * 4 * outputs > WORKSPACE_LIMIT_BYTES:
            return False
        if nominal.aligned and not can_be_aligned(self.adapted(problem)):
            return False
        if nominal.flat:
            # Images that are no whole tiles were not measured with wgmma.
            if nominal.aligned and tile.wgmma and geometry.height * geometry.width % ALIGNED_PIXELS:
                return False
            if (tile.pixel_major or tile.nchw_stages) and geometry.height * geometry.width % tile.cols:
                return False
            return not self.whole_rows or (
                WHOLE_ROW_POSITIONS % geometry.width == 0 and geometry.width % 2 == 0
            )
        if tile.images > 2 and image > MANY_IMAGES_BYTES:
            return False
        return not (tile.wgmma and tile.cols < 8) or self.adapted(problem).positions[1] <= tile.cols

    def in_shape(self, problem: TileProblem, device: Device) -> Tile:
        """Returns the tile, in the shape that fits this size best."""
        if not self.tile.shaped_pixels:
            return self.tile
        return best_shape(self.adapted(problem), self.tile, device.multiprocessors)


#: The best schedule of a class, and the other candidates for its nominal size.
Ranked = tuple[Schedule, tuple[Schedule, ...]]


def ranked(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Returns tiles for exactly this size, the one that is expected to be the fastest first. Those of
    forward/implicit_gemm_choice.py and those of forward/implicit_gemm_nchw.py alternate, the better kind first."""
    kinds = [list(candidates(problem, device)), list(forward_nchw.candidates(problem, device))]
    kinds = [kind for kind in kinds if kind]
    kinds.sort(key=lambda kind: expected_clocks(kind[0][0], kind[0][1], device.multiprocessors))
    return (entry for entries in zip_longest(*kinds) for entry in entries if entry is not None)


def choose(problem: TileProblem, device: Device, count: int = 1) -> list[tuple[TileProblem, Tile]]:
    """Returns at most ``count`` tiles for this size, from the schedules of the layer, the one that is expected to
    be the fastest first."""
    legal = [one for one in schedules(of_any_size(problem), device) if one[0].legal(problem)]
    if not legal:
        legal = list(_schedules_for_huge_inputs(of_any_size(problem), device))
    if not legal:
        return []
    sized = [(one, _for_size(one[0], problem, device)) for one in legal]
    sized.sort(key=lambda entry: expected_clocks(entry[1][0], entry[1][1], device.multiprocessors))
    found = [made for _, made in sized]
    if len(found) < count:
        others = (one for one in sized[0][0][1] if one.legal(problem))
        found = list(dict.fromkeys([*found, *(_for_size(one, problem, device) for one in others)]))
    return found[:count]


def of_any_size(problem: TileProblem) -> TileProblem:
    """Returns a problem that is the same for all sizes of a layer, except that maps of one pixel have one of their own,
    because their stride may differ (``make_problem``)."""
    side = 1 if problem.one_pixel else 64
    return replace(problem, geometry=replace(problem.geometry, batch=1, height=side, width=side))


def _for_size(schedule: Schedule, problem: TileProblem, device: Device) -> tuple[TileProblem, Tile]:
    """Returns the problem as the schedule's kernel sees it, and the tile with the splits that suit the size."""
    adapted, tile = schedule.adapted(problem), schedule.in_shape(problem, device)
    if tile.splits > 1:
        splits, chunks = 2, ceil_div(adapted.words, tile.chunk_words)
        room = device.multiprocessors * tile.blocks_per_multiprocessor
        blocks = block_count(adapted, replace(tile, splits=1))
        while splits < 8 and 2 * splits * blocks <= room and chunks >= 16 * splits:
            splits *= 2
        tile = replace(tile, splits=splits)
    return adapted, tile


@disk_cache
def schedules(layer: TileProblem, device: Device) -> tuple[Ranked, ...]:
    """Returns the schedules of ``layer``, which ``of_any_size`` made; the first computes every size."""
    if layer.one_pixel:
        one = _best(layer, _sized(layer, 4096, 1, 1), device)
        return (one,) if one is not None else ()
    found: dict[tuple[TileProblem, Tile], Ranked] = {}
    limit = (
        max_schedules_of_grad_input(layer, device)
        if layer.of_grad_input
        else max_implicit_gemm_schedules(layer, device)
    )
    for make in _classes(layer, limit):
        if len(found) == limit:
            break
        one = make(device)
        if one is None:
            continue
        found.setdefault((replace(one[0].problem, geometry=layer.geometry), of_any_shape(one[0].tile)), one)
    return tuple(found.values())


#: Makes the schedules of a class for a device; None where no kernel computes its nominal size.
Make = Callable[[Device], "Ranked | None"]


def _classes(layer: TileProblem, limit: int) -> Iterator[Make]:
    """Yields the classes of a layer's sizes, of which at most ``limit`` get a schedule, the most important first."""
    geometry = layer.geometry
    min_columns, max_columns = LARGE_COLUMNS
    channels = geometry.in_channels_per_group
    columns = min(max_columns, max(min_columns, power_above(ceil_div(CHANNEL_COLUMNS + 1, channels)) // 2))
    images = LARGE_IMAGES[channels > MANY_CHANNELS]
    channels_last = layer.input_channels_last

    def made(batch: int, height: int, width: int, aligned: bool = False) -> Make:
        def make(device: Device) -> Ranked | None:
            found = _best(layer, _sized(layer, batch, height, width, aligned), device)
            return None if found is None or found[0].problem.aligned != aligned else found

        return make

    def small(positions: int) -> Make:
        height, width = _map_of(layer, positions)
        min_images, max_images = SMALL_IMAGES
        batch = min(max_images, max(min_images, CHANNEL_IMAGES // channels))

        def make(device: Device) -> Ranked | None:
            found = made(batch, height, width)(device)
            many = made(MANY_IMAGES, height, width)(device)
            if (
                many
                and _is_narrow(many[0].tile)
                and (not found or not _suits_few_images(found[0].tile, many[0].tile))
            ):
                return many
            return found if found and many and found[0].tile.wgmma == many[0].tile.wgmma else many

        return make

    if layer.flat:
        yield made(images, columns, columns)
        yield made(1, 16, 16)
        if not channels_last:
            yield made(images, columns, columns, aligned=True)
            if max(geometry.stride) == 2:
                yield made(2048, 14, 14)
        return
    if geometry.kernel[0] == geometry.stride[0] == 1:
        # A layer of one dimension is called with maps of one row.
        yield made(8, 1, 512)
        yield made(1, 1, 64)
        if not channels_last:
            yield made(8, 1, 512, aligned=True)
        yield made(images, columns, columns)
        return
    usual = channels_last and max(geometry.stride) == 1
    # A layer that may have two schedules has one for large maps and one for sizes of few tiles.
    large = USUAL_COLUMNS if usual and limit == 2 else columns
    ieee = layer.precision == "IEEE"
    if not channels_last and ieee and channels <= MANY_CHANNELS and max(geometry.stride) > 1:
        # Large maps take the aligned schedule, so the schedule for any size is chosen for maps of fewer columns.
        yield made(SMALL_IMAGES[1], MEDIUM_COLUMNS, MEDIUM_COLUMNS)
    else:
        yield made(images, large, large)
    # Layers of many channels have small maps, which take twice as long without tiles of their own; aligned rows gain
    # less, if a layer has enough schedules for all of these. With fewer channels, sizes of few tiles gain least.
    strided = max(geometry.stride) > 1 and limit == MAX_SCHEDULES
    small_first = strided and channels > MANY_CHANNELS
    few_last = strided and not (channels_last or ieee or small_first)
    # Where a layer has at most two schedules, the second one gains more for large maps than for sizes of few small
    # tiles.
    side = USUAL_COLUMNS if max(geometry.stride) == 1 else max(min_columns, columns // 4)
    if not channels_last and not small_first:
        yield made(images, side, side, aligned=True)
    if not few_last:
        yield made(1, 16, 16)
    if usual:
        yield made(images, USUAL_COLUMNS, USUAL_COLUMNS)
    if not ieee or channels <= MANY_CHANNELS or small_first:
        yield small(8)
    yield small(4)
    if few_last:
        yield made(1, 16, 16)
    if not channels_last and small_first:
        yield made(images, side, side, aligned=True)


def _is_narrow(tile: Tile) -> bool:
    return tile.tma and tile.cols < 8


def _suits_few_images(tile: Tile, of_many: Tile) -> bool:
    """Returns whether a tile of narrow maps, chosen for few images, is worth more than that of many: nothing is packed,
    and as many positions share the weights that a block loads."""
    return tile.tma_weights and tile.positions >= of_many.positions


def _sized(layer: TileProblem, batch: int, height: int, width: int, aligned: bool = False) -> TileProblem:
    geometry = replace(layer.geometry, batch=batch, height=height, width=width)
    return replace(layer, geometry=geometry, aligned=aligned)


def _map_of(layer: TileProblem, positions: int) -> tuple[int, int]:
    """Returns the height and width of the largest map of at most so many positions along each axis, or twice that
    number where there is none."""
    found = []
    for axis in (0, 1):
        sizes = {
            size: replace(layer, geometry=replace(layer.geometry, height=size, width=size)).positions[axis]
            for size in range(1, 2 * positions + 1)
        }
        fitting = [size for size, count in sizes.items() if 0 < count <= positions]
        found.append(max(fitting, default=2 * positions))
    return found[0], found[1]


def _best(layer: TileProblem, sized: TileProblem, device: Device) -> Ranked | None:
    """Returns the best of the candidates for a nominal size, and the others; None where there is none."""
    tiles = list(islice(dict.fromkeys(ranked(sized, device)), MAX_CANDIDATES))
    made = tuple(Schedule(problem, tile, _in_whole_rows(problem, tile)) for problem, tile in tiles)
    return (made[0], made[1:]) if made else None


def _in_whole_rows(problem: TileProblem, tile: Tile) -> bool:
    return problem.flat and tile.by_rows


@lru_cache(maxsize=256)
def _schedules_for_huge_inputs(layer: TileProblem, device: Device) -> tuple[Ranked, ...]:
    """Returns a schedule without a copy of the input, for sizes whose copy would be too large
    (``MAX_COPY_BYTES``)."""
    sized = _sized(layer, 8, 256, 256)
    tiles = list(islice(candidates(sized, device), 1))
    return tuple((Schedule(problem, tile), ()) for problem, tile in tiles)
