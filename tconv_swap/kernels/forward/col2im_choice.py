"""The tiles of csrc/kernels/forward/col2im.cu that suit one size. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tconv_swap.kernels.forward.col2im_tile import (
    WARP_PIXELS,
    Tile,
    column_tiles,
    fits,
    fits_device,
    layer_of,
)
from tconv_swap.kernels.problem import Device, Problem


def of_size(problem: Problem, device: Device) -> list[Tile]:
    """Returns the tiles that are worth comparing; none where none fits."""
    tiles: dict[Tile, None] = {}
    # Each panel fits the columns of this size.
    panels, layer = _panels(problem), layer_of(problem)
    for pixels, blocks in ((64, 4), (64, 3), (128, 2), (64, 2), (128, 1), (64, 1)):
        for (panel_pixels, step_panels), buffers, stages in product(panels, (2, 1), (4, 3, 2)):
            columns = panel_pixels * step_panels
            if columns > pixels:
                continue
            tile = Tile(panel_pixels, step_panels, pixels // columns, buffers, stages, blocks)
            if fits_device(layer, tile, device):
                tiles[tile] = None
    return list(tiles)


def _panels(problem: Problem) -> list[tuple[int, int]]:
    """Returns (pixels of a panel, panels of a row) of at most 128 pixels; those that multiply the fewest columns come
    first."""
    panels = [(16, 1), (32, 1), (64, 1), (128, 1)]
    if not problem.channels_last:
        lines = [line // problem.dtype.itemsize for line in (128, 64, 32)]
        panels = [(pixels, n) for pixels in lines for n in (1, 2, 3, 4) if pixels >= 16 and pixels * n <= 128]

    def multiplied(panel: tuple[int, int]) -> tuple[int, int, int]:
        columns = panel[0] * panel[1]
        return column_tiles(problem, _with_panels(panel))[1] * columns, -columns, panel[1]

    return sorted((p for p in panels if column_tiles(problem, _with_panels(p))[1]), key=multiplied)


def _with_panels(panel: tuple[int, int]) -> Tile:
    """Returns a tile with these panels, whose other fields do not matter for its columns."""
    return Tile(*panel, step_rows=1, buffers=1, stages=2, blocks_per_multiprocessor=1)


def candidates(problem: Problem, device: Device) -> Iterator[Tile]:
    """Yields every kind of tile that the kernel computes; ``of_size`` returns those that are worth comparing."""
    geometry, item = problem.geometry, problem.dtype.itemsize
    panels = [(16, 1), (32, 1), (64, 1), (128, 1)]
    if not problem.channels_last:
        panels = [(line // item, count) for line in (32, 64, 128) for count in (1, 2, 3, 4)]
    for (panel_pixels, step_panels), step_rows in product(panels, (1, 2, 4, 8)):
        columns = panel_pixels * step_panels
        if panel_pixels < WARP_PIXELS or columns >= 2 * max(geometry.width, panels[0][0]):
            continue
        for blocks, buffers, stages in product((1, 2, 3, 4), (2, 1), (6, 4, 3, 2)):
            tile = Tile(panel_pixels, step_panels, step_rows, buffers, stages, blocks)
            if fits(problem, tile, device):
                yield tile
