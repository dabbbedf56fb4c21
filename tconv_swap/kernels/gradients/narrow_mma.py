"""What the narrow kernels of both gradients share: the problems that they compute, and the registers and shared memory
that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.dtypes import DTYPES, IEEE, TF32
from tconv_swap.kernels.common.hardware import REGISTERS, RESERVED_BYTES, RESIDENT_THREADS
from tconv_swap.kernels.gradients.grad_output_tile import (
    GradOutputTile,
    groups_of_a_block,
    largest_divisor,
    loads,
    rows,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div
from tconv_swap.runtime.program import ELEMENT_TYPES, Constant, Launch

FAMILY = "narrow_mma"
#: Where a side of a group has fewer channels, PyTorch computes in float32 even if TF32 is allowed, and these kernels do
#: the same.
TF32_CHANNELS = 8
#: The most channels of the narrow side of a group: most of a wide tile would be padding.
NARROW_CHANNELS = 8
#: The fewest taps that no wide tile holds, and the most channels of a group with so many taps.
MANY_TAPS, MANY_TAPS_CHANNELS = 256, 64
#: A block's shared memory, in bytes.
SHARED_BYTES = 100 * 1024
#: The most taps of a chunk: its steps of 8 are unrolled.
CHUNK_TAPS = 256
#: The most registers of a thread that hold weights of grad_input.
WEIGHT_REGISTERS = 96
#: The most loads of a tile that a thread makes.
MAX_LOADS = 96
#: The most loads whose sources stay in registers, and the most bytes of loads one tile ahead: SOURCES_IN_REGISTERS and
#: PREFETCHES of csrc/kernels/gradients/grad_output_tile.cuh.
MAX_KEPT_SOURCES = 12
MAX_PREFETCHED_BYTES = 64
#: The most m tiles times n tiles of a warp of grad_weight, without and with IEEE's products.
MAX_SUM_TILES = {False: 24, True: 12}
#: The most units of 16 pixels that a warp of grad_weight adds up one after the other, in TF32 or 16 bits (where the
#: tensor cores truncate) and in IEEE: rounding errors grow with the root of it, 2e-8 of the result for one
#: (docs/kernels/grad_weight/narrow_mma.md).
LONGEST_CHAIN = {False: 2048, True: 256}
#: The most registers of a thread of grad_weight that hold prefetched input.
INPUT_REGISTERS = 32
MULTIPROCESSOR_SHARED_BYTES = 227 * 1024
#: Registers that the compiler may use beyond the expected number, so that it never spills.
REGISTER_MARGIN = 40
#: The most channels whose sums a block keeps for grad_bias beside those of grad_weight.
BIAS_CHANNELS = 16

#: Microseconds of a unit, and the microseconds to add times 8 / warps, because few warps do not hide each other's
#: waits.
Price = tuple[float, float]


class TilePrice(NamedTuple):
    """The microseconds of a tile, with all its chunks, on a multiprocessor; ``warps``: of a block."""

    #: What the warps issue; what other blocks of the multiprocessor hide; the bytes that the tile loads.
    issued: Price
    latency: Price
    loaded: Price
    warps: float


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """The constants that the kernels of both gradients have, and what a tile of either costs.

    ``registers``: of a thread, as expected. ``shared_bytes``: of a block.
    """

    grad_output: GradOutputTile
    m_tiles: int
    n_tiles: int
    warps_m: int
    registers: int
    shared_bytes: int
    price: TilePrice = field(compare=False)

    @property
    def resident(self) -> int:
        """Returns how many blocks a multiprocessor runs at a time."""
        return resident_blocks(self.registers, self.grad_output, self.shared_bytes)

    @property
    def shared_constants(self) -> tuple[tuple[str, Constant], ...]:
        """Returns the constants that the kernels of both gradients have."""
        wanted = resident_blocks(self.registers + REGISTER_MARGIN, self.grad_output, self.shared_bytes)
        return (
            *self.grad_output.constants,
            ("M_TILES", self.m_tiles),
            ("N_TILES", self.n_tiles),
            ("WARPS_M", self.warps_m),
            ("MIN_BLOCKS", wanted),
        )

    def blocks_of_a_row(self, geometry: Geometry) -> int:
        """Returns how many blocks share one row of tiles: over the columns, the groups and the input channels."""
        m_blocks = ceil_div(geometry.in_channels_per_group, 16 * self.m_tiles * self.warps_m)
        tiles_w = ceil_div(geometry.width, self.grad_output.tile_w)
        return m_blocks * (geometry.groups // self.grad_output.block_groups) * tiles_w


def channel_tiles(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Yields how a block may share out the input channels: tiles of 16 channels of a warp, warps of a group, and groups
    of a block. A block of several groups has all channels of each."""
    m_total = ceil_div(problem.geometry.in_channels_per_group, 16)
    group_counts = groups_of_a_block(problem.geometry, problem.channels_last, problem.dtype.itemsize, 8)
    for m_tiles, groups in product(sorted({min(2, m_total), min(4, m_total)}), group_counts):
        warps_m = min(4, ceil_div(m_total, m_tiles))
        if groups == 1 or warps_m * m_tiles >= m_total:
            yield m_tiles, warps_m, groups


def supports(problem: Problem, device: Device, many_taps: int = MANY_TAPS) -> bool:
    """Returns whether the narrow kernels compute a problem. ``many_taps``: the fewest that no wide tile of the stage
    holds."""
    geometry = problem.geometry
    if problem.dtype not in DTYPES or device.compute_capability < 80 or geometry.batch == 0:
        return False
    if geometry.batch * geometry.height >= INT32_LIMIT:
        return False
    channels = (geometry.in_channels_per_group, geometry.out_channels_per_group)
    return min(channels) <= NARROW_CHANNELS or (
        geometry.taps >= many_taps and max(channels) <= MANY_TAPS_CHANNELS
    )


def loads_rows(problem: Problem, grad_output: GradOutputTile) -> bool:
    """Returns whether rows of grad_output hold whole loads of the tile."""
    return problem.channels_last or problem.geometry.out_width % grad_output.load == 0


def input_bytes(geometry: Geometry) -> int:
    """Returns the bytes of one float32 copy of grad_input."""
    return 4 * geometry.batch * geometry.in_channels * geometry.height * geometry.width


def rounds_nothing(problem: Problem) -> bool:
    """Returns whether float32 is computed by products of parts (IEEE), even if TF32 is allowed."""
    if problem.dtype != torch.float32:
        return False
    geometry = problem.geometry
    channels = min(geometry.in_channels_per_group, geometry.out_channels_per_group)
    # PyTorch computes these layers in float32 even with TF32 allowed, and no kernel may be less accurate than PyTorch.
    return problem.precision == "ieee" or channels < TF32_CHANNELS or geometry.taps >= MANY_TAPS


def as_exact(problem: Problem, device: Device) -> Problem:
    """Returns the problem as kernels of every family have to compute it: in IEEE where PyTorch does."""
    exact = problem.is_tf32 and supports(problem, device) and rounds_nothing(problem)
    return problem._replace(precision="ieee") if exact else problem


def common_constants(problem: Problem) -> tuple[tuple[str, Constant], ...]:
    """Returns the constants of a layer that the kernels of both gradients have."""
    geometry = problem.geometry
    largest = max(
        geometry.in_channels * geometry.height * geometry.width,
        geometry.out_channels * geometry.out_height * geometry.out_width,
        geometry.in_channels * geometry.out_channels_per_group * geometry.taps,
    )
    return (
        ("Element", ELEMENT_TYPES[problem.dtype]),
        ("Index", "int" if largest < INT32_LIMIT else "long long"),
        *geometry.layer_constants,
        ("CHANNELS_LAST", problem.channels_last),
        ("WEIGHT_CHANNELS_LAST", problem.weight_channels_last),
        ("PRECISION", IEEE if rounds_nothing(problem) else TF32),
    )


def chunk_shapes(geometry: Geometry, block_groups: int, max_taps: int) -> Iterator[tuple[int, int]]:
    """Yields (channels, rows of the kernel) of a chunk of the taps: as many taps as fit, and about a quarter of
    that."""
    channels, kernel_w = geometry.out_channels_per_group, geometry.kernel[1]
    found = set()
    for kernel_rows in sorted({geometry.kernel[0], 1}, reverse=True):
        for limit in (max_taps, max_taps // 4):

            def taps(count: int, kernel_rows: int = kernel_rows) -> int:
                return count * kernel_rows * kernel_w

            count = channels if block_groups > 1 else largest_divisor(channels, limit, taps)
            if count is not None and taps(count) <= limit and (count, kernel_rows) not in found:
                found.add((count, kernel_rows))
                yield count, kernel_rows


def loader_registers(problem: Problem, grad_output: GradOutputTile) -> int:
    """Returns about how many registers of a thread the loads of grad_output take."""
    count = loads(problem.geometry, grad_output, problem.channels_last)
    kept = 3 * count if count <= MAX_KEPT_SOURCES else 10
    if grad_output.async_:
        return kept
    pack = grad_output.load * problem.dtype.itemsize
    return kept + ceil_div(pack, 4) * count + 15 if count * pack <= MAX_PREFETCHED_BYTES else 45 + 2 * pack


def resident_blocks(registers: int, grad_output: GradOutputTile, shared_bytes: int) -> int:
    """Returns how many blocks a multiprocessor runs at a time, with so many registers of a thread."""
    by_registers = REGISTERS // (registers * grad_output.threads)
    by_shared_memory = MULTIPROCESSOR_SHARED_BYTES // (shared_bytes + RESERVED_BYTES)
    return max(1, min(by_registers, by_shared_memory, RESIDENT_THREADS // grad_output.threads))


def powers(limit: int) -> Iterator[int]:
    """Yields the powers of two up to ``limit``."""
    power = 1
    while power <= limit:
        yield power
        power *= 2


def loadable(problem: Problem, grad_output: GradOutputTile) -> bool:
    """Returns whether the loader of the kernels can load the tile."""
    geometry = problem.geometry
    return (
        loads(geometry, grad_output, problem.channels_last) <= MAX_LOADS
        and rows(geometry, grad_output) * geometry.stride[0] < 4096
    )


def why(geometry: Geometry) -> str:
    """Returns the description of a part of the family."""
    channels = f"{geometry.in_channels_per_group} to {geometry.out_channels_per_group} channels a group"
    return f"{channels}: im2col of grad_output on the tensor cores"


def overlapping(launches: Sequence[Launch], device: Device) -> tuple[Launch, ...]:
    """Returns the launches, all but the first changed to start while the one before ends (programmatic dependent
    launch)."""
    overlaps = device.compute_capability >= 90
    return (launches[0], *(launch._replace(overlaps_previous=overlaps) for launch in launches[1:]))
