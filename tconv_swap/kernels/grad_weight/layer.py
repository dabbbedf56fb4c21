"""What the families of the weight's gradient ask about a layer, whatever its sizes, and about the pixels of a size. The
functions are pure."""

from __future__ import annotations

from functools import lru_cache

import torch

from tconv_swap.geometry import Geometry, Pair
from tconv_swap.kernels.common.one_pixel import may_begin
from tconv_swap.kernels.problem import Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div


def has_pixels(geometry: Geometry) -> bool:
    """Returns whether maps of one pixel have a kernel of their own."""
    return max(geometry.stride) == 1 and may_begin(geometry)


def of_any_size(problem: Problem, pixels_apart: bool = True) -> Problem:
    """Returns the problem that stands for all sizes of a layer.
    It has the output padding with which the outputs of rows of 64 pixels are multiples of the largest power of
    two. Maps of one pixel stand for themselves if they have a kernel of their own and ``pixels_apart`` is true.
    """
    g = problem.geometry
    one_pixel = pixels_apart and g.height == g.width == 1 and has_pixels(g)
    axes = (g.kernel, g.stride, g.padding, g.dilation)
    layout = (problem.channels_last, problem.weight_channels_last)
    layer = (g.in_channels, g.out_channels, g.groups)
    return _of_any_size(one_pixel, layer, axes, problem.dtype, problem.precision, layout)


@lru_cache(maxsize=1024)
def _of_any_size(
    one_pixel: bool,
    layer: tuple[int, int, int],
    axes: tuple[Pair, Pair, Pair, Pair],
    dtype: torch.dtype,
    precision: str,
    layout: tuple[bool, bool],
) -> Problem:
    """Returns the same from what all sizes of a layer have in common."""
    (in_channels, out_channels, groups), (kernel, stride, padding, dilation) = layer, axes
    side = 1 if one_pixel else 64
    geometry = Geometry(
        1, in_channels, side, side, out_channels, kernel, stride, padding, (0, 0), dilation, groups
    )
    if not one_pixel:
        width = geometry.out_width
        paddings = range(max(stride[1], dilation[1]))
        last = max(paddings, key=lambda extra: (width + extra) & -(width + extra))
        geometry = geometry._replace(output_padding=(0, last))
    return Problem(geometry, dtype, precision, *layout)


def taps_cover_stride(geometry: Geometry, axis: int) -> bool:
    """Returns whether every offset in [0, stride) belongs to a tap: such taps together read each pixel of
    grad_output over the input exactly once, so the bias can be added up from what they read."""
    g = geometry
    offsets = {k * g.dilation[axis] - g.padding[axis] for k in range(g.kernel[axis])}
    return offsets.issuperset(range(g.stride[axis]))


def reads_all_of_grad_output(geometry: Geometry) -> bool:
    """Returns whether the taps whose offset lies in [0, stride) read every pixel of grad_output exactly once, so that
    the kernels of the implicit GEMM, whichever load for it, can add up the bias."""
    g = geometry
    whole = g.out_height == g.stride[0] * g.height and g.out_width == g.stride[1] * g.width
    return whole and taps_cover_stride(g, 0) and taps_cover_stride(g, 1)


def pixel_tiles(size: Geometry, tile: tuple[int, int, int]) -> int:
    """Returns how many tiles of ``tile`` images, rows and columns cover the pixels."""
    return ceil_div(size.batch, tile[0]) * ceil_div(size.height, tile[1]) * ceil_div(size.width, tile[2])


def largest_image(geometry: Geometry) -> int:
    """Returns the elements of an image of the input or of grad_output, whichever has more."""
    g = geometry
    return max(g.in_channels * g.height * g.width, g.out_channels * g.out_height * g.out_width)


def counts_in_32_bits(geometry: Geometry, tile: tuple[int, int, int]) -> bool:
    """Returns whether the tiles, and the offsets within one, fit the 32 bits that a kernel counts with."""
    return tile[0] * largest_image(geometry) < INT32_LIMIT and pixel_tiles(geometry, tile) < INT32_LIMIT
