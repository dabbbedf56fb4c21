"""How many of the four kernels that compute the gradient of the input of a layer, over all sizes, each family has."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import MAX_STEP
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, has_another_step
from tconv_swap.kernels.grad_input.implicit_gemm_tma_shape import fills_chunks
from tconv_swap.kernels.problem import Device

#: The most kernels that compute one stage of a layer, in one dtype and layout, over all sizes.
MAX_KERNELS = 4
#: The most kernels of implicit_gemm_tma that compute only columns of whole strides, or NCHW from a copy in
#: channels_last, and the most of im2col in 16 bits, of which it loads fewer rows.
MAX_TMA, MAX_IM2COL = 2, 1
#: The copy engine loads multiples of so many channels of 16 bits.
TMA_CHANNELS = 8
#: The most channels of grad_output that forward/stride1.py computes.
MAX_STRIDE1_CHANNELS = 256


def share_of_tma(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels implicit_gemm_tma has."""
    if layer.one_pixel:
        return 1
    pixels = _of_one_pixel(layer, device)
    if not _shared(layer, device):
        return MAX_TMA if _in_whole_strides(layer, device) else MAX_KERNELS - pixels
    return MAX_TMA - pixels


def share_of_im2col(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels im2col has."""
    if layer.one_pixel or layer.item == 2:
        return MAX_IM2COL
    # In TF32 implicit_gemm has only the kernel for sizes that im2col does not compute.
    return MAX_KERNELS - 1 - _of_one_pixel(layer, device)


def share_of_implicit_gemm(layer: StridedProblem, device: Device, of_im2col: int) -> int:
    """Returns how many kernels implicit_gemm has beside ``of_im2col`` of im2col."""
    if layer.one_pixel:
        return 1
    taken = of_im2col
    if may_be_transposed(layer, device) or _in_whole_strides(layer, device):
        taken += share_of_tma(layer, device)
    return max(1, MAX_KERNELS - _of_one_pixel(layer, device) - taken)


def share_of_stride_one(layer: TileProblem, device: Device) -> int:
    """Returns how many kernels the forward pass's implicit_gemm has, which computes the gradient of the input at stride
    1. A map of one pixel has another kernel if the layer's kernel is not padded, and large NCHW images have one of
    forward/stride1.py."""
    g = layer.geometry
    unpadded = all(
        padding == dilation * (kernel - 1)
        for kernel, padding, dilation in zip(g.kernel, g.padding, g.dilation, strict=True)
    )
    in_nchw = not (layer.input_channels_last or layer.output_channels_last)
    by_stride1 = (
        device.architecture == "sm_90a"
        and in_nchw
        and layer.parts == g.groups == 1
        and g.dilation == (1, 1)
        and g.in_channels <= MAX_STRIDE1_CHANNELS
    )
    return MAX_KERNELS - (unpadded and max(g.kernel) > 1) - by_stride1


def _shared(layer: StridedProblem, device: Device) -> bool:
    """Returns whether implicit_gemm_tma (from a copy) or im2col compute some sizes of the layer, and implicit_gemm
    others."""
    in_nchw = not (layer.input_channels_last and layer.output_channels_last)
    return device.architecture == "sm_90a" and in_nchw and layer.parts == 1


def _in_whole_strides(layer: StridedProblem, device: Device) -> bool:
    """Returns whether implicit_gemm_tma computes only the sizes in channels_last whose columns are whole strides."""
    in_channels_last = layer.input_channels_last and device.architecture == "sm_90a"
    return in_channels_last and layer.step[1] > MAX_STEP and layer.geometry.groups == layer.parts == 1


def may_be_transposed(layer: StridedProblem, device: Device) -> bool:
    """Returns whether some sizes of a layer in NCHW may be computed from copies in channels_last. In TF32 im2col has
    the kernels; where the kernel lies within the stride, it was faster to read each element where it lies."""
    g = layer.geometry
    if layer.item != 2 or layer.input_channels_last or not _shared(layer, device):
        return False
    if layer.one_pixel or layer.flat or max(layer.step) == 1:
        return False
    return g.in_channels_per_group % TMA_CHANNELS == g.out_channels % TMA_CHANNELS == 0 and fills_chunks(
        layer
    )


def _of_one_pixel(layer: StridedProblem, device: Device) -> int:
    """Returns how many kernels maps of one pixel have: of another step, or of a plain matrix product."""
    geometry = replace(layer.geometry, stride=layer.step)
    return int(has_another_step(geometry) or _is_a_product(geometry, device))


def _is_a_product(geometry: Geometry, device: Device) -> bool:
    """Returns whether gradients/gemm.py may compute maps of one pixel."""
    plain = (geometry.padding, geometry.dilation, geometry.groups) == ((0, 0), (1, 1), 1)
    return plain and device.architecture == "sm_90a"
