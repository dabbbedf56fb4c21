"""The tiles of pixels of csrc/kernels/grad_weight/implicit_gemm_tma.cu that suit a map, and which cover it correctly.
The functions are pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.grad_weight.layer import largest_image
from tconv_swap.runtime.integers import INT32_LIMIT

#: Pixels of one multiply, and of a tile.
STEP_PIXELS, MIN_PIXELS, MAX_PIXELS = 16, 32, 256
#: Rows or columns of a map up to which a tile may have exactly as many.
MAX_WHOLE_SIDE = 16

#: Images, rows and columns of a tile of pixels.
PixelShape = tuple[int, int, int]


def last_reached(geometry: Geometry, axis: int) -> int:
    """Returns the last row (column) of the output that some pixel of the input reaches; 0 if there is none."""
    size, out = (geometry.height, geometry.out_height) if axis == 0 else (geometry.width, geometry.out_width)
    stride, dilation, padding = geometry.stride[axis], geometry.dilation[axis], geometry.padding[axis]
    last = 0
    for k in range(geometry.kernel[axis]):
        offset = k * dilation - padding
        meeting = min(size - 1, (out - 1 - offset) // stride)
        if meeting >= 0:
            last = max(last, meeting * stride + offset)
    return last


def max_beyond(geometry: Geometry, axis: int) -> int:
    """Returns how many rows (columns) of zeros beyond the input a tile may have.
    More of them would meet pixels of the output that belong to no gradient, and zero times infinity is not a
    number.
    """
    g = geometry
    size = (g.height, g.width)[axis]
    # Larger maps have the same edge.
    enough = g.kernel[axis] * g.dilation[axis] + g.padding[axis] + 1
    return _max_beyond(
        min(size, enough),
        g.kernel[axis],
        g.stride[axis],
        g.padding[axis],
        g.dilation[axis],
        g.output_padding[axis],
    )


@lru_cache(maxsize=4096)
def _max_beyond(size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    geometry = Geometry(
        1, 1, 1, size, 1, (1, kernel), (1, stride), (0, padding), (0, output_padding), (1, dilation)
    )
    last = last_reached(geometry, 1)
    offsets = [k * dilation - padding for k in range(kernel)]
    real = {q * stride + offset for q in range(size) for offset in offsets}
    beyond = 0
    while (size + beyond) * stride + offsets[0] <= last:
        met = {(size + beyond) * stride + offset for offset in offsets}
        if any(0 <= at <= last and at not in real for at in met):
            return beyond
        beyond += 1
    return INT32_LIMIT


class Limits(NamedTuple):
    """What the tiles of a map must keep.
    Attributes:
        batch, height, width: of the map.
        beyond: how many rows and columns beyond it a tile may have, so that what lies there meets no pixel that it
            should not.
        images: of a tile at most, so that offsets have 32 bits.
    """

    batch: int
    height: int
    width: int
    beyond: Pair
    images: int

    def fit(self, shape: PixelShape) -> bool:
        """Returns whether tiles of so many images, rows and columns may cover the map."""
        images, rows, cols = shape
        beyond = -self.height % rows <= self.beyond[0] and -self.width % cols <= self.beyond[1]
        return beyond and images <= self.images and self.tiles(shape) < INT32_LIMIT

    def tiles(self, shape: PixelShape) -> int:
        """Returns how many tiles cover the map."""
        images, rows, cols = shape
        return -(-self.batch // images) * -(-self.height // rows) * -(-self.width // cols)


@lru_cache(maxsize=1024)
def limits_of(geometry: Geometry) -> Limits:
    """Returns the limits of the tiles of a map."""
    g = geometry
    beyond = max_beyond(g, 0), max_beyond(g, 1)
    return Limits(g.batch, g.height, g.width, beyond, (INT32_LIMIT - 1) // largest_image(g))


@lru_cache(maxsize=1024)
def pixels_that_suit(limits: Limits) -> tuple[int, ...]:
    """Returns how many pixels tiles have that are not far larger than a map, nor cover it badly."""
    sizes = range(MIN_PIXELS, MAX_PIXELS + 1, STEP_PIXELS)
    return tuple(
        pixels
        for pixels in sizes
        if any(
            images < 2 * limits.batch
            and rows < 2 * limits.height
            and cols < 2 * limits.width
            and limits.fit((images, rows, cols))
            for images, rows, cols in shapes_of(pixels, limits.height, limits.width)
        )
    )


@lru_cache(maxsize=4096)
def shapes_of(pixels: int, height: int, width: int) -> tuple[PixelShape, ...]:
    """Returns the tiles of so many pixels whose images, rows and columns are powers of two, or as many rows or columns
    as a map, those of few images first."""
    heights = {1, 2, 4, 8, 16} | ({height} if height <= MAX_WHOLE_SIDE else set())
    widths = {4, 8, 16, 32, 64} | ({width} if width <= MAX_WHOLE_SIDE else set())
    images = {
        (pixels // (rows * cols), rows, cols)
        for rows in heights
        for cols in widths
        if pixels % (rows * cols) == 0
    }
    return tuple(sorted(one for one in images if one[0] & (one[0] - 1) == 0))


def usual_shape(pixels: int) -> PixelShape:
    """Returns the tile of so many pixels that boxes can load whatever the map."""
    return 1, pixels // 8, 8


def leaves_sizes(geometry: Geometry) -> bool:
    """Returns whether a layer has sizes that no tile can cover."""
    large = geometry._replace(height=1 << 12, width=1 << 12)
    return min(max_beyond(large, 0), max_beyond(large, 1)) < INT32_LIMIT
