"""The launch of csrc/kernels/common/space_to_depth.cu: a tensor copied to lines of pixels, parted by the phases of a
stride."""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.geometry import Pair
from tconv_swap.kernels.common.sizes import space_to_depth_sizes
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import (
    Argument,
    Constant,
    ElementKind,
    Kernel,
    Launch,
    TensorMap,
    struct,
    workspace,
)

_THREADS = 256
#: For the whole chip to be busy.
_ENOUGH_WARPS = 8192


@dataclass(frozen=True, slots=True)
class Planes:
    """A tensor of lines of pixels, [plane][n][channel][cell row][cell column]; ``pitch``: floats of a line."""

    planes: int
    channels: int
    cells: Pair
    pitch: int

    def bytes(self, batch: int) -> int:
        return 4 * self.planes * batch * self.channels * self.pitch

    def map(self, base: Argument, box: int, rows: int, batch: int, element: ElementKind) -> TensorMap:
        """``box``: pixels, ``rows``: channels that a box brings."""
        return TensorMap(
            base,
            element,
            sizes=(self.cells[0] * self.cells[1], self.channels, self.planes * batch),
            strides=(4 * self.pitch, 4 * self.channels * self.pitch),
            box=(box, rows, 1),
            steps=(1, 1, 1),
            swizzle_bytes=4 * box,
        )


def planes_of(planes: int, channels: int, cells: Pair) -> Planes:
    return Planes(planes, channels, cells, round_up(cells[0] * cells[1], 4))


def identity_constants() -> tuple[tuple[str, Constant], ...]:
    """How common/space_to_depth.cu leaves pixels where they are."""
    return (
        ("ROW_PHASES", 1),
        ("COL_PHASES", 1),
        *((f"{name}_{axis}", 1) for name in ("STRIDE", "DILATION") for axis in "HW"),
        ("KERNEL_H", 1),
        ("PADDING_H", 0),
        ("PADDING_W", 0),
        ("IM2COL_ROWS", False),
        ("ZERO_ROWS", 0),
    )


def _segment(batch: int, planes: Planes) -> int:
    """Positions that a warp parts."""
    positions = round_up(planes.cells[0] * planes.cells[1], 32)
    most = batch * planes.channels * positions // _ENOUGH_WARPS
    return min(positions, 1024 if most >= 1024 else 256)


def bias_partial_rows(batch: int, planes: Planes) -> int:
    """What the parting leaves of each channel's sum: of every segment a sum, and what rounding left of it."""
    segments = ceil_div(planes.cells[0] * planes.cells[1], _segment(batch, planes))
    return 2 * batch * segments


def space_to_depth(
    batch: int,
    source: Argument,
    to: int,
    planes: Planes,
    size: Pair,
    pixel_rows: int,
    parting: tuple[tuple[str, Constant], ...],
    bias_at: int | None = None,
    segment: int | None = None,
) -> Launch:
    """``size``: of the source, in pixels; ``pixel_rows``: of the input, that taps reach cells from;
    ``bias_at``: where the sums of the segments go, in the workspace;
    ``segment``: positions that a warp parts."""
    segment = segment or _segment(batch, planes)
    warps = batch * planes.channels * ceil_div(planes.cells[0] * planes.cells[1], segment)
    kernel = Kernel(
        "common/space_to_depth.cu",
        "space_to_depth",
        (
            ("CHANNELS", planes.channels),
            *parting,
            ("WITH_BIAS", bias_at is not None),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=ceil_div(warps, _THREADS // 32),
        block=_THREADS,
        arguments=(source, workspace(to), workspace(bias_at or 0), struct(0)),
        structs=(space_to_depth_sizes(batch, size, pixel_rows, planes.cells, planes.pitch, segment),),
    )
