"""Tiles of csrc/kernels/forward/implicit_gemm_tma.cu for NCHW inputs, the best first. Pure functions of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tconv_swap.kernels.common.limits import MAX_COPY_BYTES
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.kernels.forward.implicit_gemm_tma_choice import tma_tiles
from tconv_swap.kernels.problem import Device


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
