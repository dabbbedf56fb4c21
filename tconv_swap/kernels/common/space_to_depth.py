"""The launch of csrc/kernels/common/space_to_depth.cu, which copies a tensor to planes of positions, one plane for each
phase of a stride."""

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
#: Warps that keep a whole GPU busy.
_ENOUGH_WARPS = 8192


@dataclass(frozen=True, slots=True)
class Planes:
    """A tensor [plane][n][channel][row][column] of positions; ``pitch``: floats of a channel."""

    planes: int
    channels: int
    positions: Pair
    pitch: int

    def bytes(self, batch: int) -> int:
        return 4 * self.planes * batch * self.channels * self.pitch

    def map(self, base: Argument, box: int, rows: int, batch: int, element: ElementKind) -> TensorMap:
        """Returns the tensor map whose boxes have ``box`` positions of ``rows`` channels."""
        return TensorMap(
            base,
            element,
            sizes=(self.positions[0] * self.positions[1], self.channels, self.planes * batch),
            strides=(4 * self.pitch, 4 * self.channels * self.pitch),
            box=(box, rows, 1),
            steps=(1, 1, 1),
            swizzle_bytes=4 * box,
        )


def planes_of(planes: int, channels: int, positions: Pair) -> Planes:
    return Planes(planes, channels, positions, round_up(positions[0] * positions[1], 4))


def identity_constants() -> tuple[tuple[str, Constant], ...]:
    """Returns the constants with which common/space_to_depth.cu copies a tensor to one plane, without moving pixels."""
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
    """Returns how many positions a warp copies."""
    positions = round_up(planes.positions[0] * planes.positions[1], 32)
    limit = batch * planes.channels * positions // _ENOUGH_WARPS
    return min(positions, 1024 if limit >= 1024 else 256)


def bias_partial_rows(batch: int, planes: Planes) -> int:
    """Returns how many partial sums the copy leaves for each channel: the sum of every segment, and what rounding
    lost of it."""
    segments = ceil_div(planes.positions[0] * planes.positions[1], _segment(batch, planes))
    return 2 * batch * segments


def space_to_depth(
    batch: int,
    source: Argument,
    to: int,
    planes: Planes,
    size: Pair,
    pixel_rows: int,
    constants: tuple[tuple[str, Constant], ...],
    bias_at: int | None = None,
    segment: int | None = None,
) -> Launch:
    """Returns the launch that copies ``source`` to ``planes`` at offset ``to`` of the workspace.

    Args:
        size: height and width of the source, in pixels.
        pixel_rows: rows of the input; positions that no tap reaches from them are zero.
        constants: phases, strides and padding of the planes.
        bias_at: offset of the partial sums of the segments in the workspace, or None for no sums.
        segment: positions that a warp copies.
    """
    segment = segment or _segment(batch, planes)
    warps = batch * planes.channels * ceil_div(planes.positions[0] * planes.positions[1], segment)
    kernel = Kernel(
        "common/space_to_depth.cu",
        "space_to_depth",
        (
            ("CHANNELS", planes.channels),
            *constants,
            ("WITH_BIAS", bias_at is not None),
            ("THREADS", _THREADS),
        ),
    )
    return Launch(
        kernel,
        grid=ceil_div(warps, _THREADS // 32),
        block=_THREADS,
        arguments=(source, workspace(to), workspace(bias_at or 0), struct(0)),
        structs=(space_to_depth_sizes(batch, size, pixel_rows, planes.positions, planes.pitch, segment),),
    )
