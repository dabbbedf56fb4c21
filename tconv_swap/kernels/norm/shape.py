"""A normalisation, how it is cut into tiles and splits, and the struct that the kernels take."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from tconv_swap.runtime.integers import ceil_div, round_up

#: Bytes of one memory access.
ACCESS_BYTES = 16
#: Items are counted in 32 bits, also a few beyond the end.
MAX_ITEMS = 2**30


class Activation(IntEnum):
    """The activation behind a normalisation. The numbers are those of csrc/kernels/common/activation.cuh."""

    IDENTITY = 0
    RELU = 1
    LEAKY_RELU = 2
    RELU6 = 3
    TANH = 4
    SIGMOID = 5
    SILU = 6
    GELU = 7
    GELU_TANH = 8


#: Activations whose derivative follows from their output, which PyTorch keeps for the backward pass.
FROM_OUTPUT = frozenset({Activation.RELU, Activation.TANH, Activation.SIGMOID})


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation and the activation behind it.
    Attributes:
        shape: of the tensor: ``[batch, channels, ...]``.
        channels_last: of four dimensions, the channels are innermost.
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
        """Returns the pixels of one image."""
        pixels = 1
        for size in self.shape[2:]:
            pixels *= size
        return pixels

    @property
    def count(self) -> int:
        """Returns the values that share a mean and a variance."""
        return self.pixels if self.per_image else self.batch * self.pixels

    @property
    def groups(self) -> int:
        """Returns the number of means."""
        return self.batch * self.channels if self.per_image else self.channels

    @property
    def bytes(self) -> int:
        """Returns the bytes of the tensor."""
        return self.batch * self.channels * self.pixels * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a tensor is cut into tiles of items (see csrc/kernels/norm/norm.cuh).
    Attributes:
        channels_innermost: the kernel goes by channels_last.
        values: of an item.
        lanes: items side by side (channels_last), a power of two; 1 in NCHW.
        tiles: of the tensor.
        items: of a tile, for each lane.
    """

    norm: Norm
    channels_innermost: bool
    values: int
    lanes: int
    tiles: int
    items: int

    @classmethod
    def of(cls, norm: Norm) -> Tiling:
        """Returns the tiling of a normalisation."""
        max_values = ACCESS_BYTES // norm.dtype.itemsize
        # In images of one pixel the channels are contiguous in any layout.
        if norm.channels_last or norm.pixels == 1:
            values = _common_power_of_two(norm.channels, max_values)
            lanes = _lanes(norm.channels // values)
            tiles = ceil_div(norm.channels // values, lanes) * (norm.batch if norm.per_image else 1)
            return cls(norm, True, values, lanes, tiles, norm.count)
        values = _common_power_of_two(norm.pixels, max_values)
        return cls(norm, False, values, 1, norm.groups, norm.count // values)

    @property
    def item_bytes(self) -> int:
        """Returns the bytes of an item."""
        return self.values * self.norm.dtype.itemsize

    def step(self, threads: int) -> int:
        """Returns the items of a tile that ``threads`` threads load at a time."""
        return threads // self.lanes

    def split_items(self, splits: int) -> int:
        """Returns the items of each of ``splits`` splits but the last: multiples of 32 where that wastes
        little."""
        each = ceil_div(self.items, splits)
        return round_up(each, 32) if not self.channels_innermost and each > 256 else each

    def struct_words(
        self,
        splits: int,
        *,
        cached: int = 0,
        partials: tuple[int, int] = (0, 0),
        trains: bool = True,
        counts: int = 0,
        momentum: float = 0.0,
    ) -> tuple[int, ...]:
        """Returns the words of ``Shape`` of csrc/kernels/norm/norm.cuh.
        Args:
            splits: blocks that share a tile.
            cached: items of each thread that stay in shared memory.
            partials: partial results that the launch before left, and how many items each is of.
        """
        norm = self.norm
        segment = norm.pixels // self.values if not self.channels_innermost else 1
        magic, shift = division(segment)
        per_set = ceil_div(norm.channels // self.values, self.lanes) if self.channels_innermost else 1
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
            splits,
            self.split_items(splits),
            cached,
            *partials,
            norm.groups,
            int(trains),
            counts,
            *(_float_bits(value) for value in (float(norm.count), norm.eps, momentum, norm.slope)),
        )


def _lanes(items: int) -> int:
    """Returns the items side by side: at most a fifth of them idle where that is possible."""
    for lanes in (16, 8, 4):
        if ceil_div(items, lanes) * lanes <= 1.2 * items:
            return lanes
    return min(16, 1 << (items - 1).bit_length())


def _common_power_of_two(number: int, limit: int) -> int:
    """Returns the largest power of two that divides ``number``, at most ``limit``."""
    return min(limit, number & -number)


def division(divisor: int) -> tuple[int, int]:
    """Returns ``magic, shift`` such that ``n // divisor == ((n * magic >> 32) + n) >> shift`` for ``0 <= n <
    2**31``.
    ``magic`` is the signed integer of the same bits (Granlund and Montgomery 1994, figure 4.1).
    """
    shift = (divisor - 1).bit_length()
    magic = (((1 << shift) - divisor) << 32) // divisor + 1
    return magic - (1 << 32) if magic >= 1 << 31 else magic, shift


def _float_bits(value: float) -> int:
    """Returns the bits of a float32 as a signed integer."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
