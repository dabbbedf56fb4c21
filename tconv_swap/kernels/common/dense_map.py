"""The map of dense tiles, which are positions in a row, wherever they begin (docs/kernels/dense_tiles.md). Each pixel
that a tap of a position reads has a place of its own, so that a tap is the same distance for all positions. The last
places of a row, and the last rows of an image, are no positions."""

from __future__ import annotations

from typing import NamedTuple

from tconv_swap.geometry import Pair
from tconv_swap.kernels.common.hardware import MAX_CORNER

#: Positions of a row of the widest map of a dense tile whose taps reach other rows: its stages have room for these.
MAX_COLS = 64

#: From the first column and row to those of the first pixel, and from the last ones to those of the last pixel.
Corners = tuple[int, int, int, int]


class DenseMap(NamedTuple):
    """The places of an image: its rows and columns, those of the positions, and how many places the last tap of a
    position is from the first, along each axis."""

    rows: int
    cols: int
    positions: Pair
    reach: Pair

    def count(self, batch: int) -> int:
        """Returns how many places there are from the first position to the last."""
        positions_h, positions_w = self.positions
        return (batch * self.rows - self.rows + positions_h - 1) * self.cols + positions_w

    def pixels(self, positions: int) -> int:
        """Returns how many pixels in a row the taps of so many positions in a row read."""
        return pixels_in_row(positions, self.reach, self.cols)

    def corners(self, first: Pair, step: Pair, pixels: Pair) -> Corners:
        """Returns the corners of the map, as ``TensorMap`` has them.

        Args:
            first: the row and the column of the first place's pixel.
            step: from the pixel of a place to that of the next, along each axis.
            pixels: the rows and the columns of the tensor.
        """
        last_h = first[0] + (self.rows - 1) * step[0] + 1 - pixels[0]
        last_w = first[1] + (self.cols - 1) * step[1] + 1 - pixels[1]
        return first[1], first[0], last_w, last_h


def pixels_in_row(positions: int, reach: Pair, pitch: int) -> int:
    """Returns ``DenseMap.pixels`` of a map of ``pitch`` columns."""
    return positions + reach[0] * pitch + reach[1]


def most_pixels(positions: int, reach: Pair) -> int:
    """Returns ``DenseMap.pixels`` of the widest map."""
    return pixels_in_row(positions, reach, MAX_COLS + reach[1])


def are_legal(corners: Corners) -> bool:
    """Returns whether the copy engine takes the corners."""
    return min(corners) >= -MAX_CORNER and max(corners) < MAX_CORNER
