"""Copies of images in NCHW whose rows are longer, or whose channels begin at multiples of 16 bytes
(csrc/kernels/common/pad_images.cu): their arithmetic, emulated. The tests of grad_weight/im2col_nchw.cu run them."""

from __future__ import annotations

import pytest
from grad_input_cases import words_by_name

from tconv_swap.kernels.common.pad_images import PaddedImages, pad_images
from tconv_swap.runtime.program import input_

#: Longer rows, channels of 21 pixels, one row, segments of 256 and of 1,024 pixels.
IMAGES = (
    PaddedImages(2, 3, 5, 9, 12),
    PaddedImages(2, 3, 7, 3, 3),
    PaddedImages(1, 5, 1, 101, 104),
    PaddedImages(2, 4, 30, 29, 32),
    PaddedImages(4, 2048, 33, 65, 68),
)


@pytest.mark.parametrize("images", IMAGES, ids=str)
def test_every_pixel_is_copied_once_and_the_others_are_zero(images: PaddedImages) -> None:
    launch = pad_images(input_(0), 0, images)
    sizes = words_by_name("PadImagesSizes", launch.structs[0])
    of_channel = images.height * images.columns
    found: list[int | None] = [None] * of_channel
    for segment in range(sizes["segments_value"]):
        begin = segment * sizes["segment"]
        for pixel in range(begin, min(begin + sizes["segment"], sizes["pixels"])):
            row, col = divmod(pixel, sizes["columns_value"])
            assert found[pixel] is None
            found[pixel] = row * sizes["width"] + col if col < sizes["width"] else -1
    assert found == [
        row * images.width + col if col < images.width else -1
        for row in range(images.height)
        for col in range(images.columns)
    ]
    warps = launch.grid * launch.block // 32
    assert warps >= images.batch * images.channels * sizes["segments_value"]


@pytest.mark.parametrize("images", IMAGES, ids=str)
def test_channels_begin_at_multiples_of_16_bytes_and_do_not_overlap(images: PaddedImages) -> None:
    channel, image = images.map(input_(0), 32, 2).strides
    assert channel % 16 == 0
    assert channel >= 4 * images.height * images.columns
    assert image == channel * images.channels
    assert images.bytes == image * images.batch
