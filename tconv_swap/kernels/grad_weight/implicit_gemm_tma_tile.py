"""The kernels of csrc/kernels/grad_weight/implicit_gemm_tma.cu, the tiles of pixels that a launch gives them, and their
shared memory: the Python side of grad_weight/implicit_gemm_tma.cuh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_REGISTERS, REGISTERS
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_shape import (
    STEP_PIXELS,
    Limits,
    PixelShape,
    leaves_sizes,
    limits_of,
    pixels_that_suit,
    shapes_of,
    usual_shape,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div, round_up

#: The warp that issues the copies; the warps that add up the bias.
PRODUCER_THREADS, BIAS_THREADS = 32, 96
#: Registers that a thread needs beside its sums: while it multiplies, and to store them without spills.
OTHER_REGISTERS, STORE_REGISTERS = 28, 48

ROW_BYTES, BOX_CHANNELS, BOX_ALIGNMENT = 128, 64, 1024
#: Shared memory beside the stages: up to the first multiple of BOX_ALIGNMENT, and the barriers.
FIXED_BYTES = 2 * BOX_ALIGNMENT
#: Stages of the ring.
MAX_STAGES, MIN_STAGES = 8, 3
#: Boxes of grad_output in a stage.
MAX_BOXES = 32


class TmaKernel(NamedTuple):
    """What is compiled.
    Attributes:
        warps: along input channels (m), output channels (n), taps and pixels (k).
        warp_m, warp_n: input channels of a warp, and output channels of a warpgroup.
        warp_taps: taps of a warpgroup.
        taps: rows and columns of taps of a block.
        tap_step: from one of them to the next.
        pixels: of a tile.
        box_per_tap_col: each tap column has a box of grad_output of its own, so that no tap is shifted within a
            box.
    """

    warps: tuple[int, int, int, int]
    warp_m: int
    warp_n: int
    warp_taps: int
    taps: Pair
    tap_step: Pair
    pixels: int
    box_per_tap_col: bool

    @property
    def threads(self) -> int:
        """Returns the consumers."""
        return 32 * math.prod(self.warps)

    @property
    def block_m(self) -> int:
        return self.warps[0] * self.warp_m

    @property
    def block_n(self) -> int:
        return self.warps[1] * self.warp_n

    @property
    def sums(self) -> int:
        """Returns how many registers of a consumer hold sums."""
        return self.warp_m * self.warp_n * self.warp_taps // 32

    @property
    def input_blocks(self) -> int:
        """Returns the boxes of the input in a stage."""
        return self.block_m // BOX_CHANNELS

    @property
    def channel_blocks(self) -> int:
        """Returns the boxes of grad_output side by side along output channels."""
        return ceil_div(self.block_n, BOX_CHANNELS)

    @property
    def loads(self) -> tuple[int, int, Pair, Pair, int, bool]:
        """Returns what decides which stages it may have."""
        return (
            *(self.input_blocks, self.channel_blocks, self.taps, self.tap_step),
            *(self.pixels, self.box_per_tap_col),
        )

    @property
    def fits_registers(self) -> bool:
        """Returns whether the consumers' sums fit their registers."""
        return self.sums + OTHER_REGISTERS <= self.registers

    @property
    def may_spill(self) -> bool:
        """Returns whether the compiler may spill where the sums are stored, after the last multiply."""
        return self.sums + STORE_REGISTERS > self.registers

    @property
    def registers(self) -> int:
        """Returns the registers that a thread may have: each quarter of a multiprocessor has its own, for the
        consumers and at least one other warp."""
        warps = self.threads // 128 + 1
        return min(MAX_REGISTERS, REGISTERS // (128 * warps) // 8 * 8)

    @property
    def staged_bytes(self) -> int:
        """Returns the bytes of the sums of a single split on their way to memory
        (grad_weight/implicit_gemm_store.cuh)."""
        row = round_up(self.block_n * math.prod(self.taps), 32) + 8
        return self.block_m * row * 4

    def __str__(self) -> str:
        each = ", a box per tap column" if self.box_per_tap_col else ""
        return f"{self.block_m} x {self.block_n} channels x {self.taps[0]} x {self.taps[1]} taps{each}"


class Boxes(NamedTuple):
    """The boxes of grad_output in a stage.
    Attributes:
        shape: images, rows and columns of a box.
        per_channel_block: boxes for each 64 output channels.
    """

    shape: PixelShape
    per_channel_block: int

    @property
    def copied_bytes(self) -> int:
        """Returns the bytes of a box."""
        return math.prod(self.shape) * ROW_BYTES

    @property
    def bytes(self) -> int:
        """Returns the bytes from a box to the next."""
        return round_up(self.copied_bytes, BOX_ALIGNMENT)

    def pixel(self, shape: PixelShape, k: int) -> int:
        """Returns which pixel of a box tap 0 reads for the k-th pixel of a tile of this shape."""
        _, rows, cols = shape
        return (k // (rows * cols) * self.shape[1] + k // cols % rows) * self.shape[2] + k % cols

    def steps(self, shape: PixelShape) -> list[int]:
        """Returns the same for the first pixel of each multiply."""
        return [self.pixel(shape, k) for k in range(0, math.prod(shape), STEP_PIXELS)]

    def group_pixels(self, shape: PixelShape) -> int:
        """Returns how many pixels of a box the second 8 pixels of a multiply lie behind the first."""
        return self.pixel(shape, 8)


class Stage(NamedTuple):
    """What a launch gives a kernel: a tile of pixels, and how it lies in shared memory.
    Attributes:
        shape: images, rows and columns of the input.
        boxes: the boxes of grad_output.
        bytes: from one stage to the next.
        stages: of the ring.
    """

    shape: PixelShape
    boxes: Boxes
    bytes: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Returns the dynamic shared memory of a block."""
        return FIXED_BYTES + self.stages * self.bytes

    def __str__(self) -> str:
        images, rows, cols = self.shape
        return f"tiles of {images} x {rows} x {cols} pixels, {self.stages} stages"


class Axes(NamedTuple):
    """The strides and dilations of a layer."""

    stride: Pair
    dilation: Pair


def _axes_of(geometry: Geometry) -> Axes:
    return Axes(geometry.stride, geometry.dilation)


def boxes_of(axes: Axes, taps: tuple[Pair, Pair], shape: PixelShape, box_per_tap_col: bool) -> Boxes:
    """Returns the boxes of grad_output of a tile.
    Args:
        taps: rows and columns of taps of a block, and the steps between them.
    """
    (phases_h, reach_h), (phases_w, reach_w) = reach_of(axes, taps, 0), reach_of(axes, taps, 1)
    images, rows, cols = shape
    if box_per_tap_col:
        phases_w, reach_w = taps[0][1], 0
    return Boxes((images, rows + reach_h, cols + reach_w), phases_h * phases_w)


def reach_of(axes: Axes, taps: tuple[Pair, Pair], axis: int) -> Pair:
    """Returns the phases that the taps of a block touch along an axis, and how far they reach within a phase."""
    (counts, steps), stride = taps, axes.stride[axis]
    pitch = steps[axis] * axes.dilation[axis]
    return min(counts[axis], stride // math.gcd(stride, pitch)), (counts[axis] - 1) * pitch // stride


@lru_cache(maxsize=8192)
def _groups_are_contiguous(shape: PixelShape, box: PixelShape) -> bool:
    """Returns whether the two groups of 8 pixels of each multiply are contiguous, and always the same distance
    apart."""
    boxes = Boxes(box, 1)
    distance, pixels = boxes.group_pixels(shape), math.prod(shape)
    steps = [(first, boxes.pixel(shape, first)) for first in range(0, pixels, STEP_PIXELS)]
    return all(
        boxes.pixel(shape, first + i) == at + i // 8 * distance + i % 8
        for first, at in steps
        for i in range(STEP_PIXELS)
    )


def has_gaps(problem: Problem) -> bool:
    """Returns whether the kernel skips rows and columns of the output, and no two taps read the same ones."""
    g = problem.geometry
    return all(
        len({k * d % s for k in range(kernel)}) == kernel < s
        for kernel, d, s in zip(g.kernel, g.dilation, g.stride, strict=True)
    )


def kernels_of_sizes(problem: Problem, device: Device, sizes: Sequence[Geometry]) -> list[TmaKernel]:
    """Returns the kernels of a layer whose tiles suit some of these sizes."""
    found = []
    suiting: dict[int, list[tuple[PixelShape, ...]]] = {}
    for limits in map(limits_of, sizes):
        for pixels in pixels_that_suit(limits):
            suiting.setdefault(pixels, []).append(shapes_of(pixels, limits.height, limits.width))
    for taps in _tap_choices(problem):
        blocks = [
            (warps, 16, warp_n, warp_taps)
            for warps, warp_n, warp_taps in _warpgroup_choices(problem, math.prod(taps[0]))
        ]
        shifted = reach_of(_axes_of(problem.geometry), taps, 1)[1] > 0
        for box_per_tap_col, pixels in itertools.product(
            (False, True) if shifted else (False,), sorted(suiting)
        ):
            shapes = tuple(dict.fromkeys(shape for of_size in suiting[pixels] for shape in of_size))
            loadable = loadable_shapes(_axes_of(problem.geometry), taps, pixels, box_per_tap_col, shapes)
            for block in blocks if loadable else ():
                kernel = TmaKernel(*block, *taps, pixels, box_per_tap_col)
                if kernel.fits_registers and stage_of(kernel, *loadable[0], device):
                    found.append(kernel)
    return found


def stages_of(geometry: Geometry, kernel: TmaKernel, device: Device) -> list[tuple[int, Stage]]:
    """Returns the stages with which a kernel may be the fastest for a size, each with the number of tiles that cover
    the map; the usual one, where none suits it; none if it does not compute the size correctly."""
    taps, limits = (kernel.taps, kernel.tap_step), limits_of(geometry)
    tiles = covering_tiles(_axes_of(geometry), taps, kernel.pixels, kernel.box_per_tap_col, limits)
    made = ((count, stage_of(kernel, shape, boxes, device)) for count, shape, boxes in tiles)
    found = [(count, stage) for count, stage in made if stage]
    if not found and (usual := _usual_stage(geometry, kernel, device)) and limits.fit(usual.shape):
        found.append((limits.tiles(usual.shape), usual))
    return found


def computes_any_size(layer: Problem, kernel: TmaKernel, device: Device) -> bool:
    """Returns whether a kernel computes every size of a layer, but those whose tiles it cannot count."""
    return not leaves_sizes(layer.geometry) and _usual_stage(layer.geometry, kernel, device) is not None


def _usual_stage(geometry: Geometry, kernel: TmaKernel, device: Device) -> Stage | None:
    """Returns the stage of the tile that boxes can load whatever the map, if it fits into shared memory."""
    usual, taps = (usual_shape(kernel.pixels),), (kernel.taps, kernel.tap_step)
    loadable = loadable_shapes(_axes_of(geometry), taps, kernel.pixels, kernel.box_per_tap_col, usual)
    return stage_of(kernel, *loadable[0], device) if loadable else None


def stage_of(kernel: TmaKernel, shape: PixelShape, boxes: Boxes, device: Device) -> Stage | None:
    """Returns the stage of a tile of pixels, or None where too few fit into shared memory."""
    output_boxes = boxes.per_channel_block * kernel.channel_blocks
    bytes_ = kernel.input_blocks * kernel.pixels * ROW_BYTES + output_boxes * boxes.bytes
    stages = min(MAX_STAGES, (device.shared_memory_per_block - FIXED_BYTES) // bytes_)
    # A single split stores its sums through the stages' memory.
    if stages < MIN_STAGES or output_boxes > MAX_BOXES or stages * bytes_ < kernel.staged_bytes:
        return None
    return Stage(shape, boxes, bytes_, stages)


@lru_cache(maxsize=4096)
def covering_tiles(
    axes: Axes, taps: tuple[Pair, Pair], pixels: int, box_per_tap_col: bool, limits: Limits
) -> list[tuple[int, PixelShape, Boxes]]:
    """Returns the tiles of so many pixels that suit a map, with their number: those that are fewer than all with
    smaller boxes, and of as many with equal boxes that of the fewest images."""
    batch, height, width, beyond, most_images = limits
    any_map = beyond == (INT32_LIMIT, INT32_LIMIT)
    fewest, found = INT32_LIMIT, list[tuple[int, PixelShape, Boxes]]()
    shapes = shapes_of(pixels, height, width)
    for shape, boxes in loadable_shapes(axes, taps, pixels, box_per_tap_col, shapes):
        images, rows, cols = shape
        if images <= most_images and (any_map or limits.fit(shape)):
            count = -(-batch // images) * -(-height // rows) * -(-width // cols)
            if count < fewest:
                fewest = count
                if found and found[-1][2].bytes == boxes.bytes:
                    found.pop()
                found.append((count, shape, boxes))
    return found


@lru_cache(maxsize=4096)
def loadable_shapes(
    axes: Axes,
    taps: tuple[Pair, Pair],
    pixels: int,
    box_per_tap_col: bool,
    shapes: tuple[PixelShape, ...],
) -> list[tuple[PixelShape, Boxes]]:
    """Returns those tiles that boxes can load, and the boxes, the smallest first."""
    found = ((shape, boxes_of(axes, taps, shape, box_per_tap_col)) for shape in shapes)
    return sorted(
        ((shape, boxes) for shape, boxes in found if _can_be_loaded(axes, shape, boxes)),
        key=lambda one: one[1].bytes,
    )


def _can_be_loaded(axes: Axes, shape: PixelShape, boxes: Boxes) -> bool:
    """Returns whether boxes can load a tile, and the pixels of its multiplies lie as the kernel takes them."""
    images, rows, cols = boxes.shape
    most = max(images, (rows - 1) * axes.stride[0] + 1, (cols - 1) * axes.stride[1] + 1)
    return most <= MAX_BOX and _groups_are_contiguous(shape, boxes.shape)


def _counts(taps: int) -> list[int]:
    """Returns how many of ``taps`` taps a block may take: all, half of them, a third and so on."""
    return sorted({ceil_div(taps, parts) for parts in range(1, taps + 1)})


def _tap_choices(problem: Problem) -> list[tuple[Pair, Pair]]:
    """Returns the taps of a block and the steps between them: neighbours, or those of one phase."""
    g = problem.geometry

    def along(axis: int) -> list[tuple[int, int]]:
        kernel = g.kernel[axis]
        period = g.stride[axis] // math.gcd(g.stride[axis], g.dilation[axis])
        found = {(count, 1) for count in _counts(kernel)}
        if period < kernel:
            found |= {(count, period) for count in _counts(ceil_div(kernel, period)) if count > 1}
        return sorted(found)

    return [
        ((rows, cols), (row_step, col_step))
        for (rows, row_step), (cols, col_step) in itertools.product(along(0), along(1))
        if rows * cols <= 16
    ]


def _warpgroup_choices(problem: Problem, taps: int) -> Iterator[tuple[tuple[int, int, int, int], int, int]]:
    """Yields warps along (m, n, taps, k), and the output channels and taps of a warpgroup."""
    g = problem.geometry
    widths = (64, 128, 256) if g.out_channels_per_group > 32 else (32,)
    for warp_n, groups_t in itertools.product(widths, (1, 2, 3)):
        warp_taps = ceil_div(taps, groups_t)
        sums = warp_n * warp_taps // 2
        if ceil_div(taps, warp_taps) != groups_t or warp_n >= max(128, 2 * g.out_channels_per_group):
            continue
        for groups_m, groups_n in itertools.product((1, 2, 3), (1, 2)):
            groups = groups_m * groups_n * groups_t
            if not 2 <= groups <= 3 or sums < 32 or sums > 128 or groups_n * warp_n > 256:
                continue
            if (groups_m - 1) * 64 >= g.in_channels_per_group:
                continue
            if (groups_n - 1) * warp_n >= g.out_channels_per_group:
                continue
            yield (4 * groups_m, groups_n, groups_t, 1), warp_n, warp_taps
