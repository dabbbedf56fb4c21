"""How many of the four kernels that a layer has of the gradient of the input, whatever its sizes, are each family's."""

from __future__ import annotations

from dataclasses import replace

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.forward.implicit_gemm_layout import TileProblem
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem, has_another_step
from tconv_swap.kernels.gradients.nchw_to_nhwc_pays import LEAST_CHANNELS
from tconv_swap.kernels.problem import Device

#: Kernels of one stage of a layer that multiply, in one dtype and layout, over all sizes.
MOST_KERNELS = 4
#: Of what computes NCHW beside the halo tile: by boxes from an arranged copy, or unfolded; and where both do, of the
#: unfolded ones.
MOST_COPIED, MOST_UNFOLDED = 2, 1
#: Of grad_output, that plan_strips claims.
MOST_STRIPS_CHANNELS = 256


def share_of_tma(layer: StridedProblem, device: Device) -> int:
    """Those of tiles by boxes."""
    if layer.one_pixel:
        return 1
    pixels = _of_one_pixel(layer, device)
    if not _shared(layer, device):
        return MOST_KERNELS - pixels
    return MOST_COPIED - (pixels if _may_be_arranged(layer) else 0)


def share_of_im2col(layer: StridedProblem, device: Device) -> int:
    """Those of unfolded tiles."""
    return min(share_of_tma(layer, device), MOST_UNFOLDED if _may_be_arranged(layer) else MOST_COPIED)


def share_of_tile(layer: StridedProblem, device: Device) -> int:
    """Those of the halo tile."""
    if layer.one_pixel:
        return 1
    taken = 0
    if _shared(layer, device):
        taken = share_of_tma(layer, device)
        taken += MOST_UNFOLDED if _may_be_arranged(layer) else 0
    return max(1, MOST_KERNELS - _of_one_pixel(layer, device) - taken)


def share_of_stride_one(layer: TileProblem, device: Device) -> int:
    """Those of the forward pass's halo tile, which computes the gradient of the input at stride 1; a map of one pixel
    has another one where the kernel is not padded, and large images of NCHW another one by strips."""
    g = layer.geometry
    unpadded = all(
        padding == dilation * (kernel - 1)
        for kernel, padding, dilation in zip(g.kernel, g.padding, g.dilation, strict=True)
    )
    in_nchw = not (layer.input_channels_last or layer.output_channels_last)
    by_strips = (
        device.architecture == "sm_90a"
        and in_nchw
        and layer.parts == g.groups == 1
        and g.dilation == (1, 1)
        and g.in_channels <= MOST_STRIPS_CHANNELS
    )
    return MOST_KERNELS - (unpadded and max(g.kernel) > 1) - by_strips


def _shared(layer: StridedProblem, device: Device) -> bool:
    """Whether some sizes of the layer are computed from a copy, or unfolded, and others by the halo tile."""
    in_nchw = not (layer.input_channels_last and layer.output_channels_last)
    return device.architecture == "sm_90a" and in_nchw and layer.parts == 1


def _may_be_arranged(layer: StridedProblem) -> bool:
    """Whether some sizes may be computed by way of channels_last."""
    g = layer.geometry
    return layer.item == 2 and min(g.in_channels_per_group, g.out_channels_per_group) >= LEAST_CHANNELS


def _of_one_pixel(layer: StridedProblem, device: Device) -> int:
    """Kernels that maps of one pixel have: of another step, or of a plain product."""
    geometry = replace(layer.geometry, stride=layer.step)
    return int(has_another_step(geometry) or _is_a_product(geometry, device))


def _is_a_product(geometry: Geometry, device: Device) -> bool:
    """Whether plan_pixel_gradients may compute them."""
    plain = (geometry.padding, geometry.dilation, geometry.groups) == ((0, 0), (1, 1), 1)
    return plain and device.architecture == "sm_90a"
