"""The gradient of the input by its definition, for tests that compute it with the offsets of a kernel."""

from __future__ import annotations

import numpy as np

from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem

#: Rows and columns of zeros after the image: more than any tap of a test reaches.
MARGIN = 400


def defined_gradient(posed: StridedProblem, grad_output: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns one channel of grad_input, [image][row][column], from the channels of one group.

    ``grad_output``: [image][channel][row][column]. ``weight``: [channel][kernel row][kernel column].
    """
    geometry, (step_h, step_w), (rows, cols) = posed.geometry, posed.step, posed.positions
    (dilation_h, dilation_w), (padding_h, padding_w) = geometry.dilation, geometry.padding
    images, channels, height, width = grad_output.shape
    padded = np.zeros((images, channels, height + MARGIN, width + MARGIN))
    padded[:, :, padding_h : padding_h + height, padding_w : padding_w + width] = grad_output
    found = np.zeros((images, rows, cols))
    for kh, kw in np.ndindex(*geometry.kernel):
        shifted = padded[:, :, kh * dilation_h :: step_h, kw * dilation_w :: step_w][:, :, :rows, :cols]
        found += np.einsum("nchw,c->nhw", shifted, weight[:, kh, kw])
    return found
