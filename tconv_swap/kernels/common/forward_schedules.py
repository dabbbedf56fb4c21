"""How many kernels each family of the forward pass may have for one layer, over all sizes. A layer has at most
``MAX_SCHEDULES`` in all, not counting those that pack weights, convert layouts and add up splits. Pure functions of
data."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.common.schedules import MAX_SCHEDULES
from tconv_swap.kernels.forward import col2im as forward_col2im
from tconv_swap.kernels.forward import col2im_choice as forward_col2im_choice
from tconv_swap.kernels.forward import gemm as forward_gemm
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem, has_stride_of_one_pixel
from tconv_swap.kernels.problem import Device, Problem


def max_narrow_schedules(problem: Problem, device: Device) -> int:
    """Returns how many schedules the family has that computes the sizes of a narrow layer that forward/col2im.py does
    not compute."""
    if not forward_col2im.supports_some_size(problem, device):
        return MAX_SCHEDULES
    layer = replace(problem, geometry=of_any_size(problem.geometry))
    return MAX_SCHEDULES - len(forward_col2im_choice.schedules(layer, device))


def max_implicit_gemm_schedules(layer: TileProblem, device: Device) -> int:
    """Returns how many schedules the implicit GEMM and stride1 have together. Maps of one pixel have one of their own
    if the layer has another stride for them and forward/gemm.py does not compute them all; forward/gemm.py has one."""
    pixels = Problem(
        layer.geometry,
        layer.dtype,
        layer.precision,
        layer.output_channels_last,
        layer.weight_channels_last,
    )
    of_one_pixel = has_stride_of_one_pixel(layer.geometry)
    return (
        MAX_SCHEDULES
        - (of_one_pixel and not forward_gemm.computes_every_batch(pixels, device))
        - forward_gemm.supports_some_size(pixels, device)
    )


def max_schedules_of_grad_input(layer: TileProblem) -> int:
    """Returns the same where they compute the gradient of the input at stride 1. A map of one pixel has another kernel
    if the layer's kernel is not padded."""
    g = layer.geometry
    unpadded = all(
        padding == dilation * (kernel - 1)
        for kernel, padding, dilation in zip(g.kernel, g.padding, g.dilation, strict=True)
    )
    return MAX_SCHEDULES - (unpadded and max(g.kernel) > 1)
