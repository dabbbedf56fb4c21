"""Where PyTorch's operator computes a stage instead of our kernels: gradients for which it is expected to take far
fewer clocks, and one class of layers on which its output was measured to be faster (docs/choice.md).

Both hold for Hopper (compute capability 9.0), where they were measured. ``tconv_swap.tune`` measures the layers of one
network, and its result takes precedence. bfloat16 uses the same kernels as float16 and follows its rules.
"""

from __future__ import annotations

from tconv_swap.kernels import plan
from tconv_swap.kernels import pytorch_clocks as pytorch
from tconv_swap.kernels.problem import Device, Problem

#: In float32 without TF32 at stride 1, cuDNN's output is faster from this many taps, channels on either side and
#: images on, on maps of at least and at most this many pixels.
TRANSFORMED_TAPS = 15
TRANSFORMED_CHANNELS = 64
TRANSFORMED_BATCH = 16
TRANSFORMED_PIXELS = (64 * 64, 128 * 256)

#: The family of tensor-core tiles.
IMPLICIT_GEMM = "implicit_gemm"
#: Families that ``plan.expected_clocks`` does not count, whose kernels were not slower where they were measured.
UNCOUNTED = frozenset(("depthwise", "gemm", "general", "tiny"))
#: From this stride on cuDNN's gradient of the weight in 16 bits was wrong: 1.4 from float64, relative, for 1024 -> 512
#: and 768 -> 384 channels with kernels of 20 and strides of 10; it was right for strides of 3 and 8.
UNRELIABLE_STRIDE = 10


def why_forward_is_native(problem: Problem, family: str, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the output instead of this family, or None."""
    if not _transformed(problem, family, device):
        return None
    return "PyTorch's was the faster on an H200 for large kernels of stride 1 without TF32 (1.5 to 8 times)"


def why_grad_input_is_native(problem: Problem, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the gradient of the input instead of our kernels, or None."""
    return _why_gradient_is_native(problem, (True, False, False), device)


def why_grad_weight_is_native(problem: Problem, device: Device) -> str | None:
    """Returns why PyTorch's operator should compute the gradient of the weight instead of our kernels, or None."""
    if problem.dtype.itemsize == 2 and max(problem.geometry.stride) >= UNRELIABLE_STRIDE:
        return None
    return _why_gradient_is_native(problem, (False, True, False), device)


def _why_gradient_is_native(problem: Problem, mask: tuple[bool, ...], device: Device) -> str | None:
    theirs = pytorch.clocks(problem, device)
    ours = plan.expected_clocks(problem, mask, device)
    if ours <= pytorch.MARGIN * theirs or plan.plan_backward(problem, mask, device).family in UNCOUNTED:
        return None
    return f"PyTorch's is expected to be {ours / theirs:.1f} times as fast"


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
