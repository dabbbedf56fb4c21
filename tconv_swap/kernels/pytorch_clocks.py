"""The expected time of a gradient of the input or of the weight by PyTorch's operator, which runs cuDNN. The functions
are pure.

The constants are fitted to 1,428 times of the gradient of the weight on an H100 (torch 2.11, cuDNN 9.19), in clocks of
1.7 GHz; those of the gradient of the input follow them as well (docs/choice.md). cuDNN chooses among kernels whose
times differ: the standard deviation of the logarithm is 0.4 to 0.7 in TF32 and 0.5 to 0.9 in 16 bits.
"""

from __future__ import annotations

import math

from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import round_up

#: Clocks of the launches; of a multiply-add of the whole GPU in 16 bits and in TF32, on channels in multiples of
#: ``CHANNELS``; of a byte of both tensors in NCHW, which are copied to another layout, and in channels_last.
LAUNCH_CLOCKS, MAC_CLOCKS_16_BITS, MAC_CLOCKS_TF32, CHANNELS = 56000, 3.9e-6, 1.4e-5, 64
BYTE_CLOCKS_NCHW, BYTE_CLOCKS_NHWC = 0.0019, 0.0003
#: It is taken where ours is expected to take so many times as long: less is within what its times deviate.
MARGIN = 1.5
#: Of kernels of so many taps only a few layers were measured, of which one took 20 times as long as others.
MANY_TAPS = 64


def clocks(problem: Problem, device: Device) -> float:
    """Returns the expected clocks; infinite where nothing was measured (groups, many taps, float32 without TF32, other
    GPUs than Hopper)."""
    g, item = problem.geometry, problem.dtype.itemsize
    if device.compute_capability != 90 or g.groups > 1 or g.taps >= MANY_TAPS:
        return math.inf
    if problem.is_ieee or item == 8:
        return math.inf
    pixels = g.batch * g.height * g.width
    macs = g.taps * pixels * round_up(g.in_channels, CHANNELS) * round_up(g.out_channels, CHANNELS)
    of_byte = BYTE_CLOCKS_NHWC if problem.channels_last else BYTE_CLOCKS_NCHW
    of_mac = MAC_CLOCKS_16_BITS if item == 2 else MAC_CLOCKS_TF32
    return LAUNCH_CLOCKS + of_mac * macs + of_byte * tensor_bytes(g, item)
