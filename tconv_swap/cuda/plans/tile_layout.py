"""What csrc/kernels/forward_tile.cu, forward_wgmma.cu and forward_boxes.cu compute with one tile, and the memory that
it takes."""

from __future__ import annotations

import math as mathematics
from dataclasses import dataclass, replace

import torch

from tconv_swap.geometry import Geometry, Pair

#: Words of k of one multiply, and bytes of the packed weights of one tap for 16 channels and those words.
STEP_WORDS = 8
TAP_TILE_BYTES = 512
#: A stage that boxes fill begins at a multiple of so many words.
BOX_WORDS = 256
#: Elements that one box has at most in each dimension.
BOX_MOST = 256
#: Of shared memory for each warp whose outputs leave in whole lines.
LINE_BYTES = 2048
#: Threads of grad_input_wgmma.cu that bring the input.
FILL_THREADS = 128
#: Groups of warps of forward_wgmma.cu that take turns to bring the input.
FILL_GROUPS = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """What one block computes, in the terms of forward_tile_layout.cuh. Fragments are 16 channels x 8 cells."""

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
    #: Multiplied by wgmma (sm_90a), by forward_wgmma.cu from planes of 16 bytes of k, rather than by forward_tile.cu.
    wgmma: bool = False
    #: The input comes by boxes of the copy engine (wgmma, channels_last): forward_boxes.cu.
    boxes: bool = False
    #: The weights of all channels lie in shared memory while a block works (boxes).
    weights_stay: bool = False
    #: Outputs leave in whole lines (boxes, 16 bits, channels_last), where ``stores_lines`` allows it.
    whole_lines: bool = False
    #: The weights come by boxes too, as they lie: nothing is packed (boxes, 16 bits, channels_last weights).
    weight_boxes: bool = False
    #: Chunks of an NCHW input that boxes bring as they lie, for the filling warps to turn (wgmma): forward_turned.cu.
    raw_stages: int = 0
    #: Warps that bring the input (wgmma).
    fill_warps: int = 4
    #: Bytes of each warp's part of the outputs, before they leave in whole rows (wgmma).
    part_bytes: int = 4096
    #: Of ``warps_m``, those that are one warp (grad_input_wgmma.cu): it keeps the sums of each.
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
        return 32 * self.warps_m * self.warps_n // self.m_parts + (32 * self.fill_warps if self.wgmma else 0)

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
    #: Output rows of a cell that are stacked into the rows of a multiply (few channels; forward_tile_taps.cuh), or 1.
    stack: int = 1
    #: Phases that one block computes, where not as many as ``phases`` would say: of fewer it has more cells.
    block_phases: Pair | None = None
    #: Computes a gradient of an input: the weight is read with channels exchanged and taps backwards.
    of_grad_input: bool = False

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def parts(self) -> int:
        return 2 if self.precision == "IEEE" else 1

    @property
    def words(self) -> int:
        """Words of k of one group: input channels, or pairs of them."""
        return -(-self.geometry.in_channels_per_group * self.item // 4)

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
    def cells(self) -> Pair:
        geometry = self.geometry
        rows = self.stack if self.stack > 1 else geometry.stride[0]
        return (-(-geometry.out_height // rows), -(-geometry.out_width // geometry.stride[1]))

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
        geometry, (cells_h, cells_w) = self.geometry, self.cells
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
    stride = list(geometry.stride)
    for axis, size in ((0, geometry.height), (1, geometry.width)):
        if size == 1 and (geometry.padding[axis], geometry.output_padding[axis], geometry.dilation[axis]) == (
            0,
            0,
            1,
        ):
            stride[axis] = geometry.kernel[axis]
    precision = {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(
        dtype, "IEEE" if math == "ieee" else "TF32"
    )
    pixels = geometry.height * geometry.width
    return TileProblem(
        replace(geometry, stride=(stride[0], stride[1])),
        dtype,
        precision,
        channels_last or pixels == 1,
        channels_last,
        weight_channels_last,
        has_bias,
    )


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


def power_dividing(n: int, most: int) -> int:
    """The largest power of two up to ``most``, itself one, that divides ``n``."""
    return mathematics.gcd(n, most)


def aligned_to(start: int, of: int, modulus: int, rest: int) -> int:
    """The smallest multiple of ``of`` from ``start`` on that leaves ``rest`` modulo ``modulus``."""
    n = -(-start // of) * of
    while n % modulus != rest:
        n += of
    return n


def _copy_elements(problem: TileProblem, tile: Tile) -> int:
    """Elements of one copy to shared memory."""
    most = 16 // problem.item
    if tile.raw_stages:
        return most
    if tile.wgmma and not problem.input_channels_last:
        most = 4
    if problem.input_channels_last:
        return power_dividing(problem.geometry.in_channels_per_group, most)
    width = problem.geometry.width * (problem.geometry.height if problem.flat else 1)
    return power_dividing(width, power_dividing(tile.cols, most))


def shared_bytes(problem: TileProblem, tile: Tile) -> int:
    """Shared memory of one block; mirrors forward_tile_layout.cuh, which asserts that they agree."""
    copy_pixels = 1 if problem.input_channels_last else _copy_elements(problem, tile)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    lead = least_w % copy_pixels
    halo_h = (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h
    halo_w = -(-(lead + tile.cols + most_w - least_w) // copy_pixels) * copy_pixels
    images, rows, cols = tile.fragment
    narrow = tile.wgmma and cols < 8
    row_pitch = aligned_to(halo_w, copy_pixels, 8, cols) if rows > 1 else halo_w
    image_pitch = halo_h * row_pitch
    if images > 1:
        image_pitch = aligned_to(image_pitch, copy_pixels, 8, cols * rows % 8)
    if narrow:
        image_pitch = (most_w - least_w + 1) * halo_h * tile.cols
    pixels = tile.images * image_pitch
    if tile.boxes:
        if narrow:
            pixels = (most_w - least_w + 1) * -(-tile.images * halo_h * tile.cols // 8) * 8
        input_words = -(-pixels * tile.chunk_words // BOX_WORDS) * BOX_WORDS
    elif tile.wgmma:
        planes = tile.chunk_words // 4
        input_words = tile.chunk_words * aligned_to(pixels, 1, 8, 1 if planes > 2 else 2)
    elif problem.input_channels_last:
        input_words = pixels * (tile.chunk_words + 4)
    else:
        input_words = tile.chunk_words * aligned_to(pixels, 8, 32, 8)
    input_words = -(-input_words // 4) * 4
    steps = tile.chunk_words // STEP_WORDS
    weight_bytes = steps * max(group_taps(problem)) * problem.parts * tile.block_m // 16 * TAP_TILE_BYTES
    if tile.weights_stay:
        stages = tile.stages * input_words * 4 + -(-problem.words // tile.chunk_words) * weight_bytes
    else:
        stages = tile.stages * (input_words * 4 + weight_bytes)
    if not tile.wgmma:
        return stages
    shared = stages + tile.warps_m * tile.warps_n * staged_bytes(problem, tile) + 16 * tile.stages
    if tile.raw_stages:
        raw = tile.images * halo_h * halo_w * tile.chunk_words * 4
        shared = -(-(shared + 16 * tile.raw_stages) // 128) * 128 + tile.raw_stages * raw
    return shared


def turns(problem: TileProblem, tile: Tile) -> bool:
    """Whether forward_turned.cu computes the problem with this tile."""
    geometry = problem.geometry
    return (
        not problem.input_channels_last
        and not problem.flat
        and tile.cols >= 8
        and geometry.width * problem.item % 16 == 0
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
        and raw_box(problem, tile)[0] <= BOX_MOST
    )


def raw_box(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Columns, channels and rows of a box of an NCHW input (forward_turned_fill.cuh)."""
    (least_h, most_h), (least_w, most_w) = problem.shifts
    columns = 16 // problem.item
    return (
        -(-(least_w % columns + tile.cols + most_w - least_w) // columns) * columns,
        tile.chunk_words * 4 // problem.item,
        (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h,
    )


def box_shape(problem: TileProblem, tile: Tile) -> tuple[int, int, int]:
    """Columns, rows and images of one box of the input (forward_boxes_fill.cuh)."""
    if problem.flat:
        return tile.cols // -(-tile.cols // BOX_MOST), 1, 1
    (least_h, most_h), (least_w, most_w) = problem.shifts
    cols = tile.cols if tile.cols < 8 else tile.cols + most_w - least_w
    return cols, (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h, tile.images


def fill_registers(problem: TileProblem, tile: Tile) -> int:
    """About how many registers of a filling thread of forward_wgmma.cu hold places and what is on its way there."""
    if tile.raw_stages:
        columns, channels, rows = raw_box(problem, tile)
        pieces = tile.images * rows * columns * channels * problem.item // 16
        return 2 * -(-pieces // (32 * tile.fill_warps))
    copy = _copy_elements(problem, tile)
    (least_h, most_h), (least_w, most_w) = problem.shifts
    halo_h = (tile.rows - 1) * problem.cell_input_rows + 1 + most_h - least_h
    halo_w = -(-(tile.cols + most_w - least_w) // copy)
    places = tile.images * halo_h * halo_w * tile.chunk_words // 4
    place = 16 // problem.item * -(-copy * problem.item // 4)
    slots = -(-places * FILL_GROUPS // (32 * tile.fill_warps))
    return (2 * slots if slots <= 10 else slots + 8) + place


def stores_lines(problem: TileProblem, tile: Tile) -> bool:
    """Whether outputs leave by forward_line_store.cuh."""
    return (
        tile.whole_lines
        and problem.output_channels_last
        and problem.item == 2
        and tile.splits == 1
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


def weights_come_by_boxes(problem: TileProblem) -> bool:
    """Whether forward_boxes.cu can read the weight as it lies."""
    return (
        problem.item == 2
        and problem.weight_channels_last
        and not problem.of_grad_input
        and problem.stack == 1
        and problem.geometry.out_channels_per_group % 8 == 0
    )


def staged_bytes(problem: TileProblem, tile: Tile) -> int:
    """Shared memory of one warp for a part of its outputs; mirrors forward_warp_store.cuh."""
    if stores_lines(problem, tile):
        return LINE_BYTES
    if problem.output_channels_last:
        return 0
    item = problem.item if tile.splits == 1 else 4
    per_word = 4 // item
    phases = problem.phases
    most = tile.part_bytes // (16 * 8 * phases[0] * phases[1] * item)
    fragments = 1 << max(1, most).bit_length() - 1
    cols = tile.warp_cols if tile.warp_cols <= fragments else power_dividing(tile.warp_cols, fragments)
    lines = power_dividing(tile.warp_images * tile.warp_rows, 1 << (fragments // cols).bit_length() - 1)
    pixels = cols * lines * 8 * phases[0] * phases[1]
    run_words = min(4, 2 * phases[1] // per_word)
    return 16 * aligned_to(-(-pixels // per_word), 4, 32, 4 * run_words % 32) * 4


def block_count(problem: TileProblem, tile: Tile) -> int:
    geometry, (cells_h, cells_w) = problem.geometry, problem.cells
    if problem.flat:
        tiles = -(-geometry.batch * cells_h * cells_w // tile.cols)
    else:
        tiles = -(-geometry.batch // tile.images) * -(-cells_h // tile.rows) * -(-cells_w // tile.cols)
    m_blocks = -(-geometry.out_channels_per_group // problem.block_channels(tile))
    return tiles * m_blocks * geometry.groups * len(group_taps(problem)) * tile.splits
