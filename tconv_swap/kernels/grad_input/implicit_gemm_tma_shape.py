"""The shapes of the tiles of csrc/kernels/grad_input/implicit_gemm_tma.cu: which positions a tile has, and which box of
grad_output it reads. A kernel takes them at its launch; csrc/kernels/common/sizes.cuh has the same words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tconv_swap.kernels.common.dense_map import Corners, DenseMap, most_pixels
from tconv_swap.kernels.common.hardware import MAX_PIXELS
from tconv_swap.kernels.common.sizes import Words
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.runtime.integers import ceil_div

#: Bytes that one pixel, or one weight, has of a chunk of channels: a row in shared memory.
ROW_BYTES = 128
#: Columns of a tile of narrow maps, which have fewer columns than the 8 positions of a group.
NARROW_COLS = 4
#: The fewest channels of a group, on either side: with fewer it was not measured, and most of a chunk or of a multiply
#: is padding.
MIN_CHANNELS = 32
#: Threads of a block beside its consumers.
PRODUCER_THREADS = 64


class TmaTile(NamedTuple):
    """The tile of a block, in positions, which are pixels of grad_input. A multiply is 64 positions, 8 groups of 8.

    The first six fields are its shape, an argument of the launch: ``groups_along`` and ``multiplies_along`` say along
    which axis of the map ("h", "w", or images "n") groups and multiplies follow each other; "" if ``dense``. The
    others belong to the kernel. ``dense``: the tile is so many positions in a row, wherever they begin.
    """

    #: The positions of all warpgroups of a consumer. A kernel has narrow tiles (fewer than 8 columns), or others, or
    #: both (``narrow_alike``).
    images: int
    rows: int
    cols: int
    groups_along: str
    multiplies_along: str
    #: Warpgroups that share the rows of an image; the others have images of their own.
    warpgroups_h: int
    m_tiles: int
    warpgroups: int
    channels: int
    #: The most pixels of a box: a stage of the input has room for them.
    box_pixels: int = 0
    input_stages: int = 2
    weight_stages: int = 3
    splits: int = 1
    dense: bool = False
    #: Groups of ``warpgroups`` warpgroups, each with tiles of its own (ping-pong).
    consumers: int = 1
    #: The sum goes over all chunks of a phase, then the next phase; otherwise over all phases of a chunk.
    phase_major: bool = False
    #: The tensor map of grad_output has a dimension for the phases of columns, so its boxes have no element stride
    #: there.
    phase_dimension: bool = False

    @property
    def positions(self) -> int:
        """Returns how many positions are multiplied; some of them may be outside of a tile that is not dense."""
        return 64 * self.m_tiles * self.warpgroups

    @property
    def narrow(self) -> bool:
        """Returns whether the tile has fewer columns than a group of positions."""
        return self.cols < 8

    @property
    def threads(self) -> int:
        """Returns how many threads a block has."""
        return 128 * self.warpgroups * self.consumers + PRODUCER_THREADS

    def __str__(self) -> str:
        positions = self.positions if self.dense else f"{self.images}x{self.rows}x{self.cols}"
        text = f"{positions} positions x {self.channels} channels, {self.warpgroups} warpgroups"
        text += f", {self.consumers} consumers" if self.consumers > 1 else ""
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


def fills_chunks(problem: StridedProblem) -> bool:
    """Returns whether chunks and multiplies are more than padding. (implicit_gemm was faster where the output channels
    fill at most half of a chunk.)"""
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    return channels >= MIN_CHANNELS and 2 * geometry.in_channels_per_group * problem.item > ROW_BYTES


def narrow_alike(problem: StridedProblem) -> bool:
    """Returns whether narrow tiles read the same stages as others, so that a kernel has both: each column of taps is a
    phase of its own."""
    return problem.max_shift[1] == 0


def box_size(problem: StridedProblem, tile: TmaTile) -> tuple[int, int]:
    """Returns the rows and columns of pixels of one phase of grad_output that a tile that is not dense reads."""
    shift_h, shift_w = problem.max_shift
    return tile.rows + shift_h, tile.cols + (0 if tile.narrow else shift_w)


def dense_map(problem: StridedProblem) -> DenseMap:
    """Returns the map of dense tiles. A place is a pixel of one phase of grad_output."""
    (rows, cols), (shift_h, shift_w) = problem.positions, problem.max_shift
    return DenseMap(rows + shift_h, cols + shift_w, problem.positions, problem.max_shift)


def dense_corners(problem: StridedProblem) -> Corners:
    """Returns the corners of the map of dense tiles: those of the pixels of the first phase."""
    geometry, (pad_h, pad_w) = problem.geometry, problem.geometry.padding
    return dense_map(problem).corners((-pad_h, -pad_w), problem.step, (geometry.height, geometry.width))


def box_pixels(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the pixels of a box of grad_output."""
    if tile.dense:
        return dense_map(problem).pixels(tile.positions)
    box_h, box_w = box_size(problem, tile)
    return tile.images * box_h * box_w


def max_dense_pixels(problem: StridedProblem, tile: TmaTile) -> int:
    """Returns the most pixels of a box of a dense tile, over all maps that it takes."""
    return min(MAX_PIXELS, most_pixels(tile.positions, problem.max_shift))


def tile_counts(problem: StridedProblem, tile: TmaTile) -> tuple[int, int, int]:
    """Returns how many tiles there are along the images, the rows and the columns."""
    batch, (positions_h, positions_w) = problem.geometry.batch, problem.positions
    if tile.dense:
        return 1, 1, ceil_div(dense_map(problem).count(batch), tile.positions)
    return ceil_div(batch, tile.images), ceil_div(positions_h, tile.rows), ceil_div(positions_w, tile.cols)


def shape_words(problem: StridedProblem, tile: TmaTile) -> Words:
    """Returns ``BoxTileShape`` of csrc/kernels/common/sizes.cuh."""
    box_h, box_w = (1, dense_map(problem).cols) if tile.dense else box_size(problem, tile)
    along_rows = tile.warpgroups_h == tile.warpgroups
    own_rows = tile.rows // tile.warpgroups_h
    own_images = tile.images * tile.warpgroups_h // tile.warpgroups
    image_step, row_step = (0, own_rows) if along_rows else (own_images, 0)
    distances: tuple[Words, ...] = ((8, 64),) * 2
    if not tile.dense:
        distances = _distances(tile, own_rows, tile.cols), _distances(tile, box_h, box_w)
    return (
        *(tile.images, tile.rows, tile.cols.bit_length() - 1),
        *(own_rows.bit_length() - 1, image_step, row_step),
        64 * tile.m_tiles if tile.dense else (image_step * box_h + row_step) * box_w,
        *distances[0],
        *distances[1],
        *(box_w, box_pixels(problem, tile) * ROW_BYTES),
    )


def _distances(tile: TmaTile, height: int, width: int) -> Words:
    """Returns how far a group and the next, and a multiply and the next, are in images of this height and width."""
    one = {"w": 8, "h": max(1, 8 // tile.cols) * width, "n": height * width}
    repeated = 8 if tile.multiplies_along == tile.groups_along else 1
    return one[tile.groups_along], one[tile.multiplies_along] * repeated


def dense_shape(warpgroups: int, m_tiles: int) -> TmaTile:
    """Returns the tile of this many positions in a row."""
    return TmaTile(1, 1, 8, "", "", warpgroups, m_tiles, warpgroups, 0, dense=True)


def mapped_shapes(warpgroups: int, m_tiles: int, width: int) -> Iterator[TmaTile]:
    """Yields tiles whose groups are ``width`` columns: 8, or ``NARROW_COLS``."""
    axes = "hn" if width < 8 else "hwn"
    for groups, multiplies, along in product(
        axes, axes if m_tiles > 1 else "h", "hn" if warpgroups > 1 else "h"
    ):
        size = {"n": 1, "h": 8 // width, "w": width}
        size[groups] *= 8
        size[multiplies] *= m_tiles
        size[along] *= warpgroups
        shared = warpgroups if along == "h" else 1
        yield TmaTile(size["n"], size["h"], size["w"], groups, multiplies, shared, m_tiles, warpgroups, 0)
