"""What a block of csrc/kernels/grad_weight/im2col_nchw.cu computes. A tile is a kernel, the stage that a launch gives
it, and a number of splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_BOX, MAX_STEP, TMA_ALIGNMENT
from tconv_swap.kernels.common.pad_images import PaddedImages
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import ceil_div, round_up

#: Pixels of a multiply along k, and of a box of the input.
STEP_PIXELS, BOX_PIXELS = 8, 32
#: Steps of a stage, stages of the ring.
MAX_STEPS = 8
MIN_STAGES, MAX_STAGES = 2, 8
#: Bytes of shared memory before the stages: barriers and the table of steps; the table of pixels comes behind them. The
#: stages begin at a multiple of these bytes.
_BARRIER_BYTES, _STAGE_ALIGNMENT = 192, 1024
#: Multiplies, of 8 pixels each, into the same sums: the tensor cores truncate their sums.
MAX_MULTIPLIES = 1024
#: Columns of grad_output that a stage's pixels may span; stages of more were not measured.
COLUMN_LIMIT = 512
#: Floats that boxes begin at multiples of.
ALIGNMENT = TMA_ALIGNMENT // 4
#: Warpgroups that multiply, tiles of 64 rows of each, and input channels, as registers allow.
_SHAPES = (
    *((2, 1, cols) for cols in (256, 192, 128, 96, 64)),
    *((2, 2, cols) for cols in (128, 96, 64)),
    (2, 3, 64),
    *((3, 1, cols) for cols in (192, 128, 96, 64)),
    (3, 2, 64),
)
#: Columns of a box of grad_output: narrow ones hold the rows of small maps in less memory.
_OUT_BOX_COLS = (32, 16, 8)


@dataclass(frozen=True, slots=True)
class Im2colKernel:
    """What is compiled: a row of taps x ``tile_co`` output channels by ``cols`` input channels.
    Attributes:
        warpgroups: that multiply.
        m_tiles: tiles of 64 rows of a warpgroup.
        out_box_cols: columns of a box of grad_output.
    """

    warpgroups: int
    m_tiles: int
    cols: int
    out_box_cols: int

    @property
    def rows(self) -> int:
        """Returns the rows (taps times output channels) of the product."""
        return self.warpgroups * self.m_tiles * 64

    def tile_co(self, geometry: Geometry) -> int:
        """Returns the output channels of each tap, a multiple of 16."""
        return self.rows // geometry.kernel[1] // 16 * 16


@dataclass(frozen=True, slots=True)
class Stage:
    """What a launch gives a kernel: the pixels of the input in a stage, ``images`` x ``rows`` x ``cols``.
    Its rows are whole, or there is one row.
    Attributes:
        cols: of whole rows their pitch.
        pitch: pixels from one row of the input to the next.
    """

    images: int
    rows: int
    cols: int
    pitch: int

    def has_whole_rows(self, geometry: Geometry) -> bool:
        """Returns whether a stage has whole rows."""
        return self.cols >= geometry.width

    def run(self, geometry: Geometry) -> int:
        """Returns the pixels of an image of a stage, which are contiguous."""
        return (self.rows - 1) * self.pitch + min(self.cols, geometry.width)

    def run_boxes(self, geometry: Geometry) -> int:
        """Returns the boxes of the input of each image."""
        return ceil_div(self.run(geometry), BOX_PIXELS)

    def run_steps(self, geometry: Geometry) -> int:
        """Returns the steps of each image."""
        return ceil_div(self.run(geometry), STEP_PIXELS)

    def steps(self, geometry: Geometry) -> int:
        """Returns the steps of a stage."""
        return self.images * self.run_steps(geometry)

    def counts(self, geometry: Geometry) -> tuple[int, int, int]:
        """Returns how many stages there are along the images, the rows and the columns."""
        g = geometry
        return (
            ceil_div(g.batch, self.images),
            ceil_div(g.height, self.rows),
            ceil_div(g.width, self.cols),
        )

    def left_halo(self, geometry: Geometry) -> int:
        """Returns the columns of the boxes of grad_output before the first pixel's."""
        return 0 if self.has_whole_rows(geometry) else round_up(geometry.padding[1], ALIGNMENT)

    def out_boxes(self, geometry: Geometry, box_cols: int) -> int:
        """Returns the boxes of grad_output side by side, which hold the columns that the taps read and the bias
        adds up."""
        g = geometry
        if self.has_whole_rows(g):
            return ceil_div(g.out_width, box_cols)
        reach = (self.cols - 1) * g.stride[1] + (g.kernel[1] - 1) * g.dilation[1] + 1 - g.padding[1]
        return ceil_div(self.left_halo(g) + max(reach, self.cols * g.stride[1]), box_cols)


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel, the stage that its launch gives it, and the number of parts that the pixels are split into."""

    kernel: Im2colKernel
    stage: Stage
    splits: int = 1

    def describe(self, geometry: Geometry) -> str:
        """Returns the tile in words."""
        kernel, stage = self.kernel, self.stage
        return (
            f"{kernel.cols} channels x {geometry.kernel[1]} taps of {kernel.tile_co(geometry)}, "
            f"{stage.images} x {stage.rows} x {min(stage.cols, geometry.width)} pixels, {self.splits} splits"
        )


def input_read_in_place(geometry: Geometry, stage: Stage) -> bool:
    """Returns whether boxes can load the input without a copy of it."""
    return stage.pitch == geometry.width and geometry.height * geometry.width % ALIGNMENT == 0


def out_row_pitch(geometry: Geometry) -> int:
    """Returns the columns from one row of grad_output to the next: rows are multiples of 16 bytes."""
    return round_up(geometry.out_width, ALIGNMENT)


@lru_cache(maxsize=256)
def stages_of(geometry: Geometry) -> tuple[Stage, ...]:
    """Returns the stages that cover the images."""
    g = geometry
    limit, max_cols = MAX_STEPS * STEP_PIXELS, (COLUMN_LIMIT - 1) // g.stride[1] + 1
    padded = round_up(g.width, ALIGNMENT)
    found: dict[Stage, None] = {}
    for pitch in dict.fromkeys((g.width, padded)):
        for rows in range(1, g.height + 1) if g.width <= max_cols else ():
            run = (rows - 1) * pitch + g.width
            if run > limit or (rows > 1 and not _rows_fit(g, rows)):
                break
            if rows == g.height:
                most = min(g.batch, MAX_STEPS // ceil_div(run, STEP_PIXELS))
                found.update(dict.fromkeys(Stage(n, rows, pitch, pitch) for n in (1, 2, 4) if n <= most))
            elif rows * pitch % ALIGNMENT == 0:
                found[Stage(1, rows, pitch, pitch)] = None
    for count in range(2, ceil_div(g.width, BOX_PIXELS) + 2):
        cols = round_up(ceil_div(g.width, count), ALIGNMENT)
        if cols < g.width and cols <= min(limit, max_cols):
            found[Stage(1, 1, cols, padded)] = None
    return tuple(found)


def _rows_fit(geometry: Geometry, rows: int) -> bool:
    """Returns whether a box of grad_output can have every ``stride``-th row for so many rows of the input."""
    stride = geometry.stride[0]
    return stride <= MAX_STEP and (rows - 1) * stride < MAX_BOX


def fragment_taps(geometry: Geometry) -> int:
    """Returns how many neighbouring taps share 16 rows of the product without bank conflicts: a power of two
    that divides the stride."""
    g = geometry
    if g.dilation[1] % 2 == 0:
        return 1
    return max(taps for taps in (1, 2, 4, 8) if g.stride[1] % taps == 0 and taps <= g.kernel[1])


def tiles_of(geometry: Geometry, kernel: Im2colKernel) -> int:
    """Returns the blocks of one split, of all groups."""
    g = geometry
    co_tiles = ceil_div(g.out_channels_per_group, kernel.tile_co(g))
    return ceil_div(g.in_channels_per_group, kernel.cols) * co_tiles * g.kernel[0] * g.groups


def kernels(geometry: Geometry) -> Iterator[Im2colKernel]:
    """Yields the kernels of a layer that are no larger than its work."""
    g = geometry
    for shape, out_box_cols in itertools.product(_SHAPES, _OUT_BOX_COLS):
        kernel = Im2colKernel(*shape, out_box_cols)
        tile_co = kernel.tile_co(g)
        too_many = tile_co >= 2 * max(32, g.out_channels_per_group)
        if 0 < tile_co <= MAX_BOX and not too_many and kernel.cols < 2 * max(64, g.in_channels_per_group):
            yield kernel


def output_rows(geometry: Geometry, kernel: Im2colKernel, stage: Stage) -> int:
    """Returns the rows that boxes of grad_output load in a stage."""
    boxes = stage.out_boxes(geometry, kernel.out_box_cols)
    return boxes * stage.images * stage.rows * kernel.tile_co(geometry)


def stage_bytes(geometry: Geometry, kernel: Im2colKernel, stage: Stage) -> int:
    """Returns the bytes from one stage in shared memory to the next."""
    loaded = 4 * BOX_PIXELS * stage.images * stage.run_boxes(geometry) * kernel.cols
    return round_up(loaded + 4 * kernel.out_box_cols * output_rows(geometry, kernel, stage), _STAGE_ALIGNMENT)


def fixed_bytes(geometry: Geometry) -> int:
    """Returns the bytes of shared memory beside the stages."""
    table = (MAX_STEPS + 1) * STEP_PIXELS * geometry.kernel[1] * 4
    return _STAGE_ALIGNMENT + round_up(_BARRIER_BYTES + table, _STAGE_ALIGNMENT)


def ring(geometry: Geometry, kernel: Im2colKernel, stage: Stage, device: Device) -> int:
    """Returns how many stages the ring has."""
    room = device.shared_memory_per_block - fixed_bytes(geometry)
    return min(MAX_STAGES, room // stage_bytes(geometry, kernel, stage))


def supports_stage(geometry: Geometry, kernel: Im2colKernel, stage: Stage, device: Device) -> bool:
    """Returns whether a kernel may get a stage. Narrow boxes hold whole rows."""
    narrow = kernel.out_box_cols < max(_OUT_BOX_COLS)
    if narrow and not (stage.has_whole_rows(geometry) and geometry.out_width <= kernel.out_box_cols):
        return False
    return ring(geometry, kernel, stage, device) >= MIN_STAGES


def copies_grad_output(geometry: Geometry) -> bool:
    """Returns whether rows of grad_output have to be copied for the copy engine to load them."""
    return out_row_pitch(geometry) != geometry.out_width


def copied_bytes(geometry: Geometry, stage: Stage) -> int:
    """Returns the bytes of the copies that are made before the product."""
    g = geometry
    output_bytes = padded_grad_output(g).bytes if copies_grad_output(g) else 0
    return output_bytes + (0 if input_read_in_place(g, stage) else padded_input(g, stage).bytes)


def padded_input(geometry: Geometry, stage: Stage) -> PaddedImages:
    """Returns the input as the stage reads it, in place or from a copy."""
    g = geometry
    return PaddedImages(g.batch, g.in_channels, g.height, g.width, stage.pitch)


def padded_grad_output(geometry: Geometry) -> PaddedImages:
    """Returns grad_output as the kernel reads it, in place or from a copy."""
    g = geometry
    return PaddedImages(g.batch, g.out_channels, g.out_height, g.out_width, out_row_pitch(g))
