"""The expected time of the tiles of csrc/kernels/grad_weight/implicit_gemm_tma.cu, and their splits. The functions are
pure.

The constants are fitted to 3,505 times of an H100, in clocks of 1.7 GHz; the standard deviation of the logarithm is
0.06 to 0.11 (docs/selection.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tconv_swap.geometry import Geometry
from tconv_swap.kernels.common.hardware import SECTOR_BYTES
from tconv_swap.kernels.grad_weight.implicit_gemm_clocks import WORKSPACE_LIMIT_BYTES
from tconv_swap.kernels.grad_weight.implicit_gemm_tile import Tile, tap_blocks, weight_tiles
from tconv_swap.kernels.grad_weight.implicit_gemm_tma_tile import (
    MIN_STAGES,
    ROW_BYTES,
    STEP_PIXELS,
    TmaTile,
    box_bytes,
    boxes_of,
    has_gaps,
)
from tconv_swap.kernels.problem import Device, Problem
from tconv_swap.runtime.integers import INT32_LIMIT, ceil_div

#: Clocks of the launch; of the launch that reduces splits; of a byte that is loaded of both tensors, of partial sums,
#: and of the gradient.
LAUNCH_CLOCKS, REDUCTION_CLOCKS = 10300, 5000
BYTE_CLOCKS, PARTIAL_BYTE_CLOCKS, GRADIENT_BYTE_CLOCKS = 0.000316, 0.00057, 0.00047
#: Clocks of a tile beside its work; of its multiplies over those of the tensor cores; of a byte of a stage, and how
#: many times as long it takes where pixels are no whole sectors of memory.
TILE_CLOCKS, MULTIPLY_CLOCKS, LOADED_BYTE_CLOCKS = 79, 0.856, 0.00151
RAGGED_PIXELS = 5.0
#: The pixels of a tap are a stride of columns apart: for each column above 2, the share by which a byte of grad_output
#: takes longer, over the boxes of its channels, which lie side by side.
FAR = 0.87
#: How many times as long a tile takes that has only the fewest stages.
FEW_STAGES = 1.1


class Work(NamedTuple):
    """The work of a tile, whatever the sizes.
    Attributes:
        clocks: for one tile of pixels.
        blocks: of one split.
        split_bytes: of one float32 copy of the gradient in whole tiles.
        channels_read: output channels that are loaded for each pixel of the input where the kernel leaves gaps;
            0 where all of grad_output is loaded.
    """

    clocks: float
    blocks: int
    split_bytes: int
    channels_read: int

    @property
    def beside_clocks(self) -> tuple[int, int, int]:
        """Returns everything but the clocks."""
        return self.blocks, self.split_bytes, self.channels_read


def works_of(problem: Problem, tma_tiles: Iterable[TmaTile]) -> Iterator[Work]:
    """Yields the work of each tile of a layer. What tiles of the same taps, and of the same pixels, have in common is
    computed once."""
    g = problem.geometry
    ragged = any(channels * 2 % SECTOR_BYTES for channels in (g.in_channels, g.out_channels))
    byte_clocks = LOADED_BYTE_CLOCKS * (RAGGED_PIXELS if ragged else 1.0)
    far, gaps = FAR * max(0, g.stride[1] - 2), has_gaps(problem)
    products: dict[tuple[Any, ...], _Product] = {}
    bytes_of_boxes: dict[tuple[Any, ...], tuple[int, int]] = {}
    for tma_tile in tma_tiles:
        tile, taps = tma_tile.tile, (tma_tile.tile.taps, tma_tile.tile.tap_step)
        alike = taps, tile.warps, tile.warp_n, tile.warp_taps
        product = products.get(alike)
        if product is None:
            product = products[alike] = _product_of(problem, tma_tile, gaps)
        loaded = taps, tile.shape, tma_tile.box_per_tap_col
        if loaded not in bytes_of_boxes:
            boxes = boxes_of(g, *loaded)
            of_output = boxes.per_channel_block * box_bytes(boxes.shape)
            bytes_of_boxes[loaded] = box_bytes(tile.shape), of_output
        input_box, output_boxes = bytes_of_boxes[loaded]
        of_input = product.input_blocks * tile.pixels * ROW_BYTES
        of_stage = product.input_blocks * input_box + product.channel_blocks * output_boxes
        load = byte_clocks * (of_input + (1 + far / product.channel_blocks) * (of_stage - of_input))
        steps = product.multiplies * tile.pixels / STEP_PIXELS
        clocks = TILE_CLOCKS + MULTIPLY_CLOCKS * steps * tile.warp_n / 2 + load
        few = FEW_STAGES if tile.stages == MIN_STAGES else 1.0
        yield Work(clocks * few, product.blocks, product.split_bytes, product.channels_read)


class _Product(NamedTuple):
    """What a tile computes, whatever its pixels: as in ``Work`` and ``TmaTile``.
    Attributes:
        multiplies: of all warpgroups, for each step of pixels.
    """

    blocks: int
    split_bytes: int
    channels_read: int
    input_blocks: int
    channel_blocks: int
    multiplies: int


def _product_of(problem: Problem, tma_tile: TmaTile, gaps: bool) -> _Product:
    tile, blocks = tma_tile.tile, weight_tiles(problem, tma_tile.tile)
    return _Product(
        blocks,
        blocks * tile.threads * tile.sums * 4,
        _taps_read(problem, tile) * problem.geometry.out_channels if gaps else 0,
        tma_tile.input_blocks,
        tma_tile.channel_blocks,
        tile.threads // 128 * tile.warp_taps,
    )


def _taps_read(problem: Problem, tile: Tile) -> int:
    """Returns the taps whose pixels are loaded where every tap has pixels of its own: also the unused ones of a
    block."""
    return math.prod(
        blocks * taken for blocks, taken in zip(tap_blocks(problem, tile), tile.taps, strict=True)
    )


def split_choices(work: Work, tiles: int, device: Device) -> list[int]:
    """Returns into how many splits the tiles of pixels may be cut within the workspace's limit, the fewest first."""
    max_splits = min(max(1, WORKSPACE_LIMIT_BYTES // work.split_bytes), tiles)
    found = [1]
    for waves in (1, 2, 3):
        splits = min(max_splits, waves * device.multiprocessors // work.blocks)
        if splits > found[-1]:
            found.append(splits)
    return found


def loaded_elements(geometry: Geometry, channels_read: int) -> int:
    """Returns how many elements of the input and of grad_output are loaded (``Work.channels_read``)."""
    g = geometry
    pixels = g.height * g.width
    if channels_read:
        return g.batch * pixels * (g.in_channels + channels_read)
    return g.batch * (g.in_channels * pixels + g.out_channels * g.out_height * g.out_width)


class Cut(NamedTuple):
    """A number of splits, how many blocks a multiprocessor then computes one after the other, and the clocks of adding
    up the splits."""

    splits: int
    rounds: int
    added_clocks: float


def _cuts(work: Work, tiles: int, device: Device) -> list[Cut]:
    """Returns what ``split_choices`` make of the work."""
    return [
        Cut(
            splits,
            ceil_div(work.blocks * splits, device.multiprocessors),
            REDUCTION_CLOCKS + PARTIAL_BYTE_CLOCKS * splits * work.split_bytes if splits > 1 else 0.0,
        )
        for splits in split_choices(work, tiles, device)
    ]


def _product_clocks(work: Work, tiles: int, cuts: Iterable[Cut]) -> tuple[float, int]:
    """Returns the expected clocks of the product and of adding up its splits, and the number of splits with which it
    takes them."""
    best, best_splits = math.inf, 1
    for splits, rounds, added_clocks in cuts:
        clocks = rounds * -(-tiles // splits) * work.clocks + added_clocks
        if clocks < best:
            best, best_splits = clocks, splits
    return best, best_splits


def expected_clocks(work: Work, tiles: int, elements: int, device: Device) -> tuple[float, int]:
    """Returns the expected clocks of the whole part and the number of splits with which it takes them.
    Args:
        tiles: of pixels.
        elements: that are loaded (``loaded_elements``).
    """
    product, splits = _product_clocks(work, tiles, _cuts(work, tiles, device))
    return _fixed_clocks(work, elements) + product, splits


def _fixed_clocks(work: Work, elements: int) -> float:
    return LAUNCH_CLOCKS + BYTE_CLOCKS * 2 * elements + GRADIENT_BYTE_CLOCKS * work.split_bytes


def clocks_of_sizes(work: Work, sizes: Iterable[tuple[int, int]], device: Device) -> list[float]:
    """Returns the expected clocks for each size, which is its tiles of pixels, or 0 where the kernel does not compute
    it, and the elements that are loaded; infinite where it does not. Large sizes have the same choices of splits, and
    many sizes have as many tiles as others."""
    of_many = _cuts(work, INT32_LIMIT, device)
    most = of_many[-1].splits
    products, found = {0: math.inf}, []
    for tiles, elements in sizes:
        if tiles not in products:
            cuts = of_many if tiles >= most else _cuts(work, tiles, device)
            products[tiles] = _product_clocks(work, tiles, cuts)[0]
        found.append(_fixed_clocks(work, elements) + products[tiles])
    return found
