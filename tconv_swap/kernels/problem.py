"""The input of planning: one transposed convolution, and the GPU that computes it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from tconv_swap.geometry import Geometry


class Device(NamedTuple):
    """What planning knows of a GPU. ``architecture`` is NVRTC's name for it, such as ``"sm_90a"``."""

    architecture: str
    multiprocessors: int
    #: The most bytes that one block may request.
    shared_memory_per_block: int

    @property
    def compute_capability(self) -> int:
        """90 for ``"sm_90a"``."""
        return _compute_capability(self.architecture)


@lru_cache(maxsize=64)
def _compute_capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("af"))


class Problem(NamedTuple):
    """One transposed convolution to compute. ``precision``: ``"tf32"`` allows float32 products to be rounded
    to TF32, ``"ieee"`` does not. ``channels_last`` is the layout of every activation."""

    geometry: Geometry
    dtype: torch.dtype
    precision: str
    channels_last: bool
    weight_channels_last: bool

    @property
    def is_tf32(self) -> bool:
        """Whether the dtype is float32 and products may be rounded to TF32."""
        return self.dtype == torch.float32 and self.precision == "tf32"

    @property
    def is_ieee(self) -> bool:
        """Whether the dtype is float32 and products must not be rounded to TF32."""
        return self.dtype == torch.float32 and self.precision != "tf32"
