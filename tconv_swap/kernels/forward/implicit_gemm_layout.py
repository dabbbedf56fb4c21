"""The tile that a block of csrc/kernels/forward/implicit_gemm_{mma,wgmma,tma,tma_nchw}.cu computes, and the transposed
convolution as these kernels see it; forward/implicit_gemm_memory.py has the memory that a tile takes.

The output is a grid of positions. A position stands for STRIDE_H x STRIDE_W outputs, one of each phase, which read the
same inputs apart from the shift of each tap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import NamedTuple

import torch

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.dense_map import DenseMap
from tconv_swap.kernels.common.one_pixel import has_stride_of_one_pixel
from tconv_swap.kernels.forward.hashed_once import HashedOnce
from tconv_swap.kernels.forward.implicit_gemm_axis import axis_taps, shift_bounds
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div

#: The pixels of an ``aligned`` image of a flat problem are a multiple of this number where ``wgmma`` multiplies.
ALIGNED_PIXELS = 128
#: The most columns of phases that one block computes.
MAX_PHASES = 8
#: Threads of grad_input/implicit_gemm_wgmma.cu that load the input.
PRODUCER_THREADS = 128


class Tile(NamedTuple):
    """The tile that one block computes, in the terms of forward/implicit_gemm_layout.cuh. A fragment is 16 channels x 8
    positions."""

    warps_m: int
    warp_m_tiles: int
    images: int
    rows: int
    cols: int
    warp_images: int
    warp_rows: int
    warp_cols: int
    chunk_words: int
    stages: int
    blocks_per_multiprocessor: int
    splits: int = 1
    #: Whether wgmma (sm_90a) multiplies; otherwise mma.sync does, in forward/implicit_gemm_mma.cu. In
    #: forward/implicit_gemm_wgmma.cu it reads planes of 16 bytes of k.
    wgmma: bool = False
    #: Whether the copy engine (TMA) loads an input in channels_last (with wgmma): forward/implicit_gemm_tma.cu.
    tma: bool = False
    #: Whether the weights of all chunks stay in shared memory while a block computes its tiles (with tma).
    resident_weights: bool = False
    #: Whether outputs are stored in whole lines of 128 bytes (with tma, 16 bits, channels_last), where
    #: ``stores_lines`` allows it.
    whole_lines: bool = False
    #: Whether the copy engine loads the weights, too, in their own layout, so that nothing is packed (with tma, 16
    #: bits, channels_last weights).
    tma_weights: bool = False
    #: Whether the copy engine loads an NCHW input in its own layout, 64 pixels of a channel in a row, which the
    #: multiplier reads as a pixel-major operand (with tma, 16 bits, flat).
    pixel_major: bool = False
    #: The pixels of which a stage has room where the shape of a tile is an argument of the launch
    #: (forward/implicit_gemm_shape.py; with tma), or 0.
    shaped_pixels: int = 0
    #: Whether the positions of a shaped tile are a row, wherever they begin, and not a part of a map.
    dense: bool = False
    #: How many taps, of each step of k, the second warpgroup of two begins a tile after the first; 0: together (with
    #: tma).
    stagger: int = 0
    #: Stages of an NCHW input in its own layout, which the copy engine loads and producer warps transpose (with
    #: wgmma): forward/implicit_gemm_tma_nchw.cu.
    nchw_stages: int = 0
    #: Warps that load the input (with wgmma).
    producer_warps: int = 4
    #: Bytes of shared memory in which each warp collects a subtile of its outputs, to store whole rows (with wgmma).
    subtile_bytes: int = 4096
    #: Channels of such a subtile, 8 or 16 (with wgmma): with fewer channels its rows are longer.
    subtile_channels: int = 8
    #: Whether NCHW outputs are stored in segments as long as possible, which begin where sectors of memory begin
    #: (with tma and whole rows of positions).
    by_rows: bool = False
    #: How many of ``warps_m`` are one warp (grad_input/implicit_gemm_wgmma.cu), which keeps the sums of each.
    m_parts: int = 1

    @property
    def fragment(self) -> tuple[int, int, int]:
        """The images, rows and columns of positions of one fragment."""
        cols = min(8, self.cols)
        rows = min(8 // cols, self.rows)
        return 8 // (cols * rows), rows, cols

    @property
    def positions(self) -> int:
        """The positions of the tile; some may be outside of the map."""
        return self.images * self.rows * self.cols

    @property
    def warps_n(self) -> int:
        images, rows, cols = self.fragment
        return (
            self.images
            // (images * self.warp_images)
            * (self.rows // (rows * self.warp_rows))
            * (self.cols // (cols * self.warp_cols))
        )

    @property
    def threads(self) -> int:
        """The threads of a block: consumers, and with wgmma producers."""
        return 32 * self.warps_m * self.warps_n // self.m_parts + (
            32 * self.producer_warps if self.wgmma else 0
        )

    @property
    def block_m(self) -> int:
        return 16 * self.warps_m * self.warp_m_tiles

    @property
    def warp_fragments(self) -> int:
        """The fragments of one phase whose sums a warp keeps."""
        return self.warp_m_tiles * self.warp_images * self.warp_rows * self.warp_cols

    def __str__(self) -> str:
        positions = f"{self.positions}" if self.dense else f"{self.images}x{self.rows}x{self.cols}"
        text = f"{self.block_m} x {positions} positions, {self.threads // 32} warps"
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


@dataclass(frozen=True)  # without slots, because properties that many tiles read are computed once
class TileProblem(HashedOnce):
    """A transposed convolution as the kernel sees it. The stride in ``geometry`` may differ from the caller's where the
    input has one pixel: the result does not depend on it, and with stride = kernel each tap is a phase."""

    geometry: Geometry
    dtype: torch.dtype
    precision: str
    input_channels_last: bool
    output_channels_last: bool
    weight_channels_last: bool
    has_bias: bool
    #: How many output rows of a position are stacked into the rows of a multiply (for few channels;
    #: forward/implicit_gemm_taps.cuh), or 1.
    stack: int = 1
    #: The phases that one block computes, if not those of ``phases``: with fewer phases a block has more positions.
    block_phases: Pair | None = None
    #: Whether this computes the gradient of an input: the weight is read with its channels exchanged and its taps
    #: reversed.
    of_grad_input: bool = False
    #: Whether the kernel reads a channels_last copy in the workspace, which a launch of its own makes of an NCHW
    #: input.
    nhwc_copy: bool = False
    #: Whether the columns of a row of an NCHW input are known to be a multiple of ``aligned_columns``; with ``flat``,
    #: whether the pixels of an image are, and its rows have an even number of positions.
    aligned: bool = False
    #: Whether the map has one pixel and is computed with another stride than the layer's. The other sizes of the layer
    #: then have other kernels.
    one_pixel: bool = False

    __hash__ = HashedOnce.__hash__

    @cached_property
    def item(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def parts(self) -> int:
        return 2 if self.precision == "IEEE" else 1

    @cached_property
    def words(self) -> int:
        """The 32-bit words of k of one group: each holds an input channel, or two of 16 bits."""
        return ceil_div(self.geometry.in_channels_per_group * self.item, 4)

    @cached_property
    def inputs(self) -> int:
        """The elements of the input."""
        return prod(self.geometry.input_shape)

    @cached_property
    def out_width(self) -> int:
        return self.geometry.out_width

    @cached_property
    def outputs(self) -> int:
        """The elements of the output."""
        return prod(self.geometry.output_shape)

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes of input and output together."""
        return (self.inputs + self.outputs) * self.item

    @cached_property
    def phases(self) -> Pair:
        """The rows and columns of phases that one block computes."""
        if self.block_phases is not None:
            return self.block_phases
        stride = self.geometry.stride
        if self.stack > 1:
            stride = (1, stride[1])
        if stride[0] * stride[1] <= 4:
            return stride
        if self.flat and stride[1] % 4 == 0:
            return (1, 4)
        return (1, next(cols for cols in range(MAX_PHASES, 0, -1) if stride[1] % cols == 0))

    @cached_property
    def positions(self) -> Pair:
        """The rows and columns of positions of an image."""
        geometry = self.geometry
        rows = self.stack if self.stack > 1 else geometry.stride[0]
        return (ceil_div(geometry.out_height, rows), ceil_div(geometry.out_width, geometry.stride[1]))

    @property
    def aligned_columns(self) -> int:
        """The number of which the columns of aligned rows are multiples: those of 16 bytes. The rows of grad_output are
        longer than those of the input, which usually have a multiple of that number, so the rows of most sizes of a
        layer may only be multiples of a smaller one."""
        columns = 16 // self.item
        if not self.of_grad_input or self.flat:
            return columns
        of_usual = gcd(self.geometry.width - self.geometry.out_width, columns)
        return of_usual if of_usual > 1 else columns

    @property
    def row_multiple(self) -> int:
        """A number that divides the elements of a row of an NCHW input (with ``flat``, of an image), whatever the
        size."""
        return self.aligned_columns if self.aligned else 1

    @property
    def out_row_multiple(self) -> int:
        """A number, at most 16, that divides the columns of the output, whatever the size."""
        geometry = self.geometry
        columns = 1 if not self.aligned else 2 if self.flat else self.row_multiple
        return gcd(geometry.out_width - geometry.stride[1] * geometry.width, geometry.stride[1] * columns, 16)

    @property
    def even_columns(self) -> bool:
        """Whether the rows of a flat problem have an even number of positions, whatever the size."""
        return self.aligned

    @property
    def position_input_rows(self) -> int:
        """The input rows between a position and the position below."""
        return self.stack // self.geometry.stride[0] if self.stack > 1 else 1

    def block_channels(self, tile: Tile) -> int:
        return tile.block_m // self.stack

    @cached_property
    def shifts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The smallest and the largest distance from a position to the input pixel that a tap reads, along each
        axis."""
        (kernel_h, kernel_w), (stride_h, stride_w) = self.geometry.kernel, self.geometry.stride
        (padding_h, padding_w), (dilation_h, dilation_w) = self.geometry.padding, self.geometry.dilation
        of_cols = shift_bounds(kernel_w, stride_w, padding_w, dilation_w)
        if self.stack > 1:
            return (
                (-((kernel_h - 1 - padding_h) // stride_h), (self.stack - 1 + padding_h) // stride_h),
                of_cols,
            )
        return shift_bounds(kernel_h, stride_h, padding_h, dilation_h), of_cols

    @cached_property
    def flat(self) -> bool:
        """Whether no tap is shifted and no position is cut, so that the positions of all images can form one row."""
        geometry, (positions_h, positions_w) = self.geometry, self.positions
        rows = self.stack if self.stack > 1 else geometry.stride[0]
        covered = (positions_h * rows, positions_w * geometry.stride[1])
        return (
            self.position_input_rows == 1
            and self.shifts == ((0, 0), (0, 0))
            and (positions_h, positions_w) == (geometry.height, geometry.width)
            and covered == (geometry.out_height, geometry.out_width)
        )

    @cached_property
    def group_taps(self) -> list[int]:
        """The number of taps of each phase group."""
        geometry, (phases_h, phases_w) = self.geometry, self.phases
        taps_w = axis_taps(
            geometry.kernel[1], geometry.stride[1], geometry.padding[1], geometry.dilation[1], phases_w
        )
        if self.stack > 1:
            min_shift, max_shift = self.shifts[0]
            taps_h: tuple[int, ...] = (max_shift - min_shift + 1,)
        else:
            taps_h = axis_taps(
                geometry.kernel[0], geometry.stride[0], geometry.padding[0], geometry.dilation[0], phases_h
            )
        return [rows * cols for rows in taps_h for cols in taps_w]


def make_problem(
    geometry: Geometry,
    dtype: torch.dtype,
    math: str,
    channels_last: bool,
    weight_channels_last: bool,
    has_bias: bool,
) -> TileProblem:
    """Returns a call's forward pass as the kernel sees it; ``math`` is "tf32" or "ieee"."""
    one_pixel = geometry.height == geometry.width == 1 and has_stride_of_one_pixel(geometry)
    stride = geometry.kernel if one_pixel else geometry.stride
    precision = {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(
        dtype, "IEEE" if math == "ieee" else "TF32"
    )
    return TileProblem(
        geometry if stride == geometry.stride else geometry._replace(stride=stride),
        dtype,
        precision,
        channels_last or one_pixel,
        channels_last,
        weight_channels_last,
        has_bias,
        one_pixel=one_pixel,
    )


def as_problem(problem: TileProblem) -> Problem:
    """Returns the forward pass that ``make_problem`` made this of."""
    precision = "tf32" if problem.precision == "TF32" else "ieee"
    return Problem(
        problem.geometry,
        problem.dtype,
        precision,
        problem.output_channels_last,
        problem.weight_channels_last,
    )


@lru_cache(maxsize=256)
def of_any_size(problem: TileProblem) -> TileProblem:
    """Returns a problem that is the same for all sizes of a layer, except that maps of one pixel have one of their own,
    because their stride may differ (``make_problem``)."""
    side = 1 if problem.one_pixel else 64
    return _the_same(problem._replace(geometry=problem.geometry._replace(batch=1, height=side, width=side)))


@lru_cache(maxsize=256)
def _the_same(problem: TileProblem) -> TileProblem:
    """Returns one of equal problems, so that they are found by identity, which takes less time than a comparison."""
    return problem


def can_be_aligned(problem: TileProblem) -> bool:
    """Whether ``aligned`` holds for this size."""
    width, pixels = problem.geometry.width, problem.geometry.height * problem.geometry.width
    if problem.flat:
        return width % 2 == 0 and pixels % problem.aligned_columns == 0
    return width % problem.aligned_columns == 0


def supports_tma_weights(problem: TileProblem) -> bool:
    """Whether forward/implicit_gemm_tma.cu can load the weight in its own layout."""
    return (
        problem.item == 2
        and problem.weight_channels_last
        and not problem.of_grad_input
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


@lru_cache(maxsize=256)
def dense_map(problem: TileProblem) -> DenseMap:
    """Returns the map of dense tiles. Place ``p`` along an axis is pixel ``p`` plus the smallest shift. The last places
    of a row are shared with the first of the next row where both are outside of the input."""
    places, (shifts_h, shifts_w) = [], problem.shifts
    sizes = (problem.geometry.height, problem.geometry.width)
    for pixels, positions, (least, most) in zip(sizes, problem.positions, (shifts_h, shifts_w), strict=True):
        places.append(min(positions + most - least, max(positions, pixels - least, positions + most)))
    reach = shifts_h[1] - shifts_h[0], shifts_w[1] - shifts_w[0]
    return DenseMap(places[0], places[1], problem.positions, reach)


def block_count(problem: TileProblem, tile: Tile) -> int:
    """Returns the number of work tiles of the problem, those of all channels, groups, phases and splits."""
    return map_tiles(problem, tile) * blocks_of_map_tile(problem, tile)


def map_tiles(problem: TileProblem, tile: Tile) -> int:
    """Returns the number of tiles of the positions of all images."""
    geometry, (positions_h, positions_w) = problem.geometry, problem.positions
    if tile.dense:
        return ceil_div(dense_map(problem).count(geometry.batch), tile.positions)
    if problem.flat:
        return ceil_div(geometry.batch * positions_h * positions_w, tile.cols)
    return -(-geometry.batch // tile.images) * -(-positions_h // tile.rows) * -(-positions_w // tile.cols)


def blocks_of_map_tile(problem: TileProblem, tile: Tile) -> int:
    """Returns the number of work tiles of each of these, whatever the size."""
    geometry = problem.geometry
    m_blocks = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile))
    return m_blocks * geometry.groups * len(problem.group_taps) * tile.splits
