"""What csrc/kernels/forward_{tile,wgmma,turned,boxes}.cu compute with one tile (the memory:
forward/implicit_gemm_memory.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.runtime.integers import ceil_div

#: Pixels that images with ``aligned`` are multiples of, if they are flat.
ALIGNED_PIXELS = 128
#: Of a kernel that makes an image of one pixel.
LARGE_KERNEL = 4
#: Threads of grad_input/implicit_gemm_wgmma.cu that bring the input.
PRODUCER_THREADS = 128


@dataclass(frozen=True, slots=True)
class Tile:
    """What one block computes, in the terms of forward/implicit_gemm_layout.cuh. Fragments are 16 channels x 8
    cells."""

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
    #: Multiplied by wgmma (sm_90a), by forward/implicit_gemm_wgmma.cu from planes of 16 bytes of k, rather than by
    #: forward/implicit_gemm_mma.cu.
    wgmma: bool = False
    #: The input comes by boxes of the copy engine (wgmma, channels_last): forward/implicit_gemm_tma.cu.
    tma: bool = False
    #: The weights of all channels lie in shared memory while a block works (boxes).
    resident_weights: bool = False
    #: Outputs leave in whole lines (boxes, 16 bits, channels_last), where ``stores_lines`` allows it.
    whole_lines: bool = False
    #: The weights come by boxes too, as they lie: nothing is packed (boxes, 16 bits, channels_last weights).
    tma_weights: bool = False
    #: Boxes bring an NCHW input as it lies, 64 pixels of a channel in a row, and the multiplier reads it across k
    #: (boxes, 16 bits, flat).
    pixel_major: bool = False
    #: Taps, of each step of k, that the second warpgroup of two begins a tile after the first, or 0 (boxes).
    stagger: int = 0
    #: Chunks of an NCHW input that boxes bring as they lie, for the filling warps to turn (wgmma):
    #: forward/implicit_gemm_tma_nchw.cu.
    nchw_stages: int = 0
    #: Warps that bring the input (wgmma).
    producer_warps: int = 4
    #: Bytes of each warp's part of the outputs, before they leave in whole rows (wgmma).
    subtile_bytes: int = 4096
    #: Channels of such a part, 8 or 16 (wgmma): of fewer it has longer rows.
    subtile_channels: int = 8
    #: NCHW outputs leave in runs as long as can be, that begin where sectors of memory do (boxes, whole rows of cells).
    by_rows: bool = False
    #: Of ``warps_m``, those that are one warp (grad_input/implicit_gemm_wgmma.cu): it keeps the sums of each.
    m_parts: int = 1

    @property
    def fragment(self) -> tuple[int, int, int]:
        """Images, rows and columns of cells of one fragment."""
        cols = min(8, self.cols)
        rows = min(8 // cols, self.rows)
        return 8 // (cols * rows), rows, cols

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
        """Those that multiply, and with wgmma those that fill."""
        return 32 * self.warps_m * self.warps_n // self.m_parts + (
            32 * self.producer_warps if self.wgmma else 0
        )

    @property
    def block_m(self) -> int:
        return 16 * self.warps_m * self.warp_m_tiles

    @property
    def warp_fragments(self) -> int:
        """Fragments of one phase that a warp keeps the sums of."""
        return self.warp_m_tiles * self.warp_images * self.warp_rows * self.warp_cols

    def __str__(self) -> str:
        text = f"{self.block_m} x {self.images}x{self.rows}x{self.cols} cells, {self.threads // 32} warps"
        return text + (f", {self.splits} splits" if self.splits > 1 else "")


@dataclass(frozen=True, slots=True)
class TileProblem:
    """A transposed convolution as the kernel sees it. ``geometry`` may differ from the caller's in the stride
    of an axis whose input is one pixel: nothing depends on it, and stride = kernel makes every tap a phase."""

    geometry: Geometry
    dtype: torch.dtype
    precision: str
    input_channels_last: bool
    output_channels_last: bool
    weight_channels_last: bool
    has_bias: bool
    #: Output rows of a cell that are stacked into the rows of a multiply (few channels;
    #: forward/implicit_gemm_taps.cuh), or 1.
    stack: int = 1
    #: Phases that one block computes, where not as many as ``phases`` would say: of fewer it has more cells.
    block_phases: Pair | None = None
    #: Computes a gradient of an input: the weight is read with channels exchanged and taps backwards.
    of_grad_input: bool = False
    #: ``input_channels_last`` is a copy in the workspace, which a launch of its own makes of an NCHW input.
    nhwc_copy: bool = False
    #: Rows of an NCHW input are known to be whole pieces of 16 bytes; with ``flat``, images to be whole tiles of at
    #: most 128 cells, and rows to have an even number of them.
    aligned: bool = False
    #: A map of one pixel with another stride than the layer's, for which the rest of the layer's sizes say nothing.
    one_pixel: bool = False

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def parts(self) -> int:
        return 2 if self.precision == "IEEE" else 1

    @property
    def words(self) -> int:
        """Words of k of one group: input channels, or pairs of them."""
        return ceil_div(self.geometry.in_channels_per_group * self.item, 4)

    @property
    def phases(self) -> Pair:
        """Phases that one block computes."""
        if self.block_phases is not None:
            return self.block_phases
        stride = self.geometry.stride
        if self.stack > 1:
            stride = (1, stride[1])
        if stride[0] * stride[1] <= 4:
            return stride
        if stride[1] <= 8 and not (self.flat and stride[1] % 4 == 0):
            return (1, stride[1])
        return (1, 4)

    @property
    def positions(self) -> Pair:
        geometry = self.geometry
        rows = self.stack if self.stack > 1 else geometry.stride[0]
        return (ceil_div(geometry.out_height, rows), ceil_div(geometry.out_width, geometry.stride[1]))

    @property
    def row_multiple(self) -> int:
        """What divides the elements of a row of an NCHW input (with ``flat``, of an image), whatever the size."""
        return 16 // self.item if self.aligned else 1

    @property
    def out_row_multiple(self) -> int:
        """What divides the columns of the output, whatever the size: at most 16."""
        geometry = self.geometry
        columns = 1 if not self.aligned else 2 if self.flat else self.row_multiple
        return gcd(geometry.out_width - geometry.stride[1] * geometry.width, geometry.stride[1] * columns, 16)

    @property
    def even_columns(self) -> bool:
        """Whether cells that stand in a row (``flat``) are pairs of neighbours, whatever the size."""
        return self.aligned

    @property
    def cell_input_rows(self) -> int:
        return self.stack // self.geometry.stride[0] if self.stack > 1 else 1

    def block_channels(self, tile: Tile) -> int:
        return tile.block_m // self.stack

    @property
    def shifts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and greatest distance from a cell to the input pixel that a tap reads, of each axis."""
        bounds = []
        for axis in (0, 1):
            kernel, stride = self.geometry.kernel[axis], self.geometry.stride[axis]
            padding, dilation = self.geometry.padding[axis], self.geometry.dilation[axis]
            shifts = [
                ((k * dilation - padding) % stride + padding - k * dilation) // stride for k in range(kernel)
            ]
            bounds.append((min(shifts), max(shifts)))
        if self.stack > 1:
            kernel, stride, padding = (
                self.geometry.kernel[0],
                self.geometry.stride[0],
                self.geometry.padding[0],
            )
            bounds[0] = (-((kernel - 1 - padding) // stride), (self.stack - 1 + padding) // stride)
        return bounds[0], bounds[1]

    @property
    def flat(self) -> bool:
        """No tap is shifted and no cell is cut: all cells of all images can stand in one row."""
        geometry, (cells_h, cells_w) = self.geometry, self.positions
        rows = self.stack if self.stack > 1 else geometry.stride[0]
        return (
            self.cell_input_rows == 1
            and self.shifts == ((0, 0), (0, 0))
            and (cells_h, cells_w) == (geometry.height, geometry.width)
            and (cells_h * rows, cells_w * geometry.stride[1]) == (geometry.out_height, geometry.out_width)
        )


def make_problem(
    geometry: Geometry,
    dtype: torch.dtype,
    math: str,
    channels_last: bool,
    weight_channels_last: bool,
    has_bias: bool,
) -> TileProblem:
    one_pixel = geometry.height == geometry.width == 1 and has_stride_of_one_pixel(geometry)
    stride = geometry.kernel if one_pixel else geometry.stride
    precision = {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(
        dtype, "IEEE" if math == "ieee" else "TF32"
    )
    return TileProblem(
        replace(geometry, stride=stride),
        dtype,
        precision,
        channels_last or one_pixel,
        channels_last,
        weight_channels_last,
        has_bias,
        one_pixel=one_pixel,
    )


def can_be_aligned(problem: TileProblem) -> bool:
    """Whether ``aligned`` is true of this size."""
    width, pixels = problem.geometry.width, problem.geometry.height * problem.geometry.width
    if problem.flat:
        return width % 2 == 0 and pixels % ALIGNED_PIXELS == 0
    return width * problem.item % 16 == 0


def has_stride_of_one_pixel(geometry: Geometry) -> bool:
    """Whether nothing depends on the stride where a map is one pixel, and stride = kernel is another; of layers that
    may be the first of a generator, by their kernel or because they add channels: others see no such maps."""
    plain = (geometry.padding, geometry.output_padding, geometry.dilation) == ((0, 0), (0, 0), (1, 1))
    begins = min(geometry.kernel) >= LARGE_KERNEL or geometry.out_channels > geometry.in_channels
    return plain and geometry.kernel != geometry.stride and begins


def group_taps(problem: TileProblem) -> list[int]:
    """Taps of each phase group."""
    counts = []
    for axis in (0, 1):
        if axis == 0 and problem.stack > 1:
            least, most = problem.shifts[0]
            counts.append([most - least + 1])
            continue
        kernel, stride = problem.geometry.kernel[axis], problem.geometry.stride[axis]
        padding, dilation = problem.geometry.padding[axis], problem.geometry.dilation[axis]
        phases = problem.phases[axis]
        count = [0] * (stride // phases)
        for k in range(kernel):
            count[(k * dilation - padding) % stride // phases] += 1
        counts.append(count)
    return [rows * cols for rows in counts[0] for cols in counts[1]]


def supports_tma_weights(problem: TileProblem) -> bool:
    """Whether forward/implicit_gemm_tma.cu can read the weight as it lies."""
    return (
        problem.item == 2
        and problem.weight_channels_last
        and not problem.of_grad_input
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


def block_count(problem: TileProblem, tile: Tile) -> int:
    geometry, (cells_h, cells_w) = problem.geometry, problem.positions
    if problem.flat:
        tiles = ceil_div(geometry.batch * cells_h * cells_w, tile.cols)
    else:
        tiles = (
            ceil_div(geometry.batch, tile.images)
            * ceil_div(cells_h, tile.rows)
            * ceil_div(cells_w, tile.cols)
        )
    m_blocks = ceil_div(geometry.out_channels_per_group, problem.block_channels(tile))
    return tiles * m_blocks * geometry.groups * len(group_taps(problem)) * tile.splits
