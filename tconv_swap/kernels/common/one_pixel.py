"""Which layers are expected to see maps of one pixel, as the first of a generator, and how many kernels compute those.
Pure functions of data."""

from __future__ import annotations

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.problem import Device

#: The smallest kernel size of a layer that is expected to see maps of one pixel, whatever its channels. It gets many
#: images or few, so maps of one pixel have two kernels.
LARGE_KERNEL = 4
#: The images by which a product of matrices is compared with other kernels where maps of one pixel have one kernel.
NOMINAL_IMAGES = 64


def may_begin(layer: Geometry) -> bool:
    """Returns whether a layer may be the first of a generator, whose input is one pixel: its gradients then have
    kernels for such maps. Layers whose kernel is their stride enlarge maps of any size."""
    plain = (layer.padding, layer.dilation) == ((0, 0), (1, 1))
    return plain and layer.kernel != layer.stride


def has_stride_of_one_pixel(geometry: Geometry) -> bool:
    """Returns whether a map of one pixel may be computed with stride = kernel in place of the layer's own stride. It
    holds only for layers with a large kernel or that add channels: no others are expected to see such maps."""
    begins = has_two_kernels(geometry) or geometry.out_channels > geometry.in_channels
    return may_begin(geometry) and geometry.output_padding == (0, 0) and begins


def has_two_kernels(layer: Geometry) -> bool:
    """Returns whether maps of one pixel may have two kernels."""
    return min(layer.kernel) >= LARGE_KERNEL


def has_gemm(layer: Geometry, device: Device) -> bool:
    """Returns whether gradients/gemm.py may compute the gradients of a layer's maps of one pixel."""
    return may_begin(layer) and layer.groups == 1 and device.architecture == "sm_90a"


def kernels_of_gradient(layer: Geometry, has_own: bool, device: Device) -> int:
    """Returns how many kernels compute a gradient of maps of one pixel alone, if another family ``has_own`` one for
    them."""
    gemm = has_gemm(layer, device)
    return has_own + gemm if has_two_kernels(layer) else int(has_own or gemm)
