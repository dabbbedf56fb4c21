"""The expected time of the tiles of csrc/kernels/grad_weight/im2col_nhwc.cu, and the best tile of a kernel for a size.
The functions are pure.

The constants are fitted to 1,431 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.11 (docs/selection.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.grad_weight.im2col_nhwc_tile import (
    MAX_STAGES_PER_SUM,
    STAGE_PIXELS,
    Pixels,
    Tile,
    every_pixels,
    fits,
    kernels,
    stages_of_choices,
    tiles_of,
)
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import tensor_bytes
from tconv_swap.kernels.grad_weight.split_k_untiled import PARTIAL_LIMIT_BYTES, weight_bytes
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import ceil_div

#: Clocks of the launch; of the launch that reduces splits; of the exchange of sums between two blocks of a cluster; of
#: a byte of both tensors; of a byte of the gradient, and of each of its partial sums.
LAUNCH_CLOCKS, REDUCTION_CLOCKS, EXCHANGE_CLOCKS = 11500, 3230, 9430
BYTE_CLOCKS, GRADIENT_BYTE_CLOCKS = 0.000232, 0.00158
#: Of a stage: of its multiplies over those of the tensor cores, of a byte of the fragments of grad_output, and of a
#: byte that is loaded.
MULTIPLY_CLOCKS, FRAGMENT_BYTE_CLOCKS, LOADED_BYTE_CLOCKS = 0.538, 0.0115, 0.0081
#: The pixels of a tap are a stride of columns apart: for each column above 2, the share by which a byte of grad_output
#: takes longer, over the boxes of its channels, which lie side by side.
FAR = 2.24


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One kernel of a layer: a tile, whatever its pixels and splits, and the pixels that its stages may have, with the
    expected clocks of a stage."""

    tile: Tile
    stages: tuple[tuple[Pixels, float], ...]
    blocks: int
    bytes_of_copy: int

    def best(self, geometry: Geometry, device: Device) -> tuple[float, Tile] | None:
        """Returns the expected clocks at a size, and the tile with the pixels and splits with which it takes them; None
        where the kernel does not compute it."""
        found = self.fastest(stages_of_choices(geometry), device)
        if found is None:
            return None
        clocks, pixels, splits = found
        return fixed_clocks(geometry) + clocks, replace(self.tile, pixels=pixels, splits=splits)

    def fastest(self, choices: Mapping[Pixels, int], device: Device) -> tuple[float, Pixels, int] | None:
        """Returns the expected clocks of the product and of the reduction of its splits, and the pixels and splits with
        which they are the fewest; None where the kernel does not compute the size.
        Args:
            choices: the stages of the size, for all pixels that they may have.
        """
        best = None
        for pixels, clocks in self.stages:
            stages = choices.get(pixels)
            if stages is not None and (best is None or stages * clocks < best[0]):
                best = stages * clocks, stages, clocks, pixels
        if best is None:
            return None
        _, stages, clocks, pixels = best
        cluster, found = self.tile.cluster, None
        for splits in split_choices(stages, self.blocks, self.bytes_of_copy, cluster, device):
            time = _product_clocks(clocks, stages, self.blocks, self.bytes_of_copy, splits, cluster, device)
            if found is None or time < found[0]:
                found = time, pixels, splits
        return found


def fixed_clocks(geometry: Geometry) -> float:
    """Returns the expected clocks of a size beside those of the product and of the reduction of its splits."""
    return LAUNCH_CLOCKS + BYTE_CLOCKS * tensor_bytes(geometry, 4)


@lru_cache(maxsize=256)
def pool(layer: Problem, device: Device) -> tuple[Schedule, ...]:
    """Returns all kernels that a layer may have."""
    geometry, found = layer.geometry, []
    stages_of_one: dict[Tile, tuple[tuple[Pixels, float], ...]] = {}
    for tile in kernels(geometry):
        # A block has the same stages whether or not a cluster adds up its sums.
        alone = replace(tile, cluster=1)
        if alone not in stages_of_one:
            stages_of_one[alone] = _fitting_stages(geometry, alone, device)
        if stages := stages_of_one[alone]:
            found.append(Schedule(tile, stages, tiles_of(geometry, tile), weight_bytes(geometry)))
    return tuple(found)


def _fitting_stages(geometry: Geometry, kernel: Tile, device: Device) -> tuple[tuple[Pixels, float], ...]:
    """Returns the pixels with which the stages of a kernel fit the shared memory, and the expected clocks of a
    stage."""
    tiles = (replace(kernel, pixels=pixels) for pixels in every_pixels())
    return tuple(
        (tile.pixels, stage_clocks(geometry, tile)) for tile in tiles if fits(geometry, tile, device)
    )


def split_choices(stages: int, blocks: int, bytes_of_copy: int, cluster: int, device: Device) -> list[int]:
    """Returns into how many splits ``stages`` stages may be cut. ``blocks``: of one split."""
    max_splits, min_splits = max(1, stages // 4), ceil_div(stages, MAX_STAGES_PER_SUM)
    found = []
    for waves in (1, 2, 3):
        splits = max(min_splits, min(max_splits, waves * device.multiprocessors // blocks))
        copies = max(1, splits // cluster, ceil_div(min_splits, cluster))
        if splits >= cluster and (copies == 1 or copies * bytes_of_copy <= PARTIAL_LIMIT_BYTES):
            found.append(copies * cluster)
    return list(dict.fromkeys(found))


def stage_clocks(geometry: Geometry, tile: Tile) -> float:
    """Returns the expected clocks of a stage."""
    rows = tile.warpgroups * 128
    steps = STAGE_PIXELS // 8 * (rows // 64)
    of_output = tile.copied_bytes(geometry) - tile.input_bytes
    far = 1 + FAR * max(0, geometry.stride[1] - 2) / tile.co_boxes
    return (
        MULTIPLY_CLOCKS * steps * tile.cols / 2
        + FRAGMENT_BYTE_CLOCKS * rows * STAGE_PIXELS * 4
        + LOADED_BYTE_CLOCKS * (tile.input_bytes + far * of_output)
    )


def _product_clocks(
    stage: float, stages: int, blocks: int, bytes_of_copy: int, splits: int, cluster: int, device: Device
) -> float:
    """Returns the expected clocks of the product and of the reduction of its splits, from the clocks of a stage, the
    stages of all pixels, and the blocks of one split."""
    rounds, copies = ceil_div(blocks * splits, device.multiprocessors), splits // cluster
    per_split = ceil_div(stages, splits) * stage + (cluster - 1) * EXCHANGE_CLOCKS
    clocks = rounds * per_split + GRADIENT_BYTE_CLOCKS * bytes_of_copy
    if copies > 1:
        clocks += REDUCTION_CLOCKS + GRADIENT_BYTE_CLOCKS * bytes_of_copy * copies
    return clocks
