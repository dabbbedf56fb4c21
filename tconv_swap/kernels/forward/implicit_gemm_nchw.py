"""Tiles of csrc/kernels/forward/implicit_gemm_tma.cu for NCHW inputs, the best first, and where they are expected to
be faster than the kernels whose threads load NCHW (docs/kernels/forward/implicit_gemm_wgmma.md). Pure functions of
data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import tma_tiles
from tconv_swap.kernels.problem import Device

#: The fewest output channels of a group, and the fewest products of an input element, with which a channels_last copy
#: of the input is faster at strides above 1, although it is written and read once more (measured on an H200). With so
#: many channels several blocks read the input in any case. The limits of products are MIN_PRODUCTS where tiles are
#: whole rows or no tap is shifted; in TF32, where no tap is shifted, half of them (1.04 to 1.27 times as fast on six
#: layers); elsewhere MIN_PRODUCTS_SHIFTED (in 16 bits, 2048 products: 0.97 to 1.33 times as fast on four layers; 2064
#: to 3072: 1.25 to 1.67 times on three).
MIN_OUT_CHANNELS = 128
MIN_PRODUCTS = 1024
MIN_PRODUCTS_FLAT_TF32 = 512
MIN_PRODUCTS_SHIFTED = 2048


def candidates(problem: TileProblem, device: Device) -> Iterator[tuple[TileProblem, Tile]]:
    """Yields tiles for an NCHW problem: first those that load the input in its own layout, then those that load a
    channels_last copy."""
    if device.architecture != "sm_90a" or problem.precision == "IEEE" or problem.input_channels_last:
        return
    if problem.item == 2 and problem.flat:
        for variant, tile in tma_tiles(problem, device):
            if supports_pixel_major(variant, tile):
                yield variant, replace(tile, pixel_major=True)
    geometry = problem.geometry
    if (
        geometry.batch * geometry.in_channels * geometry.height * geometry.width * problem.item
        > MAX_COPY_BYTES
    ):
        return
    copied = replace(problem, input_channels_last=True, nhwc_copy=True, aligned=False)
    yield from tma_tiles(copied, device)


def pays(problem: TileProblem, tile: Tile) -> bool:
    """Whether the first of ``candidates`` is expected to be the fastest of all tiles."""
    # For maps of a few columns, threads load the input only for mma.sync.
    if not problem.flat and tile.cols < 8:
        return True
    if tile.pixel_major:
        return max(problem.geometry.stride) > 1
    geometry = problem.geometry
    if problem.flat and problem.item == 4:
        min_products = MIN_PRODUCTS_FLAT_TF32
    elif tile.by_rows or problem.flat:
        min_products = MIN_PRODUCTS
    else:
        min_products = MIN_PRODUCTS_SHIFTED
    return (
        max(geometry.stride) > 1
        and geometry.out_channels_per_group >= MIN_OUT_CHANNELS
        and geometry.out_channels_per_group * geometry.taps >= min_products
    )


def supports_pixel_major(problem: TileProblem, tile: Tile) -> bool:
    """Whether the multiplier can read the tile's NCHW input as a pixel-major operand: no box may lie in two images or
    groups."""
    geometry = problem.geometry
    return (
        problem.item == 2
        and problem.flat
        and problem.aligned
        and geometry.height * geometry.width % tile.cols == 0
        and tile.warp_cols in (8, 16)
        and (geometry.groups == 1 or problem.words % tile.chunk_words == 0)
    )
