"""Which tiles of csrc/kernels/forward/implicit_gemm_tma.cu are worth trying for NCHW, the best first, and where they
are expected
to be faster than the kernels whose threads bring NCHW (docs/kernels/tile_nchw.md). Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward.implicit_gemm_choice import box_tiles
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.kernels.problem import Device

#: Such a copy costs its bytes twice. It pays at strides above 1 where several blocks of output channels would read the
#: input anyhow, and an element of it has so many products: few where tiles are whole rows or no tap is shifted, else
#: more, and twice as many in 16 bits, where they take half of the time.
LEAST_OUT_CHANNELS = 128
LEAST_PRODUCTS = 1024
LEAST_PRODUCTS_SHIFTED = 2048


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Tiles for a problem in NCHW: first from the input as it lies, then by way of a copy in channels_last."""
    if device.architecture != "sm_90a" or problem.precision == "IEEE" or problem.input_channels_last:
        return
    if problem.item == 2 and problem.flat:
        for posed, tile in box_tiles(problem, device):
            if takes_pixels(posed, tile):
                yield posed, replace(tile, pixel_boxes=True)
    geometry = problem.geometry
    if (
        geometry.batch * geometry.in_channels * geometry.height * geometry.width * problem.item
        > MAX_COPY_BYTES
    ):
        return
    arranged = replace(problem, input_channels_last=True, arranged=True, aligned=False)
    yield from box_tiles(arranged, device)


def pays(problem: TileProblem, tile: Tile) -> bool:
    """Whether the first of ``candidates`` is expected to be the fastest of all tiles."""
    # Threads bring maps of a few columns to mma.sync alone.
    if not problem.flat and tile.cols < 8:
        return True
    if tile.pixel_boxes:
        return max(problem.geometry.stride) > 1
    geometry = problem.geometry
    least = LEAST_PRODUCTS if tile.by_rows or problem.flat else LEAST_PRODUCTS_SHIFTED * 4 // problem.item
    return (
        max(geometry.stride) > 1
        and geometry.out_channels_per_group >= LEAST_OUT_CHANNELS
        and geometry.out_channels_per_group * geometry.taps >= least
    )


def takes_pixels(problem: TileProblem, tile: Tile) -> bool:
    """Whether the multiplier can read the tile's input across k, as it lies: no box is in two images or groups."""
    geometry = problem.geometry
    return (
        problem.item == 2
        and problem.flat
        and problem.aligned
        and geometry.height * geometry.width % tile.cols == 0
        and tile.warp_cols in (8, 16)
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
    )
