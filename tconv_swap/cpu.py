"""Transposed convolution on the CPU, out of PyTorch's own operators.

Each formulation computes the same sums in another order of operations; ``plan_cpu`` says which one is the fastest
for a geometry, and why. None of them changes an argument, and the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv_swap.geometry import Geometry
from tconv_swap.plan_cpu import Axis, Formulation, choose

#: Elements of the intermediate that one block leaves in the cache (4 MB of float32). Larger intermediates go to
#: memory and back, and above 32 MB every call pays for the page faults of a fresh allocation.
BLOCK_ELEMENTS = 1 << 20


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    memory_format: torch.memory_format,
) -> Tensor:
    """``[batch, out_channels, out_height, out_width]`` in ``memory_format``."""
    formulation = choose(geometry, input.dtype, memory_format, torch.get_num_threads())
    return FORWARD[formulation](input, weight, bias, geometry, memory_format)


def plain(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """PyTorch's own transposed convolution."""
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
    """PyTorch's own on channels_last tensors, which is what oneDNN computes in; only the conversions are ours."""
    output = plain(_to_channels_last(input), weight, bias, geometry, torch.channels_last)
    return output if memory_format == torch.channels_last else _from_channels_last(output)


def _to_channels_last(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.contiguous(memory_format=torch.channels_last)
    result = torch.empty_like(tensor, memory_format=torch.channels_last)
    for source, target in zip(tensor.flatten(2), result.permute(0, 2, 3, 1).flatten(1, 2), strict=True):
        target.copy_(source.t())
    return result


def _from_channels_last(tensor: Tensor) -> Tensor:
    """A contiguous copy. ``copy_`` transposes a matrix in tiles, but a 4-D tensor element by element, which for
    planes of 64 KB and more means a cache miss for every element."""
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.contiguous()
    result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for source, target in zip(tensor.permute(0, 2, 3, 1).flatten(1, 2), result.flatten(2), strict=True):
        target.copy_(source.t())
    return result


def outer(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """A 1x1 input without padding: the product of ``[batch, Ci]`` and ``[Ci, Co*KH*KW]`` is the output."""
    rows, columns = input.flatten(1), weight.flatten(1)
    if bias is None:
        product = rows @ columns
    else:
        product = torch.addmm(bias.repeat_interleave(geometry.taps), rows, columns)
    return product.view(geometry.output_shape).contiguous(memory_format=memory_format)


def products(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """One matrix product gives every tap of every input pixel; each tap then goes to its place in the output.

    Block by block of input rows (or of whole images), so that the product is still in the cache when it is
    spread. Taps that meet in an output pixel are added up in the dtype of the input, one after the other.
    """
    g = geometry
    vertical, horizontal = Axis.of(g, 0), Axis.of(g, 1)
    output = _empty_output(input, g, memory_format)
    overlapping = vertical.overlapping or horizontal.overlapping
    if overlapping or not (vertical.tiled and horizontal.tiled):
        _fill(output, bias)
    addend = None if overlapping or bias is None else bias.view(-1, 1, 1)
    multiply = _tap_products(weight, g, memory_format)
    for images, rows in _blocks(g):
        taps = multiply(input[images, :, rows])
        target = output[images]
        for i in range(g.kernel[0]):
            ih, oh = vertical.tap(i, rows)
            if ih.stop <= ih.start:
                continue
            for j in range(g.kernel[1]):
                iw, ow = horizontal.tap(j, slice(0, g.width))
                if iw.stop <= iw.start:
                    continue
                source = taps[i, j][:, :, ih.start - rows.start : ih.stop - rows.start, iw]
                if overlapping:
                    target[:, :, oh, ow].add_(source)
                elif addend is not None:
                    torch.add(source, addend, out=target[:, :, oh, ow])
                else:
                    target[:, :, oh, ow].copy_(source)
    return output


def _tap_products(
    weight: Tensor, g: Geometry, memory_format: torch.memory_format
) -> Callable[[Tensor], Tensor]:
    """A map from ``[images, Ci, rows, W]`` to the tap products ``[KH, KW, images, Co, rows, W]`` (a view)."""
    if memory_format == torch.channels_last and g.groups == 1:
        columns = weight.permute(0, 2, 3, 1).reshape(g.in_channels, -1)

        def multiply_channels_last(block: Tensor) -> Tensor:
            images, _, rows, width = block.shape
            pixels = block.permute(0, 2, 3, 1).reshape(-1, g.in_channels)
            product = pixels @ columns
            return product.view(images, rows, width, *g.kernel, g.out_channels).permute(3, 4, 0, 5, 1, 2)

        return multiply_channels_last

    matrices = weight.reshape(g.groups, g.in_channels_per_group, -1).transpose(1, 2)

    def multiply(block: Tensor) -> Tensor:
        images, _, rows, width = block.shape
        if images == 1:
            pixels = block[0].reshape(g.groups, g.in_channels_per_group, -1)
        else:
            grouped = block.reshape(images, g.groups, g.in_channels_per_group, -1)
            pixels = grouped.permute(1, 2, 0, 3).reshape(g.groups, g.in_channels_per_group, -1)
        # A batch of one matrix is slower than the matrix.
        product = matrices[0] @ pixels[0] if g.groups == 1 else torch.bmm(matrices, pixels)
        return product.view(g.out_channels, *g.kernel, images, rows, width).permute(1, 2, 3, 0, 4, 5)

    return multiply


def _blocks(g: Geometry) -> Iterator[tuple[slice, slice]]:
    """Images and input rows whose tap products are about ``BLOCK_ELEMENTS``, in order; more where the weight is
    larger, because every product reads all of it."""
    elements = max(BLOCK_ELEMENTS, g.in_channels * g.out_channels_per_group * g.taps)
    row = g.out_channels * g.taps * g.width
    rows = min(g.height, max(1, elements // row))
    images = max(1, elements // (row * g.height)) if rows == g.height else 1
    for n in range(0, g.batch, images):
        for h in range(0, g.height, rows):
            yield slice(n, min(n + images, g.batch)), slice(h, min(h + rows, g.height))


def phases(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, memory_format: torch.memory_format
) -> Tensor:
    """A stride-1 convolution for each phase of the output (design notes, section 1)."""
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
    """One stride-1 convolution with the phases as further output channels, then a shuffle of pixels.

    Claims undilated kernels that are a multiple of the stride, so that all phases have equally many taps, and
    outputs that are whole cells of ``stride`` pixels.
    """
    g = geometry
    (sh, sw), (th, tw) = g.stride, (g.kernel[0] // g.stride[0], g.kernel[1] // g.stride[1])
    taps = weight.reshape(g.in_channels, -1, th, sh, tw, sw).flip(2, 4)
    taps = taps.permute(0, 1, 3, 5, 2, 4).reshape(g.in_channels, -1, th, tw)
    # With the phases innermost, a row of an output cell lies together in a channels_last result.
    computed = F.conv2d(
        input.contiguous(memory_format=torch.channels_last if sw >= 8 else memory_format),
        _as_convolution(taps, g),
        None if bias is None else bias.repeat_interleave(sh * sw),
        padding=(th - 1, tw - 1),
        groups=g.groups,
    )
    cells = computed.unflatten(1, (g.out_channels, sh, sw))
    output = _empty_output(input, g, memory_format)
    target = output.unflatten(3, (-1, sw)).unflatten(2, (-1, sh)).permute(0, 1, 3, 5, 2, 4)
    rows, columns = target.shape[4:]
    for phase_h, place_h, first_h in _cell_parts(sh, g.padding[0]):
        for phase_w, place_w, first_w in _cell_parts(sw, g.padding[1]):
            source = cells[:, :, phase_h, phase_w, first_h : first_h + rows, first_w : first_w + columns]
            target[:, :, place_h, place_w].copy_(source)
    return output


def _cell_parts(stride: int, padding: int) -> list[tuple[slice, slice, int]]:
    """Padding cuts a cell of phases in two parts, of neighbouring output cells: for each part its phases, its
    place in the output cell, and the computed pixel that belongs to output cell 0."""
    whole, cut = divmod(padding, stride)
    parts = [(slice(cut, stride), slice(0, stride - cut), whole)]
    if cut:
        parts.append((slice(0, cut), slice(stride - cut, stride), whole + 1))
    return parts


def _as_convolution(weight: Tensor, g: Geometry) -> Tensor:
    """``[Ci, M, ...]`` as the weight ``[G*M, Ci/G, ...]`` of a convolution."""
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
    "outer": outer,
    "products": products,
    "phases": phases,
    "stacked_phases": stacked_phases,
}


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    memory_format: torch.memory_format,
    output_mask: tuple[bool, bool, bool],
) -> list[Tensor]:
    """The gradients ``output_mask`` asks for (input, weight, bias), in that order.

    PyTorch's own: the gradients are convolutions without a transposed one's detours, and nothing measured was faster.
    """
    gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        [geometry.out_channels],
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        True,
        geometry.output_padding,
        geometry.groups,
        output_mask,
    )
    return [
        g if g.dim() == 1 else g.contiguous(memory_format=memory_format)
        for g, wanted in zip(gradients, output_mask, strict=True)
        if wanted
    ]
