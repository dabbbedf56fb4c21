"""The launch of csrc/kernels/common/pad_images.cu, which copies images in NCHW so that TMA can load boxes of them."""

from __future__ import annotations

from dataclasses import dataclass

from tconv_swap.kernels.common.hardware import TMA_ALIGNMENT
from tconv_swap.kernels.common.sizes import pad_images_sizes
from tconv_swap.runtime.integers import ceil_div, round_up
from tconv_swap.runtime.program import (
    Argument,
    ElementKind,
    Kernel,
    Launch,
    TensorMap,
    struct,
    workspace,
)

_ITEM_BYTES = 4
_THREADS = 256
#: Warps that keep a whole GPU busy.
_ENOUGH_WARPS = 8192


@dataclass(frozen=True, slots=True)
class PaddedImages:
    """Images [n][channel][row][column] in float32, whose channels begin at multiples of 16 bytes.

    Attributes:
        width: columns of the images that are copied.
        columns: of the copy.
    """

    batch: int
    channels: int
    height: int
    width: int
    columns: int

    @property
    def pixels(self) -> int:
        """Returns the pixels of a channel of the copy."""
        return self.height * self.columns

    @property
    def pitch(self) -> int:
        """Returns the floats from one channel to the next."""
        return round_up(self.pixels, TMA_ALIGNMENT // _ITEM_BYTES)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the copy."""
        return _ITEM_BYTES * self.batch * self.channels * self.pitch

    @property
    def segment(self) -> int:
        """Returns how many pixels a warp copies."""
        pixels = round_up(self.pixels, 32)
        limit = self.batch * self.channels * pixels // _ENOUGH_WARPS
        return min(pixels, 1024 if limit >= 1024 else 256)

    @property
    def segments(self) -> int:
        """Returns the segments of a channel."""
        return ceil_div(self.pixels, self.segment)

    @property
    def bias_rows(self) -> int:
        """Returns how many partial sums the copy leaves for each channel: the sum of every segment, and what rounding
        lost of it."""
        return 2 * self.batch * self.segments

    def map(self, base: Argument, pixels: int, channels: int) -> TensorMap:
        """Returns the tensor map, rounding to TF32, whose boxes have ``pixels`` of ``channels``."""
        return TensorMap(
            base,
            ElementKind.TFLOAT32,
            sizes=(self.pixels, self.channels, self.batch),
            strides=(_ITEM_BYTES * self.pitch, _ITEM_BYTES * self.channels * self.pitch),
            box=(pixels, channels, 1),
            steps=(1, 1, 1),
            swizzle_bytes=_ITEM_BYTES * pixels,
        )


def pad_images(source: Argument, to: int, images: PaddedImages, bias_at: int | None = None) -> Launch:
    """Returns the launch that copies ``source`` to the workspace at byte ``to``.

    Args:
        bias_at: offset of the partial sums of the segments in the workspace, or None for no sums.
    """
    kernel = Kernel(
        "common/pad_images.cu",
        "pad_images",
        (("CHANNELS", images.channels), ("WITH_BIAS", bias_at is not None), ("THREADS", _THREADS)),
    )
    sizes = pad_images_sizes(
        images.batch, images.height, images.width, images.columns, images.pitch, images.segment
    )
    return Launch(
        kernel,
        grid=ceil_div(images.batch * images.channels * images.segments, _THREADS // 32),
        block=_THREADS,
        arguments=(source, workspace(to), workspace(bias_at or 0), struct(0)),
        structs=(sizes,),
    )
