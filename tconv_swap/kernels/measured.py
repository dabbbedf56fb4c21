"""Classes of layers on which PyTorch's operator was measured to be faster (benchmarks/README.md), and sizes at which
its gradient of the weight is expected to be.

The classes hold for Hopper (compute capability 9.0), where they were measured, and go by the layer's geometry alone.
``tconv_swap.tune`` measures the layers of one network, and its result takes precedence. bfloat16 uses the same
kernels as float16 and follows its rules.
"""

from __future__ import annotations

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight import implicit_gemm as grad_weight_implicit_gemm
from tconv_swap.kernels.grad_weight import pytorch_clocks as grad_weight_pytorch_clocks
from tconv_swap.kernels.problem import Device, Problem

#: From this stride on cuDNN's gradient of the input in float32 without TF32 is faster where the kernel is smaller.
WIDE_STRIDE = 5
#: A small map with many channels: the weights are most of what moves, and packing them moves them again.
SMALL_MAP_PIXELS = 64
SMALL_MAP_CHANNELS = 512

#: In channels_last cuDNN's gradient of the input is faster from so many channels on either side and so many
#: multiply-adds for each element of input, output and weight: with strides, where the copy engine cannot bring
#: grad_output for ours (five layers).
INTENSE_CHANNELS, INTENSE_WITHOUT_TMA = 128, 500
#: The same in 16 bits for every loader (seven layers), and the multiply-adds of the whole pass.
INTENSE, INTENSE_MACS = 600, 1 << 34
#: Up to so many output channels cuDNN is faster if the numbers of input and output channels are even: its kernels take
#: channels in pairs (it was faster with 2, 2 and 4 output channels in all modes, ours with 1 and 3).
FEW_CHANNELS = 4

#: In float32 without TF32 at stride 1, cuDNN's output is faster from this many taps, channels on either side and
#: images on, on maps of at least and at most this many pixels.
TRANSFORMED_TAPS = 15
TRANSFORMED_CHANNELS = 64
TRANSFORMED_BATCH = 16
TRANSFORMED_PIXELS = (64 * 64, 128 * 256)

#: The family of tensor-core tiles, and that whose tiles the copy engine loads. The narrow family was slower than cuDNN
#: only where ``_has_few_pairs`` says so, the others nowhere that they were measured.
IMPLICIT_GEMM = "implicit_gemm"
IMPLICIT_GEMM_TMA = "implicit_gemm_tma"
NARROW_MMA = "narrow_mma"

#: The families of the gradient of the weight that are ranked by their expected clocks.
RANKED_BY_CLOCKS = frozenset(
    (
        *(IMPLICIT_GEMM, IMPLICIT_GEMM_TMA, f"nchw_to_nhwc, {IMPLICIT_GEMM_TMA}"),
        *("im2col_nchw", "im2col_nhwc", "stride1"),
    )
)

_WHY = "PyTorch's was the faster on an H200 for {what} ({speedup} of its speed by ours)"


def why_forward_is_native(problem: Problem, family: str, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the output instead of this family, or None."""
    if _transformed(problem, family, device):
        return _WHY.format(what="large kernels of stride 1 without TF32", speedup="0.13 to 1.04")
    geometry = problem.geometry
    small_map = 1 < geometry.height * geometry.width <= SMALL_MAP_PIXELS
    many_channels = geometry.in_channels_per_group >= SMALL_MAP_CHANNELS
    if not (_applies(problem, family, device) and problem.channels_last and problem.dtype.itemsize == 2):
        return None
    # Weights in channels_last need no packing, and packing is what made our kernels slower.
    if not (small_map and many_channels) or problem.weight_channels_last:
        return None
    return _WHY.format(what="many channels on a small map, weights to be packed", speedup="0.85 to 0.94")


def why_grad_input_is_native(problem: Problem, family: str, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the gradient of the input instead of this family, or None."""
    if device.compute_capability != 90:
        return None
    geometry, precision = problem.geometry, problem.precision if problem.dtype == torch.float32 else "16 bits"
    # Of maps of one row, only layers with strides were measured.
    one_row = geometry.height == 1 < geometry.width and max(geometry.stride) > 1
    if family == IMPLICIT_GEMM and not problem.channels_last:
        if precision == "tf32" and one_row:
            return _WHY.format(what="maps of one row in NCHW with TF32", speedup="0.65 to 0.82")
        if precision == "ieee" and max(geometry.stride) >= WIDE_STRIDE and _leaves_gaps(geometry):
            return _WHY.format(what="wide strides and gaps in NCHW without TF32", speedup="0.87")
    if not problem.channels_last or precision == "ieee" or geometry.groups > 1:
        return None
    if family == NARROW_MMA and _has_few_pairs(geometry):
        return _WHY.format(what="2 or 4 output channels in channels_last", speedup="0.45 to 0.94")
    if family in (IMPLICIT_GEMM, IMPLICIT_GEMM_TMA) and _is_intense(geometry, family, precision):
        return _WHY.format(what="many products of an element in channels_last", speedup="0.18 to 0.91")
    return None


def why_grad_weight_is_native(problem: Problem, family: str, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the gradient of the weight instead of this family, or None."""
    if family not in RANKED_BY_CLOCKS:
        return None
    theirs = grad_weight_pytorch_clocks.clocks(problem, device)
    ours = grad_weight_implicit_gemm.expected_clocks(problem, device)
    if ours <= grad_weight_pytorch_clocks.MARGIN * theirs:
        return None
    return f"PyTorch's is expected to be {ours / theirs:.1f} times as fast"


def _has_few_pairs(geometry: Geometry) -> bool:
    few = geometry.out_channels <= FEW_CHANNELS
    return few and geometry.in_channels % 2 == geometry.out_channels % 2 == 0


def _is_intense(geometry: Geometry, family: str, precision: str) -> bool:
    """Returns whether so many products are made of an element that cuDNN's kernels come nearer to the multiplier's
    rate than this family."""
    if min(geometry.in_channels, geometry.out_channels) < INTENSE_CHANNELS:
        return False
    if family == IMPLICIT_GEMM and max(geometry.stride) > 1:
        return geometry.macs >= INTENSE_WITHOUT_TMA * geometry.elements
    large = geometry.macs >= INTENSE_MACS and geometry.macs >= INTENSE * geometry.elements
    return large and precision == "16 bits"


def _leaves_gaps(geometry: Geometry) -> bool:
    """Returns whether the output has rows or columns that no tap reaches."""
    return all(kernel < stride for kernel, stride in zip(geometry.kernel, geometry.stride, strict=True))


def _transformed(problem: Problem, family: str, device: Device) -> bool:
    """Returns whether cuDNN computes this output, of float32 without TF32, by a transform whose time does not
    depend on the kernel's size (the table is in docs/kernels/forward/implicit_gemm_mma.md)."""
    geometry = problem.geometry
    if device.compute_capability != 90 or family != IMPLICIT_GEMM or not problem.is_ieee:
        return False
    return (
        geometry.stride == geometry.dilation == (1, 1)
        and geometry.groups == 1
        and geometry.taps >= TRANSFORMED_TAPS
        and min(geometry.in_channels, geometry.out_channels) >= TRANSFORMED_CHANNELS
        and geometry.batch >= TRANSFORMED_BATCH
        and TRANSFORMED_PIXELS[0] <= geometry.height * geometry.width <= TRANSFORMED_PIXELS[1]
    )


def _applies(problem: Problem, family: str, device: Device) -> bool:
    """Returns whether the measurements apply: strides above 1, implicit_gemm, Hopper, not float32 without TF32."""
    if device.compute_capability != 90 or family != IMPLICIT_GEMM or max(problem.geometry.stride) == 1:
        return False
    return problem.dtype.itemsize == 2 or problem.precision == "tf32"
