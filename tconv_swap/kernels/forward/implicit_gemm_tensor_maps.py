"""The tensor maps with which the copy engine loads what csrc/kernels/forward/implicit_gemm_tma.cu and
forward/implicit_gemm_tma_nchw.cu multiply. Pure functions of data."""

from __future__ import annotations

from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, TileProblem
from tconv_swap.kernels.forward.implicit_gemm_memory import box_pixels, box_shape, nchw_box
from tconv_swap.kernels.forward.implicit_gemm_shape import dense_corners
from tconv_swap.runtime.program import Argument, ElementKind, TensorMap, input_

#: Pixels of a row of a box that the multiplier reads as a pixel-major operand: 128 bytes of 16 bits, its widest
#: swizzle.
_PIXEL_MAJOR_PIXELS = 64
#: Output channels of a box of weights: 128 bytes of 16 bits.
_WEIGHT_CHANNELS = 64


def input_map(problem: TileProblem, tile: Tile, source: Argument) -> TensorMap:
    """Returns the tensor map of the input, whose dimensions forward/implicit_gemm_tma_producer.cuh lists; ``source``
    is the input or its channels_last copy."""
    geometry, item = problem.geometry, problem.item
    channels, pixel = geometry.in_channels_per_group, geometry.in_channels * item
    chunk = tile.chunk_words * 4 // item
    if tile.pixel_major:
        image = geometry.height * geometry.width
        sizes: tuple[int, ...] = (image, geometry.in_channels, geometry.batch)
        strides: tuple[int, ...] = (image * item, geometry.in_channels * image * item)
        return TensorMap(
            source, _element(problem), sizes, strides, (_PIXEL_MAJOR_PIXELS, chunk, 1), (1, 1, 1)
        )
    if tile.dense:
        row = geometry.width * pixel
        return TensorMap(
            source,
            _element(problem),
            (geometry.in_channels, geometry.width, geometry.height, geometry.batch),
            (pixel, row, geometry.height * row),
            (chunk, box_pixels(problem, tile)),
            (1, 1, 1, 1),
            swizzle_bytes=4 * tile.chunk_words,
            corners=dense_corners(problem),
        )
    cols, rows, images = box_shape(problem, tile)
    if problem.flat:
        pixels = geometry.batch * geometry.height * geometry.width
        sizes = (channels, pixels, geometry.groups)
        strides = (pixel, channels * item)
        box: tuple[int, ...] = (chunk, cols, 1)
    else:
        row = geometry.width * pixel
        sizes = (channels, geometry.width, geometry.height, geometry.batch, geometry.groups)
        strides = (pixel, row, geometry.height * row, channels * item)
        box = (chunk, cols, rows, images, 1)
    return TensorMap(
        source, _element(problem), sizes, strides, box, (1,) * len(box), swizzle_bytes=4 * tile.chunk_words
    )


def nchw_map(problem: TileProblem, tile: Tile) -> TensorMap:
    """Returns the tensor map of an NCHW input: column, channel, row, image
    (forward/implicit_gemm_tma_nchw_producer.cuh)."""
    geometry, item = problem.geometry, problem.item
    height, width = geometry.height, geometry.width
    if problem.flat:
        height, width = 1, height * width
    row = width * item
    plane = height * row
    return TensorMap(
        input_(0),
        _element(problem),
        sizes=(width, geometry.in_channels, height, geometry.batch),
        strides=(plane, row, geometry.in_channels * plane),
        box=(*nchw_box(problem, tile), 1),
        steps=(1, 1, 1, 1),
        swizzle_bytes=0,
    )


def weight_map(problem: TileProblem, tile: Tile) -> TensorMap:
    """Returns the tensor map of a channels_last weight: output channel, input channel, tap, group
    (forward/implicit_gemm_tma_weights.cuh)."""
    geometry, item = problem.geometry, problem.item
    taps = geometry.kernel[0] * geometry.kernel[1]
    channels, tap = geometry.in_channels_per_group, geometry.out_channels_per_group * item
    return TensorMap(
        input_(1),
        _element(problem),
        sizes=(geometry.out_channels_per_group, channels, taps, geometry.groups),
        strides=(taps * tap, tap, channels * taps * tap),
        box=(_WEIGHT_CHANNELS, tile.chunk_words * 4 // item, taps if len(problem.group_taps) == 1 else 1, 1),
        steps=(1, 1, 1, 1),
    )


def _element(problem: TileProblem) -> ElementKind:
    kinds = {"FP16": ElementKind.FLOAT16, "BF16": ElementKind.BFLOAT16}
    return kinds.get(problem.precision, ElementKind.TFLOAT32)
