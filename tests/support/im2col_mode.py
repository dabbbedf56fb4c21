"""What TMA loads in im2col mode."""

from __future__ import annotations

import numpy as np

from tconv_swap.runtime.program import TensorMap


def loaded(source: TensorMap, first: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the images, rows and columns of the pixels of a copy from the ``first`` ones on."""
    (_, sizes_w, sizes_h, _), (_, step_w, step_h, _) = source.sizes, source.steps
    first_w, first_h, last_w, last_h = source.corners
    image, row, col = first
    pixels = []
    for _ in range(source.box[1]):
        pixels.append((image, row, col))
        col += step_w
        if col >= sizes_w + last_w:
            col, row = first_w, row + step_h
        if row >= sizes_h + last_h:
            row, image = first_h, image + 1
    images, rows, cols = np.array(pixels).T
    return images, rows, cols
