"""The gradient of the input as a convolution of grad_output, and the shared memory and registers that a tile of
csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.one_pixel import may_begin
from tconv_swap.kernels.forward.implicit_gemm_layout import PRODUCER_THREADS, Tile, TileProblem, make_problem
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

#: Aligned rows of an NCHW grad_output are multiples of so many columns, at most those of one copy, if they belong to so
#: many positions and there is no output_padding.
ALIGNED_COLUMNS, ALIGNED_CELLS = 4, 64


@dataclass(frozen=True)
class StridedProblem(TileProblem):
    """The gradient of the input as a convolution of grad_output. ``geometry`` has the channels exchanged, grad_output's
    size as input and grad_input's as output, the layer's padding, and stride 1. ``step``, the layer's stride, is the
    distance between the taps of neighbouring positions (pixels of grad_input)."""

    step: Pair = (1, 1)

    #: Rows of grad_input are known to have an even number of columns.
    even: bool = False

    __hash__ = TileProblem.__hash__

    @cached_property
    def positions(self) -> Pair:
        """Returns the rows and columns of positions of an image: the pixels of grad_input."""
        return self.geometry.out_height, self.geometry.out_width

    @cached_property
    def grad_input_elements(self) -> int:
        """Returns how many elements grad_input has."""
        return self.geometry.batch * self.geometry.out_channels * self.positions[0] * self.positions[1]

    @cached_property
    def image_bytes(self) -> int:
        """Returns the bytes of an image of grad_output."""
        return self.geometry.in_channels * self.geometry.height * self.geometry.width * self.item

    @cached_property
    def weight_elements(self) -> int:
        """Returns how many elements the weight has."""
        return self.geometry.in_channels_per_group * self.geometry.out_channels * self.geometry.taps

    @cached_property
    def row_multiple(self) -> int:
        """Returns a number that divides the columns of grad_output at every size, and with ``flat`` the columns that
        the positions of a row have there."""
        return self.aligned_columns if self.aligned else 1

    @cached_property
    def aligned_columns(self) -> int:
        """Returns the number of columns of which aligned rows of grad_output are multiples: it divides the columns that
        most layers have. If these are odd, layers have an output_padding, and any power of two may divide them."""
        columns = (ALIGNED_CELLS - 1) * self.step[1] + self.reach[1] + 1 - 2 * self.geometry.padding[1]
        return ALIGNED_COLUMNS if columns % 2 else power_of_two_dividing(columns, ALIGNED_COLUMNS)

    @property
    def out_row_multiple(self) -> int:
        """Returns a number that divides the columns of grad_input at every size."""
        return 2 if self.even else 1

    @property
    def even_columns(self) -> bool:
        """Returns whether rows have an even number of positions."""
        return self.even

    @cached_property
    def can_be_aligned(self) -> bool:
        """Returns whether ``aligned`` holds for this size."""
        spanned = self.positions[1] * self.step[1] if self.flat else 0
        return not self.input_channels_last and (self.geometry.width | spanned) % self.aligned_columns == 0

    @cached_property
    def flat(self) -> bool:
        """Returns whether each input pixel meets at most one output pixel, and none lies outside the input."""
        return self.geometry.padding == (0, 0) and self.max_shift == (0, 0)

    @property
    def one_row(self) -> bool:
        """Returns whether the layer is of one dimension (``Geometry.one_row``)."""
        return as_problem(self).geometry.one_row

    @cached_property
    def phases_used(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the phases of grad_output that have taps, for each axis."""
        (kh, kw), (dh, dw), (step_h, step_w) = self.geometry.kernel, self.geometry.dilation, self.step
        return _phases_of(kh, dh, step_h), _phases_of(kw, dw, step_w)

    @cached_property
    def reach(self) -> Pair:
        """Returns the pixels of grad_output from the first tap to the last, for each axis."""
        (kh, kw), (dh, dw) = self.geometry.kernel, self.geometry.dilation
        return (kh - 1) * dh, (kw - 1) * dw

    @cached_property
    def max_shift(self) -> Pair:
        """Returns the greatest shift of a tap within the image of its phase, for each axis."""
        reach_h, reach_w = self.reach
        return reach_h // self.step[0], reach_w // self.step[1]

    @cached_property
    def phase_taps(self) -> tuple[int, ...]:
        """Returns how many taps each phase has that is a stage of its own: a phase of rows, in channels_last of rows
        and columns."""
        counts = []
        for axis in (0, 1):
            kernel, dilation, step = self.geometry.kernel[axis], self.geometry.dilation[axis], self.step[axis]
            if axis == 1 and not self.input_channels_last:
                counts.append([kernel])
                continue
            of_tap = Counter((kernel - 1 - k) * dilation % step for k in range(kernel))
            counts.append([of_tap[phase] for phase in self.phases_used[axis]])
        return tuple(rows * cols for rows in counts[0] for cols in counts[1])


@lru_cache(maxsize=1024)
def _phases_of(kernel: int, dilation: int, step: int) -> tuple[int, ...]:
    return tuple(sorted({k * dilation % step for k in range(kernel)}))


@lru_cache(maxsize=256)
def as_convolution(problem: Problem) -> StridedProblem:
    """Returns the gradient of the input as a convolution, for any stride. (The plans of one size ask several times.)"""
    geometry = problem.geometry
    # For one pixel nothing depends on the stride; with stride = kernel, every tap is a phase of its own.
    one_pixel = geometry.height == geometry.width == 1 and may_begin(geometry)
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
    # The output_padding that gives the convolution's output the size of the gradient, by Geometry's formula.
    missing = (geometry.height - swapped.out_height, geometry.width - swapped.out_width)
    forward = make_problem(
        swapped,
        problem.dtype,
        problem.precision,
        problem.channels_last,
        problem.weight_channels_last,
        has_bias=False,
    )
    return StridedProblem(
        geometry=swapped._replace(output_padding=missing),
        dtype=forward.dtype,
        precision=forward.precision,
        input_channels_last=forward.input_channels_last,
        output_channels_last=forward.output_channels_last or one_pixel,
        weight_channels_last=forward.weight_channels_last,
        has_bias=False,
        of_grad_input=True,
        one_pixel=one_pixel,
        step=step,
    )


def as_problem(convolution: StridedProblem) -> Problem:
    """Returns the layer's problem of which this is the convolution, with the step as its stride."""
    g, step = convolution.geometry, convolution.step
    unpadded = Geometry(
        g.batch,
        g.out_channels,
        *convolution.positions,
        g.in_channels,
        g.kernel,
        step,
        g.padding,
        dilation=g.dilation,
        groups=g.groups,
    )
    beyond = (g.height - unpadded.out_height, g.width - unpadded.out_width)
    return Problem(
        unpadded._replace(output_padding=beyond),
        convolution.dtype,
        "tf32" if convolution.precision == "TF32" else "ieee",
        convolution.input_channels_last,
        convolution.weight_channels_last,
    )


def sized(problem: StridedProblem, batch: int, rows: int, cols: int) -> StridedProblem:
    """Returns the problem of the same layer for another size of grad_input, with the smallest grad_output."""
    geometry, pairs = (
        problem.geometry,
        zip(problem.step, problem.reach, problem.geometry.padding, strict=True),
    )
    # For each axis: the pixels of grad_output, and the output_padding that gives the convolution's output its size.
    found = []
    for positions, (step, reach, padding) in zip((rows, cols), pairs, strict=True):
        pixels = max(1, (positions - 1) * step + reach + 1 - 2 * padding)
        found.append((pixels, positions - (pixels + reach - 2 * padding)))
    (height, missing_h), (width, missing_w) = found
    resized = geometry._replace(
        batch=batch, height=height, width=width, output_padding=(missing_h, missing_w)
    )
    return problem._replace(geometry=resized)


@lru_cache(maxsize=256)
def of_any_size(problem: StridedProblem) -> StridedProblem:
    """Returns a problem that is the same for all sizes of a layer. A map of one pixel may have another step than the
    others (``as_convolution``)."""
    side = 1 if problem.one_pixel else 64
    return sized(problem, 1, side, side)


def through_registers(problem: StridedProblem, tile: Tile) -> bool:
    """Returns whether copies to shared memory go through registers."""
    return tile.wgmma or (problem.item == 2 and not problem.input_channels_last)


def copy_elements(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many elements one copy to shared memory has."""
    if problem.input_channels_last:
        return power_of_two_dividing(problem.geometry.in_channels_per_group, 16 // problem.item)
    if not through_registers(problem, tile):
        return 1
    return power_of_two_dividing(
        problem.row_multiple, power_of_two_dividing(tile.cols * problem.step[1], ALIGNED_COLUMNS)
    )


def copied_box(problem: StridedProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the rows of a phase that a tile copies, their columns, and how many of these are there for alignment,
    before the first position's."""
    step, reach, shift = problem.step[1], problem.reach[1], problem.max_shift
    rows, cols = tile.rows + shift[0], tile.cols
    if problem.input_channels_last:
        return rows, cols + shift[1], 0
    copy = copy_elements(problem, tile)
    if tile.wgmma and tile.fragment[2] < 8:
        columns = step * (cols - 1) + reach + 1 - problem.geometry.padding[1]
        return rows, round_up(max(1, columns), copy), 0
    if problem.flat:
        return rows, cols * step, 0
    alignment_columns = -problem.geometry.padding[1] % copy
    return rows, round_up(alignment_columns + step * (cols - 1) + reach + 1, copy), alignment_columns


def shared_bytes(problem: StridedProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory of one block, as grad_input/implicit_gemm_layout.cuh counts them; the kernel
    asserts that both agree."""
    return tile.stages * stage_bytes(problem, tile) + output_bytes(problem, tile)


def output_bytes(problem: StridedProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory in which the warps of a block collect outputs."""
    return consumer_threads(tile) // 32 * staged_bytes(problem, tile) if tile.wgmma else 0


def stage_bytes(problem: StridedProblem, tile: Tile) -> int:
    """Returns the bytes of shared memory of one stage, with its barriers."""
    step, shift = problem.step[1], problem.max_shift
    copied_rows, copied_cols, alignment_columns = copied_box(problem, tile)
    images, rows, cols = tile.fragment
    narrow = tile.wgmma and cols < 8
    if narrow or problem.flat:
        halo_w = tile.cols
    elif problem.input_channels_last:
        halo_w = copied_cols
    else:
        halo_w = ceil_div(alignment_columns, step) + (copied_cols - 1 - alignment_columns) // step + 1
    row_pitch = aligned_to(halo_w, 1, 8, cols) if rows > 1 and not narrow else halo_w
    image_pitch = copied_rows * row_pitch
    if narrow:
        image_pitch *= shift[1] + 1
    elif images > 1:
        image_pitch = aligned_to(image_pitch, 1, 8, cols * rows % 8)
    phase_image = tile.images * image_pitch
    column_phases = 1 if problem.input_channels_last else len(problem.phases_used[1])
    copy_pixels = 1 if problem.input_channels_last else copy_elements(problem, tile)
    if tile.wgmma:
        lanes = 8 // min(8, tile.chunk_words // 4)
        if column_phases > 1:
            phase_image = aligned_to(
                phase_image, 1, 8, max(1, lanes // column_phases) % 8 if copy_pixels == 1 else 1
            )
        input_words = (
            problem.parts
            * tile.chunk_words
            * aligned_to(column_phases * phase_image, 1, 8, 1 if copy_pixels >= 2 * step else lanes % 8)
        )
    elif problem.input_channels_last:
        input_words = phase_image * (tile.chunk_words + 4)
    else:
        if column_phases > 1:
            phase_image = aligned_to(phase_image, 1, 32, 32 // min(32, column_phases) % 32)
        input_words = tile.chunk_words * aligned_to(column_phases * phase_image, 8, 32, 8)
    input_words = round_up(input_words, 4)
    steps = tile.chunk_words // STEP_WORDS
    weight_bytes = steps * max(problem.phase_taps) * problem.parts * tile.block_m // 16 * TAP_TILE_BYTES
    return input_words * 4 + weight_bytes + (16 if tile.wgmma else 0)


def consumer_threads(tile: Tile) -> int:
    """Returns how many threads of a block multiply."""
    return 32 * tile.warps_m * tile.warps_n // tile.m_parts


def copy_slots(problem: StridedProblem, tile: Tile) -> int:
    """Returns how many copies of a phase each producer thread makes."""
    rows, cols, _ = copied_box(problem, tile)
    copy_pixels = 1 if problem.input_channels_last else copy_elements(problem, tile)
    places = tile.images * rows * (cols // copy_pixels) * tile.chunk_words // 4
    return ceil_div(places, PRODUCER_THREADS)


def layer_constants(layer: StridedProblem, split: bool) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants of a kernel that computes all sizes of a layer. ``split``: it stores partial sums in
    float32."""
    return (
        ("Element", ELEMENT_TYPES[layer.dtype]),
        ("Out", "float" if split else ELEMENT_TYPES[layer.dtype]),
        ("PRECISION", ("TF32", "FP16", "BF16").index(layer.precision)),
        *((name, value) for name, value in layer.geometry.layer_constants if not name.startswith("STRIDE")),
        ("STEP_H", layer.step[0]),
        ("STEP_W", layer.step[1]),
    )
