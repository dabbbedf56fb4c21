"""What csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu compute with one tile, and
the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.schedules import (
    CHANNEL_COLUMNS,
    ONE_PIXEL,
    SINGLE,
    SIZES,
    SIZES_OF_ONE_ROW,
    UNUSUAL,
)
from tconv_swap.kernels.forward.implicit_gemm_layout import FILL_THREADS, Tile, TileProblem, make_problem
from tconv_swap.kernels.forward.implicit_gemm_memory import (
    STEP_WORDS,
    TAP_TILE_BYTES,
    aligned_to,
    power_of_two_dividing,
    staged_bytes,
)
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import ELEMENT_TYPES, Constant

#: Columns of an NCHW grad_output of which rows are multiples, if they are aligned: those of one copy, at most. Of so
#: many cells and no output_padding.
ALIGNED_COLUMNS, ALIGNED_CELLS = 4, 64


@dataclass(frozen=True, slots=True)
class StridedProblem(TileProblem):
    """A gradient of the input as the kernels see it: a convolution of grad_output. ``geometry`` has the channels
    exchanged, grad_output's size as input and grad_input's as output, the layer's padding, and stride 1; what the
    taps of neighbouring outputs lie apart is ``step``, the layer's stride."""

    step: Pair = (1, 1)

    #: Rows of grad_input are known to have an even number of columns.
    even: bool = False

    @property
    def row_multiple(self) -> int:
        """What divides the columns of grad_output, whatever the size, and with ``flat`` the columns that the cells of a
        row have there."""
        return self.aligned_columns if self.aligned else 1

    @property
    def aligned_columns(self) -> int:
        """Columns of grad_output of which aligned rows are multiples: what divides those that most layers have. Where
        these are odd, layers have an output_padding, and any power of two may divide them."""
        columns = (ALIGNED_CELLS - 1) * self.step[1] + self.reach[1] + 1 - 2 * self.geometry.padding[1]
        return ALIGNED_COLUMNS if columns % 2 else power_of_two_dividing(columns, ALIGNED_COLUMNS)

    @property
    def out_row_multiple(self) -> int:
        """What divides the columns of grad_input, whatever the size."""
        return 2 if self.even else 1

    @property
    def even_columns(self) -> bool:
        """The same of cells."""
        return self.even

    @property
    def can_be_aligned(self) -> bool:
        """Whether ``aligned`` is true of this size."""
        spanned = self.cells[1] * self.step[1] if self.flat else 0
        return not self.input_channels_last and (self.geometry.width | spanned) % self.aligned_columns == 0

    @property
    def flat(self) -> bool:
        """Each input pixel meets one output pixel at most, and none lies outside the input."""
        return self.geometry.padding == (0, 0) and self.most_shift == (0, 0)

    @property
    def phases_used(self) -> tuple[list[int], list[int]]:
        """Of each axis, the phases of grad_output that have taps."""
        rows, cols = (
            sorted({k * dilation % step for k in range(kernel)})
            for kernel, dilation, step in zip(
                self.geometry.kernel, self.geometry.dilation, self.step, strict=True
            )
        )
        return rows, cols

    @property
    def reach(self) -> Pair:
        """Pixels of grad_output from the first tap to the last."""
        (kh, kw), (dh, dw) = self.geometry.kernel, self.geometry.dilation
        return (kh - 1) * dh, (kw - 1) * dw

    @property
    def most_shift(self) -> Pair:
        return self.reach[0] // self.step[0], self.reach[1] // self.step[1]


def as_convolution(problem: Problem) -> StridedProblem:
    """The gradient of the input, for any stride."""
    geometry = problem.geometry
    # Nothing depends on the stride there; with stride = kernel, every tap is a phase of its own.
    one_pixel = geometry.height == geometry.width == 1 and has_another_step(geometry)
    step = geometry.kernel if one_pixel else geometry.stride
    swapped = Geometry(
        geometry.batch,
        geometry.out_channels,
        geometry.out_height,
        geometry.out_width,
        geometry.in_channels,
        geometry.kernel,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
    )
    # Whatever makes the convolution's output the size of the gradient, by Geometry's formula.
    missing = (geometry.height - swapped.out_height, geometry.width - swapped.out_width)
    posed = make_problem(
        swapped,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias=False,
    )
    return StridedProblem(
        geometry=replace(swapped, output_padding=missing),
        dtype=posed.dtype,
        precision=posed.precision,
        input_channels_last=posed.input_channels_last,
        output_channels_last=posed.output_channels_last or one_pixel,
        weight_channels_last=posed.weight_channels_last,
        has_bias=False,
        of_grad_input=True,
        one_pixel=one_pixel,
        step=step,
    )


def has_another_step(geometry: Geometry) -> bool:
    """Whether a map of one pixel is computed with a step that is not the layer's stride."""
    plain = (geometry.padding, geometry.dilation) == ((0, 0), (1, 1))
    return plain and geometry.kernel != geometry.stride


def sized(problem: StridedProblem, batch: int, rows: int, cols: int) -> StridedProblem:
    """The same layer with another grad_input, of the least grad_output."""
    geometry, pairs = (
        problem.geometry,
        zip(problem.step, problem.reach, problem.geometry.padding, strict=True),
    )
    # Of each axis: the pixels of grad_output, and what makes the convolution's output as large as it should be.
    found = []
    for cells, (step, reach, padding) in zip((rows, cols), pairs, strict=True):
        pixels = max(1, (cells - 1) * step + reach + 1 - 2 * padding)
        found.append((pixels, cells - (pixels + reach - 2 * padding)))
    (height, missing_h), (width, missing_w) = found
    posed = replace(geometry, batch=batch, height=height, width=width, output_padding=(missing_h, missing_w))
    return replace(problem, geometry=posed)


def representatives(layer: StridedProblem) -> tuple[list[StridedProblem], list[float]]:
    """The sizes that stand for all of a layer, and what each counts for."""
    channels, (least, most) = layer.geometry.out_channels_per_group, CHANNEL_COLUMNS
    sizes: tuple[tuple[int, int, int], ...]
    if layer.one_pixel or layer.geometry.kernel[0] == layer.step[0] == 1:
        sizes = ONE_PIXEL if layer.one_pixel else SIZES_OF_ONE_ROW
        weights = [SINGLE if batch == 1 else 1.0 for batch, _, _ in sizes]
    else:
        sizes = SIZES
        weights = [
            (SINGLE if batch == 1 else 1.0) * (1.0 if least <= channels * columns <= most else UNUSUAL)
            for batch, _, columns in sizes
        ]
    return [sized(layer, *size) for size in sizes], weights


@lru_cache(maxsize=256)
def of_any_size(problem: StridedProblem) -> StridedProblem:
    """The same for all sizes of a layer, but that a map of one pixel may have another step (``as_convolution``)."""
    side = 1 if problem.one_pixel else 64
    return sized(problem, 1, side, side)


def through_registers(problem: StridedProblem, tile: Tile) -> bool:
    """Whether copies to shared memory pass through registers."""
    return tile.wgmma or (problem.item == 2 and not problem.input_channels_last)


def _copy_elements(problem: StridedProblem, tile: Tile) -> int:
    """Elements of one copy to shared memory."""
    if problem.input_channels_last:
        return power_of_two_dividing(problem.geometry.in_channels_per_group, 16 // problem.item)
    if not through_registers(problem, tile):
        return 1
    return power_of_two_dividing(
        problem.row_multiple, power_of_two_dividing(tile.cols * problem.step[1], ALIGNED_COLUMNS)
    )


def slice_taps(problem: StridedProblem) -> list[int]:
    """Taps of each slice: of one phase of rows, and in channels_last of columns."""
    counts = []
    for axis in (0, 1):
        kernel, dilation = problem.geometry.kernel[axis], problem.geometry.dilation[axis]
        step = problem.step[axis]
        if axis == 1 and not problem.input_channels_last:
            counts.append([kernel])
            continue
        counts.append(
            [
                sum((kernel - 1 - k) * dilation % step == phase for k in range(kernel))
                for phase in problem.phases_used[axis]
            ]
        )
    return [rows * cols for rows in counts[0] for cols in counts[1]]


def _copied(problem: StridedProblem, tile: Tile) -> tuple[int, int, int]:
    """Rows of a slice that a tile copies, its columns, and of these those before the first cell's."""
    step, reach, shift = problem.step[1], problem.reach[1], problem.most_shift
    rows, cols = tile.rows + shift[0], tile.cols
    if problem.input_channels_last:
        return rows, cols + shift[1], 0
    copy = _copy_elements(problem, tile)
    if tile.wgmma and tile.fragment[2] < 8:
        columns = step * (cols - 1) + reach + 1 - problem.geometry.padding[1]
        return rows, round_up(max(1, columns), copy), 0
    if problem.flat:
        return rows, cols * step, 0
    lead = -problem.geometry.padding[1] % copy
    return rows, round_up(lead + step * (cols - 1) + reach + 1, copy), lead


def shared_bytes(problem: StridedProblem, tile: Tile) -> int:
    """Shared memory of one block; mirrors grad_input/implicit_gemm_layout.cuh, which asserts that they agree."""
    step, shift = problem.step[1], problem.most_shift
    copied_rows, copied_cols, lead = _copied(problem, tile)
    images, rows, cols = tile.fragment
    narrow = tile.wgmma and cols < 8
    if narrow or problem.flat:
        halo_w = tile.cols
    elif problem.input_channels_last:
        halo_w = copied_cols
    else:
        halo_w = ceil_div(lead, step) + (copied_cols - 1 - lead) // step + 1
    row_pitch = aligned_to(halo_w, 1, 8, cols) if rows > 1 and not narrow else halo_w
    image_pitch = copied_rows * row_pitch
    if narrow:
        image_pitch *= shift[1] + 1
    elif images > 1:
        image_pitch = aligned_to(image_pitch, 1, 8, cols * rows % 8)
    picture = tile.images * image_pitch
    pictures = 1 if problem.input_channels_last else len(problem.phases_used[1])
    copy_pixels = 1 if problem.input_channels_last else _copy_elements(problem, tile)
    if tile.wgmma:
        lanes = 8 // min(8, tile.chunk_words // 4)
        if pictures > 1:
            picture = aligned_to(picture, 1, 8, max(1, lanes // pictures) % 8 if copy_pixels == 1 else 1)
        input_words = (
            problem.parts
            * tile.chunk_words
            * aligned_to(pictures * picture, 1, 8, 1 if copy_pixels >= 2 * step else lanes % 8)
        )
    elif problem.input_channels_last:
        input_words = picture * (tile.chunk_words + 4)
    else:
        if pictures > 1:
            picture = aligned_to(picture, 1, 32, 32 // min(32, pictures) % 32)
        input_words = tile.chunk_words * aligned_to(pictures * picture, 8, 32, 8)
    input_words = round_up(input_words, 4)
    steps = tile.chunk_words // STEP_WORDS
    weight_bytes = steps * max(slice_taps(problem)) * problem.parts * tile.block_m // 16 * TAP_TILE_BYTES
    stages = tile.stages * (input_words * 4 + weight_bytes)
    if not tile.wgmma:
        return stages
    return stages + multiplying_threads(tile) // 32 * staged_bytes(problem, tile) + 16 * tile.stages


def multiplying_threads(tile: Tile) -> int:
    return 32 * tile.warps_m * tile.warps_n // tile.m_parts


def fill_slots(problem: StridedProblem, tile: Tile) -> int:
    """Places of a slice that each of their threads brings."""
    rows, cols, _ = _copied(problem, tile)
    copy_pixels = 1 if problem.input_channels_last else _copy_elements(problem, tile)
    places = tile.images * rows * (cols // copy_pixels) * tile.chunk_words // 4
    return ceil_div(places, FILL_THREADS)


def fill_registers(problem: StridedProblem, tile: Tile, ahead: int) -> int:
    """About how many registers one of them needs for its places and what is on its way there, of ``ahead`` slices."""
    carried = 4
    if not problem.input_channels_last:
        carried *= max(_copy_elements(problem, tile), 4 // problem.item)
    return fill_slots(problem, tile) * (4 + ahead * carried)


def tile_registers(problem: StridedProblem, tile: Tile) -> int:
    """About how many registers of a thread of grad_input/implicit_gemm_mma.cu hold sums, fragments of the input, and
    places with what is on its way there."""
    rows, cols, _ = _copied(problem, tile)
    copy = _copy_elements(problem, tile)
    places, sharers = tile.images * rows * cols, 1
    if problem.input_channels_last:
        places = places * tile.chunk_words * 4 // (copy * problem.item)
        staged = 0
    else:
        places //= copy
        while sharers < tile.chunk_words and 2 * sharers * places <= tile.threads:
            sharers *= 2
        staged = tile.chunk_words // sharers * 2 * ceil_div(copy, 2) if problem.item == 2 else 0
    slots = ceil_div(places, tile.threads // sharers)
    reach = tile.fragment[1] * (tile.warp_rows - 1) + problem.most_shift[0] + 1
    fragments = 2 * tile.warp_images * reach * tile.warp_cols * problem.parts
    return 4 * tile.warp_fragments + fragments + slots * (3 + staged)


def layer_constants(layer: StridedProblem, split: bool) -> tuple[tuple[str, Constant], ...]:
    """Constants of a kernel that computes a layer whatever its sizes; ``split``: it leaves partial sums in float32."""
    return (
        ("Element", ELEMENT_TYPES[layer.dtype]),
        ("Out", "float" if split else ELEMENT_TYPES[layer.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16").index(layer.precision)),
        *((name, value) for name, value in layer.geometry.layer_constants if not name.startswith("STRIDE")),
        ("STEP_H", layer.step[0]),
        ("STEP_W", layer.step[1]),
    )
