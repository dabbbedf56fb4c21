"""The kernels of csrc/kernels/grad_input/implicit_gemm_wgmma.cu and grad_input/implicit_gemm_mma.cu that a layer has,
the sizes for which each is right, and the best of them for each size. The functions are pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tconv_swap.kernels.common.general import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.forward import implicit_gemm as forward_implicit_gemm
from tconv_swap.kernels.forward.implicit_gemm_layout import Tile, block_count
from tconv_swap.kernels.grad_input.implicit_gemm_clocks import clocks
from tconv_swap.kernels.grad_input.implicit_gemm_layout import StridedProblem
from tconv_swap.kernels.problem import Device
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: The most taps of a kernel. With more, the code would be too long: it has a multiply for each tap and step of k.
MAX_TAPS = 64
#: The most phases of an axis that have taps: a copy of the input has a bit for each.
MAX_PHASES = 16


def supports(problem: StridedProblem, device: Device) -> bool:
    """Returns whether the kernels compute the problem, and faster than the general kernel."""
    return (
        forward_implicit_gemm.supports(problem, device)
        and max(len(used) for used in problem.phases_used) <= MAX_PHASES
        and problem.geometry.taps <= MAX_TAPS
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kernel: its tile, and whether it computes only aligned rows of grad_output (``aligned_columns``), and only even
    rows of grad_input. A tile of 2 splits stands for any number of splits above 1."""

    tile: Tile
    aligned: bool = False
    even: bool = False

    def posed(self, problem: StridedProblem) -> StridedProblem:
        """Returns the problem as the kernel is compiled for it."""
        if (problem.aligned, problem.even) == (self.aligned, self.even):
            return problem
        return problem._replace(aligned=self.aligned, even=self.even)

    def computes_any_size(self, layer: StridedProblem) -> bool:
        """Returns whether it is legal for all sizes of a layer, but images of 2 GiB."""
        narrow = self.tile.wgmma and self.tile.cols < 8
        if self.aligned or self.even or narrow:
            return False
        return layer.one_pixel or self.tile.images == self.tile.splits == 1

    def legal(self, problem: StridedProblem) -> bool:
        """Returns whether the kernel computes this size correctly."""
        if self.aligned and not problem.can_be_aligned:
            return False
        if self.even and problem.positions[1] % 2:
            return False
        tile, (positions_h, positions_w) = self.tile, problem.positions
        # A map of one pixel has no other kernel; its partial sums are few beside grad_output.
        if tile.splits > 1 and not problem.one_pixel and most_splits(problem, tile) < 2:
            return False
        if tile.wgmma and tile.cols < 8 and positions_w > tile.cols:
            return False
        # Offsets from a tile's first image are counted in 32 bits.
        images = 1 + ceil_div(tile.cols, positions_h * positions_w) if problem.flat else tile.images
        return images * problem.image_bytes < INT32_LIMIT


def ranked(
    among: Iterable[Schedule], problem: StridedProblem, device: Device
) -> list[tuple[float, StridedProblem, Tile]]:
    """Returns the tiles of those schedules that compute this size, with their expected clocks and the problem that
    their kernels are compiled for, the one expected to be the fastest first."""
    found = []
    for one in among:
        if one.legal(problem):
            posed, tile = one.posed(problem), one.tile
            if tile.splits > 1:
                blocks = block_count(problem, tile._replace(splits=1))
                tile = tile._replace(splits=splits_of(problem, tile, blocks, device.multiprocessors))
            found.append((clocks(posed, tile, device), posed, tile))
    return sorted(found, key=lambda entry: entry[0])


def splits_of(problem: StridedProblem, tile: Tile, blocks: int, multiprocessors: int) -> int:
    """Returns over how many blocks the sum over channels of a schedule's tile is split; without splits the problem has
    so many ``blocks``."""
    if tile.splits == 1:
        return 1
    splits = 2
    if pays_to_split(problem, tile, blocks, multiprocessors):
        room, most = multiprocessors * tile.blocks_per_multiprocessor, most_splits(problem, tile)
        while 2 * splits * blocks <= room and 2 * splits <= most:
            splits *= 2
    return splits


def pays_to_split(problem: StridedProblem, tile: Tile, blocks: int, multiprocessors: int) -> bool:
    """Returns whether there are so few blocks that the sum over channels of a tile should be split (split_k)."""
    return (
        4 * blocks < 3 * multiprocessors
        and 2 * blocks <= multiprocessors * tile.blocks_per_multiprocessor
        and most_splits(problem, tile) >= 2
    )


def most_splits(problem: StridedProblem, tile: Tile) -> int:
    """Returns into how many parts the sum can be split, whose partial sums the workspace holds."""
    chunks = ceil_div(problem.words, tile.chunk_words)
    return min(chunks, WORKSPACE_LIMIT_BYTES // (4 * problem.grad_input_elements))
