"""Plans of csrc/kernels/pad/reflection_pad.cu, which pads images by reflection, and of its gradient. Pure functions of
data; docs/kernels/reflection_pad.md has the bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tconv_swap.kernels.common.dtypes import DTYPES
from tconv_swap.kernels.common.hardware import RESIDENT_THREADS
from tconv_swap.kernels.common.sizes import divisor
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Kernel, Launch, Output, Plan, input_, output, struct

#: Bytes of the widest access.
_ACCESS_BYTES = 16
_THREADS = 256
#: Planes that a thread computes, by the bytes of its accesses: the narrow ones need more of them in flight.
_PLANES_OF_NARROW, _PLANES_OF_WIDE, _NARROW_BYTES = 8, 4, 4


@dataclass(frozen=True, slots=True)
class Pad:
    """A reflection padding.

    Attributes:
        shape: of the image that is padded: ``[batch, channels, height, width]`` or ``[channels, height, width]``.
        channels_last: of four dimensions, the channels are innermost.
        dtype: float32, float16 or bfloat16.
        padding: columns on the left and on the right, rows above and below.
    """

    shape: tuple[int, ...]
    channels_last: bool
    dtype: torch.dtype
    padding: tuple[int, ...]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        *others, height, width = self.shape
        left, right, above, below = self.padding
        return *others, height + above + below, width + left + right

    @property
    def item_values(self) -> int:
        """Returns the elements of an access: channels of a pixel, or one element of a plane."""
        most = _ACCESS_BYTES // self.dtype.itemsize
        return math.gcd(self.shape[1], most) if self.channels_last else 1

    @property
    def pixel_items(self) -> int:
        return self.shape[1] // self.item_values if self.channels_last else 1

    @property
    def planes(self) -> int:
        return self.shape[0] if self.channels_last else math.prod(self.shape[:-2])


def plan_forward(pad: Pad, device: Device) -> Plan | None:
    """Returns the plan that pads an image, or None where the kernel does not support it: no elements, padding that is
    negative or not less than the size, too many elements. Input: the image. Output: the padded image, of the same
    layout."""
    return _planned(pad, "forward", pad.padded_shape, device) if _is_supported(pad) else None


def plan_backward(pad: Pad, device: Device) -> Plan | None:
    """Returns the plan of the gradient of a padding, or None as ``plan_forward``. Input: the gradient of the padded
    image, which lies as the image does. Output: the gradient of the image."""
    return _planned(pad, "backward", pad.shape, device) if _is_supported(pad) else None


def _is_supported(pad: Pad) -> bool:
    if pad.dtype not in DTYPES or len(pad.shape) not in (3, 4) or len(pad.padding) != 4:
        return False
    height, width = pad.shape[-2:]
    sizes = width, width, height, height
    if not all(0 <= one < size for one, size in zip(pad.padding, sizes, strict=True)):
        return False
    return 0 < math.prod(pad.padded_shape) // pad.item_values < INT32_LIMIT - _THREADS


def _planned(pad: Pad, stage: str, written: tuple[int, ...], device: Device) -> Plan:
    """``written``: the shape of the output."""
    plane_items = written[-2] * written[-1] * pad.pixel_items
    at_once = _planes_at_once(pad, plane_items, device)
    kernel = Kernel(
        "pad/reflection_pad.cu",
        f"reflection_pad_{stage}",
        (
            ("Element", ELEMENT_TYPES[pad.dtype]),
            ("VALUES", pad.item_values),
            ("PLANES", at_once),
            ("THREADS", _THREADS),
        ),
    )
    left, _, above, _ = pad.padding
    (height, width), (padded_height, padded_width) = pad.shape[-2:], pad.padded_shape[-2:]
    words = (
        pad.planes,
        *(height, padded_height, above),
        *(width, padded_width, left),
        *divisor(plane_items),
        *divisor(written[-1] * pad.pixel_items),
        *divisor(pad.pixel_items),
    )
    threads = ceil_div(pad.planes, at_once) * plane_items
    launch = Launch(
        kernel, ceil_div(threads, _THREADS), _THREADS, (input_(0), output(0), struct(0)), structs=(words,)
    )
    why = f"each thread a place of {at_once} planes" if at_once > 1 else "each thread a place"
    return Plan("reflection_pad", why, (Output(written, pad.channels_last),), (launch,))


def _planes_at_once(pad: Pad, plane_items: int, device: Device) -> int:
    """Returns how many planes a thread computes: several where enough threads remain to fill the GPU."""
    narrow = pad.item_values * pad.dtype.itemsize <= _NARROW_BYTES
    several = _PLANES_OF_NARROW if narrow else _PLANES_OF_WIDE
    fills = pad.planes // several * plane_items >= device.multiprocessors * RESIDENT_THREADS
    return several if fills else 1
