"""Computes the gradients of a transposed convolution on the CPU with PyTorch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from tconv_swap.cpu.forward import blocks_of
from tconv_swap.cpu.plan import choose_backward
from tconv_swap.geometry import Geometry


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    geometry: Geometry,
    memory_format: torch.memory_format,
    output_mask: tuple[bool, ...],
) -> list[Tensor]:
    """Returns the gradients of input, weight and bias for which ``output_mask`` is true, in that order."""
    formulation = choose_backward(geometry, input.dtype, memory_format)
    if formulation == "outer":
        gradients = _outer(grad_output, input, weight, geometry, output_mask)
    elif formulation == "products":
        gradients = _products(grad_output, input, weight, geometry, output_mask)
    else:
        gradients = _plain(grad_output, input, weight, geometry, output_mask)
    return [_laid_out(gradient, memory_format) for gradient in gradients]


def _laid_out(gradient: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns the gradient in a memory format; also the strides of dimensions of size 1 have it, since the next layer
    chooses its format by them."""
    if gradient.dim() == 1:
        return gradient
    gradient = gradient.contiguous(memory_format=memory_format)
    strides = torch.empty(gradient.shape, device="meta", memory_format=memory_format).stride()
    return gradient if gradient.stride() == strides else gradient.as_strided(gradient.shape, strides)


def _plain(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, output_mask: tuple[bool, ...]
) -> list[Tensor]:
    """Returns the gradients that PyTorch's own operator computes."""
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
    return [gradient for gradient, wanted in zip(gradients, output_mask, strict=True) if wanted]


def _outer(
    grad_output: Tensor, input: Tensor, weight: Tensor, g: Geometry, output_mask: tuple[bool, ...]
) -> list[Tensor]:
    """Returns the gradients for a 1x1 input without padding: the output is a product of ``[batch, Ci]`` and ``[Ci,
    Co*KH*KW]``."""
    # The operands are detached for the reason that ``outer`` in forward.py gives.
    wants_input, wants_weight, wants_bias = output_mask
    columns = grad_output.reshape(g.batch, -1)
    gradients = []
    if wants_input:
        gradients.append(torch.mm(columns, weight.flatten(1).t()).view(g.input_shape).detach())
    if wants_weight:
        gradients.append(torch.mm(input.flatten(1).t(), columns).view(g.weight_shape).detach())
    if wants_bias:
        gradients.append(grad_output.sum((0, 2, 3)))
    return gradients


def _products(
    grad_output: Tensor, input: Tensor, weight: Tensor, g: Geometry, output_mask: tuple[bool, ...]
) -> list[Tensor]:
    """Returns the gradients for kernels as large as the stride, without padding and with one group: each input pixel
    has a patch of the output of its own. The patches, as the columns of a matrix, give both gradients by matrix
    products, block by block, in a fixed order.
    """
    (sh, sw), (wants_input, wants_weight, wants_bias) = g.stride, output_mask
    matrix = weight.flatten(1)
    grad_input = input.new_empty(g.input_shape)
    grad_weight = input.new_zeros(matrix.shape)
    if wants_input or wants_weight:
        for images, blocks in blocks_of(g):
            for n in range(images.start, images.stop):
                for rows in blocks:
                    height = rows.stop - rows.start
                    cells = grad_output[n, :, rows.start * sh : rows.stop * sh]
                    cells = cells.reshape(g.out_channels, height, sh, g.width, sw).permute(0, 2, 4, 1, 3)
                    columns = cells.reshape(len(matrix[0]), height * g.width)
                    if wants_input:
                        pixels = torch.mm(matrix, columns)
                        grad_input[n, :, rows] = pixels.view(g.in_channels, height, g.width)
                    if wants_weight:
                        pixels = input[n, :, rows].reshape(g.in_channels, height * g.width)
                        grad_weight.addmm_(pixels, columns.t())
    grad_bias = grad_output.sum((0, 2, 3)) if wants_bias else grad_output.new_empty(0)
    gradients = (grad_input, grad_weight.view(g.weight_shape).detach(), grad_bias)
    return [gradient for gradient, wanted in zip(gradients, output_mask, strict=True) if wanted]
