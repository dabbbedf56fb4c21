"""The gradient of the input by its definition, for tests that compute it with the offsets of a kernel, and the words of
a launch by the names that the kernel gives them."""

from __future__ import annotations

import re

import numpy as np

from tconv_swap.kernels.common.sizes import Words
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.runtime.cache import csrc_directory


def defined_gradient(posed: StridedProblem, grad_output: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns one channel of grad_input, [image][row][column], from the channels of one group.

    ``grad_output``: [image][channel][row][column]. ``weight``: [channel][kernel row][kernel column].
    """
    geometry, (step_h, step_w), (rows, cols) = posed.geometry, posed.step, posed.positions
    (dilation_h, dilation_w), (padding_h, padding_w) = geometry.dilation, geometry.padding
    images, channels, height, width = grad_output.shape
    reach_h, reach_w = posed.reach
    # As far as the last position's last tap.
    padded_height = max(height + padding_h, (rows - 1) * step_h + reach_h + 1)
    padded_width = max(width + padding_w, (cols - 1) * step_w + reach_w + 1)
    padded = np.zeros((images, channels, padded_height, padded_width))
    padded[:, :, padding_h : padding_h + height, padding_w : padding_w + width] = grad_output
    found = np.zeros((images, rows, cols))
    for kh, kw in np.ndindex(*geometry.kernel):
        shifted = padded[:, :, kh * dilation_h :: step_h, kw * dilation_w :: step_w][:, :, :rows, :cols]
        found += np.einsum("nchw,c->nhw", shifted, weight[:, kh, kw])
    return found


def words_by_name(struct: str, words: Words) -> dict[str, int]:
    """Returns the words of a struct of csrc/kernels/common/sizes.cuh by the names of its fields."""
    header = (csrc_directory() / "kernels/common/sizes.cuh").read_text()
    (body,) = re.findall(rf"struct {struct} \{{(.*?)\n\}};", header, re.DOTALL)
    names = []
    for kind, fields in re.findall(r"^  (int|Divisor) ([a-z_, ]+);", body, re.MULTILINE):
        parts = ("",) if kind == "int" else ("_value", "_magic", "_shift")
        names += [field + part for field in fields.split(", ") for part in parts]
    return dict(zip(names, words, strict=True))
