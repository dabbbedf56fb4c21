"""Which layers are narrow: memory bounds them, or a group has few channels. forward/narrow_mma.py and
forward/narrow_ffma.py have tiles for them. Pure functions of data."""

from __future__ import annotations

from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.layer_sizes import of_any_size
from tconv_swap.kernels.forward.implicit_gemm_layout import MAX_PHASES
from tconv_swap.kernels.forward.narrow_ffma_choice import terms
from tconv_swap.kernels.problem import Problem

#: The most multiply-adds for each element moved and for each output: with more, tensor cores in larger tiles are
#: faster.
MULTIPLY_ADDS_PER_ELEMENT = 84
MULTIPLY_ADDS_PER_OUTPUT = 96
#: The same limit of multiply-adds for each output, for layers of strides above MAX_PHASES, which implicit_gemm did not
#: support when this was measured. Apart from the narrow kernels only the general kernels and PyTorch's operator
#: computed such layers; they took 5.7 to 22 times as long (92 products for an output, on an H200).
MULTIPLY_ADDS_OF_WIDE_STRIDES = 128
#: With at most so many channels on one side, most of a larger tile would be padding.
NARROW_CHANNELS = 8
#: Batch, rows and columns of the nominal map by which a layer is judged, and of that of a layer whose maps have one
#: row.
NOMINAL_MAP, NOMINAL_ROW = (16, 64, 64), (16, 1, 1024)
#: With fewer channels, with dilation and with groups, cuDNN computes in float32 even where TF32 is allowed.
MIN_TF32_CHANNELS = 16


def is_narrow(geometry: Geometry) -> bool:
    """Returns whether a layer is narrow, whatever its sizes."""
    return _is_narrow(of_any_size(geometry))


@lru_cache(maxsize=1024)
def _is_narrow(layer: Geometry) -> bool:
    if min(layer.in_channels_per_group, layer.out_channels_per_group) <= NARROW_CHANNELS:
        return True
    if layer.stride[1] > MAX_PHASES:
        return terms(layer) <= MULTIPLY_ADDS_OF_WIDE_STRIDES
    batch, height, width = NOMINAL_ROW if layer.one_row else NOMINAL_MAP
    nominal = layer._replace(batch=batch, height=height, width=width)
    return (
        terms(layer) <= MULTIPLY_ADDS_PER_OUTPUT
        and nominal.macs <= MULTIPLY_ADDS_PER_ELEMENT * nominal.elements
    )


def as_exact(problem: Problem) -> Problem:
    """Returns the problem without TF32 where it is narrow and cuDNN computes it in float32 even if TF32 is allowed:
    tiles of TF32 would be less exact than what they replace."""
    if problem.is_tf32 and not rounds(problem.geometry) and is_narrow(problem.geometry):
        return problem._replace(precision="ieee")
    return problem


def rounds(geometry: Geometry) -> bool:
    """Returns whether cuDNN rounds the products of a layer to TF32 where that is allowed."""
    channels = min(geometry.in_channels, geometry.out_channels)
    return geometry.groups == 1 and geometry.dilation == (1, 1) and channels >= MIN_TF32_CHANNELS
