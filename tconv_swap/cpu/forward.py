"""Computes the output of a transposed convolution on the CPU with PyTorch's own operators.

Each formulation computes the same sums in another order of operations; ``plan.choose`` says which one is the fastest
for a geometry, and why. None of them changes an argument, and the same input gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap.cpu.plan import Axis, Formulation, choose, fastest, products_are_rounded
from tconv_swap.geometry import Geometry, check_geometry

#: Elements of a matrix product that one block leaves in the cache (4 MB of float32).
BLOCK_ELEMENTS = 1 << 20
#: Elements of any other intermediate (8 MB of float32). Above 32 MB the allocator maps new pages for every allocation,
#: whose page faults take about 0.2 ms for each MB.
TEMPORARY_ELEMENTS = 1 << 21
#: Elements of a piece that is transposed at once: it fits the second-level cache, and the threads share it.
PIECE_ELEMENTS = 1 << 17


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    memory_format: torch.memory_format,
) -> Tensor:
    """Returns ``[batch, out_channels, out_height, out_width]`` in ``memory_format``."""
    formulation = choose(geometry, input.dtype, memory_format)
    return FORWARD[formulation](input, weight, bias, geometry, memory_format)


def is_plain(input: Tensor, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]) -> bool:
    """Returns whether PyTorch should compute a call with valid arguments (stride, padding, output_padding, groups,
    dilation) by itself. This function is faster than the path through our op, whose code has left the caches after some
    milliseconds of arithmetic.
    """
    if input.is_contiguous() and weight.is_contiguous():
        memory_format = torch.contiguous_format
    elif input.is_contiguous(memory_format=torch.channels_last):
        memory_format = torch.channels_last
    else:
        return False
    tensors = (input, weight) if bias is None else (input, weight, bias)
    kinds = tuple((t.shape, t.dtype, t.device) for t in tensors)
    return products_are_rounded(input.dtype) or _is_plain(kinds, arguments, memory_format)


@lru_cache(maxsize=4096)
def _is_plain(kinds: tuple[Any, ...], arguments: tuple[Any, ...], memory_format: torch.memory_format) -> bool:
    (input, dtype, device), (weight, *_), *bias = kinds
    if device.type != "cpu" or any(kind[1:] != (dtype, device) for kind in kinds):
        return False
    try:
        geometry = check_geometry(input, weight, bias[0][0] if bias else None, *arguments)
    except RuntimeError:  # the checks of the op report what is wrong
        return False
    return fastest(geometry, dtype, memory_format) == "plain"


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes PyTorch's own transposed convolution."""
    output = F.conv_transpose2d(
        input,
        weight,
        bias,
        geometry.stride,
        geometry.padding,
        geometry.output_padding,
        geometry.groups,
        geometry.dilation,
    )
    return output.contiguous(memory_format=memory_format)


def channels_last(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes PyTorch's own on channels_last tensors, the layout in which oneDNN computes; only the conversions are
    ours."""
    # oneDNN reorders the weight for its kernel, which takes longer from NCHW.
    weight = weight.contiguous(memory_format=torch.channels_last)
    return _in_pieces(input, weight, bias, geometry, memory_format, torch.channels_last)


def pieces(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes PyTorch's own, one piece of the output at a time, so that its temporaries need no newly mapped pages."""
    return _in_pieces(input, weight, bias, geometry, memory_format, memory_format)


def _in_pieces(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    g: Geometry,
    memory_format: torch.memory_format,
    computed_in: torch.memory_format,
) -> Tensor:
    """Computes pieces of output rows (or of whole images), each from the input rows that reach it."""
    output = _empty_output(input, g, memory_format)
    row = g.out_channels * g.out_width
    rows = min(g.out_height, max(1, TEMPORARY_ELEMENTS // row))
    images = max(1, TEMPORARY_ELEMENTS // (row * g.out_height)) if rows == g.out_height else 1
    for n in range(0, g.batch, images):
        for o in range(0, g.out_height, rows):
            target = output[n : n + images, :, o : o + rows]
            outputs = slice(o, o + target.shape[2])
            reaching, first = Axis.of(g, 0).reaching(outputs, g.output_padding[0])
            piece = F.conv_transpose2d(
                input[n : n + images, :, reaching].contiguous(memory_format=computed_in),
                weight,
                bias,
                g.stride,
                g.padding,
                g.output_padding,
                g.groups,
                g.dilation,
            )[:, :, first : first + target.shape[2]]
            if computed_in == memory_format:
                target.copy_(piece)
            else:
                _copy_in_pieces(piece, target)
    return output


def _copy_in_pieces(source: Tensor, target: Tensor) -> None:
    """Does ``target.copy_(source)`` for a target of another memory format, some rows at a time. A copy of the whole
    would miss the cache for every element: for each channel it reads every cache line of the source and uses one
    element of it. A few rows stay in the cache."""
    row = math.prod(source.shape) // max(1, source.shape[2])
    # A 1-D signal is one long row, so it is copied by columns.
    axis = 2 if source.shape[2] > 1 else 3
    size = max(1, PIECE_ELEMENTS // max(1, row if axis == 2 else row // source.shape[3]))
    for piece, place in zip(source.split(size, axis), target.split(size, axis), strict=True):
        place.copy_(piece)


def outer(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes a 1x1 input without padding: the product of ``[batch, Ci]`` and ``[Ci, Co*KH*KW]`` is the output."""
    rows, columns = input.flatten(1), weight.flatten(1)
    if bias is None:
        product = rows @ columns
    else:
        product = torch.addmm(bias.repeat_interleave(geometry.taps), rows, columns)
    # Detached: autograd refuses an in-place write, such as ReLU(inplace=True), into a view that a Function made.
    return product.view(geometry.output_shape).detach().contiguous(memory_format=memory_format)


def products(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes every tap of every input pixel by a matrix product, then writes each tap to its place in the output.

    It works on blocks of input rows (or of whole images), so that the product is still in the cache when its taps are
    written. Taps of the same output pixel are added in the dtype of the input, one after the other. They are added
    phase by phase, where neighbours are contiguous, and only the sums are written to the strided output.
    """
    g = geometry
    vertical, horizontal = Axis.of(g, 0), Axis.of(g, 1)
    output = _empty_output(input, g, memory_format)
    matrices = weight.reshape(g.groups, g.in_channels_per_group, -1).transpose(1, 2)
    overlapping = vertical.overlapping or horizontal.overlapping
    if not overlapping and not (vertical.tiled and horizontal.tiled):
        _fill(output, bias)
    for images, blocks in blocks_of(g):
        if overlapping:
            sums = _zero_phases(input, g, images.stop - images.start)
            for rows in blocks:
                _add_taps(_tap_products(input[images, :, rows], matrices, g), sums, rows, g)
            _spread_phases(sums, bias, output[images], g)
        else:
            for rows in blocks:
                _spread_taps(
                    _tap_products(input[images, :, rows], matrices, g), bias, output[images], rows, g
                )
    return output


def _tap_products(block: Tensor, matrices: Tensor, g: Geometry) -> Tensor:
    """Maps ``[images, Ci, rows, W]`` to ``[images, Co, KH, KW, rows, W]``."""
    images, _, rows, width = block.shape
    if images > 1:
        product = torch.matmul(matrices, block.reshape(images, g.groups, g.in_channels_per_group, -1))
    else:
        pixels = block[0].reshape(g.groups, g.in_channels_per_group, -1)
        # A batched product of one matrix is slower than the plain product.
        product = torch.mm(matrices[0], pixels[0]) if g.groups == 1 else torch.bmm(matrices, pixels)
    return product.view(images, g.out_channels, *g.kernel, rows, width)


def _spread_taps(taps: Tensor, bias: Tensor | None, output: Tensor, rows: slice, g: Geometry) -> None:
    """Writes every tap to its places in ``output``."""
    vertical, horizontal = Axis.of(g, 0), Axis.of(g, 1)
    for i in range(g.kernel[0]):
        ih, oh = vertical.tap(i, rows)
        for j in range(g.kernel[1]):
            iw, ow = horizontal.tap(j, slice(0, g.width))
            if ih.stop > ih.start and iw.stop > iw.start:
                source = taps[:, :, i, j, ih.start - rows.start : ih.stop - rows.start, iw]
                _copy_with_bias(source, bias, output[:, :, oh, ow])


def _zero_phases(input: Tensor, g: Geometry, images: int) -> Tensor:
    """Returns zeros ``[images, Co, SH, SW, cells, cells]``: room for every phase of the output and for what padding
    cuts off."""
    cells = (Axis.of(g, axis).cells for axis in (0, 1))
    return input.new_zeros(images, g.out_channels, *g.stride, *cells)


def _add_taps(taps: Tensor, sums: Tensor, rows: slice, g: Geometry) -> None:
    for i, r, down in Axis.of(g, 0).shifts:
        for j, s, right in Axis.of(g, 1).shifts:
            top = rows.start + down
            cells = sums[:, :, r, s, top : top + taps.shape[4], right : right + g.width]
            cells.add_(taps[:, :, i, j])


def _spread_phases(sums: Tensor, bias: Tensor | None, output: Tensor, g: Geometry) -> None:
    for r in range(g.stride[0]):
        ih, oh = Axis.of(g, 0).phase_cells(r)
        for s in range(g.stride[1]):
            iw, ow = Axis.of(g, 1).phase_cells(s)
            _copy_with_bias(sums[:, :, r, s, ih, iw], bias, output[:, :, oh, ow])


def _copy_with_bias(source: Tensor, bias: Tensor | None, target: Tensor) -> None:
    if bias is None:
        target.copy_(source)
    else:
        torch.add(source, bias.view(-1, 1, 1), out=target)


def blocks_of(g: Geometry) -> Iterator[tuple[slice, list[slice]]]:
    """Yields images, and their input rows in blocks whose tap products have about ``BLOCK_ELEMENTS`` elements; larger
    blocks if the weight is larger, because every product reads all of it."""
    elements = max(BLOCK_ELEMENTS, math.prod(g.weight_shape))
    row = g.out_channels * g.taps * g.width
    rows = min(g.height, max(1, elements // row))
    images = max(1, elements // (row * g.height)) if rows == g.height else 1
    blocks = [slice(h, min(h + rows, g.height)) for h in range(0, g.height, rows)]
    for n in range(0, g.batch, images):
        yield slice(n, min(n + images, g.batch)), blocks


def pixel_products(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes as ``products``, pixel by pixel: for few pixels, whose rows are too short to be added one by one, and
    weights too large to be reordered. For one group."""
    g = geometry
    pixels = input.permute(0, 2, 3, 1).reshape(g.batch * g.height * g.width, g.in_channels)
    product = (pixels @ weight.flatten(1)).view(len(pixels), g.out_channels, g.taps).transpose(1, 2)
    taps = product.reshape(g.batch, g.height, g.width, *g.kernel, g.out_channels).transpose(2, 3)
    vertical, horizontal = Axis.of(g, 0), Axis.of(g, 1)
    sums = input.new_zeros(
        g.batch, vertical.cells, g.stride[0], horizontal.cells, g.stride[1], g.out_channels
    )
    if bias is not None:
        sums.copy_(bias.expand_as(sums))
    for i, r, down in vertical.shifts:
        for j, s, right in horizontal.shifts:
            sums[:, down : down + g.height, r, right : right + g.width, s].add_(taps[:, :, i, :, j])
    top, left = g.padding
    inside = sums.flatten(3, 4).flatten(1, 2)[:, top : top + g.out_height, left : left + g.out_width]
    output = _empty_output(input, g, memory_format)
    _copy_in_pieces(inside.permute(0, 3, 1, 2), output)
    return output


def phases(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes a stride-1 convolution for each phase of the output."""
    g = geometry
    vertical, horizontal = Axis.of(g, 0), Axis.of(g, 1)
    output = _empty_output(input, g, memory_format)
    if not (vertical.covered and horizontal.covered):
        _fill(output, bias)
    input = input.contiguous(memory_format=memory_format)
    for row in vertical.phases:
        for column in horizontal.phases:
            taps = weight[:, :, row.taps, column.taps].flip(2, 3)
            computed = F.conv2d(
                input,
                _as_convolution(taps, g),
                bias,
                padding=(row.padding, column.padding),
                dilation=(row.dilation, column.dilation),
                groups=g.groups,
            )
            output[:, :, row.output, column.output].copy_(computed[:, :, row.computed, column.computed])
    return output


def stacked_phases(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """Computes all phases of every cell of the output by one matrix product, so that the rows of a cell are contiguous.

    A cell is ``stride`` consecutive output positions. Takes undilated kernels of one group whose size is a multiple of
    the stride, so that all phases have the same number of taps, and outputs of whole cells. Works block by block of the
    phases' rows.
    """
    g = geometry
    (sh, sw), (th, tw) = g.stride, (g.kernel[0] // g.stride[0], g.kernel[1] // g.stride[1])
    height, width = g.height + th - 1, g.width + tw - 1
    # Tap t of a phase reads the input pixel t before its own; unfold calls this offset th - 1 - t.
    neighbours = F.unfold(input, (th, tw), padding=(th - 1, tw - 1)).unflatten(1, (-1, th, tw)).flip(2, 3)
    pixels = neighbours.permute(0, 4, 1, 2, 3).reshape(g.batch * height * width, g.in_channels * th * tw)
    phases = weight.reshape(g.in_channels, -1, th, sh, tw, sw).permute(0, 2, 4, 1, 3, 5)
    output = _empty_output(input, g, memory_format)
    target = output.unflatten(3, (-1, sw)).unflatten(2, (-1, sh)).permute(0, 1, 2, 4, 3, 5)
    rows, columns = target.shape[2:4]
    step = max(1, TEMPORARY_ELEMENTS // max(1, len(pixels) * g.out_channels * sw))
    for phase_h, place_h, first_h in _cell_parts(sh, g.padding[0]):
        for r in range(phase_h.start, phase_h.stop, step):
            block = phases[..., r : min(r + step, phase_h.stop), :]
            matrix, depth = block.reshape(pixels.shape[1], -1), block.shape[4]
            if bias is None:
                product = pixels @ matrix
            else:
                product = torch.addmm(bias.repeat_interleave(depth * sw), pixels, matrix)
            cells = product.view(g.batch, height, width, g.out_channels, depth, sw).permute(0, 3, 1, 2, 4, 5)
            place = r - phase_h.start + place_h.start
            for phase_w, place_w, first_w in _cell_parts(sw, g.padding[1]):
                source = cells[:, :, first_h : first_h + rows, first_w : first_w + columns, :, phase_w]
                target[:, :, :, :, place : place + depth, place_w].copy_(source)
    return output


def _cell_parts(stride: int, padding: int) -> list[tuple[slice, slice, int]]:
    """Padding cuts a cell of phases in two parts, which belong to neighbouring output cells. Returns for each part its
    phases, its place in the output cell, and the computed pixel that belongs to output cell 0."""
    whole, cut = divmod(padding, stride)
    parts = [(slice(cut, stride), slice(0, stride - cut), whole)]
    if cut:
        parts.append((slice(0, cut), slice(stride - cut, stride), whole + 1))
    return parts


def _as_convolution(weight: Tensor, g: Geometry) -> Tensor:
    """Returns ``[Ci, M, ...]`` as the weight ``[G*M, Ci/G, ...]`` of a convolution."""
    if g.groups == 1:
        return weight.transpose(0, 1)
    by_group = weight.reshape(g.groups, g.in_channels_per_group, *weight.shape[1:])
    return by_group.transpose(1, 2).flatten(0, 1)


def _empty_output(input: Tensor, g: Geometry, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(g.output_shape, dtype=input.dtype, device=input.device, memory_format=memory_format)


def _fill(output: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        output.zero_()
    else:
        output.copy_(bias.view(-1, 1, 1).expand_as(output))


FORWARD: dict[
    Formulation, Callable[[Tensor, Tensor, Tensor | None, Geometry, torch.memory_format], Tensor]
] = {
    "plain": plain,
    "channels_last": channels_last,
    "pieces": pieces,
    "outer": outer,
    "products": products,
    "pixel_products": pixel_products,
    "phases": phases,
    "stacked_phases": stacked_phases,
}
