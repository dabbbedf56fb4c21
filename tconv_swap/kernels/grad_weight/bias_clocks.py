"""The expected time of the gradient of the bias by launches of its own. The functions are pure."""

from __future__ import annotations

from tconv_swap.kernels.problem import Problem

#: Clocks at 1.7 GHz of the launches (common/general.py), and of a byte of grad_output, which they read again (32 times
#: of an H100).
LAUNCH_CLOCKS, BYTE_CLOCKS = 6000, 0.0007


def clocks(problem: Problem) -> float:
    """Returns the expected clocks of the launches that compute the bias's gradient alone."""
    g = problem.geometry
    elements = g.batch * g.out_channels * g.out_height * g.out_width
    return LAUNCH_CLOCKS + BYTE_CLOCKS * elements * problem.dtype.itemsize
