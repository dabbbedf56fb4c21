"""What is normalised, how it is cut into tiles and slices, and the struct that tells a kernel."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes of one access.
ACCESS_BYTES = 16
#: Items are counted in 32 bits, a few of them beyond the end too.
MOST_ITEMS = 2**30


class Activation(IntEnum):
    """What follows the normalisation. The numbers are shared with csrc/kernels/norm/norm.cuh."""

    IDENTITY = 0
    RELU = 1
    LEAKY_RELU = 2
    RELU6 = 3
    TANH = 4
    SIGMOID = 5
    SILU = 6
    GELU = 7
    GELU_TANH = 8


#: Activations whose output tells their derivative, and is what PyTorch keeps of them for the backward pass.
FROM_OUTPUT = frozenset({Activation.RELU, Activation.TANH, Activation.SIGMOID})


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation to compute, and the activation behind it.

    Attributes:
        shape: of the tensor: ``[batch, channels, ...]``.
        channels_last: of four dimensions, the channels lie together.
        dtype: of the tensor: float32, float16 or bfloat16.
        parameters: the dtype of weight, bias and running statistics: ``dtype`` or float32.
        per_image: every image has statistics of its own (InstanceNorm).
        slope: of a leaky ReLU.
        adds: a tensor is added before the activation, which is one of ``FROM_OUTPUT``.
    """

    shape: tuple[int, ...]
    channels_last: bool
    dtype: torch.dtype
    parameters: torch.dtype
    per_image: bool
    eps: float
    activation: Activation = Activation.IDENTITY
    slope: float = 0.0
    adds: bool = False

    @property
    def batch(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def pixels(self) -> int:
        """Of one image."""
        pixels = 1
        for size in self.shape[2:]:
            pixels *= size
        return pixels

    @property
    def count(self) -> int:
        """Values that have a mean and a variance in common."""
        return self.pixels if self.per_image else self.batch * self.pixels

    @property
    def groups(self) -> int:
        """Means."""
        return self.batch * self.channels if self.per_image else self.channels

    @property
    def bytes(self) -> int:
        return self.batch * self.channels * self.pixels * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a tensor is cut into tiles of items, as the top of csrc/kernels/norm/norm.cuh says.

    Attributes:
        values: of an item.
        lanes: items beside one another (channels_last), a power of two; 1 in NCHW.
        tiles: of the tensor.
        items: of a tile, for each lane.
    """

    norm: Norm
    walks_channels_last: bool
    values: int
    lanes: int
    tiles: int
    items: int

    @classmethod
    def of(cls, norm: Norm) -> Tiling:
        most = ACCESS_BYTES // norm.dtype.itemsize
        # Of images of one pixel the channels lie together in any layout.
        if norm.channels_last or norm.pixels == 1:
            values = _common_power_of_two(norm.channels, most)
            lanes = _lanes(norm.channels // values)
            tiles = ceil_div(norm.channels // values, lanes) * (norm.batch if norm.per_image else 1)
            return cls(norm, True, values, lanes, tiles, norm.count)
        values = _common_power_of_two(norm.pixels, most)
        return cls(norm, False, values, 1, norm.groups, norm.count // values)

    @property
    def item_bytes(self) -> int:
        return self.values * self.norm.dtype.itemsize

    def step(self, threads: int) -> int:
        """Items of a tile that so many threads take at a time."""
        return threads // self.lanes

    def slice(self, slices: int) -> int:
        """Items of each of so many slices but the last: whole rows of 32 lanes, where that is no waste."""
        each = ceil_div(self.items, slices)
        return round_up(each, 32) if not self.walks_channels_last and each > 256 else each

    def words(
        self,
        slices: int,
        *,
        cached: int = 0,
        partials: tuple[int, int] = (0, 0),
        trains: bool = True,
        counts: int = 0,
        momentum: float = 0.0,
    ) -> tuple[int, ...]:
        """``Shape`` of csrc/kernels/norm/norm.cuh.

        Args:
            slices: blocks that share a tile.
            cached: items of each thread that stay in shared memory.
            partials: how many the launch before left, and the items that each was of.
        """
        norm = self.norm
        segment = norm.pixels // self.values if not self.walks_channels_last else 1
        magic, shift = division(segment)
        per_set = ceil_div(norm.channels // self.values, self.lanes) if self.walks_channels_last else 1
        return (
            norm.channels,
            norm.pixels,
            self.items,
            segment,
            magic,
            shift,
            0 if norm.per_image else norm.channels,
            per_set,
            self.lanes.bit_length() - 1,
            slices,
            self.slice(slices),
            cached,
            *partials,
            norm.groups,
            int(trains),
            counts,
            *(_float_bits(value) for value in (float(norm.count), norm.eps, momentum, norm.slope)),
        )


def _lanes(items: int) -> int:
    """Beside one another: at most a fifth of them idle where that can be had."""
    for lanes in (16, 8, 4):
        if ceil_div(items, lanes) * lanes <= 1.2 * items:
            return lanes
    return min(16, 1 << (items - 1).bit_length())


def _common_power_of_two(number: int, most: int) -> int:
    return min(most, number & -number)


def division(divisor: int) -> tuple[int, int]:
    """``magic, shift``: for ``0 <= n < 2**31``, ``n // divisor == ((n * magic >> 32) + n) >> shift`` (Granlund and
    Montgomery 1994, figure 4.1); ``magic`` as the signed integer of the same bits."""
    shift = (divisor - 1).bit_length()
    magic = (((1 << shift) - divisor) << 32) // divisor + 1
    return magic - (1 << 32) if magic >= 1 << 31 else magic, shift


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
